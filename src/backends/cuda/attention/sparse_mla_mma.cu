// Sparse MLA on tensor cores by mma.sync, for the widths of the released models: latent 512, rope
// 64 or none, bf16 queries, caches of bf16 or fp8_ds_mla. Memory-bound: what counts is that the
// gather never stops.
//
// A block of 8 warps takes 16 heads and a split of one row's list. Tiles of 32 keys come by 16-byte
// asynchronous copies, the next while this one is used, into slabs of 64 columns: key k of slab s
// lies at s * 4096 + k * 128, its 16-byte chunk c at place c ^ (k & 7), so that neither the copies
// nor ldmatrix meet a bank twice. Of a tile
//   scores: warp (g, half) multiplies columns [128 g, 128 g + 128) of the latent and 16 of the rope
//     by 16 keys, with its query fragments in registers; the four column groups meet in shared
//     memory. A group is one scale block of fp8_ds_mla, so the scales multiply float32 sums and
//     every e4m3 value goes through bf16 exactly.
//   softmax: a warp two heads, a lane a key; running maximum and sum stay in registers.
//   output: warp w owns columns [64 w, 64 w + 64), which is slab w, for all 16 heads. A weight is
//     two bf16 numbers, what it rounds to and what is then left: one alone would be off by 2^-9,
//     which shows where large values cancel. With fp8_ds_mla the scale of (key, column group) goes
//     into the weight first.
#include <string>

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/mma.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = static_cast<int>(kPlanHeads);
constexpr int kTileKeys = static_cast<int>(kSplitKeys);
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kSlabBytes = kTileKeys * 128;
constexpr int kLatentSlabs = kLatent / 64;
constexpr int kStages = 2;
constexpr int kColumnGroups = 4;
constexpr int kLatentSteps = kLatent / kColumnGroups / 16;  // of 16 columns
constexpr float kLog2E = 1.44269504088896341f;
// Floats from one head's scores to the next: the 8 x 8 corners that a warp stores at once then fall
// into different banks.
constexpr int kScorePitch = kTileKeys + 8;
// Bytes from one head's bf16 weights to the next, for ldmatrix without conflicts.
constexpr int kWeightPitch = 2 * kTileKeys + 16;
constexpr int kFp8Bytes = static_cast<int>(kFp8DsMlaRowBytes);

// With fp8_ds_mla two blocks an SM only where it was looked at: sm_80, sm_86, sm_89 and sm_120 have
// no shared memory for two, and elsewhere their registers would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int kFp8BlocksPerSm = 1;
#else
constexpr int kFp8BlocksPerSm = 2;
#endif

template <bool kFp8, bool kHasRope>
struct Layout {
  static constexpr int kTileBytes = (kLatentSlabs + (kHasRope ? 1 : 0)) * kSlabBytes;
  // What the copies fill: tiles as they are, or raw records of which one tile is made.
  static constexpr int kStageBytes = kFp8 ? kTileKeys * kFp8Bytes : kTileBytes;
  static constexpr int kTileAt = kFp8 ? kStages * kStageBytes : 0;
  static constexpr int kScoresAt = kStages * kStageBytes + (kFp8 ? kTileBytes : 0);
  static constexpr int kWeightsAt = kScoresAt + 4 * kColumnGroups * kHeads * kScorePitch;
  static constexpr int kRescalesAt =
      kWeightsAt + (kFp8 ? 4 * kHeads * kScorePitch : 2 * kHeads * kWeightPitch);
  static constexpr int kValidAt = kRescalesAt + 4 * kHeads;
  // Fragments of the query, 16 bytes a thread, for which there are no registers: the last latent
  // steps, then the rope.
  static constexpr int kParkedSteps = !kFp8 ? 0 : kHasRope ? 1 : 2;
  static constexpr int kQueryAt = kValidAt + 4 * kStages * kTileKeys;
  static constexpr int kBytes = kQueryAt + 16 * kThreads * (kParkedSteps + (kHasRope ? 1 : 0));
};
static_assert(Layout<true, true>::kTileAt % 128 == 0);
static_assert(Layout<true, true>::kBytes <= 99 * 1024, "GPUs of sm_86, sm_89 and sm_120 run this");

__device__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Where 16-byte chunk `chunk` (of 8 columns) of a key lies in a slab. Chunk 2 i + chunk is then at
// chunk_at(key, chunk) ^ (i << 5).
__device__ uint32_t chunk_at(int key, int chunk) { return key * 128 + ((chunk ^ (key & 7)) << 4); }

// The gather: 8 threads a key. Entries are read two tiles ahead and translated one tile ahead, so
// that no copy waits for its address.
template <bool kFp8, bool kHasRope>
class Gather {
 public:
  using Smem = Layout<kFp8, kHasRope>;

  __device__ Gather(const SparseMlaParams& p, const SplitTask& task, uint32_t smem, char* generic)
      : p_(p),
        queries_(task.row),
        key_(static_cast<int>(threadIdx.x) / 8),
        chunk_(static_cast<int>(threadIdx.x) % 8),
        at_(task.begin + key_),
        end_(task.end),
        stages_(smem),
        valid_(reinterpret_cast<int*>(generic + Smem::kValidAt)) {
    row_ = cached_row(p_, request_of(p_, queries_), read_entry());
    at_ += kTileKeys;
    next_entry_ = read_entry();
  }

  // Starts the copies of the next tile into `stage`.
  __device__ void issue(int stage) {
    const bool valid = row_ >= 0;
    // Nothing is read through the address of an invalid key.
    const char* from = valid ? p_.kv + static_cast<int64_t>(row_) * p_.row_bytes
                             : static_cast<const char*>(p_.q_nope);
    if constexpr (kFp8) {
      const uint32_t to = stages_ + stage * Smem::kStageBytes + key_ * kFp8Bytes;
      constexpr int kChunks = (kHasRope ? kFp8Bytes : static_cast<int>(kFp8DsMlaRopeOffset)) / 16;
#pragma unroll
      for (int i = 0; i < (kChunks + 7) / 8; ++i) {
        const int chunk = i * 8 + chunk_;
        if (chunk < kChunks) {
          cp_async_16(to + chunk * 16, from + chunk * 16, valid);
        }
      }
    } else {
      const uint32_t to = stages_ + stage * Smem::kStageBytes + chunk_at(key_, chunk_);
#pragma unroll
      for (int slab = 0; slab < Smem::kTileBytes / kSlabBytes; ++slab) {
        cp_async_16(to + slab * kSlabBytes, from + slab * 128 + chunk_ * 16, valid);
      }
    }
    cp_async_commit();
    if (chunk_ == 0) {
      valid_[stage * kTileKeys + key_] = valid;
    }
    row_ = cached_row(p_, request_of(p_, queries_), next_entry_);
    at_ += kTileKeys;
    next_entry_ = read_entry();
  }

 private:
  // The list's address and its request are worked out again each time: registers are what is short.
  __device__ int32_t read_entry() const {
    return at_ < end_ ? __ldcg(p_.indices.row(queries_) + at_) : -1;
  }

  const SparseMlaParams& p_;
  const int32_t queries_;
  const int key_;
  const int chunk_;
  int32_t at_;  // lists are shorter than 2^31
  const int32_t end_;
  const uint32_t stages_;
  int* const valid_;
  int32_t row_;  // of the tile that is copied next
  int32_t next_entry_;
};

// Raw records to a tile of bf16: e4m3 values exactly and without their scales, rope as it is.
template <bool kHasRope>
__device__ void widen_fp8(const char* records, char* tile) {
  const int key = static_cast<int>(threadIdx.x) / 8;
  const int lane = static_cast<int>(threadIdx.x) % 8;
  const char* record = records + key * kFp8Bytes;
  char* row = tile + key * 128;
  // Chunk c of 16 values makes chunks 2c and 2c + 1 of slab c / 4. The eight lanes of a key write
  // to different banks. Not unrolled: the registers hold the query and the output.
#pragma unroll 1
  for (int i = 0; i < kLatent / 16 / 8; ++i) {
    const int chunk = i * 8 + lane;
    const uint4 raw = *reinterpret_cast<const uint4*>(record + chunk * 16);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    uint32_t pairs[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 values = unpack_fp8(words[w]);
      pairs[2 * w] = pack_bf16(values.x, values.y);
      pairs[2 * w + 1] = pack_bf16(values.z, values.w);
    }
    char* slab = row + chunk / 4 * kSlabBytes;
    const int to = chunk % 4 * 2;
    *reinterpret_cast<uint4*>(slab + ((to ^ (key & 7)) << 4)) = {pairs[0], pairs[1], pairs[2],
                                                                 pairs[3]};
    *reinterpret_cast<uint4*>(slab + (((to + 1) ^ (key & 7)) << 4)) = {pairs[4], pairs[5], pairs[6],
                                                                       pairs[7]};
  }
  if constexpr (kHasRope) {
    *reinterpret_cast<uint4*>(row + kLatentSlabs * kSlabBytes + ((lane ^ (key & 7)) << 4)) =
        *reinterpret_cast<const uint4*>(record + kFp8DsMlaRopeOffset + lane * 16);
  }
}

__device__ void unpark(const uint4* from, uint32_t (&fragment)[4]) {
  const uint4 words = *from;
  fragment[0] = words.x;
  fragment[1] = words.y;
  fragment[2] = words.z;
  fragment[3] = words.w;
}

// Word w of lane t of a quad of lanes becomes word t of lane w.
__device__ void transpose_quad(uint32_t (&words)[4]) {
  const int lane_idx = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = (lane_idx & bit) != 0;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int first = bit == 1 ? 2 * pair : pair;
      const uint32_t sent = upper ? words[first] : words[first + bit];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, sent, bit);
      (upper ? words[first] : words[first + bit]) = received;
    }
  }
}

// 16 bytes of the query a lane, then across the quad what the lane needs of its four chunks of 8
// columns: the pair 2 t, 2 t + 1 of each.
__device__ void load_query(const Bf16* from, uint32_t (&words)[4]) {
  const uint4 chunk = from == nullptr ? uint4{} : *reinterpret_cast<const uint4*>(from);
  words[0] = chunk.x;
  words[1] = chunk.y;
  words[2] = chunk.z;
  words[3] = chunk.w;
  transpose_quad(words);
}

template <bool kFp8, bool kHasRope>
__global__ __launch_bounds__(kThreads, kFp8 ? kFp8BlocksPerSm : 2) void sparse_mla_mma_kernel(
    const __grid_constant__ SparseMlaParams p) {
  using Smem = Layout<kFp8, kHasRope>;
  extern __shared__ __align__(128) char smem[];
  const uint32_t smem_at = smem_address(smem);
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int group_row = lane_idx / 4;  // of mma fragments
  const int group_column = lane_idx % 4;
  const int matrix = lane_idx / 8;  // of ldmatrix
  const int matrix_row = lane_idx % 8;

  pdl_wait();
  pdl_launch_dependents();
  const int head_blocks = (p.num_heads + kHeads - 1) / kHeads;
  const int first_head = static_cast<int>(blockIdx.x % head_blocks) * kHeads;
  SplitTask task;
  if (!find_task(p, static_cast<int>(blockIdx.x / head_blocks), task)) {
    return;
  }
  const int num_tiles =
      task.end > task.begin ? (task.end - task.begin + kTileKeys - 1) / kTileKeys : 0;
  Gather<kFp8, kHasRope> gather(p, task, smem_at, smem);
  if (num_tiles > 0) {
    gather.issue(0);
  }

  // Query fragments of the warp's columns: a[0..3] of each step of 16.
  const int column_group = warp_idx % kColumnGroups;
  const int key_half = warp_idx / kColumnGroups;
  constexpr int kHeldSteps = kLatentSteps - Smem::kParkedSteps;
  uint32_t query[kHeldSteps][4];
  uint4* parked_query = reinterpret_cast<uint4*>(smem + Smem::kQueryAt) + threadIdx.x;
  {
    const Bf16* rows[2];
    const Bf16* rope_rows[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = first_head + group_row + 8 * i;
      const bool exists = head < p.num_heads;
      rows[i] = exists ? static_cast<const Bf16*>(p.q_nope) + task.row * p.q_nope_strides[0] +
                             head * p.q_nope_strides[1]
                       : nullptr;
      rope_rows[i] = exists ? static_cast<const Bf16*>(p.q_rope) + task.row * p.q_rope_strides[0] +
                                  head * p.q_rope_strides[1]
                            : nullptr;
    }
    // Loads of whole 64-byte pieces: pairs one by one would keep L1 busy for longer than the keys
    // take to come.
    const int column = column_group * 128 + 8 * group_column;
#pragma unroll
    for (int step = 0; step < kLatentSteps; step += 2) {
      uint32_t words[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_query(rows[i] == nullptr ? nullptr : rows[i] + column + step * 16, words[i]);
      }
#pragma unroll
      for (int s = 0; s < 2; ++s) {
        if (step + s < kHeldSteps) {
          query[step + s][0] = words[0][2 * s];
          query[step + s][1] = words[1][2 * s];
          query[step + s][2] = words[0][2 * s + 1];
          query[step + s][3] = words[1][2 * s + 1];
        } else {
          parked_query[(step + s - kHeldSteps) * kThreads] = {
              words[0][2 * s], words[1][2 * s], words[0][2 * s + 1], words[1][2 * s + 1]};
        }
      }
    }
    if constexpr (kHasRope) {
      // The two chunks of either row.
      const Bf16* row = group_column < 2 ? rope_rows[0] : rope_rows[1];
      uint32_t words[4];
      load_query(row == nullptr ? nullptr : row + column_group * 16 + group_column % 2 * 8, words);
      parked_query[Smem::kParkedSteps * kThreads] = {words[0], words[2], words[1], words[3]};
    }
  }

  // Where ldmatrix reads: keys for the scores, values (the warp's slab) for the output.
  const uint32_t keys_at = smem_at + Smem::kTileAt + 2 * column_group * kSlabBytes +
                           chunk_at(key_half * 16 + matrix / 2 * 8 + matrix_row, matrix % 2);
  const uint32_t rope_at =
      smem_at + Smem::kTileAt + kLatentSlabs * kSlabBytes +
      chunk_at(key_half * 16 + matrix / 2 * 8 + matrix_row, column_group * 2 + matrix % 2);
  const uint32_t values_at = smem_at + Smem::kTileAt + warp_idx * kSlabBytes +
                             chunk_at(matrix % 2 * 8 + matrix_row, matrix / 2);

  float out[8][4] = {};  // heads group_row and + 8, columns 64 w + 8 n + 2 group_column and + 1
  float max[2] = {kMinusInfinity, kMinusInfinity};  // heads 2 w and 2 w + 1; the same in every lane
  float sum[2] = {};                                // a lane's share
  float* scores = reinterpret_cast<float*>(smem + Smem::kScoresAt);
  float* rescales = reinterpret_cast<float*>(smem + Smem::kRescalesAt);
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kStages;
    cp_async_wait<0>();
    __syncthreads();  // this tile has come, and the last one has been used
    if (tile + 1 < num_tiles) {
      gather.issue(stage ^ 1);
    }
    const char* records = smem + stage * Smem::kStageBytes;
    const uint32_t tile_at = kFp8 ? 0 : stage * Smem::kStageBytes;
    if constexpr (kFp8) {
      widen_fp8<kHasRope>(records, smem + Smem::kTileAt);
      __syncthreads();
    }

    // Scores of 16 heads by 16 keys over the warp's columns.
    {
      float latent_part[2][4] = {};
#pragma unroll
      for (int step = 0; step < kLatentSteps; ++step) {
        uint32_t keys[4];
        ldmatrix_x4(keys, ((tile_at + keys_at) ^ (step % 4 << 5)) + step / 4 * kSlabBytes);
        uint32_t parked[4];
        if (step >= kHeldSteps) {
          unpark(parked_query + (step - kHeldSteps) * kThreads, parked);
        }
        mma_16816(latent_part[0], step < kHeldSteps ? query[step] : parked, keys[0], keys[1]);
        mma_16816(latent_part[1], step < kHeldSteps ? query[step] : parked, keys[2], keys[3]);
      }
      // Read again for each tile: registers are what is short.
      const float latent_scale = p.latent_scale == nullptr ? 1.0f : __ldcg(p.latent_scale);
      const float rope_scale = p.rope_scale == nullptr ? 1.0f : __ldcg(p.rope_scale);
      uint32_t rope_keys[4];
      uint32_t rope_query[4];
      if constexpr (kHasRope) {
        unpark(parked_query + Smem::kParkedSteps * kThreads, rope_query);
        ldmatrix_x4(rope_keys, tile_at + rope_at);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = key_half * 16 + n * 8 + 2 * group_column;
        float scale[2] = {latent_scale, latent_scale};
        if constexpr (kFp8) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scale[i] *= *reinterpret_cast<const float*>(records + (column + i) * kFp8Bytes +
                                                        kFp8DsMlaScaleOffset + 4 * column_group);
          }
        }
        float rope_part[4] = {};
        if constexpr (kHasRope) {
          mma_16816(rope_part, rope_query, rope_keys[2 * n], rope_keys[2 * n + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = {
              latent_part[n][2 * i] * scale[0] + rope_part[2 * i] * rope_scale,
              latent_part[n][2 * i + 1] * scale[1] + rope_part[2 * i + 1] * rope_scale};
          *reinterpret_cast<float2*>(
              scores + (column_group * kHeads + group_row + 8 * i) * kScorePitch + column) = value;
        }
      }
    }
    __syncthreads();

    // Weights of two heads.
    {
      const bool valid =
          reinterpret_cast<const int*>(smem + Smem::kValidAt)[stage * kTileKeys + lane_idx] != 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 2 * warp_idx + i;
        float score = 0.0f;
#pragma unroll
        for (int g = 0; g < kColumnGroups; ++g) {
          score += scores[(g * kHeads + head) * kScorePitch + lane_idx];
        }
        score = valid ? score * p.softmax_scale : kMinusInfinity;
        const float new_max = fmaxf(max[i], reduce_warp(score, Max()));
        const float shift = new_max == kMinusInfinity ? 0.0f : new_max;
        const float weight = exp2_fast((score - shift) * kLog2E);
        const float rescale = exp2_fast((max[i] - shift) * kLog2E);
        sum[i] = sum[i] * rescale + weight;
        max[i] = new_max;
        if constexpr (kFp8) {
          reinterpret_cast<float*>(smem + Smem::kWeightsAt)[head * kScorePitch + lane_idx] = weight;
        } else {
          const Bf16 high = from_float<Bf16>(weight);
          char* at = smem + Smem::kWeightsAt + head * kWeightPitch + 2 * lane_idx;
          *reinterpret_cast<Bf16*>(at) = high;
          *reinterpret_cast<Bf16*>(at + kHeads * kWeightPitch) =
              from_float<Bf16>(weight - load_float(high));
        }
        if (lane_idx == 0) {
          rescales[head] = rescale;
        }
      }
    }
    __syncthreads();

    // Weighted latents: the warp's slab.
    const float rescale[2] = {rescales[group_row], rescales[group_row + 8]};
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        out[n][0] *= rescale[0];
        out[n][1] *= rescale[0];
        out[n][2] *= rescale[1];
        out[n][3] *= rescale[1];
      }
    }
#pragma unroll
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint32_t high[4];  // the weights, and
      uint32_t low[4];   // what they lost
      if constexpr (kFp8) {
        const float* of_heads = reinterpret_cast<const float*>(smem + Smem::kWeightsAt);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = step * 16 + half * 8 + 2 * group_column;
          float scale[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scale[i] = *reinterpret_cast<const float*>(records + (key + i) * kFp8Bytes +
                                                       kFp8DsMlaScaleOffset + 4 * (warp_idx / 2));
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(
                of_heads + (group_row + 8 * i) * kScorePitch + key);
            const float weight[2] = {pair.x * scale[0], pair.y * scale[1]};
            high[2 * half + i] = pack_bf16(weight[0], weight[1]);
            const float2 rounded = unpack_bf16(high[2 * half + i]);
            low[2 * half + i] = pack_bf16(weight[0] - rounded.x, weight[1] - rounded.y);
          }
        }
      } else {
        const uint32_t at = smem_at + Smem::kWeightsAt +
                            (matrix % 2 * 8 + matrix_row) * kWeightPitch +
                            (step * 2 + matrix / 2) * 16;
        ldmatrix_x4(high, at);
        ldmatrix_x4(low, at + kHeads * kWeightPitch);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, ((tile_at + values_at) ^ (n << 5)) + step * 16 * 128);
        mma_16816(out[2 * n], high, values[0], values[1]);
        mma_16816(out[2 * n + 1], high, values[2], values[3]);
        mma_16816(out[2 * n], low, values[0], values[1]);
        mma_16816(out[2 * n + 1], low, values[2], values[3]);
      }
    }
  }

  // The heads' sums go to the warps that hold their columns.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + 2 * warp_idx + i;
    const float total = reduce_warp(sum[i], Sum());
    float factor = 1.0f;
    if (head < p.num_heads && task.slot >= 0) {
      if (lane_idx == 0) {
        p.partial_sums[int64_t{task.slot} * p.num_heads + head] = make_float2(max[i], total);
      }
    } else if (head < p.num_heads) {
      factor = finish_head(p, task.row, head, max[i], total, lane_idx == 0);
    }
    if (lane_idx == 0) {
      rescales[2 * warp_idx + i] = factor;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = first_head + group_row + 8 * i;
    if (head >= p.num_heads) {
      continue;
    }
    const int column = warp_idx * 64 + 2 * group_column;
    if (task.slot >= 0) {
      if (num_tiles == 0) {
        continue;  // never read: its largest score says that there was no key
      }
      float* to = p.partial_out + (int64_t{task.slot} * p.num_heads + head) * kLatent + column;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        *reinterpret_cast<float2*>(to + 8 * n) = {out[n][2 * i], out[n][2 * i + 1]};
      }
      continue;
    }
    const float factor = rescales[group_row + 8 * i];
    const int64_t at = task.row * p.out_strides[0] + head * p.out_strides[1] + column;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float low = factor == 0.0f ? 0.0f : out[n][2 * i] * factor;
      const float high = factor == 0.0f ? 0.0f : out[n][2 * i + 1] * factor;
      if (p.out_dtype == DType::kBFloat16) {
        *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + at + 8 * n) = pack_bf16(low, high);
      } else {
        store_out(p, at + 8 * n, low);
        store_out(p, at + 8 * n + 1, high);
      }
    }
  }
}

bool lies_at(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Data and rows at multiples of `bytes`.
Status check_alignment(const ConstTensorView& tensor, const char* name, int64_t bytes) {
  const int64_t elements = bytes / size_bytes(tensor.dtype);
  if (tensor.empty() || (lies_at(tensor.data, bytes) && tensor.strides[0] % elements == 0 &&
                         tensor.strides[1] % elements == 0)) {
    return ok_status();
  }
  return unsupported(std::string(name) + ": expected data and rows at multiples of " +
                     std::to_string(bytes) + " bytes");
}

template <bool kFp8, bool kHasRope>
Status launch_mma(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                  int64_t blocks) {
  return launch("cuda/sparse_mla_mma", sparse_mla_mma_kernel<kFp8, kHasRope>, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)),
                 .block = dim3(kThreads),
                 .smem_bytes = Layout<kFp8, kHasRope>::kBytes,
                 .pdl = true},
                params);
}

Status attend_mma(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                  int64_t blocks) {
  const bool fp8 = params.kv_format == KvFormat::kFp8DsMla;
  const auto run = params.rope == 0 ? (fp8 ? launch_mma<true, false> : launch_mma<false, false>)
                                    : (fp8 ? launch_mma<true, true> : launch_mma<false, true>);
  return run(params, device, where, blocks);
}

}  // namespace

Status supports_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device) {
  const KvLayout& layout = args.kv.layout;
  if ((layout.format != KvFormat::kLatentBf16 && layout.format != KvFormat::kFp8DsMla) ||
      layout.latent != kLatent || (layout.rope != kRope && layout.rope != 0)) {
    return unsupported("kv.layout: " + std::string(kv_format_name(layout.format)) + " of " +
                       std::to_string(layout.latent) + " + " + std::to_string(layout.rope) +
                       ", expected latent_bf16 or fp8_ds_mla of 512 + 64 or 512 + 0");
  }
  const ConstTensorView& q = args.q.empty() ? args.q_nope : args.q;
  if (q.dtype != DType::kBFloat16) {
    return unsupported("q: " + std::string(dtype_name(q.dtype)) + ", expected bfloat16");
  }
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q, "q", 16));
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q_nope, "q_nope", 16));
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q_rope, "q_rope", 16));
  if (args.out.dtype == DType::kBFloat16) {
    LACUNA_RETURN_IF_ERROR(check_alignment(args.out, "out", 4));
  }
  if (!lies_at(args.kv.data, 16) || args.kv.row_bytes % 16 != 0) {
    return unsupported("kv: rows of " + std::to_string(args.kv.row_bytes) +
                       " bytes, expected data and rows at multiples of 16");
  }
  const int64_t needed = Layout<true, true>::kBytes;
  if (device.smem_optin_bytes < needed) {
    return unsupported("this GPU gives a block " + std::to_string(device.smem_optin_bytes) +
                       " bytes of shared memory, needs " + std::to_string(needed));
  }
  return check_sparse_mla_plan(args, device, kHeads);
}

Status run_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device,
                          const Launch& where) {
  return run_sparse_mla_plan(args, device, where, kHeads, attend_mma);
}

}  // namespace lacuna::cuda
