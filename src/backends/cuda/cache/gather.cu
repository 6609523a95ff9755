// Reads position ranges of a paged latent cache into contiguous rows. A block of threads owns a
// tile of output rows and finds the range that each belongs to; a warp then copies a row.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/cache/cache_layout.cuh"
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileRows = 16;

struct Params {
  CacheAddress cache;
  int64_t num_blocks;
  int latent_width;
  int rope_width;
  const float* latent_scale;  // null: 1
  const float* rope_scale;
  Strided2<const int32_t> block_table;
  int64_t num_requests;
  int64_t num_columns;
  Strided1<const int32_t> request_ids;
  Strided1<const int32_t> starts;
  Strided1<const int32_t> lengths;
  Strided1<const int32_t> out_starts;
  int num_ranges;
  void* out;
  int64_t out_stride;
  int64_t num_out_rows;
  // Whether four elements at a multiple of four can be loaded and stored at once on both sides.
  bool fours;
};

// Where the row of an output row lies; null for a row of zeros.
__device__ const char* find_record(const Params& p, int range, int64_t out_row) {
  const int64_t position = int64_t{p.starts(range)} + (out_row - p.out_starts(range));
  // A sum of two int32 that are not negative fits 32 bits, and divides quickly.
  if (position < 0) {
    return nullptr;
  }
  const int64_t column =
      p.cache.block_size > position
          ? 0
          : static_cast<uint32_t>(position) / static_cast<uint32_t>(p.cache.block_size);
  if (column >= p.num_columns) {
    return nullptr;
  }
  const int32_t block = p.block_table(p.request_ids(range), column);
  return block < 0 || block >= p.num_blocks
             ? nullptr
             : p.cache.record(block, position - column * p.cache.block_size);
}

template <class T>
__device__ float4 load_four(const T* from);
template <>
__device__ float4 load_four<float>(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
template <>
__device__ float4 load_four<Bf16>(const Bf16* from) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(from);
  const float2 low = unpack_bf16(pairs.x);
  const float2 high = unpack_bf16(pairs.y);
  return {low.x, low.y, high.x, high.y};
}
template <>
__device__ float4 load_four<Fp8E4M3>(const Fp8E4M3* from) {
  return unpack_fp8(*reinterpret_cast<const uint32_t*>(from));
}

__device__ void store_four(float4 x, float* to) { *reinterpret_cast<float4*>(to) = x; }
__device__ void store_four(float4 x, Bf16* to) {
  *reinterpret_cast<uint2*>(to) = {pack_bf16(x.x, x.y), pack_bf16(x.z, x.w)};
}

// to[i] = from[i] * scale, rounded once to the type of `to`; one warp.
template <class From, class To>
__device__ void copy_scaled(const From* from, int count, float scale, bool fours, To* to,
                            int lane_idx) {
  if (fours) {
    for (int i = 4 * lane_idx; i < count; i += 4 * kWarp) {
      const float4 x = load_four(from + i);
      store_four(float4{x.x * scale, x.y * scale, x.z * scale, x.w * scale}, to + i);
    }
    return;
  }
#pragma unroll 2
  for (int i = lane_idx; i < count; i += kWarp) {
    to[i] = from_float<To>(load_float(from[i]) * scale);
  }
}

template <KvFormat kFormat, class Out>
__global__ __launch_bounds__(kThreads) void gather_kv_kernel(const Params p) {
  __shared__ int ranges[kTileRows];  // -1: the row belongs to no range and keeps its bytes
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows;
  if (threadIdx.x < kTileRows) {
    ranges[threadIdx.x] = -1;
  }
  __syncthreads();
  pdl_wait();
  pdl_launch_dependents();
  for (int n = static_cast<int>(threadIdx.x); n < p.num_ranges; n += kThreads) {
    const int32_t request = p.request_ids(n);
    if (request < 0 || request >= p.num_requests) {
      continue;
    }
    const int64_t out_start = p.out_starts(n);
    const int64_t begin = max(out_start, first_row);
    const int64_t end = min(out_start + p.lengths(n), min(first_row + kTileRows, p.num_out_rows));
    for (int64_t row = begin; row < end; ++row) {
      atomicMax(&ranges[row - first_row], n);  // of ranges that overlap the last one counts
    }
  }
  __syncthreads();
  const float latent_scale = p.latent_scale == nullptr ? 1.0f : *p.latent_scale;
  const float rope_scale = p.rope_scale == nullptr ? 1.0f : *p.rope_scale;
  for (int i = warp_idx; i < kTileRows; i += kWarps) {
    if (ranges[i] < 0) {
      continue;
    }
    const int64_t row = first_row + i;
    Out* out = static_cast<Out*>(p.out) + row * p.out_stride;
    const char* record = find_record(p, ranges[i], row);
    if (record == nullptr) {
      for (int c = lane_idx; c < p.latent_width + p.rope_width; c += kWarp) {
        out[c] = Out{0};
      }
    } else if constexpr (kFormat == KvFormat::kFp8DsMla) {
      const float* scales = reinterpret_cast<const float*>(record + kFp8DsMlaScaleOffset);
      constexpr int kGroup = kFp8DsMlaScaleBlock;
#pragma unroll
      for (int g = 0; g < kFp8DsMlaLatent / kGroup; ++g) {
        copy_scaled(reinterpret_cast<const Fp8E4M3*>(record) + g * kGroup, kGroup,
                    scales[g] * latent_scale, p.fours, out + g * kGroup, lane_idx);
      }
      copy_scaled(reinterpret_cast<const Bf16*>(record + kFp8DsMlaRopeOffset), p.rope_width,
                  rope_scale, p.fours, out + kFp8DsMlaLatent, lane_idx);
    } else {
      using Stored = std::conditional_t<kFormat == KvFormat::kLatentBf16, Bf16, float>;
      const Stored* stored = reinterpret_cast<const Stored*>(record);
      copy_scaled(stored, p.latent_width, latent_scale, p.fours, out, lane_idx);
      copy_scaled(stored + p.latent_width, p.rope_width, rope_scale, p.fours, out + p.latent_width,
                  lane_idx);
    }
  }
}

template <class Out>
Status run_gather_kv_typed(const GatherKvArgs& args, const DeviceInfo& device,
                           const Launch& where) {
  const KvLayout& layout = args.kv.layout;
  const int64_t record_alignment = layout.format == KvFormat::kLatentF32 ? 16 : 8;
  const int64_t out_alignment = 4 * size_bytes(args.out.dtype);
  const bool fours = layout.latent % 4 == 0 && layout.rope % 4 == 0 &&
                     has_aligned_records(args.kv, record_alignment) &&
                     reinterpret_cast<uintptr_t>(args.out.data) % out_alignment == 0 &&
                     (args.out.shape[0] <= 1 || args.out.strides[0] % 4 == 0);
  const Params params = {.cache = cache_address(args.kv),
                         .num_blocks = args.kv.num_blocks,
                         .latent_width = static_cast<int>(layout.latent),
                         .rope_width = static_cast<int>(layout.rope),
                         .latent_scale = args.kv.latent_scale,
                         .rope_scale = args.kv.rope_scale,
                         .block_table = strided2<const int32_t>(args.block_table),
                         .num_requests = args.block_table.shape[0],
                         .num_columns = args.block_table.shape[1],
                         .request_ids = strided1<const int32_t>(args.request_ids),
                         .starts = strided1<const int32_t>(args.starts),
                         .lengths = strided1<const int32_t>(args.lengths),
                         .out_starts = strided1<const int32_t>(args.out_starts),
                         .num_ranges = static_cast<int>(args.request_ids.shape[0]),
                         .out = args.out.data,
                         .out_stride = args.out.strides[0],
                         .num_out_rows = args.out.shape[0],
                         .fours = fours};
  auto* kernel =
      layout.format == KvFormat::kLatentBf16  ? gather_kv_kernel<KvFormat::kLatentBf16, Out>
      : layout.format == KvFormat::kLatentF32 ? gather_kv_kernel<KvFormat::kLatentF32, Out>
                                              : gather_kv_kernel<KvFormat::kFp8DsMla, Out>;
  return launch("cuda/gather_kv", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(params.num_out_rows, kTileRows))),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

Status run_gather_kv(const GatherKvArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.out.dtype == DType::kBFloat16 ? run_gather_kv_typed<Bf16>(args, device, where)
                                            : run_gather_kv_typed<float>(args, device, where);
}

}  // namespace

// Validation lets only the formats through that are read here.
const Kernel<GatherKvArgs> kGatherKv = {
    .name = "cuda/gather_kv", .supports = supports_all<GatherKvArgs>, .run = run_gather_kv};

}  // namespace lacuna::cuda
