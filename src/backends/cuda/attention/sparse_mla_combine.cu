// Joins the splits of a row: out = sum_s exp(m_s - M) O_s / sum_s exp(m_s - M) l_s with M the
// largest m_s, in a fixed order. Few splits: a warp joins 128 columns of a head. Many: a block of
// threads does 64, each half of a warp every sixteenth split, so that their reads overlap.
#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
// With more splits, halves of warps share the splits of a head. With 8 splits of 32 rows that
// took 38.7 us instead of 32.0.
constexpr int kFewSplits = 8;

// Four columns of a head, and the state that they belong to.
struct Part {
  float4 values;
  float max;
  float sum;
};

__device__ Part load_part(const SparseMlaParams& p, int64_t slot, int head, int column) {
  Part part = {.values = {0.0f, 0.0f, 0.0f, 0.0f}, .max = kMinusInfinity, .sum = 0.0f};
  const int64_t at = slot * p.num_heads + head;
  const float2 state = __ldcg(p.partial_sums + at);
  part.max = state.x;
  part.sum = state.y;
  const float* from = p.partial_out + at * p.latent + column;
  if (p.latent % 4 == 0) {
    if (column < p.latent) {
      part.values = __ldcg(reinterpret_cast<const float4*>(from));
    }
  } else {
    part.values.x = column < p.latent ? __ldcg(from) : 0.0f;
    part.values.y = column + 1 < p.latent ? __ldcg(from + 1) : 0.0f;
    part.values.z = column + 2 < p.latent ? __ldcg(from + 2) : 0.0f;
    part.values.w = column + 3 < p.latent ? __ldcg(from + 3) : 0.0f;
  }
  return part;
}

// The sum of parts, which the later ones come after.
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
    const float weight = expf(parts[i].max - shift);
    total.sum += weight * parts[i].sum;
    // A split without keys wrote no values.
    if (parts[i].max != kMinusInfinity) {
      total.values.x += weight * parts[i].values.x;
      total.values.y += weight * parts[i].values.y;
      total.values.z += weight * parts[i].values.z;
      total.values.w += weight * parts[i].values.w;
    }
  }
  return total;
}

// kSharers threads with kReads reads each share four columns of a head; they are one thread, or
// the halves of all warps of a block.
template <int kSharers, int kReads>
__global__ __launch_bounds__(kThreads) void combine_kernel(
    const __grid_constant__ SparseMlaParams p, uint32_t num_items, uint32_t num_strips) {
  constexpr int kLanes = kSharers == 1 ? kWarp : kWarp / 2;  // of a strip, four columns each
  __shared__ Part shared_parts[kSharers == 1 ? 1 : kWarps][kLanes];
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t index = kSharers == 1 ? blockIdx.x * kWarps + warp_idx : blockIdx.x;
  const uint32_t item_head = index / num_strips;
  const int strip = static_cast<int>(index - item_head * num_strips);
  const uint32_t item = item_head / static_cast<uint32_t>(p.num_heads);
  const int head = static_cast<int>(item_head - item * static_cast<uint32_t>(p.num_heads));
  const int column = (strip * kLanes + lane_idx % kLanes) * 4;
  const int sharer = kSharers == 1 ? 0 : static_cast<int>(threadIdx.x) / kLanes;
  // The successor waits for the end of this kernel, whenever it starts; all blocks of this one
  // have their place by then.
  pdl_launch_dependents();
  pdl_wait();
  int64_t row = 0;
  int64_t slot = 0;
  const int states = item < num_items ? num_states(p, item, row, slot) : 0;
  if (states == 0) {
    return;  // the same for the whole block (or the warp, where warps do not meet)
  }
  // All reads at once, whatever their weights.
  Part parts[kReads];
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    const int s = i * kSharers + sharer;
    parts[i] = {.values = {0.0f, 0.0f, 0.0f, 0.0f}, .max = kMinusInfinity, .sum = 0.0f};
    if (s < states) {
      parts[i] = load_part(p, slot + s, head, column);
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
    if (lane_idx < kLanes) {
      shared_parts[warp_idx][lane_idx] = join_parts(halves);
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) >= kLanes) {
      return;
    }
    Part of_warps[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      of_warps[w] = shared_parts[w][lane_idx];
    }
    total = join_parts(of_warps);
  }
  const float factor = finish_head(p, row, head, total.max, total.sum, strip == 0 && lane_idx == 0);
  const int64_t at = row * p.out_strides[0] + head * p.out_strides[1] + column;
  if (column + 4 <= p.latent) {
    store_four(p, at, total.values, factor);
    return;
  }
  const float rest[3] = {total.values.x, total.values.y, total.values.z};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (column + i < p.latent) {
      store_out(p, at + i, factor == 0.0f ? 0.0f : rest[i] * factor);
    }
  }
}

}  // namespace

Status combine_splits(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items) {
  // By a schedule the number of splits is not known here.
  const bool many = params.schedule != nullptr || params.num_splits > kFewSplits;
  const int64_t strips = ceil_div(params.latent, many ? 2 * kWarp : 4 * kWarp);
  const int64_t pieces = num_items * params.num_heads * strips;
  if (pieces > INT32_MAX) {
    return unsupported("cuda/sparse_mla_combine: too many rows for one launch");
  }
  constexpr int kSharers = 2 * kWarps;
  const auto kernel = many                    ? combine_kernel<kSharers, kSplitsMax / kSharers>
                      : params.num_splits > 4 ? combine_kernel<1, kFewSplits>
                                              : combine_kernel<1, 4>;
  const int64_t blocks = many ? pieces : ceil_div(pieces, kWarps);
  return launch("cuda/sparse_mla_combine", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true},
                params, static_cast<uint32_t>(num_items), static_cast<uint32_t>(strips));
}

}  // namespace lacuna::cuda
