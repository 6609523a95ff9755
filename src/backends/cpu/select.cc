// See select.h: radix selection from the top bits down, a histogram a pass.
#include "backends/cpu/select.h"

#include <algorithm>

namespace lacuna::cpu {
namespace {

struct Pass {
  int shift;
  int bits;
};
constexpr Pass kPasses[] = {{21, 11}, {10, 11}, {0, 10}};

// True when the bits of `key` above the pass are those of `prefix`.
constexpr bool in_prefix(uint32_t key, uint32_t prefix, Pass pass) {
  return pass.shift + pass.bits == 32 || (key ^ prefix) >> (pass.shift + pass.bits) == 0;
}

constexpr uint32_t bin_of(uint32_t key, Pass pass) {
  return (key >> pass.shift) & ((1u << pass.bits) - 1);
}

}  // namespace

Threshold kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* histogram) {
  uint32_t prefix = 0;
  int64_t wanted = k;  // of the keys in the prefix
  for (const Pass pass : kPasses) {
    const int bins = 1 << pass.bits;
    std::fill_n(histogram, bins, 0u);
    for (int64_t i = 0; i < n; ++i) {
      if (in_prefix(keys[i], prefix, pass)) {
        ++histogram[bin_of(keys[i], pass)];
      }
    }
    int bin = bins - 1;
    for (; bin > 0 && histogram[bin] < wanted; --bin) {
      wanted -= histogram[bin];
    }
    prefix |= static_cast<uint32_t>(bin) << pass.shift;
  }
  // The walk ends at key 0 when fewer than k keys count.
  return prefix == 0 ? Threshold{} : Threshold{prefix, wanted};
}

Threshold largest_with_mass(const uint32_t* keys, const float* masses, int64_t n, double target,
                            double* histogram) {
  uint32_t prefix = 0;
  double above = 0;  // mass of the keys above the prefix
  for (const Pass pass : kPasses) {
    const int bins = 1 << pass.bits;
    std::fill_n(histogram, bins, 0.0);
    for (int64_t i = 0; i < n; ++i) {
      if (in_prefix(keys[i], prefix, pass)) {
        histogram[bin_of(keys[i], pass)] += masses[i];
      }
    }
    // The lowest bin that has mass, in case rounding keeps the sum below the target.
    int last = 0;
    int bin = bins - 1;
    double before_last = above;
    for (; bin >= 0; --bin) {
      if (histogram[bin] > 0) {
        last = bin;
        before_last = above;
        above += histogram[bin];
        if (above >= target) {
          break;
        }
      }
    }
    above = before_last;
    prefix |= static_cast<uint32_t>(last) << pass.shift;
  }
  int64_t ties = 0;
  for (int64_t i = 0; i < n && (ties == 0 || above < target); ++i) {
    if (keys[i] == prefix && masses[i] > 0) {
      above += masses[i];
      ++ties;
    }
  }
  return {prefix, ties};
}

}  // namespace lacuna::cpu
