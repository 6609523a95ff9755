// Attention operations: sparse MLA (absorbed, one shared KV head), MHA over un-absorbed keys with
// an optional bit mask, the mask builder, and the LSE algebra that joins partial results.
//
// Conventions, everywhere: LSE is the natural logarithm in float32. A row without keys has output 0
// and LSE -inf, the neutral element of merging. Indices below 0 mean none. Shapes: T query rows, H
// heads, W list width.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lacuna/context.h"
#include "lacuna/kv_cache.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

// What the entries of `indices` are.
enum class IndexKind : uint8_t {
  kRows = 0,   // rows of the cache
  kPositions,  // positions of the row's request, translated through block_table and request_ids
};

// Sparse MLA: for query row t and head h, over the listed keys j (c_j the latent, r_j the rope key
// of a row),
//   s_j = softmax_scale * (q_nope[t,h] . c_j + q_rope[t,h] . r_j)
//   out[t,h] = sum_j softmax(s)_j c_j
//   lse[t,h] = log sum_j exp(s_j)
//   max_logits[t,h] = max_j s_j
// in float32 or better (DeepSeek-V2, arXiv 2405.04434, eq. 37-47 in absorbed form). An entry that
// is negative, at or beyond the row bound kv.num_rows(), or (positions) maps to no valid block is
// ignored; a duplicate counts twice. Only the first min(max(valid_counts[t], 0), W) entries of row
// t are read. Only out[t, 0..H), lse and max_logits are written. T = 0 or H = 0 does nothing; a row
// without keys writes out 0, lse -inf, max_logits -inf.
struct SparseMlaArgs {
  // The query, fused or split: exactly one of the two forms. bf16, fp16 or f32; the last dimension
  // is contiguous.
  ConstTensorView q;        // [T, H, latent + rope]
  ConstTensorView q_nope;   // [T, H, latent]
  ConstTensorView q_rope;   // [T, H, rope]; absent when layout.rope is 0
  KvCacheView kv;           // latent layout; flat_rows() for unpaged keys
  ConstTensorView indices;  // [T, W] int32, last dimension contiguous
  IndexKind index_kind = IndexKind::kRows;
  ConstTensorView block_table;   // [R, max_blocks] int32; only with kPositions
  ConstTensorView request_ids;   // [T] int32; only with kPositions; negative: the row has no keys
  ConstTensorView valid_counts;  // [T] int32, optional; absent: all W entries
  double softmax_scale = 0;      // must be finite and not 0 after narrowing to float32
  // Attention sink, applied once: out *= exp(lse) / (exp(lse) + exp(sink[h])). Not part of lse.
  // -inf: no effect; +inf: out 0. A row without keys stays 0.
  ConstTensorView sink;  // [H] f32, optional
  TensorView out;  // [T, H, latent] bf16, fp16 or f32; last dimension contiguous, other strides any
  TensorView lse;  // [T, H] f32, optional, any strides
  TensorView max_logits;         // [T, H] f32, optional, any strides
  int rows_per_request = 1;      // uniform decode: consecutive rows of one request, 1..8 (a hint)
  int64_t valid_count_max = -1;  // host-known upper bound of valid_counts, for planning; -1: W
  // Optional, from build_schedule of the same T, W and H. On a GPU nobody reads it before the
  // kernel does: with a schedule of another shape rows stay unwritten, and no Status says so.
  ConstTensorView schedule;
  // The work split depends on W alone, so a row's bits do not depend on the other rows of the call.
  // Costs: short batches may leave threads or SMs idle, and every row pays the merge.
  bool batch_invariant = false;
  std::string_view kernel = {};  // forces a kernel by name; empty: dispatch
};

// Prepares the work split of sparse_mla once a step (the layers of an index group share it). Ragged
// rows are balanced by their valid_counts. The schedule is opaque to the caller; size it with
// schedule_entries().
struct SparseMlaScheduleArgs {
  int64_t num_rows = 0;    // T
  int64_t list_width = 0;  // W
  int64_t num_heads = 0;   // H
  int64_t d_qk = 0;
  ConstTensorView valid_counts;  // [T] int32, optional
  int64_t valid_count_max = -1;
  bool batch_invariant = false;
  TensorView schedule;  // [schedule_entries, 4] int32, contiguous
  std::string_view kernel = {};
};

// Rows of the schedule tensor that any kernel may need for T rows of width W: monotone in both.
int64_t schedule_entries(const Context& context, int64_t num_rows, int64_t list_width);

// Multi-head attention over un-absorbed keys, for prefill. Sequences are packed: sequence b owns
// query rows [cu_seqlens_q[b], cu_seqlens_q[b+1]) and key rows [cu_seqlens_k[b],
// cu_seqlens_k[b+1]), or is given by lengths.
//   s = softmax_scale * q . k;  causal keeps key j of query i iff j <= i + (len_k - len_q)
//   (bottom-right)
// With a mask, key j is kept iff bit key_start[b] + j of the query row's mask is set (and causality
// holds). A query row without keys writes out 0, lse -inf. Empty sequences are fine. A key that a
// row does not keep may hold anything, but its values must be finite: they may be multiplied by 0,
// and NaN stays NaN.
struct MhaArgs {
  ConstTensorView q;             // [Tq, H, d_qk] bf16 or f32, last dimension contiguous
  ConstTensorView k;             // [Tk, H, d_qk] fused, or
  ConstTensorView k_nope;        // [Tk, H, d_qk - d_rope] with
  ConstTensorView k_rope;        // [Tk, d_rope] shared by all heads (absent when d_rope is 0)
  ConstTensorView v;             // [Tk, H, d_v]
  ConstTensorView cu_seqlens_q;  // [B + 1] int32, non-decreasing from 0; or absent, with
  ConstTensorView cu_seqlens_k;  // [B + 1] int32
  ConstTensorView seqlens_q;     // [B] int32: lengths of sequences packed back to back
  ConstTensorView seqlens_k;     // [B] int32
  double softmax_scale = 0;      // as in SparseMlaArgs
  bool causal = true;
  ConstTensorView mask;       // [Tq, words] int32, optional; row stride a multiple of 4 words
  ConstTensorView key_start;  // [B] int32, optional; absent: 0
  int64_t seqlen_q_max = -1;  // host-known upper bounds, for planning; -1: Tq, Tk
  int64_t seqlen_k_max = -1;
  TensorView out;  // [Tq, H, d_v] f32 or bf16; last dimension contiguous
  TensorView lse;  // [Tq, H] f32, optional, any strides
  std::string_view kernel = {};
};

// Builds the bit mask of packed query rows: bit i (word i >> 5, bit i & 31) of row t is set iff
// position key_begin + i is among the first valid_counts[t] entries of indices[t]. The whole row
// stride is zeroed first. Ids that are negative, below key_begin or at or beyond key_begin +
// key_count are ignored.
struct BuildMaskArgs {
  ConstTensorView indices;       // [T, W] int32 positions
  ConstTensorView valid_counts;  // [T] int32, optional
  ConstTensorView key_begin;     // [T] int32, optional; absent: 0
  int64_t key_count = 0;         // bits that may be set; at most 32 * words
  TensorView mask;               // [T, words] int32; row stride a multiple of 4 words
  std::string_view kernel = {};
};

enum class LseBase : uint8_t { kNatural = 0, kTwo };

// One operand of merge_states: attention over a part of the keys.
struct PartialState {
  ConstTensorView out;  // [T, H, D] f32, bf16 or fp16; last dimension contiguous
  ConstTensorView lse;  // [T, H] f32, any strides
};

inline constexpr int kMaxPartialStates = 64;

// Joins attention over disjoint key sets: L = log sum_n exp(lse_n), out = sum_n exp(lse_n - L)
// out_n, in float32. An input lse of NaN or +inf reads as -inf, and the output of a state whose lse
// is -inf is not read (it may be NaN). All -inf gives (0, -inf). out and lse may be one of the
// inputs. `lse` is natural whatever `lse_base` says of the inputs.
struct MergeStatesArgs {
  std::span<const PartialState> states;  // 1..kMaxPartialStates
  LseBase lse_base = LseBase::kNatural;
  TensorView out;  // [T, H, D] f32, bf16 or fp16; last dimension contiguous
  TensorView lse;  // [T, H] f32, optional
  std::string_view kernel = {};
};

// Scales one rank's output in place by exp(lse[rank] - logsumexp over ranks); where that factor is
// 0 (or not a number) it writes 0, whatever out held. NaN and +inf of lse read as -inf. The sum
// over ranks is then the merged output (decode context parallelism). `merged_lse`, when given,
// receives the natural logsumexp.
struct RescaleByLseArgs {
  TensorView out;       // [T, H, D] f32, bf16 or fp16, in place
  ConstTensorView lse;  // [N, T, H] f32
  int rank = 0;         // 0 <= rank < N
  LseBase lse_base = LseBase::kNatural;
  TensorView merged_lse;  // [T, H] f32, optional
  std::string_view kernel = {};
};

Status sparse_mla(const Context& context, const SparseMlaArgs& args, const Launch& launch = {});
Status build_schedule(const Context& context, const SparseMlaScheduleArgs& args,
                      const Launch& launch = {});
Status mha(const Context& context, const MhaArgs& args, const Launch& launch = {});
Status build_mask(const Context& context, const BuildMaskArgs& args, const Launch& launch = {});
Status merge_states(const Context& context, const MergeStatesArgs& args, const Launch& launch = {});
Status rescale_by_lse(const Context& context, const RescaleByLseArgs& args,
                      const Launch& launch = {});

Result<int64_t> workspace_bytes(const Context& context, const SparseMlaArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const SparseMlaScheduleArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const MhaArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const BuildMaskArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const MergeStatesArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const RescaleByLseArgs& args);

Explanation explain(const Context& context, const SparseMlaArgs& args);
Explanation explain(const Context& context, const SparseMlaScheduleArgs& args);
Explanation explain(const Context& context, const MhaArgs& args);
Explanation explain(const Context& context, const BuildMaskArgs& args);
Explanation explain(const Context& context, const MergeStatesArgs& args);
Explanation explain(const Context& context, const RescaleByLseArgs& args);

}  // namespace lacuna
