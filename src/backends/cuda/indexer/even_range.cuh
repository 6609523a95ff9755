// Cuts a number of things into parts that differ by at most one.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

struct Range {
  int64_t begin, end;
};

// In 32 bits: 64-bit divisions are function calls on the device.
__device__ inline Range even_range(uint32_t count, uint32_t part, uint32_t parts) {
  const uint32_t each = count / parts;
  const uint32_t longer = count % parts;  // the first parts have one more
  const uint32_t begin = each * part + (part < longer ? part : longer);
  return {begin, int64_t{begin} + each + (part < longer ? 1 : 0)};
}

}  // namespace lacuna::cuda
