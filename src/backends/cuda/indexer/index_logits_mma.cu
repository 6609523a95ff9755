// The lightning indexer's scores on tensor cores, for keys of 128 bf16 or FP8 elements.
//
// A warp scores sixteen keys at a time (M) against all heads of one query row (N), whose fragments
// stay in registers. The order of the elements within a dot product is free as long as both sides
// agree, so a thread takes whole 16-byte pieces of its two keys: they go from global memory through
// the thread's own queue in shared memory (cp.async) to its A fragments, and no thread ever waits
// for another. FP8 keys are widened exactly on the way: to f16 when the query is FP8 as well, else
// to bf16. The sum over heads runs within a thread, then over four lanes, in one order for every
// key.
#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/mma.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/indexer/score_share.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kDim = 128;
constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileKeys = 16;
constexpr int kHeadsMax = 64;
constexpr int kSteps = kDim / 16;  // of the MMA
// Keys of the smallest share of a row: four tiles a warp pay for loading the query.
constexpr int kUnit = 4 * kWarps * kTileKeys;
constexpr int64_t kBlocksPerSm = 16;  // so that rows of unequal length even out

// A key as a thread sees it: kUnits pieces of 16 bytes, of kUnitDims elements; the four threads of
// a key take neighbouring pieces.
template <class Key>
struct KeyPieces {
  static constexpr int kUnitDims = 16 / sizeof(Key);
  static constexpr int kUnits = kDim / 4 / kUnitDims;
  static constexpr int kUnitSteps = kUnitDims / 4;
  // Tiles in flight: about 32 KB an SM with two blocks on it.
  static constexpr int kStages = sizeof(Key) == 1 ? 4 : 3;
  static constexpr int kStageBytes = kThreads * 2 * kUnits * 16;
  static constexpr int64_t kSmemBytes =
      int64_t{kStages} * (kStageBytes + kThreads * static_cast<int>(sizeof(float)));
};

// Two e4m3 as two f16 or two bf16, exactly.
template <bool kHalf>
__device__ uint32_t widen_fp8(uint32_t pair) {
  const __half2_raw halves =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xffffu), __NV_E4M3);
  if constexpr (kHalf) {
    return static_cast<uint32_t>(halves.x) | static_cast<uint32_t>(halves.y) << 16;
  } else {
    const float2 floats = __half22float2(__half2(halves));
    return pack_bf16(floats.x, floats.y);
  }
}

template <bool kHalf>
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    mma_16816(c, a, b[0], b[1]);
  }
}

__device__ void cp_async_4(uint32_t smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(gmem) : "memory");
}

// The elements [dim, dim + kCount) of one head as packed pairs.
template <bool kHalf, int kCount>
__device__ void load_query(const ScoreParams& p, int64_t at, uint32_t (&pairs)[kCount / 2]) {
  if (p.q_dtype == DType::kFloat8E4M3) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const Fp8E4M3*>(p.q) + at);
    uint32_t words[kCount / 4];
    if constexpr (kCount == 16) {
      *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(from);
    } else {
      *reinterpret_cast<uint2*>(words) = *reinterpret_cast<const uint2*>(from);
    }
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      pairs[2 * i] = widen_fp8<kHalf>(words[i]);
      pairs[2 * i + 1] = widen_fp8<kHalf>(words[i] >> 16);
    }
  } else if constexpr (!kHalf) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const Bf16*>(p.q) + at);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const uint4 words = from[i];
      pairs[4 * i] = words.x;
      pairs[4 * i + 1] = words.y;
      pairs[4 * i + 2] = words.z;
      pairs[4 * i + 3] = words.w;
    }
  }
}

// A key that is being looked up: its block comes from the table a tile before it is needed.
struct Lookup {
  int32_t block;
  int32_t offset;
};

template <class Key, bool kHalf, int kTiles>
__global__ __launch_bounds__(kThreads, 2) void score_mma_kernel(const ScoreParams p) {
  using Pieces = KeyPieces<Key>;
  constexpr int kStages = Pieces::kStages;
  constexpr bool kPlanar = sizeof(Key) == 1;
  extern __shared__ __align__(16) char smem[];
  const ScoreShare share = score_share(p, kUnit);
  const int64_t t = share.t;
  if (share.begin < share.end) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int group = static_cast<int>(threadIdx.x) % kWarp / 4;  // key of a tile; head
    const int quad = static_cast<int>(threadIdx.x) % 4;
    const uint32_t pieces = smem_address(smem) + threadIdx.x * 16;
    float* scales = reinterpret_cast<float*>(smem + kStages * Pieces::kStageBytes) + threadIdx.x;
    const uint32_t scales_address = smem_address(scales);

    const int32_t request = p.lengths.request_ids(t);
    const KeyAddressing& keys = p.keys;
    const bool known = request < keys.num_requests;  // a padding row has nothing to score
    const int32_t* table = keys.paged && known ? keys.block_table.row(request) : nullptr;
    const int64_t table_stride = keys.block_table.strides[1];
    const int64_t first_row = !keys.paged && known ? int64_t{keys.key_starts(request)} : -1;
    const auto look_up = [&](int64_t position) {
      Lookup found = {-1, 0};
      if (position < share.end) {
        if (table != nullptr) {
          const uint32_t column =
              static_cast<uint32_t>(position) / static_cast<uint32_t>(keys.block_size);
          found.offset =
              static_cast<int32_t>(position) - static_cast<int32_t>(column) * keys.block_size;
          if (column < keys.num_table_columns) {
            found.block = table[column * table_stride];
          }
        } else {
          const int64_t row = first_row + position;
          const bool exists = !keys.paged && known && row >= 0 && row < keys.block_size;
          found = {exists ? 0 : -1, exists ? static_cast<int32_t>(row) : 0};
        }
      }
      return found;
    };
    const auto position_of = [&](int64_t tile, int half) {
      return share.begin + (tile * kWarps + warp) * kTileKeys + group + 8 * half;
    };
    // Whether the score that this thread writes (quad 0: the first key, quad 1: the second) has a
    // key: the newest tile in bit 0.
    uint32_t exists = 0;
    const auto fetch = [&](int stage, const Lookup(&lookups)[2]) {
      exists <<= 1;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool valid = lookups[half].block >= 0 && lookups[half].block < keys.num_blocks;
        const KeyPlace place = {valid ? lookups[half].block : 0, lookups[half].offset};
        const char* key = keys.key_at(place) + quad * 16;
#pragma unroll
        for (int u = 0; u < Pieces::kUnits; ++u) {
          cp_async_16(
              pieces + stage * Pieces::kStageBytes + (half * Pieces::kUnits + u) * kThreads * 16,
              valid ? key + u * 64 : keys.data, valid);
        }
        if (quad == half && valid) {
          exists |= 1;
          if constexpr (kPlanar) {
            cp_async_4(scales_address + stage * kThreads * 4, keys.scale_at(place));
          }
        }
      }
    };

    const int64_t num_tiles =
        (share.end - share.begin + kWarps * kTileKeys - 1) / (kWarps * kTileKeys);
    Lookup next[2];
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
      next[0] = look_up(position_of(stage, 0));
      next[1] = look_up(position_of(stage, 1));
      fetch(stage, next);
      cp_async_commit();
    }
    next[0] = look_up(position_of(kStages - 1, 0));
    next[1] = look_up(position_of(kStages - 1, 1));

    // The query. A negative scale of the cache turns its sign, so that relu sees the right one.
    const float latent_scale = keys.latent_scale == nullptr ? 1.0f : *keys.latent_scale;
    const uint32_t sign = latent_scale < 0 ? 0x80008000u : 0;
    uint32_t b[kTiles][kSteps][2];
    float weights[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const bool real = 8 * n + group < p.num_heads;
#pragma unroll
      for (int u = 0; u < Pieces::kUnits; ++u) {
        uint32_t pairs[Pieces::kUnitDims / 2] = {};
        if (real) {
          load_query<kHalf, Pieces::kUnitDims>(p,
                                               t * p.q_row_stride +
                                                   (8 * n + group) * p.q_head_stride +
                                                   (4 * u + quad) * Pieces::kUnitDims,
                                               pairs);
        }
#pragma unroll
        for (int i = 0; i < Pieces::kUnitSteps; ++i) {
          b[n][u * Pieces::kUnitSteps + i][0] = pairs[2 * i] ^ sign;
          b[n][u * Pieces::kUnitSteps + i][1] = pairs[2 * i + 1] ^ sign;
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 8 * n + 2 * quad + i;
        weights[n][i] = head < p.num_heads ? p.head_weights(t, head) : 0.0f;
      }
    }

    int stage = 0;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int free_stage = stage == 0 ? kStages - 1 : stage - 1;
      fetch(free_stage, next);
      cp_async_commit();
      next[0] = look_up(position_of(tile + kStages, 0));
      next[1] = look_up(position_of(tile + kStages, 1));
      cp_async_wait<kStages - 1>();

      float c[kTiles][4] = {};
      const uint4* mine =
          reinterpret_cast<const uint4*>(smem + stage * Pieces::kStageBytes) + threadIdx.x;
#pragma unroll
      for (int u = 0; u < Pieces::kUnits; ++u) {
        const uint4 low = mine[u * kThreads];
        const uint4 high = mine[(Pieces::kUnits + u) * kThreads];
        const uint32_t low_words[4] = {low.x, low.y, low.z, low.w};
        const uint32_t high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < Pieces::kUnitSteps; ++i) {
          uint32_t a[4];
          if constexpr (kPlanar) {
            a[0] = widen_fp8<kHalf>(low_words[i]);
            a[1] = widen_fp8<kHalf>(high_words[i]);
            a[2] = widen_fp8<kHalf>(low_words[i] >> 16);
            a[3] = widen_fp8<kHalf>(high_words[i] >> 16);
          } else {
            a[0] = low_words[2 * i];
            a[1] = high_words[2 * i];
            a[2] = low_words[2 * i + 1];
            a[3] = high_words[2 * i + 1];
          }
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            mma<kHalf>(c[n], a, b[n][u * Pieces::kUnitSteps + i]);
          }
        }
      }
      if (p.num_heads != 8 * kTiles) {
        // A key that is not finite must not meet the heads that do not exist.
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            c[n][i] = 8 * n + 2 * quad + i % 2 < p.num_heads ? c[n][i] : 0.0f;
          }
        }
      }
      float sums[2] = {};
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[i / 2] = fmaf(weights[n][i % 2], relu(c[n][i]), sums[i / 2]);
        }
      }
      const float first = reduce_warp<4>(sums[0], Sum{});
      const float second = reduce_warp<4>(sums[1], Sum{});
      const int64_t position = position_of(tile, quad);
      if (quad < 2 && position < share.end) {
        float score = quad == 0 ? first : second;
        if constexpr (kPlanar) {
          score *= scales[stage * kThreads];
        }
        score *= fabsf(latent_scale);
        store_logit(p, t, position, (exists >> (kStages - 1) & 1) != 0 ? score : -INFINITY);
      }
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }
  fill_unscored(p, share);
}

template <class Key, bool kHalf>
auto kernel_for(int64_t num_heads) {
  return num_heads <= 16   ? score_mma_kernel<Key, kHalf, 2>
         : num_heads <= 32 ? score_mma_kernel<Key, kHalf, 4>
                           : score_mma_kernel<Key, kHalf, 8>;
}

}  // namespace

Status score_mma_supports(const ScoreParams& p) {
  if (p.dim != kDim) {
    return unsupported("q: head width " + std::to_string(p.dim) + ", expected " +
                       std::to_string(kDim));
  }
  if (p.num_heads < 1 || p.num_heads > kHeadsMax) {
    return unsupported("q: " + std::to_string(p.num_heads) + " heads, expected 1 to " +
                       std::to_string(kHeadsMax));
  }
  if (p.format == KvFormat::kIndexF32 || p.q_dtype == DType::kFloat32) {
    return unsupported("q, keys: float32, expected bf16 or FP8");
  }
  const int64_t q_bytes = size_bytes(p.q_dtype);
  if (reinterpret_cast<uintptr_t>(p.q) % 16 != 0 || p.q_row_stride * q_bytes % 16 != 0 ||
      p.q_head_stride * q_bytes % 16 != 0) {
    return unsupported("q: data and strides of heads must be multiples of 16 bytes");
  }
  if (reinterpret_cast<uintptr_t>(p.keys.data) % 16 != 0 ||
      (p.keys.num_blocks > 1 && p.keys.block_stride_bytes % 16 != 0) ||
      p.keys.key_stride_bytes % 16 != 0) {
    return unsupported("keys: data, blocks and keys must lie at multiples of 16 bytes");
  }
  return ok_status();
}

Status score_mma(const ScoreParams& params, const DeviceInfo& device, const Launch& where) {
  ScoreParams p = params;
  p.splits = std::clamp<int64_t>(
      ceil_div(kBlocksPerSm * device.sm_count, std::max<int64_t>(p.num_rows, 1)), 1,
      std::max<int64_t>(ceil_div(p.num_columns, kUnit), 1));
  const bool fp8_keys = p.format == KvFormat::kIndexFp8;
  const auto kernel = !fp8_keys                         ? kernel_for<Bf16, false>(p.num_heads)
                      : p.q_dtype == DType::kFloat8E4M3 ? kernel_for<Fp8E4M3, true>(p.num_heads)
                                                        : kernel_for<Fp8E4M3, false>(p.num_heads);
  return launch(
      "cuda/index_logits_mma", kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(p.num_rows * p.splits)),
       .block = dim3(kThreads),
       .smem_bytes = fp8_keys ? KeyPieces<Fp8E4M3>::kSmemBytes : KeyPieces<Bf16>::kSmemBytes},
      p);
}

}  // namespace lacuna::cuda
