// See select.h: radix selection from the top bits down, a histogram a pass.
#include "backends/cpu/select.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/select.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// Copies the keys in [first, last]; returns how many. Whole vectors are written: `to` has room for
// as many keys as there are, and the cursor never passes the read position.
int64_t copy_between(const uint32_t* keys, int64_t n, uint32_t first, uint32_t last, uint32_t* to) {
  const hn::ScalableTag<uint32_t> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto first_v = hn::Set(d, first);
  const auto width_v = hn::Set(d, last - first);
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, keys + i);
    // One unsigned comparison for both ends.
    const auto inside = hn::Not(hn::Lt(width_v, hn::Sub(v, first_v)));
    count += static_cast<int64_t>(hn::CompressStore(v, inside, d, to + count));
  }
  for (; i < n; ++i) {
    to[count] = keys[i];
    count += keys[i] - first <= last - first ? 1 : 0;
  }
  return count;
}

int64_t keep_places_simd(const uint32_t* keys, int64_t n, Threshold threshold, int32_t* places) {
  const hn::ScalableTag<uint32_t> d;
  const hn::RebindToSigned<decltype(d)> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto key_v = hn::Set(d, threshold.key);
  int64_t count = 0;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, keys + i);
    auto kept = hn::Lt(key_v, v);
    const auto tied = hn::Eq(v, key_v);
    if (threshold.ties > 0 && !hn::AllFalse(d, tied)) {
      const int64_t ties = static_cast<int64_t>(hn::CountTrue(d, tied));
      if (ties > threshold.ties) {
        break;  // some of these: one at a time
      }
      threshold.ties -= ties;
      kept = hn::Or(kept, tied);
    }
    if (hn::AllFalse(d, kept)) {
      continue;
    }
    // Exact stores: the list may have no room for a whole vector.
    const auto at = hn::Iota(di, static_cast<int32_t>(i));
    count += static_cast<int64_t>(
        hn::CompressBlendedStore(at, hn::RebindMask(di, kept), di, places + count));
  }
  for (; i < n; ++i) {
    if (keys[i] > threshold.key || (keys[i] == threshold.key && --threshold.ties >= 0)) {
      places[count++] = static_cast<int32_t>(i);
    }
  }
  return count;
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(copy_between);
HWY_EXPORT(keep_places_simd);

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

Threshold kth_largest(const uint32_t* keys, int64_t n, int64_t k, uint32_t* candidates,
                      uint32_t* histogram) {
  uint32_t prefix = 0;
  int64_t wanted = k;  // of the keys in the prefix
  for (const Pass pass : kPasses) {
    // Two histograms in turn: neighbours often fall into one bin, and an increment has to wait for
    // the one before it.
    uint32_t* odd = histogram + kHistogramBins;
    std::fill_n(histogram, kCountHistogram, 0u);
    int64_t i = 0;
    for (; i + 2 <= n; i += 2) {
      ++histogram[bin_of(keys[i], pass)];
      ++odd[bin_of(keys[i + 1], pass)];
    }
    if (i < n) {
      ++histogram[bin_of(keys[i], pass)];
    }
    int bin = (1 << pass.bits) - 1;
    for (; bin > 0; --bin) {
      const int64_t count = int64_t{histogram[bin]} + odd[bin];
      if (count >= wanted) {
        break;
      }
      wanted -= count;
    }
    prefix |= static_cast<uint32_t>(bin) << pass.shift;
    // What is left to look at. After the first pass it reads and writes the same array, which
    // copy_between may.
    if (pass.shift > 0) {
      n = HWY_DYNAMIC_DISPATCH(copy_between)(keys, n, prefix, prefix + ((1u << pass.shift) - 1),
                                             candidates);
      keys = candidates;
    }
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

int64_t keep_places(const uint32_t* keys, int64_t n, Threshold threshold, int32_t* places) {
  return HWY_DYNAMIC_DISPATCH(keep_places_simd)(keys, n, threshold, places);
}

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
