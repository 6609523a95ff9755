// Multi-head attention on tensor cores (mma.sync) over bf16. A block of four warps owns a tile of
// query rows of one head, 16 or 32 rows a warp, and walks the keys 64 at a time with a running
// softmax. Queries, keys and values lie in swizzled rows of shared memory; the next keys arrive
// while the softmax and the second product of a tile run, its values while the first product runs.
// Weights are rounded to bf16 for the second product; their sum is taken before.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "backends/cuda/attention/mha.h"
#include "backends/cuda/attention/mha_tiles.cuh"
#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/exp2.cuh"
#include "backends/cuda/device/mma.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kBlocksPerSm = 2;
constexpr int kRoundsPerGroup = 3;
constexpr int kTileKeys = 64;
constexpr int kMmaRows = 16;
constexpr int kMmaDepth = 16;
constexpr int kChunk = 8;  // elements of a 16-byte copy
constexpr int kSlab = 64;  // elements of 128 bytes, within which chunks are swizzled
constexpr int kSlabChunks = kSlab / kChunk;
constexpr int kKeyFragments = kTileKeys / 8;
constexpr int kMaskWords = kTileKeys / 32 + 1;
constexpr int kMaskSlotWords = 4;  // kMaskWords, and one that keeps slots aligned
// A running maximum is replaced when a score exceeds it by more than 2^kSlackLog2: weights stay
// below that, which costs no accuracy in bf16 and f32, and the accumulators are rarely rescaled.
constexpr float kSlackLog2 = 8.0f;

// Widths up to which a kernel is built (in shared memory they are filled up with zeros), and the
// 16-row fragments that a warp owns: two halve the reads of keys and values from shared memory,
// which otherwise limit the kernel; wider values leave registers for one.
template <int kDepthMax, int kWidthMax, int kFragments>
struct Shape {
  static constexpr int kDepth = kDepthMax;
  static constexpr int kWidth = kWidthMax;
  static constexpr int kMTiles = kFragments;
  static constexpr int kWarpRows = kMTiles * kMmaRows;
  static constexpr int kTileRows = kWarps * kWarpRows;
  // Bytes of shared memory, in this order.
  static constexpr int kQueryBytes = kTileRows * kDepth * 2;
  static constexpr int kKeyBytes = kTileKeys * kDepth * 2;
  static constexpr int kValueBytes = kTileKeys * kWidth * 2;
  static constexpr int kKeptBytes = 2 * kTileRows * 8;  // two buffers, a bit a key
  static constexpr int kMaskBytes = kTileRows * kMaskSlotWords * 4;
  static constexpr int kSmemBytes = kQueryBytes + kKeyBytes + kValueBytes + kKeptBytes + kMaskBytes;
  static_assert(kDepth % kSlab == 0 && kWidth % kSlab == 0);
  static_assert(kSmemBytes <= 99 * 1024, "what sm_86, sm_89 and sm_120 have");
};
using Shape128 = Shape<128, 128, 2>;
using Shape192 = Shape<192, 128, 2>;
using Shape256 = Shape<256, 256, 1>;

struct Params {
  MhaInputs<Bf16> in;
  int heads_per_group;
  int tiles_max;
  int qk_chunks;
  int nope_chunks;
  int v_chunks;
  float scale_log2;  // softmax_scale / ln 2, positive
  float slack;       // kSlackLog2 in units of scores before scaling
};

struct Work {
  int head;
  int tile;
};

// Blocks in the order of their numbers: heads in groups whose keys and values fit L2 together;
// within a group the last tiles of the sequences first, as they see most keys under causality.
__device__ Work find_work(const Params& p, int block_idx) {
  const int group_blocks = p.heads_per_group * p.tiles_max;
  const int group = block_idx / group_blocks;
  const int in_group = block_idx - group * group_blocks;
  const int first_head = group * p.heads_per_group;
  const int num_heads = min(p.heads_per_group, p.in.num_heads - first_head);
  return {.head = first_head + in_group % num_heads,
          .tile = p.tiles_max - 1 - in_group / num_heads};
}

// Copies the mask words that hold the bits of a tile of keys, three as the first bit may lie
// anywhere in its word. Row `row` of the tile must be one of the sequence's.
__device__ void copy_mask(const MhaSequences& s, const MhaTile& tile, int row, int key_tile,
                          uint32_t smem) {
  const int32_t* words = s.mask + (int64_t{tile.q_begin} + tile.query + row) * s.mask_stride;
  const uint32_t first = (tile.key_start + static_cast<uint32_t>(key_tile * kTileKeys)) >> 5;
#pragma unroll
  for (uint32_t i = 0; i < kMaskWords; ++i) {
    const bool exists = first + i < s.mask_words;
    cp_async_4(smem + 4 * i, words + (exists ? first + i : 0), exists);
  }
}

// The keys of a tile of keys that a query row keeps: bit i of word w is key 32 w + i.
__device__ uint2 kept_bits(uint32_t key_start, const uint32_t* mask, int visible, int key_tile) {
  const int left = visible - key_tile * kTileKeys;
  uint2 bits = {low_bits(left), low_bits(left - 32)};
  if (mask != nullptr) {
    bits.x &= __funnelshift_r(mask[0], mask[1], key_start & 31);
    bits.y &= __funnelshift_r(mask[1], mask[2], key_start & 31);
  }
  return bits;
}

// Address of the 16-byte chunk `chunk` (below kSlabChunks) of a row whose number is `row` modulo
// 8: rows of whole 128-byte slabs would otherwise start in the same bank.
__device__ uint32_t swizzled(int chunk, int row) {
  return static_cast<uint32_t>((chunk ^ (row & 7)) * 16);
}

// Rows of one head of a tensor as they are copied.
struct RowSource {
  const Bf16* row;    // the first one
  int64_t row_bytes;  // from one row to the next
};

template <class Tensor>
__device__ RowSource rows_of(const Tensor& tensor, const Bf16* row) {
  return {row, 2 * tensor.strides[0]};
}

// Copies kRows rows of up to kColumns elements; rows from `valid_rows` and chunks from `num_chunks`
// on become zeros. Chunks from `first_chunks` on come from the second source.
template <int kRows, int kColumns>
__device__ void copy_rows(uint32_t smem, RowSource first, int first_chunks, RowSource second,
                          int num_chunks, int valid_rows) {
  constexpr int kRowsAtOnce = kThreads / kSlabChunks;
  static_assert(kRows % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
  const int chunk_in_slab = static_cast<int>(threadIdx.x) % kSlabChunks;
  const int first_row = static_cast<int>(threadIdx.x) / kSlabChunks;
  const uint32_t to = smem + first_row * (kColumns * 2) + swizzled(chunk_in_slab, first_row);
  // Not unrolled: there are no registers for the addresses of all slabs.
#pragma unroll 1
  for (int slab = 0; slab < kColumns / kSlab; ++slab) {
    const int chunk = slab * kSlabChunks + chunk_in_slab;
    const bool from_first = chunk < first_chunks;
    const int64_t row_bytes = from_first ? first.row_bytes : second.row_bytes;
    const char* from =
        reinterpret_cast<const char*>(from_first ? first.row + chunk * kChunk
                                                 : second.row + (chunk - first_chunks) * kChunk) +
        first_row * row_bytes;
    const int rows = chunk < num_chunks ? valid_rows : 0;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      cp_async_16(to + i * kRowsAtOnce * kColumns * 2 + slab * kSlab * 2, from,
                  first_row + i * kRowsAtOnce < rows);
      from += kRowsAtOnce * row_bytes;
    }
  }
}

// The state of one warp's rows. A thread holds rows g and g + 8 of each fragment (lane = 4 g + t).
template <class S>
struct Rows {
  float out[S::kMTiles][S::kWidth / 8][4];
  float max[S::kMTiles][2];  // in units of scores before scaling
  float sum[S::kMTiles][2];  // over the thread's own columns
};

template <class S>
using Scores = float[S::kMTiles][kKeyFragments][4];

// scores = Q K^T of the warp's rows. `q` and `k` are the thread's ldmatrix addresses.
template <class S>
__device__ void score_tile(uint32_t q, uint32_t k, Scores<S>& scores) {
#pragma unroll
  for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] = 0;
      }
    }
  }
#pragma unroll
  for (int step = 0; step < S::kDepth / kMmaDepth; ++step) {
    // Two chunks a step: within a slab the step's number flips bits of the swizzled address.
    const uint32_t flip = step % (kSlab / kMmaDepth) * 32;
    const uint32_t slab = step / (kSlab / kMmaDepth) * kSlab * 2;
    uint32_t a[S::kMTiles][4];
#pragma unroll
    for (int m = 0; m < S::kMTiles; ++m) {
      ldmatrix_x4(a[m], (q ^ flip) + slab + m * kMmaRows * S::kDepth * 2);
    }
#pragma unroll
    for (int n = 0; n < kKeyFragments; n += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, (k ^ flip) + slab + n * 8 * S::kDepth * 2);
#pragma unroll
      for (int m = 0; m < S::kMTiles; ++m) {
        mma_16816(scores[m][n], a[m], b[0], b[1]);
        mma_16816(scores[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Scores of keys that are not kept become -inf. `kept` points at the thread's first row.
template <class S>
__device__ void drop_scores(const uint2* kept, Scores<S>& scores) {
  const int shift = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 bits = kept[m * kMmaRows + half * 8];
      const uint32_t words[2] = {bits.x >> shift, bits.y >> shift};
#pragma unroll
      for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((words[n / 4] & (1u << (n % 4 * 8 + i))) == 0) {
            scores[m][n][2 * half + i] = -INFINITY;
          }
        }
      }
    }
  }
}

// Scores become weights relative to the running maximum, which is raised where it must be.
template <class S>
__device__ void softmax_tile(float scale_log2, float slack, Scores<S>& scores, Rows<S>& rows) {
  float factor[S::kMTiles][2];
  bool raised = false;
#pragma unroll
  for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeyFragments; ++n) {
        tile_max = fmaxf(tile_max, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
      }
      tile_max = reduce_warp<4>(tile_max, Max());
      const float old_max = rows.max[m][half];
      const bool raise = tile_max > old_max + slack;  // always when there was none: -inf
      const float new_max = raise ? tile_max : old_max;
      factor[m][half] = raise ? exp2_fast((old_max - new_max) * scale_log2) : 1.0f;
      rows.max[m][half] = new_max;
      raised |= raise;
      const float base = new_max == -INFINITY ? 0.0f : new_max * scale_log2;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyFragments; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = scores[m][n][2 * half + i];
          score = exp2_fast(fmaf(score, scale_log2, -base));
          sum += score;
        }
      }
      rows.sum[m][half] = fmaf(rows.sum[m][half], factor[m][half], sum);
    }
  }
  if (__any_sync(0xffffffffu, raised)) {
#pragma unroll
    for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < S::kWidth / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          rows.out[m][n][i] *= factor[m][i / 2];
        }
      }
    }
  }
}

// out += P V. `v` is the thread's ldmatrix address.
template <class S>
__device__ void weigh_tile(uint32_t v, const Scores<S>& weights, Rows<S>& rows) {
#pragma unroll
  for (int step = 0; step < kTileKeys / kMmaDepth; ++step) {
    uint32_t a[S::kMTiles][4];
#pragma unroll
    for (int m = 0; m < S::kMTiles; ++m) {
      // The accumulators of two neighbouring fragments are an A fragment.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = weights[m][2 * step + i / 2];
        a[m][i] = pack_bf16(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < S::kWidth / 8; n += 2) {
      const uint32_t flip = n / 2 % (kSlab / 16) * 32;
      const uint32_t slab = n * 8 / kSlab * kSlab * 2;
      uint32_t b[4];
      ldmatrix_x4_trans(b, (v ^ flip) + slab + step * kMmaDepth * S::kWidth * 2);
#pragma unroll
      for (int m = 0; m < S::kMTiles; ++m) {
        mma_16816(rows.out[m][n], a[m], b[0], b[1]);
        mma_16816(rows.out[m][n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

template <class S>
__device__ void store_rows(const Params& p, const MhaTile& tile, int head, int first_row,
                           Rows<S>& rows) {
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = reduce_warp<4>(rows.sum[m][half], Sum());
      const int row = tile.query + first_row + m * kMmaRows + half * 8 + lane_idx / 4;
      if (row >= tile.q_count) {
        continue;
      }
      const bool empty = sum == 0.0f;
      const float factor = empty ? 0.0f : 1.0f / sum;
      const int64_t t = int64_t{tile.q_begin} + row;
      if (p.in.lse && lane_idx % 4 == 0) {
        p.in.lse(t, head) = empty ? -INFINITY : rows.max[m][half] * p.scale_log2 * kLn2 + logf(sum);
      }
      const int64_t at = t * p.in.out_strides[0] + head * p.in.out_strides[1] + lane_idx % 4 * 2;
#pragma unroll
      for (int n = 0; n < S::kWidth / 8; ++n) {
        if (n < p.v_chunks) {
          const float low = rows.out[m][n][2 * half] * factor;
          const float high = rows.out[m][n][2 * half + 1] * factor;
          if (p.in.bf16_out) {
            *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.in.out) + at + n * 8) =
                pack_bf16(low, high);
          } else {
            *reinterpret_cast<float2*>(static_cast<float*>(p.in.out) + at + n * 8) =
                float2{low, high};
          }
        }
      }
    }
  }
}

template <class S>
__global__ __launch_bounds__(kThreads,
                             kBlocksPerSm) void mha_mma_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) uint8_t smem[];
  pdl_wait();
  pdl_launch_dependents();
  // In shared memory because the accumulators leave no registers for what is seldom looked at.
  __shared__ MhaTile tile;
  __shared__ int head;
  {
    const Work work = find_work(p, static_cast<int>(blockIdx.x));
    MhaTile found;
    if (!find_tile(p.in.sequences, work.tile, S::kTileRows, &found)) {
      return;
    }
    if (threadIdx.x == 0) {
      tile = found;
      head = work.head;
    }
    __syncthreads();
  }
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t q_smem = smem_address(smem);
  const uint32_t k_smem = q_smem + S::kQueryBytes;
  const uint32_t v_smem = k_smem + S::kKeyBytes;
  uint2* kept = reinterpret_cast<uint2*>(smem + S::kQueryBytes + S::kKeyBytes + S::kValueBytes);
  uint32_t* masks = reinterpret_cast<uint32_t*>(kept) + S::kKeptBytes / 4;

  // A thread looks after the kept keys of one row of its own warp (16 threads of a warp of 16).
  const int first_row = warp_idx * S::kWarpRows;
  const int own_row = first_row + lane_idx;
  const bool owner = lane_idx < S::kWarpRows;
  const bool masked = p.in.sequences.mask != nullptr;
  const int num_key_tiles =
      (tile_keys(p.in.sequences, tile, S::kTileRows) + kTileKeys - 1) / kTileKeys;
  // Keys below this are seen by every row of the tile.
  const int seen_by_all = visible_keys(p.in.sequences, tile, 0);

  // Where this thread's ldmatrix rows lie.
  const int matrix = lane_idx / 8;
  const int a_row = matrix % 2 * 8 + lane_idx % 8;  // of Q, and of V, which is transposed
  const int b_row = matrix / 2 * 8 + lane_idx % 8;  // of K
  const uint32_t q_lane =
      q_smem + (first_row + a_row) * S::kDepth * 2 + swizzled(matrix / 2, lane_idx);
  const uint32_t k_lane = k_smem + b_row * S::kDepth * 2 + swizzled(matrix % 2, lane_idx);
  const uint32_t v_lane = v_smem + a_row * S::kWidth * 2 + swizzled(matrix / 2, lane_idx);

  Rows<S> rows;
#pragma unroll
  for (int m = 0; m < S::kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < S::kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows.out[m][n][i] = 0;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows.max[m][half] = -INFINITY;
      rows.sum[m][half] = 0;
    }
  }

  // Asks for the mask of the thread's row; it is there after the next wait.
  const auto copy_own_mask = [&](int key_tile) {
    if (masked && owner && tile.query + own_row < tile.q_count) {
      copy_mask(p.in.sequences, tile, own_row, key_tile,
                smem_address(masks + own_row * kMaskSlotWords));
    }
  };
  // The next tile of keys that some row keeps keys of, from `next` on, whose mask was asked for and
  // awaited; num_key_tiles when there is none. `bits` becomes the thread's row's. A barrier: on
  // return all warps have reached it.
  const auto find_next = [&](int next, uint2* bits) {
    while (true) {
      // A thread reads what it copied itself.
      *bits = owner ? kept_bits(tile.key_start, masked ? masks + own_row * kMaskSlotWords : nullptr,
                                visible_keys(p.in.sequences, tile, own_row), next)
                    : uint2{0, 0};
      if (__syncthreads_or((bits->x | bits->y) != 0) != 0) {
        return next;
      }
      if (++next >= num_key_tiles) {
        return num_key_tiles;
      }
      copy_own_mask(next);
      cp_async_commit();
      cp_async_wait<0>();
    }
  };
  const auto load_keys = [&](int key_tile) {
    const int key = key_tile * kTileKeys;
    const int64_t row = int64_t{tile.k_begin} + key;
    copy_rows<kTileKeys, S::kDepth>(k_smem, rows_of(p.in.k, p.in.k.row(row, head)), p.nope_chunks,
                                    rows_of(p.in.k_rope, p.in.k_rope.row(row)), p.qk_chunks,
                                    tile.k_count - key);
    cp_async_commit();
  };

  uint2 bits;
  copy_own_mask(0);
  cp_async_commit();
  copy_rows<S::kTileRows, S::kDepth>(
      q_smem, rows_of(p.in.q, p.in.q.row(int64_t{tile.q_begin} + tile.query, head)), p.qk_chunks,
      {}, p.qk_chunks, tile.q_count - tile.query);
  cp_async_commit();
  cp_async_wait<1>();  // the mask
  int key_tile = find_next(0, &bits);
  int buffer = 0;
  if (key_tile < num_key_tiles) {
    load_keys(key_tile);
    if (owner) {
      kept[own_row] = bits;
    }
  }
  bool alive = __any_sync(0xffffffffu, (bits.x | bits.y) != 0);
  while (key_tile < num_key_tiles) {
    cp_async_wait<0>();
    __syncthreads();  // the keys are there, and nobody reads the last tile's values any more
    {
      const int key = key_tile * kTileKeys;
      copy_rows<kTileKeys, S::kWidth>(
          v_smem, rows_of(p.in.v, p.in.v.row(int64_t{tile.k_begin} + key, head)), p.v_chunks, {},
          p.v_chunks, tile.k_count - key);
      copy_own_mask(key_tile + 1);
      cp_async_commit();
    }
    Scores<S> scores;
    // A warp without kept keys in this tile has nothing to do: above the diagonal, most often.
    if (alive) {
      score_tile<S>(q_lane, k_lane, scores);
    }
    cp_async_wait<0>();
    // Also: the values are there, and nobody reads the keys any more.
    const int next = find_next(key_tile + 1, &bits);
    if (next < num_key_tiles) {
      load_keys(next);
      if (owner) {
        kept[(buffer ^ 1) * S::kTileRows + own_row] = bits;
      }
    }
    if (alive) {
      if (masked || (key_tile + 1) * kTileKeys > seen_by_all) {
        drop_scores<S>(kept + buffer * S::kTileRows + first_row + lane_idx / 4, scores);
      }
      softmax_tile<S>(p.scale_log2, p.slack, scores, rows);
      weigh_tile<S>(v_lane, scores, rows);
    }
    alive = __any_sync(0xffffffffu, (bits.x | bits.y) != 0);
    key_tile = next;
    buffer ^= 1;
  }
  cp_async_wait<0>();
  store_rows<S>(p, tile, head, first_row, rows);
}

// Whether all rows of a tensor can be copied in chunks of 16 bytes.
bool has_chunks(const ConstTensorView& tensor) {
  bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
  for (int i = 0; i < tensor.rank; ++i) {
    aligned = aligned && (i == tensor.rank - 1 ? tensor.shape[i] % kChunk == 0
                                               : tensor.strides[i] % kChunk == 0);
  }
  return aligned;
}

template <class S>
bool fits(const MhaArgs& args) {
  return args.q.shape[2] <= S::kDepth && args.v.shape[2] <= S::kWidth;
}

template <class S>
Status run_shape(const MhaArgs& args, const DeviceInfo& device, const Launch& where) {
  const int64_t num_heads = args.q.shape[1];
  const int64_t tiles_max = mha_tiles_max(args, S::kTileRows);
  if (tiles_max == 0) {
    return ok_status();
  }
  // Half of L2 holds the keys and values of a group of heads, the rest what passes through. But a
  // group, the last one too, has work for several rounds of the GPU, or its longest tiles would end
  // late.
  const int64_t head_bytes =
      std::max<int64_t>(1, 2 * args.v.shape[0] * (args.q.shape[2] + args.v.shape[2]));
  const int64_t round_blocks = kBlocksPerSm * device.sm_count;
  const int64_t group_heads =
      std::clamp<int64_t>(std::max(device.l2_bytes / 2 / head_bytes,
                                   ceil_div(kRoundsPerGroup * round_blocks, tiles_max)),
                          1, num_heads);
  const int64_t heads_per_group = ceil_div(num_heads, num_heads / group_heads);
  const float scale_log2 = static_cast<float>(args.softmax_scale) * kLog2E;
  const Params params = {.in = mha_inputs<Bf16>(args),
                         .heads_per_group = static_cast<int>(heads_per_group),
                         .tiles_max = static_cast<int>(tiles_max),
                         .qk_chunks = static_cast<int>(args.q.shape[2] / kChunk),
                         .nope_chunks = static_cast<int>(mha_keys(args).shape[2] / kChunk),
                         .v_chunks = static_cast<int>(args.v.shape[2] / kChunk),
                         .scale_log2 = scale_log2,
                         .slack = kSlackLog2 / scale_log2};
  return launch("cuda/mha_mma", mha_mma_kernel<S>, device, where,
                {.grid = dim3(static_cast<unsigned>(tiles_max * num_heads)),
                 .block = dim3(kThreads),
                 .smem_bytes = S::kSmemBytes,
                 .pdl = true},
                params);
}

}  // namespace

Status supports_mha_mma(const MhaArgs& args, const DeviceInfo& device) {
  if (args.q.dtype != DType::kBFloat16) {
    return unsupported("q: " + std::string(dtype_name(args.q.dtype)) +
                       ", cuda/mha_mma takes bfloat16");
  }
  if (!fits<Shape256>(args)) {
    return unsupported("d_qk, d_v: " + std::to_string(args.q.shape[2]) + ", " +
                       std::to_string(args.v.shape[2]) + ", cuda/mha_mma takes at most 256");
  }
  struct Named {
    const ConstTensorView& tensor;
    const char* name;
  };
  for (const Named& named : {Named{args.q, "q"}, Named{args.k, "k"}, Named{args.k_nope, "k_nope"},
                             Named{args.k_rope, "k_rope"}, Named{args.v, "v"}}) {
    if (!named.tensor.empty() && !has_chunks(named.tensor)) {
      return unsupported(std::string(named.name) +
                         ": cuda/mha_mma copies 16 bytes at a time: data aligned to 16 bytes, "
                         "width and strides multiples of 8");
    }
  }
  const int64_t pair_bytes = 2 * size_bytes(args.out.dtype);
  if (reinterpret_cast<uintptr_t>(args.out.data) % pair_bytes != 0 ||
      args.out.strides[0] % 2 != 0 || args.out.strides[1] % 2 != 0) {
    return unsupported("out: cuda/mha_mma stores pairs: data aligned to " +
                       std::to_string(pair_bytes) + " bytes, strides multiples of 2");
  }
  if (args.softmax_scale < 0) {
    return unsupported("softmax_scale: " + std::to_string(args.softmax_scale) +
                       ", cuda/mha_mma takes positive scales");
  }
  if (device.smem_optin_bytes < Shape256::kSmemBytes) {
    return unsupported("device: " + std::to_string(device.smem_optin_bytes) +
                       " bytes of shared memory, cuda/mha_mma needs " +
                       std::to_string(Shape256::kSmemBytes));
  }
  return ok_status();
}

Status run_mha_mma(const MhaArgs& args, const DeviceInfo& device, const Launch& where) {
  return fits<Shape128>(args)   ? run_shape<Shape128>(args, device, where)
         : fits<Shape192>(args) ? run_shape<Shape192>(args, device, where)
                                : run_shape<Shape256>(args, device, where);
}

}  // namespace lacuna::cuda
