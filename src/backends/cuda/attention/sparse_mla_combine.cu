// Joins the splits of a row: out = sum_s exp(m_s - M) O_s / sum_s exp(m_s - M) l_s with M the
// largest m_s, in the order of the splits. Few splits: a warp joins 128 columns of a head. Many: a
// block of threads does, each warp every eighth split, so that their reads overlap.
#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kColumns = 128;  // 4 a lane
// From this many splits on, warps share the splits of a head. With 8 splits of 32 rows that
// took 38.7 us instead of 32.0.
constexpr int64_t kManySplits = 17;

// Row and number of states of an item; 0 states: nothing to do.
__device__ int num_states(const SparseMlaParams& p, int64_t item, int64_t& row, int64_t& slot) {
  if (p.schedule == nullptr) {
    row = p.first_row + item;
    slot = item * p.num_splits;
    return p.num_splits;
  }
  const int4 header = __ldcg(p.schedule);
  if (header.x != kBalanced || item >= header.y || header.z != p.num_rows ||
      header.w != p.list_width) {
    return 0;
  }
  const int4 entry = __ldcg(p.schedule + 1 + item);
  row = entry.x;
  slot = item;
  const bool first = entry.y == 0 && entry.w > 1 && entry.w <= kSplitsMax;
  return first && row >= 0 && row < p.num_rows && item + entry.w <= p.num_slots ? entry.w : 0;
}

template <int kSplitWarps>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ SparseMlaParams p, int64_t num_items, int num_strips) {
  __shared__ float4 parts[kSplitWarps == 1 ? 1 : kWarps][kWarp];
  pdl_wait();
  pdl_launch_dependents();
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  int64_t index = blockIdx.x;
  if constexpr (kSplitWarps == 1) {
    index = index * kWarps + warp_idx;
  }
  const int strip = static_cast<int>(index % num_strips);
  const int head = static_cast<int>(index / num_strips % p.num_heads);
  const int64_t item = index / num_strips / p.num_heads;
  int64_t row = 0;
  int64_t slot = 0;
  const int states = item < num_items ? num_states(p, item, row, slot) : 0;
  if (states == 0) {
    return;  // the same for the whole block (or the warp, where warps do not meet)
  }
  // All reads at once: the sums, two states a lane, and the values, whatever their weights.
  float2 sums[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int s = lane_idx + i * kWarp;
    sums[i] = s < states ? __ldcg(p.partial_sums + (slot + s) * p.num_heads + head)
                         : make_float2(kMinusInfinity, 0.0f);
  }
  const int column = strip * kColumns + 4 * lane_idx;
  const bool vectors = p.latent % 4 == 0;
  constexpr int kReads = kSplitWarps == 1 ? static_cast<int>(kManySplits) - 1 : kSplitsMax / kWarps;
  float4 values[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int s = kSplitWarps == 1 ? i : i * kWarps + warp_idx;
    values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (s < states) {
      const float* part = p.partial_out + ((slot + s) * p.num_heads + head) * p.latent;
      if (vectors) {
        if (column < p.latent) {
          values[i] = __ldcg(reinterpret_cast<const float4*>(part + column));
        }
      } else {
        values[i].x = column < p.latent ? __ldcg(part + column) : 0.0f;
        values[i].y = column + 1 < p.latent ? __ldcg(part + column + 1) : 0.0f;
        values[i].z = column + 2 < p.latent ? __ldcg(part + column + 2) : 0.0f;
        values[i].w = column + 3 < p.latent ? __ldcg(part + column + 3) : 0.0f;
      }
    }
  }
  // Every warp works the weights out.
  const float max = reduce_warp(fmaxf(sums[0].x, sums[1].x), Max());
  const float shift = max == kMinusInfinity ? 0.0f : max;
  float weights[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    weights[i] = expf(sums[i].x - shift);
  }
  const float sum = reduce_warp(weights[0] * sums[0].y + weights[1] * sums[1].y, Sum());
  float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int s = kSplitWarps == 1 ? i : i * kWarps + warp_idx;
    const int half = i * kSplitWarps / kWarp;  // whose lanes hold state s
    const float state_max = __shfl_sync(0xffffffffu, sums[half].x, s % kWarp);
    const float weight = __shfl_sync(0xffffffffu, weights[half], s % kWarp);
    // A split without keys wrote no values.
    if (state_max != kMinusInfinity) {
      total.x += weight * values[i].x;
      total.y += weight * values[i].y;
      total.z += weight * values[i].z;
      total.w += weight * values[i].w;
    }
  }
  if constexpr (kSplitWarps > 1) {
    parts[warp_idx][lane_idx] = total;
    __syncthreads();
    if (warp_idx > 0) {
      return;
    }
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      const float4 other = parts[w][lane_idx];
      total.x += other.x;
      total.y += other.y;
      total.z += other.z;
      total.w += other.w;
    }
  }
  const float factor = finish_head(p, row, head, max, sum, strip == 0 && lane_idx == 0);
  const int64_t at = row * p.out_strides[0] + head * p.out_strides[1] + column;
  const float outs[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (column + i < p.latent) {
      store_out(p, at + i, factor == 0.0f ? 0.0f : outs[i] * factor);
    }
  }
}

}  // namespace

Status combine_splits(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items) {
  const int64_t strips = ceil_div(params.latent, kColumns);
  const int64_t pieces = num_items * params.num_heads * strips;
  // By a schedule the number of splits is not known here.
  const bool many = params.schedule != nullptr || params.num_splits >= kManySplits;
  const int64_t blocks = many ? pieces : ceil_div(pieces, kWarps);
  if (blocks > INT32_MAX) {
    return unsupported("cuda/sparse_mla_combine: too many rows for one launch");
  }
  return launch("cuda/sparse_mla_combine", many ? combine_kernel<kWarps> : combine_kernel<1>,
                device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true},
                params, num_items, static_cast<int>(strips));
}

}  // namespace lacuna::cuda
