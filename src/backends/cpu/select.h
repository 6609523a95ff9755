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

// Bins of a histogram over the top bits of a key.
inline constexpr int kHistogramBins = 2048;
// Entries of the histogram that kth_largest wants: two, counted in turn.
inline constexpr int kCountHistogram = 2 * kHistogramBins;

// The threshold of the k largest of n keys; keys of 0 never count. With at most k others, all of
// them do. `candidates` is scratch of n keys, `histogram` of kCountHistogram.
Threshold kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* candidates,
                      uint32_t* histogram);

// The threshold of the fewest largest keys whose masses reach `target`, the crossing one included;
// at least one key of positive mass. `histogram` is scratch of kHistogramBins.
Threshold largest_with_mass(const uint32_t* keys, const float* masses, int64_t n, double target,
                            double* histogram);

// Places of the keys that the threshold keeps, ascending; returns how many.
int64_t keep_places(const uint32_t* keys, int64_t n, Threshold threshold, int32_t* places);

}  // namespace lacuna::cpu
