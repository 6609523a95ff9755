// Joins the states of a row's splits: out = sum_s 2^(m_s - M) O_s / sum_s 2^(m_s - M) l_s with M
// the largest m_s, in the order of the splits. A unit is 16 output columns by 8 heads: a warp's
// accumulators, 512 bytes of each state. Few splits: a warp a unit. Many: the warps of a block
// share the splits of one unit.
#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/sm90/attention/small_head_cut.cuh"
#include "backends/sm90/attention/small_head_output.cuh"
#include "backends/sm90/attention/sparse_mla_small_head.h"

namespace lacuna::sm90 {
namespace {

using cuda::kMinusInfinity;
using cuda::kWarp;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
// From this many splits on, warps share the splits of a unit.
constexpr int kManySplits = 9;

template <int kHeads, bool kMany, bool kRuns>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ SmallHeadParams params, int64_t num_items) {
  constexpr int kPairs = kHeads / 8;
  constexpr int kUnits = kLatentSlabs * 4 * kPairs;  // of a row
  // States of 8 lanes at once: lane 4 r + c holds those of states r, r + 8, .. for heads 2 c, + 1.
  constexpr int kRounds = kMany ? static_cast<int>(cuda::kSplitsMax) / 8 : 1;
  constexpr int kReads =
      kMany ? static_cast<int>(cuda::kSplitsMax) / kWarps : 8;  // states of a warp
  __shared__ float4 parts[kMany ? kWarps : 1][kWarp];
  const cuda::SparseMlaParams& p = params.call;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t index = kMany ? blockIdx.x : int64_t{blockIdx.x} * kWarps + warp;
  const int unit = static_cast<int>(index % kUnits);
  const int64_t item = index / kUnits;
  const int slab = unit / (4 * kPairs);
  const int pair = unit / 4 % kPairs;
  const int strip = unit % 4;  // warp of the warpgroup that wrote it
  cuda::prefetch_params(params);
  // Once without states, so that the instructions are there when the states are.
#pragma unroll 1
  for (int pass = 0; pass < 2; ++pass) {
    int64_t row = 0;
    int64_t slot = 0;
    int states = 0;
    if (pass > 0) {
      if constexpr (kMany) {
        __syncthreads();  // the parts of the dry pass have been read
      }
      cuda::pdl_wait();
      cuda::pdl_launch_dependents();
      if (item < num_items) {
        states = kRuns ? run_states(params, item, row, slot) : cuda::num_states(p, item, row, slot);
      }
      if (states == 0) {
        return;  // the same for the whole block (or the warp, where warps do not meet)
      }
    }
    // All reads at once, whatever the weights.
    float4 sums[kRounds];  // largest scores and sums of heads 2 c and 2 c + 1
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int s = round * 8 + lane / 4;
      sums[round] = {kMinusInfinity, 0.0f, kMinusInfinity, 0.0f};
      if (s < states) {
        sums[round] = __ldcg(reinterpret_cast<const float4*>(p.partial_sums + (slot + s) * kHeads +
                                                             pair * 8 + lane % 4 * 2));
      }
    }
    float4 values[kReads];
    const auto* from = reinterpret_cast<const float4*>(p.partial_out) +
                       ((slot * kLatentSlabs + slab) * kPairs + pair) * kWarpgroup + strip * kWarp +
                       lane;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const int s = kMany ? i * kWarps + warp : i;
      values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (s < states) {
        values[i] = __ldcg(from + s * kLatentSlabs * kPairs * kWarpgroup);
      }
    }
    float2 max = {kMinusInfinity, kMinusInfinity};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      max = {fmaxf(max.x, sums[round].x), fmaxf(max.y, sums[round].z)};
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      max.x = fmaxf(max.x, __shfl_xor_sync(0xffffffffu, max.x, offset));
      max.y = fmaxf(max.y, __shfl_xor_sync(0xffffffffu, max.y, offset));
    }
    float2 weights[kRounds];
    float2 sum = {0.0f, 0.0f};
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      weights[round] = {exp2_fast(sums[round].x - (max.x == kMinusInfinity ? 0.0f : max.x)),
                        exp2_fast(sums[round].z - (max.y == kMinusInfinity ? 0.0f : max.y))};
      sum.x += weights[round].x * sums[round].y;
      sum.y += weights[round].y * sums[round].w;
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      sum.x += __shfl_xor_sync(0xffffffffu, sum.x, offset);
      sum.y += __shfl_xor_sync(0xffffffffu, sum.y, offset);
    }
    float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      // State s = 8 round + r: its weights are in lanes 4 r + c. The others' rounds are constants.
      const int round = kMany ? i * kWarps / 8 : 0;
      const int holder = (kMany ? i * kWarps % 8 + warp : i) * 4 + lane % 4;
      const float even = __shfl_sync(0xffffffffu, weights[round].x, holder);
      const float odd = __shfl_sync(0xffffffffu, weights[round].y, holder);
      // A split without keys wrote no values: its weight is 0.
      if (even != 0.0f) {
        total.x += even * values[i].x;
        total.z += even * values[i].z;
      }
      if (odd != 0.0f) {
        total.y += odd * values[i].y;
        total.w += odd * values[i].w;
      }
    }
    if constexpr (kMany) {
      parts[warp][lane] = total;
      __syncthreads();
      if (warp > 0 && pass > 0) {
        return;
      }
#pragma unroll
      for (int w = 1; w < kWarps; ++w) {
        const float4 other = parts[w][lane];
        total = {total.x + other.x, total.y + other.y, total.z + other.z, total.w + other.w};
      }
    }
    const int head = pair * 8 + lane % 4 * 2;
    const bool writes = pass > 0 && slab == 0 && strip == 0 && lane < 4;
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = head + i < p.num_heads;
      factors[i] =
          finish_head_log2(p, static_cast<int32_t>(row), exists ? head + i : 0,
                           i == 0 ? max.x : max.y, i == 0 ? sum.x : sum.y, writes && exists);
    }
    const float4 value = {factors[0] == 0.0f ? 0.0f : total.x * factors[0],
                          factors[1] == 0.0f ? 0.0f : total.y * factors[1],
                          factors[0] == 0.0f ? 0.0f : total.z * factors[0],
                          factors[1] == 0.0f ? 0.0f : total.w * factors[1]};
    write_output(output_at(p, static_cast<int32_t>(row), pair, slab * 64 + strip * 16, lane),
                 pass > 0 && pair * 8 + lane / 4 < p.num_heads, value);
  }
}

template <int kHeads>
Status launch_combine(const SmallHeadParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items) {
  // By a schedule the number of splits is not known here.
  const bool runs = params.runs.num_runs > 0;
  const int64_t splits = runs ? params.runs.row_parts_max() : params.call.num_splits;
  const bool many = params.call.schedule != nullptr || splits >= kManySplits;
  const int64_t units = num_items * kLatentSlabs * 4 * (kHeads / 8);
  const int64_t blocks = many ? units : cuda::ceil_div(units, kWarps);
  if (blocks > INT32_MAX) {
    return unsupported("sm90/sparse_mla_small_head: too many rows for one launch");
  }
  const auto kernel =
      runs   ? many ? combine_kernel<kHeads, true, true> : combine_kernel<kHeads, false, true>
        : many ? combine_kernel<kHeads, true, false>
             : combine_kernel<kHeads, false, false>;
  return cuda::launch(
      "sm90/sparse_mla_small_head_combine", kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true}, params,
      num_items);
}

}  // namespace

Status combine_small_head(const SmallHeadParams& params, const DeviceInfo& device,
                          const Launch& where, int64_t num_items) {
  switch (padded_heads(params.call.num_heads)) {
    case 8:
      return launch_combine<8>(params, device, where, num_items);
    case 16:
      return launch_combine<16>(params, device, where, num_items);
    default:
      return launch_combine<32>(params, device, where, num_items);
  }
}

}  // namespace lacuna::sm90
