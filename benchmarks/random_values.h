// Contents of the benchmarks' tensors.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "core/rng.h"

namespace lacuna::bench {

// Calls visit(i, value) with values uniform in [-1, 1).
template <class Visit>
void for_random(int64_t count, uint64_t seed, Visit&& visit) {
  for (int64_t i = 0; i < count; i += 4) {
    const std::array<uint32_t, 4> bits = philox4x32(seed, static_cast<uint64_t>(i));
    for (int64_t j = i; j < std::min(count, i + 4); ++j) {
      visit(j, static_cast<float>(bits[j - i] >> 8) * 0x1p-23f - 1.0f);
    }
  }
}

}  // namespace lacuna::bench
