// The lightning indexer's scores on tensor cores, for keys of 128 bf16 or FP8 elements.
//
// A warp holds sixty-four keys (M) in registers and walks over the heads of one query row (N),
// eight at a time, while the products of the eight before are weighted and summed. The order of the
// elements within a dot product is free as long as both sides agree, so a thread takes whole
// 16-byte pieces of its keys: they go from global memory through the thread's own places in shared
// memory (cp.async) to its A fragments, and no warp ever waits for another. FP8 keys are widened
// exactly on the way: to f16 when the query is FP8 as well, else to bf16. The sum over heads runs
// within a thread, then over four lanes, in one order for every key.
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
constexpr int kTilesM = 4;
constexpr int kWarpKeys = 16 * kTilesM;
constexpr int kUnit = kWarps * kWarpKeys;  // keys that a block scores at a time
constexpr int kSteps = kDim / 16;          // of the MMA
constexpr int kHeadsMax = 64;
constexpr int64_t kBlocksPerSm = 16;  // so that rows of unequal length even out

// A key as a thread sees it: kUnits pieces of 16 bytes, of kUnitDims elements; the four threads of
// a key take neighbouring pieces.
template <class Key>
struct KeyPieces {
  static constexpr int kUnitDims = 16 / sizeof(Key);
  static constexpr int kUnits = kDim / 4 / kUnitDims;
  static constexpr int kUnitSteps = kUnitDims / 4;
};

// The two e4m3 in the low half of `pair` as two f16 or two bf16, exactly.
template <bool kHalf>
__device__ uint32_t widen_fp8(uint32_t pair) {
  uint32_t halves;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
#else
  const __half2_raw raw =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair & 0xffffu), __NV_E4M3);
  halves = static_cast<uint32_t>(raw.x) | static_cast<uint32_t>(raw.y) << 16;
#endif
  if constexpr (kHalf) {
    return halves;
  } else {
    const float2 floats = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack_bf16(floats.x, floats.y);
  }
}

template <bool kHalf>
__device__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    mma_16816(c, a, b0, b1);
  }
}

// The elements [at, at + kCount) of the query as packed pairs.
template <bool kHalf, int kCount>
__device__ void load_query(const ScoreParams& p, int64_t at, uint32_t (&pairs)[kCount / 2]) {
  if (p.q_dtype == DType::kFloat8E4M3) {
    const uint2* from = reinterpret_cast<const uint2*>(static_cast<const Fp8E4M3*>(p.q) + at);
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      const uint2 words = from[i];
      pairs[4 * i] = widen_fp8<kHalf>(words.x);
      pairs[4 * i + 1] = widen_fp8<kHalf>(words.x >> 16);
      pairs[4 * i + 2] = widen_fp8<kHalf>(words.y);
      pairs[4 * i + 3] = widen_fp8<kHalf>(words.y >> 16);
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

// position / block_size, by a multiplication.
__device__ uint32_t divide_by_block_size(const ScoreParams& p, uint32_t position) {
  return static_cast<uint32_t>(uint64_t{position} * p.keys.division_factor >>
                               p.keys.division_shift);
}

// What a block has in shared memory.
template <class Key>
struct Smem {
  // [warp][16 * kTilesM rows in halves of 8][unit][lane]
  uint4 pieces[kWarps][2 * kTilesM][KeyPieces<Key>::kUnits][kWarp];
  // B fragments: [tile of eight heads][two steps][lane]
  uint4 query[kHeadsMax / 8][kSteps / 2][kWarp];
  float weights[kHeadsMax];
  // Where the keys of this round and the next lie, and their scales: bytes from the cache's begin;
  // -1: there is no such key.
  int64_t key_offsets[kWarps][2][kWarpKeys];
  int64_t scale_offsets[kWarps][2][kWarpKeys];
};

// What a warp adds to its sums when the products of eight heads are there.
struct Products {
  float c[kTilesM][4];
};

template <class Key, bool kHalf>
__global__ __launch_bounds__(kThreads, 2) void score_mma_kernel(const ScoreParams p) {
  using Pieces = KeyPieces<Key>;
  constexpr bool kPlanar = sizeof(Key) == 1;
  extern __shared__ __align__(16) char smem_bytes[];
  Smem<Key>& smem = *reinterpret_cast<Smem<Key>*>(smem_bytes);
  const ScoreShare share = score_share(p, kUnit);
  const int64_t t = share.t;
  if (share.begin >= share.end) {
    fill_unscored(p, share);
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int group = lane / 4;  // key of eight; head of eight
  const int quad = lane % 4;
  const int32_t request = p.lengths.request_ids(t);
  const KeyAddressing& keys = p.keys;
  const int64_t warp_begin = share.begin + warp * kWarpKeys;
  const int num_rounds = static_cast<int>((share.end - share.begin + kUnit - 1) / kUnit);

  // A lane looks up two keys of a round. What the table says is looked at only when it is needed: a
  // round later, so that nobody waits for it.
  const int32_t* table =
      keys.paged && request < keys.num_requests ? keys.block_table.row(request) : nullptr;
  const bool ragged = !keys.paged && request < keys.num_requests && keys.num_blocks > 0;
  const int64_t first_row = ragged ? keys.key_starts(request) : 0;
  const auto position_of = [&](int round, int i) {
    return warp_begin + int64_t{round} * kUnit + i * kWarp + lane;
  };
  const auto table_entry = [&](int round, int i) {
    const int64_t position = position_of(round, i);
    if (table == nullptr || position >= share.end) {
      return -1;
    }
    const uint32_t column = divide_by_block_size(p, static_cast<uint32_t>(position));
    return column < keys.num_table_columns ? table[column * keys.block_table.strides[1]] : -1;
  };
  const auto place_of = [&](int round, int i, int32_t block) {
    const int64_t position = position_of(round, i);
    if (table != nullptr) {
      const uint32_t column = divide_by_block_size(p, static_cast<uint32_t>(position));
      return KeyPlace{block >= keys.num_blocks ? -1 : block,
                      static_cast<int32_t>(static_cast<uint32_t>(position) -
                                           column * static_cast<uint32_t>(keys.block_size))};
    }
    const int64_t row = first_row + position;
    return ragged && position < share.end && row >= 0 && row < keys.block_size
               ? KeyPlace{0, static_cast<int32_t>(row)}
               : KeyPlace{};
  };
  const auto put_places = [&](int round, const int32_t(&blocks)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const KeyPlace place = place_of(round, i, blocks[i]);
      const int at = i * kWarp + lane;
      smem.key_offsets[warp][round & 1][at] = place.block < 0 ? -1 : keys.key_at(place) - keys.data;
      if constexpr (kPlanar) {
        smem.scale_offsets[warp][round & 1][at] =
            reinterpret_cast<const char*>(keys.scale_at(place)) - keys.data;
      }
    }
    __syncwarp();
  };
  const auto fetch = [&](int round) {
    int64_t offsets[2 * kTilesM];
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      offsets[r] = smem.key_offsets[warp][round & 1][8 * r + group];
    }
#pragma unroll
    for (int r = 0; r < 2 * kTilesM; ++r) {
      const bool valid = offsets[r] >= 0;
      const char* key = keys.data + (valid ? offsets[r] + quad * 16 : 0);
#pragma unroll
      for (int u = 0; u < Pieces::kUnits; ++u) {
        cp_async_16(smem_address(&smem.pieces[warp][r][u][lane]), key + u * 64, valid);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int round = 0; round < 2; ++round) {
    put_places(round, {table_entry(round, 0), table_entry(round, 1)});
  }
  fetch(0);

  // The query. A negative scale of the cache turns its sign, so that relu sees the right one.
  const float latent_scale = keys.latent_scale == nullptr ? 1.0f : *keys.latent_scale;
  const uint32_t sign = latent_scale < 0 ? 0x80008000u : 0;
  const int num_heads = static_cast<int>(p.num_heads);
  const int num_tiles = (num_heads + 15) / 16 * 2;  // of eight heads, in pairs
  for (int item = warp; item < num_tiles * Pieces::kUnits; item += kWarps) {
    const int n = item / Pieces::kUnits;
    const int u = item % Pieces::kUnits;
    const int head = 8 * n + group;
    uint32_t pairs[Pieces::kUnitDims / 2] = {};
    if (head < num_heads) {
      load_query<kHalf, Pieces::kUnitDims>(
          p, t * p.q_row_stride + head * p.q_head_stride + (4 * u + quad) * Pieces::kUnitDims,
          pairs);
    }
#pragma unroll
    for (int i = 0; i < Pieces::kUnitSteps / 2; ++i) {
      smem.query[n][u * (Pieces::kUnitSteps / 2) + i][lane] = {
          pairs[4 * i] ^ sign, pairs[4 * i + 1] ^ sign, pairs[4 * i + 2] ^ sign,
          pairs[4 * i + 3] ^ sign};
    }
  }
  if (threadIdx.x < kHeadsMax) {
    const int head = static_cast<int>(threadIdx.x);
    smem.weights[head] = head < num_heads ? p.head_weights(t, head) : 0.0f;
  }
  __syncthreads();

  for (int round = 0; round < num_rounds; ++round) {
    // The lane writes two scores in the end: of keys `group` and `group + 8` of tile `mine`.
    const int mine = quad % 2 * 2 + quad / 2;
    bool exists[2];
    float scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = 16 * mine + 8 * half + group;
      exists[half] = smem.key_offsets[warp][round & 1][at] >= 0;
      scales[half] = 1.0f;
      if (kPlanar && exists[half]) {
        scales[half] =
            *reinterpret_cast<const float*>(keys.data + smem.scale_offsets[warp][round & 1][at]);
      }
    }
    cp_async_wait<0>();
    uint32_t a[kTilesM][kSteps][4];
#pragma unroll
    for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
      for (int u = 0; u < Pieces::kUnits; ++u) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 piece = smem.pieces[warp][2 * m + half][u][lane];
          const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
          for (int i = 0; i < Pieces::kUnitSteps; ++i) {
            uint32_t(&fragment)[4] = a[m][u * Pieces::kUnitSteps + i];
            if constexpr (kPlanar) {
              fragment[half] = widen_fp8<kHalf>(words[i]);
              fragment[2 + half] = widen_fp8<kHalf>(words[i] >> 16);
            } else {
              fragment[half] = words[2 * i];
              fragment[2 + half] = words[2 * i + 1];
            }
          }
        }
      }
    }
    __syncwarp();  // this round's keys and places are read
    int32_t next[2] = {-1, -1};
    if (round + 1 < num_rounds) {
      next[0] = table_entry(round + 2, 0);
      next[1] = table_entry(round + 2, 1);
      fetch(round + 1);
    }

    float sums[2 * kTilesM] = {};
    // Adds the products of eight heads: part `step` of kSteps, so that it fills the MMAs' shadow.
    const auto add_products = [&](const Products& products, const float2& weights, int step) {
#pragma unroll
      for (int i = 0; i < 2 * kTilesM / 4; ++i) {
        const int m = step * 2 / 4;  // two values a step
        const int v = step * 2 % 4 + i;
        sums[2 * m + v / 2] =
            fmaf(v % 2 == 0 ? weights.x : weights.y, relu(products.c[m][v]), sums[2 * m + v / 2]);
      }
    };
    static_assert(2 * kSteps == 4 * kTilesM);
    const auto multiply = [&](int n, Products& products, const Products* before,
                              const float2& weights_before) {
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          products.c[m][i] = 0.0f;
        }
      }
#pragma unroll
      for (int s = 0; s < kSteps; s += 2) {
        const uint4 b = smem.query[n][s / 2][lane];
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          mma<kHalf>(products.c[m], a[m][s], b.x, b.y);
        }
        if (before != nullptr) {
          add_products(*before, weights_before, s);
        }
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          mma<kHalf>(products.c[m], a[m][s + 1], b.z, b.w);
        }
        if (before != nullptr) {
          add_products(*before, weights_before, s + 1);
        }
      }
      // A key that is not finite must not meet the heads that do not exist.
      if (8 * n + 8 > num_heads) {
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            products.c[m][i] = 8 * n + 2 * quad + i % 2 < num_heads ? products.c[m][i] : 0.0f;
          }
        }
      }
    };
    const auto weights_of = [&](int n) {
      return *reinterpret_cast<const float2*>(&smem.weights[8 * n + 2 * quad]);
    };
    Products even, odd;
    multiply(0, even, nullptr, {});
    multiply(1, odd, &even, weights_of(0));
    for (int n = 2; n < num_tiles; n += 2) {
      multiply(n, even, &odd, weights_of(n - 1));
      multiply(n + 1, odd, &even, weights_of(n));
    }
    const float2 weights = weights_of(num_tiles - 1);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      add_products(odd, weights, s);
    }

    // Sums over the four lanes of a key: each step halves what a lane is left with.
    float halves[kTilesM];
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      const bool upper = quad % 2 != 0;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? sums[i] : sums[kTilesM + i], 1);
      halves[i] = (upper ? sums[kTilesM + i] : sums[i]) + other;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool upper = quad / 2 != 0;
      const float other = __shfl_xor_sync(0xffffffffu, upper ? halves[half] : halves[2 + half], 2);
      float score = (upper ? halves[2 + half] : halves[half]) + other;
      score = score * scales[half] * fabsf(latent_scale);
      const int64_t position = warp_begin + int64_t{round} * kUnit + 16 * mine + 8 * half + group;
      if (position < share.end) {
        store_logit(p, t, position, exists[half] ? score : -INFINITY);
      }
    }
    if (round + 1 < num_rounds) {
      put_places(round + 2, next);  // over those of this round, which all lanes have read
    }
  }
  fill_unscored(p, share);
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
  const auto kernel = !fp8_keys                         ? score_mma_kernel<Bf16, false>
                      : p.q_dtype == DType::kFloat8E4M3 ? score_mma_kernel<Fp8E4M3, true>
                                                        : score_mma_kernel<Fp8E4M3, false>;
  const size_t smem_bytes = fp8_keys ? sizeof(Smem<Fp8E4M3>) : sizeof(Smem<Bf16>);
  return launch("cuda/index_logits_mma", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(p.num_rows * p.splits)),
                 .block = dim3(kThreads),
                 .smem_bytes = static_cast<int64_t>(smem_bytes)},
                p);
}

}  // namespace lacuna::cuda
