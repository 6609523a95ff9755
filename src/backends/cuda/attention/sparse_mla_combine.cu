// Joins the splits of a row: out = sum_s exp(m_s - M) O_s / sum_s exp(m_s - M) l_s with M the
// largest m_s, in a fixed order. A unit is 64 columns of a head: 16 threads read up to four states
// of it, and as many half warps share a unit as its states ask for, so that all reads overlap.
#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/exp2.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLanes = kWarp / 2;  // of a unit, four columns each
constexpr int kHalves = kThreads / kLanes;
constexpr int kReads = 4;  // of states, by a half warp
static_assert(kHalves * kReads >= kSplitsMax);

// Four columns of a head, and the state that they belong to.
struct Part {
  float4 values;
  float max;
  float sum;
};

// The sum of parts, which the later ones come after. Parts without keys hold no values.
template <int kParts>
__device__ Part join_parts(const Part (&parts)[kParts]) {
  Part total = {.values = {0.0f, 0.0f, 0.0f, 0.0f}, .max = kMinusInfinity, .sum = 0.0f};
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    total.max = fmaxf(total.max, parts[i].max);
  }
  const float shift = total.max == kMinusInfinity ? 0.0f : total.max;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    const float weight = exp2_fast((parts[i].max - shift) * kLog2E);
    total.sum += weight * parts[i].sum;
    if (parts[i].max != kMinusInfinity) {
      total.values.x += weight * parts[i].values.x;
      total.values.y += weight * parts[i].values.y;
      total.values.z += weight * parts[i].values.z;
      total.values.w += weight * parts[i].values.w;
    }
  }
  return total;
}

// kSharers half warps share a unit. kWhole: latent is a multiple of 4.
template <int kSharers, bool kWhole>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ SparseMlaParams p, uint32_t num_items, uint32_t num_strips,
    int first_pass) {
  __shared__ Part shared_parts[kSharers <= 2 ? 1 : kWarps][kLanes];
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kLanes;
  const int half = static_cast<int>(threadIdx.x) / kLanes;
  const int sharer = half % kSharers;
  const uint32_t index = blockIdx.x * (kHalves / kSharers) + half / kSharers;
  const uint32_t item_head = index / num_strips;
  const int strip = static_cast<int>(index - item_head * num_strips);
  const uint32_t item = item_head / static_cast<uint32_t>(p.num_heads);
  const int head = static_cast<int>(item_head - item * static_cast<uint32_t>(p.num_heads));
  const int column = (strip * kLanes + lane_idx) * 4;
  // The successor waits for the end of this kernel, whenever it starts; all blocks of this one
  // have their place by then.
  pdl_launch_dependents();
  prefetch_params(p);
  // In a loop, so that what no pass changes is worked out before the wait. The first pass has no
  // states: it brings the instructions, where blocks start before their predecessor ends.
#pragma unroll 1
  for (int pass = first_pass; pass < 2; ++pass) {
    int64_t row = 0;
    int64_t slot = 0;
    int states = 0;
    if (pass > 0) {
      pdl_wait();
      states = item < num_items ? num_states(p, item, row, slot) : 0;
      if (kSharers == kHalves && states == 0) {
        return;  // the same for the whole block
      }
    }
    // All reads at once, whatever their weights.
    Part parts[kReads];
    const int64_t at = (slot + sharer) * p.num_heads + head;
    const float2* sums = p.partial_sums + at;
    const float* outs = p.partial_out + at * p.latent + column;
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      parts[i] = {.values = {0.0f, 0.0f, 0.0f, 0.0f}, .max = kMinusInfinity, .sum = 0.0f};
      if (i * kSharers + sharer < states) {
        const int64_t ahead = int64_t{i * kSharers} * p.num_heads;
        const float2 state = __ldcg(sums + ahead);
        const float* from = outs + ahead * p.latent;
        parts[i].max = state.x;
        parts[i].sum = state.y;
        if constexpr (kWhole) {
          if (column < p.latent) {
            parts[i].values = __ldcg(reinterpret_cast<const float4*>(from));
          }
        } else {
          parts[i].values.x = column < p.latent ? __ldcg(from) : 0.0f;
          parts[i].values.y = column + 1 < p.latent ? __ldcg(from + 1) : 0.0f;
          parts[i].values.z = column + 2 < p.latent ? __ldcg(from + 2) : 0.0f;
          parts[i].values.w = column + 3 < p.latent ? __ldcg(from + 3) : 0.0f;
        }
      }
    }
    Part total = join_parts(parts);
    if constexpr (kSharers > 1) {
      const auto other_half = [](float x) { return __shfl_down_sync(0xffffffffu, x, kLanes); };
      const Part halves[2] = {total,
                              {.values = {other_half(total.values.x), other_half(total.values.y),
                                          other_half(total.values.z), other_half(total.values.w)},
                               .max = other_half(total.max),
                               .sum = other_half(total.sum)}};
      total = join_parts(halves);
    }
    if constexpr (kSharers > 2) {
      if (half % 2 == 0) {
        shared_parts[warp_idx][lane_idx] = total;
      }
      __syncthreads();
      if (sharer == 0) {
        Part of_warps[kSharers / 2];
#pragma unroll
        for (int w = 0; w < kSharers / 2; ++w) {
          of_warps[w] = shared_parts[warp_idx + w][lane_idx];
        }
        total = join_parts(of_warps);
      }
    }
    const bool writes = states > 0 && sharer == 0;
    const float factor =
        finish_head(p, row, head, total.max, total.sum, writes && strip == 0 && lane_idx == 0);
    if (writes) {
      const int64_t to = row * p.out_strides[0] + head * p.out_strides[1] + column;
      if (column + 4 <= p.latent) {
        store_four(p, to, total.values, factor);
      } else if constexpr (!kWhole) {
        const float rest[3] = {total.values.x, total.values.y, total.values.z};
#pragma unroll
        for (int i = 0; i < 3; ++i) {
          if (column + i < p.latent) {
            store_out(p, to + i, factor == 0.0f ? 0.0f : rest[i] * factor);
          }
        }
      }
    }
    if (kSharers > 2 && pass == 0) {
      __syncthreads();  // shared_parts are written again
    }
  }
}

template <int kSharers>
Status launch_combine(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items) {
  const int64_t strips = ceil_div(params.latent, 4 * kLanes);
  const int64_t units = num_items * params.num_heads * strips;
  if (units > INT32_MAX) {
    return unsupported("cuda/sparse_mla_combine: too many rows for one launch");
  }
  const int64_t blocks = ceil_div(units, kHalves / kSharers);
  // A grid that is not there at once does without the pass that has no states.
  const int first_pass = blocks <= device.sm_count ? 0 : 1;
  return launch(
      "cuda/sparse_mla_combine",
      params.latent % 4 == 0 ? combine_kernel<kSharers, true> : combine_kernel<kSharers, false>,
      device, where,
      {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true}, params,
      static_cast<uint32_t>(num_items), static_cast<uint32_t>(strips), first_pass);
}

}  // namespace

Status combine_splits(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items) {
  // By a schedule the number of splits is not known here.
  const int64_t splits = params.schedule != nullptr ? kSplitsMax : params.num_splits;
  const auto run = splits <= 4    ? launch_combine<1>
                   : splits <= 8  ? launch_combine<2>
                   : splits <= 16 ? launch_combine<4>
                   : splits <= 32 ? launch_combine<8>
                                  : launch_combine<16>;
  return run(params, device, where, num_items);
}

}  // namespace lacuna::cuda
