// Writes tokens into paged caches. append_kv: a block of threads a token, for the FP8 record a warp
// a scale group. append_index_keys: a warp a key, which lies in shared memory between the passes.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <type_traits>

#include "backends/cuda/cache/cache_layout.cuh"
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

struct Slots {
  const void* data;
  int64_t stride;
  bool wide;  // int64, otherwise int32
  int64_t num_slots;

  // -1: the token is skipped.
  __device__ int64_t operator()(int64_t t) const {
    const int64_t slot = wide ? static_cast<const int64_t*>(data)[t * stride]
                              : static_cast<const int32_t*>(data)[t * stride];
    return slot < num_slots ? slot : -1;
  }
};

Slots slots_of(const ConstTensorView& slot_mapping, const KvCacheView& kv) {
  return {.data = slot_mapping.data,
          .stride = slot_mapping.strides[0],
          .wide = slot_mapping.dtype == DType::kInt64,
          .num_slots = kv.num_slots()};
}

// Largest magnitude that counts for a scale: an infinity must not turn its neighbours into zeros,
// it saturates. NaN does not count.
__device__ float finite_magnitude(float x) {
  const float magnitude = fabsf(x);
  return magnitude <= FLT_MAX ? magnitude : 0.0f;
}

// 2^ceil(log2(x)) for a normal positive x, by its exponent: exact where log2 would round.
__device__ float power_of_two_at_least(float x) {
  const uint32_t bits = __float_as_uint(x);
  return __uint_as_float((bits & 0x7f800000u) + ((bits & 0x7fffffu) == 0 ? 0u : 0x800000u));
}

// The floor stands on amax / 448 for latents and on amax for index keys.
__device__ float latent_scale(float amax, Fp8ScaleRule rule) {
  const float scale = __fdiv_rn(amax, 448.0f);
  return rule == Fp8ScaleRule::kAmax ? fmaxf(scale, FLT_MIN)
                                     : power_of_two_at_least(fmaxf(scale, 1e-4f));
}
__device__ float index_scale(float amax, Fp8ScaleRule rule) {
  const float scale = __fdiv_rn(fmaxf(amax, 1e-4f), 448.0f);
  return rule == Fp8ScaleRule::kAmax ? scale : power_of_two_at_least(scale);
}

// Same type: the bits. Otherwise widened or rounded.
template <class To, class From>
__device__ To convert(From x) {
  if constexpr (std::is_same_v<To, From>) {
    return x;
  } else {
    return from_float<To>(load_float(x));
  }
}

// ------------------------------------------------------------------------------------ append_kv

constexpr int kThreads = 128;
static_assert(kFp8DsMlaLatent / kFp8DsMlaScaleBlock == kThreads / kWarp, "a warp a scale group");
static_assert(kFp8DsMlaScaleBlock == 4 * kWarp, "a lane packs four values");

template <class T>
struct AppendKvParams {
  Strided2<const T> latent;
  Strided2<const T> rope;
  int latent_width;
  int rope_width;
  Slots slots;
  CacheAddress cache;
  Fp8ScaleRule scale_rule;
  // Whether whole vectors of 16 bytes lie on both sides of every row; only where the types agree.
  bool vectors;
};

template <class Stored, class T>
__device__ void store_latent(const AppendKvParams<T>& p, int64_t t, char* to) {
  const T* latent = p.latent.row(t);
  const T* rope = p.rope.row(t);  // not read when there is none
  Stored* record = reinterpret_cast<Stored*>(to);
  if constexpr (std::is_same_v<T, Stored>) {
    if (p.vectors) {
      constexpr int kPerVector = 16 / sizeof(T);
      const int latent_vectors = p.latent_width / kPerVector;
      const int num_vectors = latent_vectors + p.rope_width / kPerVector;
      for (int i = threadIdx.x; i < num_vectors; i += kThreads) {
        reinterpret_cast<uint4*>(record)[i] =
            i < latent_vectors ? reinterpret_cast<const uint4*>(latent)[i]
                               : reinterpret_cast<const uint4*>(rope)[i - latent_vectors];
      }
      return;
    }
  }
  for (int i = threadIdx.x; i < p.latent_width + p.rope_width; i += kThreads) {
    record[i] = convert<Stored>(i < p.latent_width ? latent[i] : rope[i - p.latent_width]);
  }
}

template <class T>
__device__ void store_fp8_ds_mla(const AppendKvParams<T>& p, int64_t t, char* record) {
  const int thread_idx = static_cast<int>(threadIdx.x);
  const T* latent = p.latent.row(t) + 4 * thread_idx;
  float x[4];
  float amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = load_float(latent[i]);
    amax = fmaxf(amax, finite_magnitude(x[i]));
  }
  const float scale = latent_scale(reduce_warp(amax, Max()), p.scale_rule);
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    packed |= uint32_t{from_float<Fp8E4M3>(__fdiv_rn(x[i], scale)).bits} << (8 * i);
  }
  reinterpret_cast<uint32_t*>(record)[thread_idx] = packed;
  if (thread_idx % kWarp == 0) {
    reinterpret_cast<float*>(record + kFp8DsMlaScaleOffset)[thread_idx / kWarp] = scale;
  }
  if (thread_idx < kFp8DsMlaRope) {
    const Bf16 value =
        thread_idx < p.rope_width ? convert<Bf16>(p.rope.row(t)[thread_idx]) : Bf16{0};
    reinterpret_cast<Bf16*>(record + kFp8DsMlaRopeOffset)[thread_idx] = value;
  }
}

// Stored: the type of the latent's elements; FP8 is the record of DeepSeek's MLA.
template <class T, class Stored>
__global__ __launch_bounds__(kThreads) void append_kv_kernel(const AppendKvParams<T> p) {
  pdl_wait();
  pdl_launch_dependents();
  const int64_t t = blockIdx.x;
  const int64_t slot = p.slots(t);
  if (slot < 0) {
    return;
  }
  if constexpr (std::is_same_v<Stored, Fp8E4M3>) {
    store_fp8_ds_mla(p, t, p.cache.record(slot));
  } else {
    store_latent<Stored>(p, t, p.cache.record(slot));
  }
}

// Rows of a [T, width] tensor are whole vectors of 16 bytes at aligned addresses.
bool has_vector_rows(const ConstTensorView& tensor) {
  const int64_t per_vector = 16 / size_bytes(tensor.dtype);
  return tensor.empty() ||
         (reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.shape[1] % per_vector == 0 &&
          (tensor.shape[0] <= 1 || tensor.strides[0] % per_vector == 0));
}

template <class T>
Status run_append_kv_typed(const AppendKvArgs& args, const DeviceInfo& device,
                           const Launch& where) {
  const KvLayout& layout = args.kv.layout;
  const AppendKvParams<T> params = {.latent = strided2<const T>(args.latent),
                                    .rope = strided2<const T>(args.rope),
                                    .latent_width = static_cast<int>(layout.latent),
                                    .rope_width = static_cast<int>(layout.rope),
                                    .slots = slots_of(args.slot_mapping, args.kv),
                                    .cache = cache_address(args.kv),
                                    .scale_rule = args.scale_rule,
                                    .vectors = has_vector_rows(args.latent) &&
                                               has_vector_rows(args.rope) &&
                                               has_aligned_records(args.kv, 16)};
  auto* kernel = layout.format == KvFormat::kLatentBf16  ? append_kv_kernel<T, Bf16>
                 : layout.format == KvFormat::kLatentF32 ? append_kv_kernel<T, float>
                                                         : append_kv_kernel<T, Fp8E4M3>;
  return launch("cuda/append_kv", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(args.latent.shape[0])),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

Status run_append_kv(const AppendKvArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.latent.dtype == DType::kBFloat16 ? run_append_kv_typed<Bf16>(args, device, where)
                                               : run_append_kv_typed<float>(args, device, where);
}

// ---------------------------------------------------------------------------- append_index_keys

constexpr int kKeysPerBlock = 4;             // warps
constexpr int64_t kKeyBytesMax = 48 * 1024;  // of shared memory, which needs no opting in
constexpr int64_t kKeyWidthMax = kKeyBytesMax / 4;

struct AppendIndexKeysParams {
  const void* keys;  // [T, dim]
  int64_t key_stride;
  bool bf16_keys;
  int64_t num_keys;
  int dim;
  Slots slots;
  CacheAddress cache;
  KvFormat format;
  Fp8ScaleRule scale_rule;
  bool hadamard;
  float hadamard_scale;  // dim^-0.5
};

// x times the Walsh-Hadamard matrix in Sylvester order; n is a power of two. One warp.
__device__ void hadamard_transform(float* x, int n, int lane_idx) {
  for (int half = 1; half < n; half *= 2) {
    __syncwarp();
    for (int pair = lane_idx; pair < n / 2; pair += kWarp) {
      // `half` is a power of two: the pair's first element has that bit clear.
      const int i = 2 * (pair & ~(half - 1)) | (pair & (half - 1));
      const float a = x[i];
      const float b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  __syncwarp();
}

__global__ void append_index_keys_kernel(const AppendIndexKeysParams p) {
  extern __shared__ float shared_keys[];  // [warps, dim]
  pdl_wait();
  pdl_launch_dependents();
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + warp_idx;
  if (t >= p.num_keys) {
    return;
  }
  const int64_t slot = p.slots(t);
  if (slot < 0) {
    return;
  }
  float* key = shared_keys + warp_idx * p.dim;
  for (int i = lane_idx; i < p.dim; i += kWarp) {
    const int64_t at = t * p.key_stride + i;
    key[i] = p.bf16_keys ? load_float(static_cast<const Bf16*>(p.keys)[at])
                         : static_cast<const float*>(p.keys)[at];
  }
  // Without the transform a lane reads only what it wrote.
  if (p.hadamard) {
    hadamard_transform(key, p.dim, lane_idx);
  }
  const float factor = p.hadamard ? p.hadamard_scale : 1.0f;
  if (p.format == KvFormat::kIndexFp8) {
    float amax = 0;
    for (int i = lane_idx; i < p.dim; i += kWarp) {
      amax = fmaxf(amax, finite_magnitude(key[i] * factor));
    }
    const float scale = index_scale(reduce_warp(amax, Max()), p.scale_rule);
    const CacheAddress::Planar at = p.cache.planar(slot, p.dim);
    for (int i = lane_idx; i < p.dim; i += kWarp) {
      at.values[i] = from_float<Fp8E4M3>(__fdiv_rn(key[i] * factor, scale));
    }
    if (lane_idx == 0) {
      *at.scale = scale;
    }
    return;
  }
  char* record = p.cache.record(slot);
  for (int i = lane_idx; i < p.dim; i += kWarp) {
    const float value = key[i] * factor;
    if (p.format == KvFormat::kIndexBf16) {
      reinterpret_cast<Bf16*>(record)[i] = from_float<Bf16>(value);
    } else {
      reinterpret_cast<float*>(record)[i] = value;
    }
  }
}

Status supports_append_index_keys(const AppendIndexKeysArgs& args, const DeviceInfo&) {
  return args.kv.layout.latent <= kKeyWidthMax
             ? ok_status()
             : unsupported("kv: index keys of " + std::to_string(args.kv.layout.latent) +
                           " values; cuda/append_index_keys takes at most " +
                           std::to_string(kKeyWidthMax));
}

Status run_append_index_keys(const AppendIndexKeysArgs& args, const DeviceInfo& device,
                             const Launch& where) {
  const int64_t dim = args.kv.layout.latent;
  const AppendIndexKeysParams params = {
      .keys = args.keys.data,
      .key_stride = args.keys.strides[0],
      .bf16_keys = args.keys.dtype == DType::kBFloat16,
      .num_keys = args.keys.shape[0],
      .dim = static_cast<int>(dim),
      .slots = slots_of(args.slot_mapping, args.kv),
      .cache = cache_address(args.kv),
      .format = args.kv.layout.format,
      .scale_rule = args.scale_rule,
      .hadamard = args.hadamard,
      .hadamard_scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(dim)))};
  const int64_t keys_per_block = std::clamp<int64_t>(kKeyBytesMax / (4 * dim), 1, kKeysPerBlock);
  return launch("cuda/append_index_keys", append_index_keys_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(params.num_keys, keys_per_block))),
                 .block = dim3(static_cast<unsigned>(keys_per_block * kWarp)),
                 .smem_bytes = keys_per_block * dim * 4,
                 .pdl = true},
                params);
}

}  // namespace

// Validation lets only the formats through that are written here.
const Kernel<AppendKvArgs> kAppendKv = {
    .name = "cuda/append_kv", .supports = supports_all<AppendKvArgs>, .run = run_append_kv};

const Kernel<AppendIndexKeysArgs> kAppendIndexKeys = {.name = "cuda/append_index_keys",
                                                      .supports = supports_append_index_keys,
                                                      .run = run_append_index_keys};

}  // namespace lacuna::cuda
