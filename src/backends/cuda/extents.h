// Arithmetic on extents that plans share. No CUDA.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// Blocks of `tile` that cover `count`.
constexpr int64_t ceil_div(int64_t count, int64_t tile) { return (count + tile - 1) / tile; }

// Products of extents that no memory could hold end here instead of wrapping around.
inline constexpr int64_t kExtentMax = int64_t{1} << 56;
inline int64_t product(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) || result > kExtentMax ? kExtentMax : result;
}

}  // namespace lacuna::cuda
