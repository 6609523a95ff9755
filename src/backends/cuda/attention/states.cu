// The algebra of partial attention: joins states over disjoint keys, and scales one rank's output
// so that the sum over ranks is the joined one. A warp a (row, head); memory-bound.
#include <cmath>
#include <string>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/exp2.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr float kMinusInfinity = -INFINITY;

// An lse as it counts: natural, and -inf for what carries no weight.
__device__ float natural_lse(float lse, LseBase base) {
  if (isnan(lse) || lse == INFINITY) {
    return kMinusInfinity;
  }
  return base == LseBase::kTwo ? lse * kLn2 : lse;
}

// What a warp works on.
struct Pair {
  int64_t row;
  int64_t head;
};

// False when there is no pair left for the warp.
__device__ bool find_pair(int64_t num_pairs, int num_heads, Pair* pair) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  *pair = {.row = number / num_heads, .head = number % num_heads};
  return number < num_pairs;
}

struct State {
  const void* out;
  const float* lse;
  int64_t out_strides[2];
  int64_t lse_strides[2];
  DType dtype;
};

// By value: the caller's span of views lives on the host only for the call. 64 states are 3.6 KB of
// the 4 KB that parameters may be.
struct MergeParams {
  State states[kMaxPartialStates];
  void* out;
  int64_t out_strides[2];
  float* lse;
  int64_t lse_strides[2];
  int64_t num_pairs;  // rows times heads
  int32_t num_states;
  int32_t num_heads;
  int32_t width;
  DType out_dtype;
  LseBase base;
};
static_assert(sizeof(MergeParams) <= 4000);

__global__ __launch_bounds__(kThreads) void merge_states_kernel(
    const __grid_constant__ MergeParams p) {
  Pair pair;
  if (!find_pair(p.num_pairs, p.num_heads, &pair)) {
    return;
  }
  pdl_wait();
  const auto [row, head] = pair;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  float lses[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = lane_idx + i * kWarp;
    lses[i] = kMinusInfinity;
    if (n < p.num_states) {
      const State& state = p.states[n];
      lses[i] =
          natural_lse(state.lse[row * state.lse_strides[0] + head * state.lse_strides[1]], p.base);
    }
  }
  const float max = reduce_warp(fmaxf(lses[0], lses[1]), Max());
  float joined = kMinusInfinity;
  if (max != kMinusInfinity) {
    joined = max + logf(reduce_warp(expf(lses[0] - max) + expf(lses[1] - max), Sum()));
  }
  float weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights[i] = lses[i] == kMinusInfinity ? 0.0f : expf(lses[i] - joined);
  }
  // All inputs of a column are read before it is written, so that out may be one of them.
  for (int first = 0; first < p.width; first += kWarp) {
    const int column = first + lane_idx;
    float sum = 0.0f;
    for (int n = 0; n < p.num_states; ++n) {
      const float weight = __shfl_sync(0xffffffffu, n < kWarp ? weights[0] : weights[1], n % kWarp);
      const float lse = __shfl_sync(0xffffffffu, n < kWarp ? lses[0] : lses[1], n % kWarp);
      // A state without keys is not read: its output may be NaN.
      if (lse != kMinusInfinity && column < p.width) {
        const State& state = p.states[n];
        sum += weight * load_any(state.out, state.dtype,
                                 row * state.out_strides[0] + head * state.out_strides[1] + column);
      }
    }
    if (column < p.width) {
      store_any(p.out, p.out_dtype, row * p.out_strides[0] + head * p.out_strides[1] + column, sum);
    }
  }
  if (p.lse != nullptr && lane_idx == 0) {
    p.lse[row * p.lse_strides[0] + head * p.lse_strides[1]] = joined;
  }
}

struct RescaleParams {
  void* out;
  int64_t out_strides[2];
  Strided3<const float> lse;  // [N, T, H]
  float* merged_lse;
  int64_t merged_strides[2];
  int64_t num_pairs;
  int64_t num_ranks;
  int32_t rank;
  int32_t num_heads;
  int32_t width;
  DType dtype;
  LseBase base;
};

__global__ __launch_bounds__(kThreads) void rescale_by_lse_kernel(const RescaleParams p) {
  Pair pair;
  if (!find_pair(p.num_pairs, p.num_heads, &pair)) {
    return;
  }
  pdl_wait();
  const auto [row, head] = pair;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const auto lse_of = [&](int64_t rank) {
    return natural_lse(p.lse.row(rank, row)[head * p.lse.strides[2]], p.base);
  };
  float max = kMinusInfinity;
  for (int64_t n = lane_idx; n < p.num_ranks; n += kWarp) {
    max = fmaxf(max, lse_of(n));
  }
  max = reduce_warp(max, Max());
  float joined = max;
  if (max != kMinusInfinity) {
    float sum = 0.0f;
    for (int64_t n = lane_idx; n < p.num_ranks; n += kWarp) {
      sum += expf(lse_of(n) - max);
    }
    joined = max + logf(reduce_warp(sum, Sum()));
  }
  // -inf minus -inf is NaN, and no factor.
  const float given = expf(lse_of(p.rank) - joined);
  const float factor = isnan(given) ? 0.0f : given;
  const int64_t at = row * p.out_strides[0] + head * p.out_strides[1];
  for (int column = lane_idx; column < p.width; column += kWarp) {
    const float value = factor == 0.0f ? 0.0f : factor * load_any(p.out, p.dtype, at + column);
    store_any(p.out, p.dtype, at + column, value);
  }
  if (p.merged_lse != nullptr && lane_idx == 0) {
    p.merged_lse[row * p.merged_strides[0] + head * p.merged_strides[1]] = joined;
  }
}

// Both operations: a warp a pair, and everything fits the grid.
template <class Args>
Status supports_pairs(const Args& args, const DeviceInfo&) {
  const TensorView& out = args.out;
  if (out.shape[1] > INT32_MAX || out.shape[2] > INT32_MAX ||
      out.shape[0] > int64_t{INT32_MAX} * kWarps / out.shape[1]) {
    return unsupported("out: " + std::to_string(out.shape[0]) + " rows of " +
                       std::to_string(out.shape[1]) + " heads, expected at most 2^34 in all");
  }
  return ok_status();
}

template <class Params>
Status launch_pairs(const char* name, void (*kernel)(Params), const Params& params,
                    const DeviceInfo& device, const Launch& where) {
  return launch(name, kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(params.num_pairs, kWarps))),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

Status run_merge_states(const MergeStatesArgs& args, const DeviceInfo& device,
                        const Launch& where) {
  MergeParams params = {};
  for (size_t n = 0; n < args.states.size(); ++n) {
    const PartialState& state = args.states[n];
    params.states[n] = {.out = state.out.data,
                        .lse = state.lse.as<float>(),
                        .out_strides = {state.out.strides[0], state.out.strides[1]},
                        .lse_strides = {state.lse.strides[0], state.lse.strides[1]},
                        .dtype = state.out.dtype};
  }
  params.out = args.out.data;
  params.out_dtype = args.out.dtype;
  params.lse = static_cast<float*>(args.lse.data);
  for (int d = 0; d < 2; ++d) {
    params.out_strides[d] = args.out.strides[d];
    params.lse_strides[d] = args.lse.strides[d];
  }
  params.num_pairs = args.out.shape[0] * args.out.shape[1];
  params.num_states = static_cast<int32_t>(args.states.size());
  params.num_heads = static_cast<int32_t>(args.out.shape[1]);
  params.width = static_cast<int32_t>(args.out.shape[2]);
  params.base = args.lse_base;
  return launch_pairs("cuda/merge_states", merge_states_kernel, params, device, where);
}

Status run_rescale_by_lse(const RescaleByLseArgs& args, const DeviceInfo& device,
                          const Launch& where) {
  const RescaleParams params = {
      .out = args.out.data,
      .out_strides = {args.out.strides[0], args.out.strides[1]},
      .lse = strided3<const float>(args.lse),
      .merged_lse = static_cast<float*>(args.merged_lse.data),
      .merged_strides = {args.merged_lse.strides[0], args.merged_lse.strides[1]},
      .num_pairs = args.out.shape[0] * args.out.shape[1],
      .num_ranks = args.lse.shape[0],
      .rank = args.rank,
      .num_heads = static_cast<int32_t>(args.out.shape[1]),
      .width = static_cast<int32_t>(args.out.shape[2]),
      .dtype = args.out.dtype,
      .base = args.lse_base};
  return launch_pairs("cuda/rescale_by_lse", rescale_by_lse_kernel, params, device, where);
}

}  // namespace

const Kernel<MergeStatesArgs> kMergeStates = {.name = "cuda/merge_states",
                                              .supports = supports_pairs<MergeStatesArgs>,
                                              .run = run_merge_states};

const Kernel<RescaleByLseArgs> kRescaleByLse = {.name = "cuda/rescale_by_lse",
                                                .supports = supports_pairs<RescaleByLseArgs>,
                                                .run = run_rescale_by_lse};

}  // namespace lacuna::cuda
