// Exact selection without sorting: the k-th largest of a row in a few linear passes.
#pragma once

#include <bit>
#include <cstdint>

namespace lacuna::cpu {

// Unsigned keys in the order of floats: -0 equals +0, NaN is 0, below every number.
constexpr uint32_t ordered_key(float x) {
  if (x != x) {
    return 0;
  }
  const uint32_t bits = std::bit_cast<uint32_t>(x + 0.0f);  // -0 + 0 is +0
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// What belongs to the k largest: every key above `key`, and the first `ties` that equal it.
struct Threshold {
  uint32_t key = 0;
  int64_t ties = 0;
};

// Bins of the histograms below: 11, 11 and 10 bits of a key a pass.
inline constexpr int kHistogramBins = 2048;

// The threshold of the k largest of n keys; keys of 0 never count. With at most k others, all of
// them do. `histogram` is scratch of kHistogramBins.
Threshold kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* histogram);

// The threshold of the fewest largest keys whose masses reach `target`, the crossing one included;
// at least one key of positive mass. `histogram` is scratch of kHistogramBins.
Threshold largest_with_mass(const uint32_t* keys, const float* masses, int64_t n, double target,
                            double* histogram);

}  // namespace lacuna::cpu
