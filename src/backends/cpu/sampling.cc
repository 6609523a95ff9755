// Draws tokens: softmax with temperature, top-k, top-p, min-p, then the inverse of the running sum.
// Nothing is sorted: both filters are thresholds found by radix selection.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "backends/cpu/select.h"
#include "core/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/sampling.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// NaN counts as -inf.
template <class D>
HWY_INLINE hn::Vec<D> without_nan(D d, hn::Vec<D> x) {
  return hn::IfThenElse(hn::IsNaN(x), hn::Set(d, -std::numeric_limits<float>::infinity()), x);
}

float largest_logit(const float* logits, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  float largest = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  if (n >= lanes) {
    auto largest_v = hn::Set(d, largest);
    for (; i + lanes <= n; i += lanes) {
      largest_v = hn::Max(largest_v, without_nan(d, hn::LoadU(d, logits + i)));
    }
    largest = hn::GetLane(hn::MaxOfLanes(d, largest_v));
  }
  for (; i < n; ++i) {
    largest = logits[i] > largest ? logits[i] : largest;  // false for NaN
  }
  return largest;
}

// exp((x - largest) / temperature) for finite `largest`; 0 for x = -inf and NaN.
template <class D>
HWY_INLINE hn::Vec<D> likelihood(D d, hn::Vec<D> x, float largest, float temperature) {
  return hn::Exp(d,
                 hn::Div(hn::Sub(without_nan(d, x), hn::Set(d, largest)), hn::Set(d, temperature)));
}

// Unnormalised probabilities into `to` (may be null), and their sum. Blocks are summed in float and
// added in double: 16 lanes of up to 128 values lose nothing that matters.
double likelihoods(const float* logits, int64_t n, float largest, float temperature, float* to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int64_t kBlock = 2048;
  HWY_ALIGN float buffer[hn::MaxLanes(d)];
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    auto sum = hn::Zero(d);
    int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      const auto p = likelihood(d, hn::LoadU(d, logits + i), largest, temperature);
      sum = hn::Add(sum, p);
      if (to != nullptr) {
        hn::StoreU(p, d, to + i);
      }
    }
    total += hn::GetLane(hn::SumOfLanes(d, sum));
    for (; i < end; ++i) {
      hn::Store(likelihood(d, hn::Set(d, logits[i]), largest, temperature), d, buffer);
      total += buffer[0];
      if (to != nullptr) {
        to[i] = buffer[0];
      }
    }
  }
  return total;
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(largest_logit);
HWY_EXPORT(likelihoods);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct SampleScratch {
  float* masses;            // [V]
  uint32_t* keys;           // [V]
  uint32_t* candidates;     // [V]
  double* mass_histogram;   // [kHistogramBins]
  uint32_t* key_histogram;  // [kCountHistogram]
};

SampleScratch take_scratch(Workspace& workspace, int64_t vocabulary) {
  SampleScratch scratch;
  scratch.masses = workspace.take<float>(vocabulary);
  scratch.keys = workspace.take<uint32_t>(vocabulary);
  scratch.candidates = workspace.take<uint32_t>(vocabulary);
  scratch.mass_histogram = workspace.take<double>(kHistogramBins);
  scratch.key_histogram = workspace.take<uint32_t>(kCountHistogram);
  return scratch;
}

// Drops what the threshold does not keep. Ties stay by lowest id; those that an earlier filter
// dropped come after those that it kept.
void keep_largest(const Threshold& threshold, const uint32_t* keys, int64_t n, float* masses) {
  int64_t ties = threshold.ties;
  for (int64_t i = 0; i < n; ++i) {
    if (keys[i] < threshold.key || (keys[i] == threshold.key && --ties < 0)) {
      masses[i] = 0;
    }
  }
}

double sum_of_masses(const float* masses, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) {
    total += masses[i];
  }
  return total;
}

// Softmax numerators before the filters. With infinite logits they share all of the mass.
double fill_masses(const float* logits, int64_t n, float largest, float temperature,
                   float* masses) {
  if (largest < kInfinity) {
    return HWY_DYNAMIC_DISPATCH(likelihoods)(logits, n, largest, temperature, masses);
  }
  double total = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float mass = logits[i] == kInfinity ? 1.0f : 0.0f;
    if (masses != nullptr) {
      masses[i] = mass;
    }
    total += mass;
  }
  return total;
}

struct Filters {
  float temperature;
  int64_t top_k;
  float top_p;
  float min_p;
  float uniform;
};

int64_t draw(const float* logits, int64_t n, float largest, const Filters& filters,
             const SampleScratch& scratch) {
  float* masses = scratch.masses;
  double total = fill_masses(logits, n, largest, std::min(filters.temperature, FLT_MAX), masses);
  const bool by_count = filters.top_k > 0 && filters.top_k < n;
  const bool by_mass = filters.top_p < 1.0f;
  if (by_count || by_mass) {
    for (int64_t i = 0; i < n; ++i) {
      scratch.keys[i] = ordered_key(logits[i]);
    }
  }
  if (by_count) {
    keep_largest(
        kth_largest(scratch.keys, n, filters.top_k, scratch.candidates, scratch.key_histogram),
        scratch.keys, n, masses);
    total = sum_of_masses(masses, n);
  }
  if (by_mass) {
    keep_largest(
        largest_with_mass(scratch.keys, masses, n, filters.top_p * total, scratch.mass_histogram),
        scratch.keys, n, masses);
    total = sum_of_masses(masses, n);
  }
  if (filters.min_p > 0.0f) {
    const float least = filters.min_p * *std::max_element(masses, masses + n);
    for (int64_t i = 0; i < n; ++i) {
      masses[i] = masses[i] >= least ? masses[i] : 0.0f;
    }
    total = sum_of_masses(masses, n);
  }
  const double target = filters.uniform * total;
  double running = 0;
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (masses[i] > 0) {
      last = i;
      running += masses[i];
      if (running > target) {
        break;
      }
    }
  }
  return last;
}

void sample_row(const SampleArgs& args, int64_t t, const SampleScratch& scratch) {
  const float* logits = args.logits.as<float>() + t * args.logits.strides[0];
  const int64_t n = args.logits.shape[1];
  const float largest = HWY_DYNAMIC_DISPATCH(largest_logit)(logits, n);
  const Filters filters = {
      .temperature = args.temperature.as<float>()[t * args.temperature.strides[0]],
      .top_k = args.top_k.as<int32_t>()[t * args.top_k.strides[0]],
      .top_p = args.top_p.as<float>()[t * args.top_p.strides[0]],
      .min_p = args.min_p.as<float>()[t * args.min_p.strides[0]],
      .uniform = args.uniform.as<float>()[t * args.uniform.strides[0]]};
  int64_t id = 0;
  if (largest > -kInfinity) {
    // Also greedy for a temperature that is NaN.
    id = filters.temperature > 0 ? draw(logits, n, largest, filters, scratch)
                                 : std::find(logits, logits + n, largest) - logits;
  }
  args.ids.as<int32_t>()[t * args.ids.strides[0]] = static_cast<int32_t>(id);
  if (!args.logprobs.empty()) {
    double logprob = -kInfinity;
    if (largest > -kInfinity) {
      const double total = fill_masses(logits, n, largest, 1.0f, nullptr);
      const double above = largest < kInfinity ? static_cast<double>(logits[id]) - largest : 0.0;
      logprob = above - std::log(total);
    }
    args.logprobs.as<float>()[t * args.logprobs.strides[0]] = static_cast<float>(logprob);
  }
}

int64_t sample_workspace(const SampleArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  take_scratch(workspace, args.logits.shape[1]);
  return workspace.used_bytes() * device.num_threads;
}

Status sample(const SampleArgs& args, const DeviceInfo& device, const Launch& launch) {
  const int64_t bytes = sample_workspace(args, device) / device.num_threads;
  device.thread_pool->parallel_for(args.ids.shape[0], [&](int64_t t, int worker) {
    Workspace workspace(static_cast<char*>(launch.workspace) + worker * bytes, bytes);
    sample_row(args, t, take_scratch(workspace, args.logits.shape[1]));
  });
  return ok_status();
}

}  // namespace

const Kernel<SampleArgs> kSample = {
    .name = "cpu/sample",
    .supports = supports_all<SampleArgs>,
    .workspace_bytes = sample_workspace,
    .run = sample,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
