// Sparse MLA for any width, element type and alignment, in float32 arithmetic without tensor cores.
// A block of threads takes a split of a row and up to eight heads. Keys pass through shared memory
// as floats, a tile at a time: a warp scores its head against the tile, a lane a key, then all
// threads add the weighted latents.
#include <string>

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kHeadsMax = kWarps;  // a warp a head
constexpr int kTileKeysMax = kWarp;
// Two blocks an SM where an SM has 227 KB; where a block may have no more than 99 KB the tile
// shrinks.
constexpr int64_t kSmemBytesMax = 112 * 1024;

// How a block of threads divides its shared memory.
struct Tiling {
  int heads;  // a block
  int keys;   // a tile
  int pitch;  // floats from one key to the next: odd, so that lanes meet no bank twice
  int64_t smem_bytes;
};

// heads is 0 when not even one head and one key fit.
Tiling tiling_of(int64_t latent, int64_t rope, int64_t num_heads, const DeviceInfo& device) {
  const int64_t budget = std::min(kSmemBytesMax, device.smem_optin_bytes) / 4 -
                         kHeadsMax * kTileKeysMax - kHeadsMax - 2 * kTileKeysMax;
  const int64_t width = latent + rope;
  const int64_t pitch = width | 1;
  // Few keys a tile leave lanes idle, few heads a block gather the keys again for the others.
  for (int64_t heads = std::min<int64_t>(kHeadsMax, num_heads); heads >= 1; heads /= 2) {
    const int64_t keys = (budget - heads * (width + latent)) / pitch;
    if (keys >= (heads == 1 ? 1 : 8)) {
      const int64_t tile = std::min<int64_t>(keys, kTileKeysMax);
      const int64_t floats = heads * (width + latent) + tile * pitch + kHeadsMax * kTileKeysMax +
                             kHeadsMax + 2 * kTileKeysMax;
      return {.heads = static_cast<int>(heads),
              .keys = static_cast<int>(tile),
              .pitch = static_cast<int>(pitch),
              .smem_bytes = 4 * floats};
    }
  }
  return {};
}

struct Smem {
  int64_t* rows;    // [tile] cached rows; -1: none
  float* query;     // [heads, latent + rope]
  float* sums;      // [heads, latent]
  float* weights;   // [heads, kTileKeysMax]
  float* rescales;  // [heads]
  float* keys;      // [tile, pitch]
};

__device__ float load_query(const SparseMlaParams& p, int64_t row, int head, int i) {
  const bool in_latent = i < p.latent;
  const void* data = in_latent ? p.q_nope : p.q_rope;
  const int64_t* strides = in_latent ? p.q_nope_strides : p.q_rope_strides;
  return load_any(data, p.q_dtype,
                  row * strides[0] + head * strides[1] + (in_latent ? i : i - p.latent));
}

// Element i of a cached record as it is stored: tensor scales come later.
template <KvFormat kFormat>
__device__ float load_key(const char* record, int latent, int i) {
  if constexpr (kFormat == KvFormat::kLatentF32) {
    return reinterpret_cast<const float*>(record)[i];
  } else if constexpr (kFormat == KvFormat::kLatentBf16) {
    return load_float(reinterpret_cast<const Bf16*>(record)[i]);
  } else {
    if (i < latent) {
      const float scale = reinterpret_cast<const float*>(
          record + kFp8DsMlaScaleOffset)[i / static_cast<int>(kFp8DsMlaScaleBlock)];
      return load_float(reinterpret_cast<const Fp8E4M3*>(record)[i]) * scale;
    }
    return load_float(reinterpret_cast<const Bf16*>(record + kFp8DsMlaRopeOffset)[i - latent]);
  }
}

// In eight chains, so that the error does not grow with the whole width.
__device__ float dot(const float* a, const float* b, int n) {
  float chains[8] = {};
  int i = 0;
  for (; i + 8 <= n; i += 8) {
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      chains[c] += a[i + c] * b[i + c];
    }
  }
  for (; i < n; ++i) {
    chains[0] += a[i] * b[i];
  }
  return ((chains[0] + chains[1]) + (chains[2] + chains[3])) +
         ((chains[4] + chains[5]) + (chains[6] + chains[7]));
}

template <KvFormat kFormat>
__global__ __launch_bounds__(kThreads, 2) void sparse_mla_simt_kernel(
    const __grid_constant__ SparseMlaParams p, const __grid_constant__ Tiling tiling) {
  extern __shared__ __align__(16) char smem_bytes[];
  const int width = p.latent + p.rope;
  Smem smem;
  smem.rows = reinterpret_cast<int64_t*>(smem_bytes);
  smem.query = reinterpret_cast<float*>(smem.rows + kTileKeysMax);
  smem.sums = smem.query + tiling.heads * width;
  smem.weights = smem.sums + tiling.heads * p.latent;
  smem.rescales = smem.weights + kHeadsMax * kTileKeysMax;
  smem.keys = smem.rescales + kHeadsMax;

  pdl_wait();
  pdl_launch_dependents();
  const int head_blocks = (p.num_heads + tiling.heads - 1) / tiling.heads;
  const int first_head = static_cast<int>(blockIdx.x % head_blocks) * tiling.heads;
  SplitTask task;
  if (!find_task(p, static_cast<int>(blockIdx.x / head_blocks), task)) {
    return;
  }
  const int32_t request = request_of(p, task.row);
  const int32_t* entries = p.indices.row(task.row);
  const int heads = min(tiling.heads, p.num_heads - first_head);
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  for (int h = 0; h < heads; ++h) {
    for (int i = static_cast<int>(threadIdx.x); i < width; i += kThreads) {
      smem.query[h * width + i] = load_query(p, task.row, first_head + h, i);
    }
  }
  for (int i = static_cast<int>(threadIdx.x); i < heads * p.latent; i += kThreads) {
    smem.sums[i] = 0.0f;
  }
  const float latent_scale = p.latent_scale == nullptr ? 1.0f : *p.latent_scale;
  const float rope_scale = p.rope_scale == nullptr ? 1.0f : *p.rope_scale;
  float max = kMinusInfinity;  // of the warp's head; the same in every lane
  float sum = 0.0f;            // the lane's share
  for (int begin = task.begin; begin < task.end; begin += tiling.keys) {
    const int keys = min(tiling.keys, task.end - begin);
    __syncthreads();  // the last tile has been used
    if (static_cast<int>(threadIdx.x) < keys) {
      smem.rows[threadIdx.x] = cached_row(p, request, entries[begin + threadIdx.x]);
    }
    __syncthreads();
    for (int k = warp_idx; k < keys; k += kWarps) {
      const int64_t row = smem.rows[k];
      const char* record = p.kv + (row < 0 ? 0 : row * p.row_bytes);
      for (int i = lane_idx; i < width; i += kWarp) {
        smem.keys[k * tiling.pitch + i] = row < 0 ? 0.0f : load_key<kFormat>(record, p.latent, i);
      }
    }
    __syncthreads();
    if (warp_idx < heads) {
      float score = kMinusInfinity;
      if (lane_idx < keys && smem.rows[lane_idx] >= 0) {
        const float* query = smem.query + warp_idx * width;
        const float* key = smem.keys + lane_idx * tiling.pitch;
        const float latent_part = dot(query, key, p.latent);
        const float rope_part = dot(query + p.latent, key + p.latent, p.rope);
        score = p.softmax_scale * (latent_scale * latent_part + rope_scale * rope_part);
      }
      const float new_max = fmaxf(max, reduce_warp(score, Max()));
      const float shift = new_max == kMinusInfinity ? 0.0f : new_max;
      const float weight = expf(score - shift);
      const float rescale = expf(max - shift);
      sum = sum * rescale + weight;
      max = new_max;
      smem.weights[warp_idx * kTileKeysMax + lane_idx] = weight;
      if (lane_idx == 0) {
        smem.rescales[warp_idx] = rescale;
      }
    }
    __syncthreads();
    for (int h = 0; h < heads; ++h) {
      const float rescale = smem.rescales[h];
      const float* weights = smem.weights + h * kTileKeysMax;
      for (int i = static_cast<int>(threadIdx.x); i < p.latent; i += kThreads) {
        float value = 0.0f;
        for (int k = 0; k < keys; ++k) {
          value += weights[k] * smem.keys[k * tiling.pitch + i];
        }
        float& at = smem.sums[h * p.latent + i];
        at = at * rescale + value;
      }
    }
  }
  __syncthreads();
  if (warp_idx >= heads) {
    return;
  }
  const int head = first_head + warp_idx;
  sum = reduce_warp(sum, Sum());
  const float* sums = smem.sums + warp_idx * p.latent;
  if (task.slot >= 0) {
    const int64_t at = int64_t{task.slot} * p.num_heads + head;
    if (lane_idx == 0) {
      p.partial_sums[at] = make_float2(max, sum);
    }
    for (int i = lane_idx; i < p.latent && max != kMinusInfinity; i += kWarp) {
      p.partial_out[at * p.latent + i] = sums[i];
    }
    return;
  }
  const float factor = finish_head(p, task.row, head, max, sum, lane_idx == 0);
  const int64_t at = task.row * p.out_strides[0] + head * p.out_strides[1];
  for (int i = lane_idx; i < p.latent; i += kWarp) {
    store_out(p, at + i, factor == 0.0f ? 0.0f : factor * sums[i]);
  }
}

Tiling tiling_of(const SparseMlaArgs& args, const DeviceInfo& device) {
  return tiling_of(args.kv.layout.latent, args.kv.layout.rope, args.out.shape[1], device);
}

Status attend_simt(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                   int64_t blocks) {
  const Tiling tiling = tiling_of(params.latent, params.rope, params.num_heads, device);
  const auto kernel =
      params.kv_format == KvFormat::kLatentBf16  ? sparse_mla_simt_kernel<KvFormat::kLatentBf16>
      : params.kv_format == KvFormat::kLatentF32 ? sparse_mla_simt_kernel<KvFormat::kLatentF32>
                                                 : sparse_mla_simt_kernel<KvFormat::kFp8DsMla>;
  return launch("cuda/sparse_mla_simt", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)),
                 .block = dim3(kThreads),
                 .smem_bytes = tiling.smem_bytes,
                 .pdl = true},
                params, tiling);
}

}  // namespace

Status supports_sparse_mla_simt(const SparseMlaArgs& args, const DeviceInfo& device) {
  // An element of the cache is read as a whole.
  const int64_t element = args.kv.layout.format == KvFormat::kLatentBf16 ? 2 : 4;
  if (args.kv.row_bytes % element != 0 ||
      reinterpret_cast<uintptr_t>(args.kv.data) % element != 0) {
    return unsupported("kv: rows of " + std::to_string(args.kv.row_bytes) +
                       " bytes, expected data and rows at multiples of " + std::to_string(element));
  }
  const Tiling tiling = tiling_of(args, device);
  if (tiling.heads == 0) {
    return unsupported("kv.layout: keys of " + std::to_string(args.kv.layout.d_qk()) +
                       " elements do not fit the shared memory of an SM");
  }
  return check_sparse_mla_plan(args, device, tiling.heads);
}

Status run_sparse_mla_simt(const SparseMlaArgs& args, const DeviceInfo& device,
                           const Launch& where) {
  return run_sparse_mla_plan(args, device, where, tiling_of(args, device).heads, false,
                             attend_simt);
}

}  // namespace lacuna::cuda
