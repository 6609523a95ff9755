// The algebra of partial attention on the CPU: joins states over disjoint keys, and scales one
// rank's output so that the sum over ranks is the joined one. Memory-bound; a task is a range of
// (row, head) pairs.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/states.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Columns that are joined at once. All inputs of a strip are read before it is written, so out may
// be one of them.
constexpr int64_t kStrip = 256;

// An lse as it counts: natural, and -inf for what carries no weight.
double natural_lse(float lse, LseBase base) {
  if (std::isnan(lse) || lse == std::numeric_limits<float>::infinity()) {
    return kMinusInfinity;
  }
  return base == LseBase::kTwo ? lse * std::numbers::ln2 : lse;
}

// log sum_n exp(lse[n]).
double log_sum_exp(const double* lse, int64_t n) {
  double max = kMinusInfinity;
  for (int64_t i = 0; i < n; ++i) {
    max = std::max(max, lse[i]);
  }
  if (max == kMinusInfinity) {
    return max;
  }
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += std::exp(lse[i] - max);
  }
  return max + std::log(sum);
}

template <class View>
int64_t head_offset(const View& tensor, int64_t row, int64_t head) {
  return row * tensor.strides[0] + head * tensor.strides[1];
}

void read_strip(const ConstTensorView& tensor, int64_t at, int64_t count, float* to) {
  switch (tensor.dtype) {
    case DType::kBFloat16:
      return widen(tensor.as<Bf16>() + at, count, to);
    case DType::kFloat16:
      return widen(tensor.as<Fp16>() + at, count, to);
    default:
      return widen(tensor.as<float>() + at, count, to);
  }
}

void write_strip(const TensorView& tensor, int64_t at, int64_t count, const float* from) {
  switch (tensor.dtype) {
    case DType::kBFloat16:
      return narrow(from, count, tensor.as<Bf16>() + at);
    case DType::kFloat16:
      return narrow(from, count, tensor.as<Fp16>() + at);
    default:
      return narrow(from, count, tensor.as<float>() + at);
  }
}

void merge_head(const MergeStatesArgs& args, int64_t row, int64_t head) {
  const int64_t num_states = static_cast<int64_t>(args.states.size());
  std::array<double, kMaxPartialStates> lse = {};
  for (int64_t n = 0; n < num_states; ++n) {
    const ConstTensorView& view = args.states[n].lse;
    lse[n] = natural_lse(view.as<float>()[head_offset(view, row, head)], args.lse_base);
  }
  const double joined = log_sum_exp(lse.data(), num_states);
  std::array<float, kMaxPartialStates> weight = {};
  for (int64_t n = 0; n < num_states; ++n) {
    weight[n] = lse[n] == kMinusInfinity ? 0.0f : static_cast<float>(std::exp(lse[n] - joined));
  }
  const int64_t width = args.out.shape[2];
  HWY_ALIGN std::array<float, kStrip> sum;
  HWY_ALIGN std::array<float, kStrip> part;
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    std::fill_n(sum.begin(), count, 0.0f);
    for (int64_t n = 0; n < num_states; ++n) {
      // A state without keys is not read: its output may be NaN.
      if (lse[n] == kMinusInfinity) {
        continue;
      }
      const ConstTensorView& view = args.states[n].out;
      read_strip(view, head_offset(view, row, head) + column, count, part.data());
      for (int64_t i = 0; i < count; ++i) {
        sum[i] += weight[n] * part[i];
      }
    }
    write_strip(args.out, head_offset(args.out, row, head) + column, count, sum.data());
  }
  if (!args.lse.empty()) {
    args.lse.as<float>()[head_offset(args.lse, row, head)] = static_cast<float>(joined);
  }
}

void rescale_head(const RescaleByLseArgs& args, int64_t row, int64_t head) {
  // Ranks may be many: two passes over them instead of an array.
  const auto lse_of = [&](int64_t rank) {
    const float* lse = args.lse.as<float>();
    return natural_lse(
        lse[rank * args.lse.strides[0] + row * args.lse.strides[1] + head * args.lse.strides[2]],
        args.lse_base);
  };
  double max = kMinusInfinity;
  for (int64_t rank = 0; rank < args.lse.shape[0]; ++rank) {
    max = std::max(max, lse_of(rank));
  }
  double joined = max;
  if (max != kMinusInfinity) {
    double sum = 0;
    for (int64_t rank = 0; rank < args.lse.shape[0]; ++rank) {
      sum += std::exp(lse_of(rank) - max);
    }
    joined = max + std::log(sum);
  }
  // -inf minus -inf is NaN, and no factor.
  const float given = static_cast<float>(std::exp(lse_of(args.rank) - joined));
  const float factor = std::isnan(given) ? 0.0f : given;
  const int64_t width = args.out.shape[2];
  HWY_ALIGN std::array<float, kStrip> strip;
  for (int64_t column = 0; column < width; column += kStrip) {
    const int64_t count = std::min(kStrip, width - column);
    const int64_t at = head_offset(args.out, row, head) + column;
    if (factor == 0.0f) {
      std::fill_n(strip.begin(), count, 0.0f);
    } else {
      read_strip(args.out, at, count, strip.data());
      for (int64_t i = 0; i < count; ++i) {
        strip[i] *= factor;
      }
    }
    write_strip(args.out, at, count, strip.data());
  }
  if (!args.merged_lse.empty()) {
    args.merged_lse.as<float>()[head_offset(args.merged_lse, row, head)] =
        static_cast<float>(joined);
  }
}

// (row, head) pairs [begin, end), counted through.
void merge_states_range(const MergeStatesArgs& args, int64_t begin, int64_t end) {
  const int64_t heads = args.out.shape[1];
  for (int64_t i = begin; i < end; ++i) {
    merge_head(args, i / heads, i % heads);
  }
}

void rescale_by_lse_range(const RescaleByLseArgs& args, int64_t begin, int64_t end) {
  const int64_t heads = args.out.shape[1];
  for (int64_t i = begin; i < end; ++i) {
    rescale_head(args, i / heads, i % heads);
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {

HWY_EXPORT(merge_states_range);
HWY_EXPORT(rescale_by_lse_range);

const Kernel<MergeStatesArgs> kMergeStates = {
    .name = "cpu/merge_states",
    .supports = supports_all<MergeStatesArgs>,
    .run =
        [](const MergeStatesArgs& args, const DeviceInfo& device, const Launch&) {
          const auto range = HWY_DYNAMIC_DISPATCH(merge_states_range);
          const int64_t bytes = 4 * args.out.shape[2] * static_cast<int64_t>(args.states.size());
          parallel_ranges(device, args.out.shape[0] * args.out.shape[1], grain_rows(bytes),
                          [&](int64_t begin, int64_t end, int) { range(args, begin, end); });
          return ok_status();
        },
};

const Kernel<RescaleByLseArgs> kRescaleByLse = {
    .name = "cpu/rescale_by_lse",
    .supports = supports_all<RescaleByLseArgs>,
    .run =
        [](const RescaleByLseArgs& args, const DeviceInfo& device, const Launch&) {
          const auto range = HWY_DYNAMIC_DISPATCH(rescale_by_lse_range);
          parallel_ranges(device, args.out.shape[0] * args.out.shape[1],
                          grain_rows(8 * args.out.shape[2]),
                          [&](int64_t begin, int64_t end, int) { range(args, begin, end); });
          return ok_status();
        },
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
