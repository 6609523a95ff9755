// What the MHA kernels share: from a tile's number to its sequence, which is known on the device
// only, and from causality and the bit mask to the keys that a query row keeps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/launch.h"
#include "lacuna/attention.h"

namespace lacuna::cuda {

struct MhaSequences {
  Strided1<const int32_t> q;  // [B + 1] starts, or [B] lengths
  Strided1<const int32_t> k;
  bool by_starts;
  int num_sequences;
  bool causal;
  int32_t num_q_rows;
  int32_t num_k_rows;
  const int32_t* mask;  // [Tq, words]; null: none
  int64_t mask_stride;
  uint32_t mask_words;
  Strided1<const int32_t> key_start;
};

// What both kernels are given, with keys and values of type T.
template <class T>
struct MhaInputs {
  MhaSequences sequences;
  Strided3<const T> q;
  Strided3<const T> k;       // [Tk, H, d_nope], or fused with d_nope = d_qk
  Strided2<const T> k_rope;  // [Tk, d_qk - d_nope]
  Strided3<const T> v;
  int num_heads;
  void* out;
  int64_t out_strides[2];
  bool bf16_out;
  Strided2<float> lse;
};

// A tile of query rows of one sequence.
struct MhaTile {
  int q_begin;  // the sequence's rows
  int q_count;
  int k_begin;
  int k_count;
  uint32_t key_start;  // bit of the mask that stands for key 0
  int query;           // first row of the tile within the sequence
};

// Sum over the lanes up to and including the caller's.
template <class T>
__device__ inline T scan_warp(T value, int lane_idx) {
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T before = __shfl_up_sync(0xffffffffu, value, offset);
    value += lane_idx >= offset ? before : T{0};
  }
  return value;
}

// Finds tile number `tile` of the tiles of all sequences, `tile_rows` query rows each; false when
// there are fewer. Called by whole warps. Bounds that do not fit the tensors are cut, so that a bad
// length can not lead outside of them.
__device__ inline bool find_tile(const MhaSequences& s, int64_t tile, int tile_rows,
                                 MhaTile* found) {
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  int64_t first_tile = 0;
  int64_t q_next = 0;
  int64_t k_next = 0;
  for (int first = 0; first < s.num_sequences; first += kWarp) {
    const int b = first + lane_idx;
    const bool exists = b < s.num_sequences;
    int64_t q_begin = 0;
    int64_t q_end = 0;
    int64_t k_begin = 0;
    int64_t k_end = 0;
    if (s.by_starts) {
      if (exists) {
        q_begin = s.q(b);
        q_end = s.q(b + 1);
        k_begin = s.k(b);
        k_end = s.k(b + 1);
      }
    } else {
      const int64_t q_length = exists ? max(0, s.q(b)) : 0;
      const int64_t k_length = exists ? max(0, s.k(b)) : 0;
      q_end = q_next + scan_warp(q_length, lane_idx);
      k_end = k_next + scan_warp(k_length, lane_idx);
      q_begin = q_end - q_length;
      k_begin = k_end - k_length;
      q_next = __shfl_sync(0xffffffffu, q_end, kWarp - 1);
      k_next = __shfl_sync(0xffffffffu, k_end, kWarp - 1);
    }
    const int64_t num_q_rows = s.num_q_rows;
    const int64_t num_k_rows = s.num_k_rows;
    q_begin = min(max(q_begin, int64_t{0}), num_q_rows);
    k_begin = min(max(k_begin, int64_t{0}), num_k_rows);
    const int q_count = static_cast<int>(min(max(q_end, q_begin), num_q_rows) - q_begin);
    const int k_count = static_cast<int>(min(max(k_end, k_begin), num_k_rows) - k_begin);
    const int64_t num_tiles = (q_count + tile_rows - 1) / tile_rows;
    const int64_t end = first_tile + scan_warp(num_tiles, lane_idx);
    const unsigned hit =
        __ballot_sync(0xffffffffu, exists && tile >= end - num_tiles && tile < end);
    if (hit != 0) {
      const int lane = __ffs(static_cast<int>(hit)) - 1;
      const int in_sequence = static_cast<int>(tile - (end - num_tiles));
      found->q_begin = __shfl_sync(0xffffffffu, static_cast<int>(q_begin), lane);
      found->q_count = __shfl_sync(0xffffffffu, q_count, lane);
      found->k_begin = __shfl_sync(0xffffffffu, static_cast<int>(k_begin), lane);
      found->k_count = __shfl_sync(0xffffffffu, k_count, lane);
      found->query = tile_rows * __shfl_sync(0xffffffffu, in_sequence, lane);
      found->key_start = s.key_start ? static_cast<uint32_t>(max(0, s.key_start(first + lane))) : 0;
      return true;
    }
    first_tile = __shfl_sync(0xffffffffu, end, kWarp - 1);
  }
  return false;
}

// How many of the sequence's first keys causality lets row `row` of the tile see; 0 for a row
// behind the sequence's end.
__device__ inline int visible_keys(const MhaSequences& s, const MhaTile& tile, int row) {
  if (tile.query + row >= tile.q_count) {
    return 0;
  }
  const int last = tile.query + row + tile.k_count - tile.q_count;
  return s.causal ? min(max(last + 1, 0), tile.k_count) : tile.k_count;
}

// The keys that some row of a tile of `tile_rows` rows sees.
__device__ inline int tile_keys(const MhaSequences& s, const MhaTile& tile, int tile_rows) {
  return visible_keys(s, tile, min(tile_rows, tile.q_count - tile.query) - 1);
}

// The lowest `count` bits; any count.
__device__ inline uint32_t low_bits(int count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0u : (1u << count) - 1;
}

// Word `word` of a row of the mask; 0 behind its end.
__device__ inline uint32_t mask_word(const MhaSequences& s, const int32_t* row, uint32_t word) {
  return word < s.mask_words ? static_cast<uint32_t>(row[word]) : 0u;
}

inline MhaSequences mha_sequences(const MhaArgs& args) {
  const bool by_starts = !args.cu_seqlens_q.empty();
  const ConstTensorView& q = by_starts ? args.cu_seqlens_q : args.seqlens_q;
  const ConstTensorView& k = by_starts ? args.cu_seqlens_k : args.seqlens_k;
  constexpr int64_t kInt32Max = 0x7fffffff;
  return {.q = strided1<const int32_t>(q),
          .k = strided1<const int32_t>(k),
          .by_starts = by_starts,
          .num_sequences = static_cast<int>(q.shape[0] - (by_starts ? 1 : 0)),
          .causal = args.causal,
          .num_q_rows = static_cast<int32_t>(std::min(args.q.shape[0], kInt32Max)),
          .num_k_rows = static_cast<int32_t>(std::min(args.v.shape[0], kInt32Max)),
          .mask = static_cast<const int32_t*>(args.mask.data),
          .mask_stride = args.mask.strides[0],
          .mask_words = static_cast<uint32_t>(std::min(args.mask.shape[1], kInt32Max)),
          .key_start = strided1<const int32_t>(args.key_start)};
}

// The keys with a head each: fused, or the part of a split key that heads do not share.
inline const ConstTensorView& mha_keys(const MhaArgs& args) {
  return args.k.empty() ? args.k_nope : args.k;
}

template <class T>
MhaInputs<T> mha_inputs(const MhaArgs& args) {
  return {.sequences = mha_sequences(args),
          .q = strided3<const T>(args.q),
          .k = strided3<const T>(mha_keys(args)),
          .k_rope = strided2<const T>(args.k_rope),
          .v = strided3<const T>(args.v),
          .num_heads = static_cast<int>(args.q.shape[1]),
          .out = args.out.data,
          .out_strides = {args.out.strides[0], args.out.strides[1]},
          .bf16_out = args.out.dtype == DType::kBFloat16,
          .lse = strided2<float>(args.lse)};
}

// Upper bound of the tiles of all sequences, from what the host knows.
inline int64_t mha_tiles_max(const MhaArgs& args, int64_t tile_rows) {
  const int64_t rows = args.q.shape[0];
  const int64_t longest = args.seqlen_q_max < 0 ? rows : std::min<int64_t>(rows, args.seqlen_q_max);
  const int64_t sequences =
      args.cu_seqlens_q.empty() ? args.seqlens_q.shape[0] : args.cu_seqlens_q.shape[0] - 1;
  return std::min(sequences * ceil_div(longest, tile_rows), rows / tile_rows + sequences);
}

}  // namespace lacuna::cuda
