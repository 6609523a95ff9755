// The lightning indexer: scores of cached keys, exact top-k, translation of positions to cache
// rows, and the composite of the three.
//
// Selection order, everywhere: score descending, then position ascending; -0 equals +0; output
// ascending by position; unused tail -1. A row whose visible length is at most k selects every
// visible key whatever the scores (which are then not read). Otherwise a NaN score is never chosen,
// -inf is chosen last, and the count says how many were chosen.
#pragma once

#include <cstdint>
#include <string_view>

#include "lacuna/context.h"
#include "lacuna/kv_cache.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

// Decode context parallelism: position p belongs to rank (p / interleave) % size and has the local
// position (p / (size * interleave)) * interleave + p % interleave there.
struct DcpShard {
  int size = 1;
  int rank = 0;
  int interleave = 1;
};

// Positions -> cache rows. For entry p = indices[t, c] of request r = request_ids[t]:
//   row = block_table[r, p / block_size] * block_stride_rows + p % block_size
// and -1 if p < 0, c >= valid_counts[t], r < 0 (a padding row) or r >= R, the table has no such
// column, or the block is negative or >= num_blocks. With DCP, positions of other ranks give -1 and
// p is made local first. Columns keep their place, or with `compact` the valid ones move to the
// front in list order, -1 after. `counts` = valid entries a row. Workspace mode: a row with
// workspace_ids[t] >= 0 gives workspace_starts[workspace_ids[t]] + p instead (any p >= 0). `rows`
// may be `indices` itself.
struct TranslateIndicesArgs {
  ConstTensorView indices;       // [T, W] int32, last dimension contiguous
  ConstTensorView request_ids;   // [T] int32
  ConstTensorView block_table;   // [R, max_blocks] int32, last dimension contiguous
  ConstTensorView valid_counts;  // [T] int32, optional: leading entries that count
  int64_t num_blocks = 0;        // bound of block ids
  int64_t block_size = 0;
  int64_t block_stride_rows = 0;  // 0: block_size
  DcpShard dcp;
  bool compact = false;
  ConstTensorView workspace_ids;     // [T] int32, optional
  ConstTensorView workspace_starts;  // [P] int32, with workspace_ids
  TensorView rows;                   // [T, W] int32, last dimension contiguous
  TensorView counts;                 // [T] int32, optional
  std::string_view kernel = {};
};

// Scores of the lightning indexer (DeepSeek-V3.2), for query row t and key position j <
// visible_lengths[t]:
//   logits[t, j] = key_scale[j] * sum_h head_weights[t, h] * relu(q[t, h] . k_j)
// in float32. All scale factors (head_dim^-0.5, heads^-0.5, the query's FP8 scale) are folded into
// head_weights by the caller; key_scale is the cached scale of an FP8 key, else 1. Columns j >=
// visible_lengths[t] (clamped to [0, C]) are written -inf. A key whose block is invalid scores
// -inf.
struct IndexLogitsArgs {
  ConstTensorView q;                // [T, Hi, dim] f32, bf16 or fp8; last dimension contiguous
  ConstTensorView head_weights;     // [T, Hi] f32, last dimension contiguous
  KvCacheView keys;                 // index layout
  ConstTensorView request_ids;      // [T] int32; negative: padding row, all -inf
  ConstTensorView visible_lengths;  // [T] int32, keys that row t may see
  // Paged keys: block_table. Ragged keys (flat_rows): key_starts, the first row of each request.
  // Exactly one of them.
  ConstTensorView block_table;  // [R, max_blocks] int32, last dimension contiguous
  ConstTensorView key_starts;   // [R] int32
  int next_n = 1;               // hint: consecutive rows of one request (speculative decode)
  // Cap of the kernel's own scratch; a smaller one works in more chunks and gives the same bits. 0:
  // the kernel's choice.
  int64_t scratch_bytes_max = 0;
  TensorView logits;  // [T, C] f32 or bf16; last dimension contiguous
  std::string_view kernel = {};
};

// Where top_k and select_keys put what they chose. At least one of indices, rows and mask is
// present.
struct SelectionOutputs {
  TensorView indices;  // [T, W] int32 positions (or candidate ids), W >= list width of k; tail -1
  TensorView scores;  // [T, W] f32, optional: the chosen scores, in the order of indices; tail -inf
  TensorView counts;  // [T] int32, optional
  // The same list as cache rows, translated as translate_indices does (no DCP): needs request_ids,
  // block_table, block_size and num_blocks. An entry that has no row is -1 in its place.
  TensorView rows;  // [T, W] int32, optional
  ConstTensorView request_ids;
  ConstTensorView block_table;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t block_stride_rows = 0;  // 0: block_size
  // The same list as a bit mask (BuildMaskArgs): [T, words] int32, optional. Bits at or beyond 32 *
  // words are dropped.
  TensorView mask;
};

// Exact top-k of each row of logits over columns [row_starts[t], row_starts[t] + lengths[t]);
// positions count from the row start. A length is clamped to [0, C - row_start]. k above the width
// is fine.
//
// kpool > 1: columns are pools of kpool positions, `lengths` counts tokens; floor(length / kpool)
// complete pools may be chosen, k / kpool of them are, each expands to its positions, and the
// incomplete tail is always added: the list is up to k + kpool - 1 wide.
struct TopKArgs {
  ConstTensorView logits;      // [T, C] f32 or bf16, last dimension contiguous
  ConstTensorView row_starts;  // [T] int32, optional; absent: 0
  ConstTensorView lengths;     // [T] int32, optional; absent: C (times kpool)
  ConstTensorView
      candidate_ids;  // [T, C] int32, optional: id of each column, unique in a row; negative: not a
                      // candidate. Ids take the place of positions (ties, output order).
  int64_t k = 0;      // > 0; a multiple of kpool
  int kpool = 1;
  SelectionOutputs outputs;
  std::string_view kernel = {};
};

// List width that k and kpool can produce.
constexpr int64_t selection_width(int64_t k, int kpool) { return k + kpool - 1; }

// index_logits, top_k and translation in one: what a fused kernel may stand in for. Appending keys
// is not part of it. Rows with visible length <= k are not scored, unless outputs.scores asks for
// their scores. `logits_bytes_max` caps the logits scratch (chunks of rows, same result); 0: 256
// MiB. With kpool > 1, `keys` holds pool keys and visible_lengths counts tokens.
struct SelectKeysArgs {
  ConstTensorView q;
  ConstTensorView head_weights;
  KvCacheView keys;
  ConstTensorView request_ids;
  ConstTensorView visible_lengths;
  ConstTensorView block_table;
  ConstTensorView key_starts;
  int next_n = 1;
  int64_t visible_length_max =
      -1;  // host-known upper bound of visible_lengths; -1: what the cache can hold
  int64_t logits_bytes_max = 0;
  int64_t k = 0;
  int kpool = 1;
  SelectionOutputs outputs;  // its request_ids default to the above
  std::string_view kernel = {};
};

Status translate_indices(const Context& context, const TranslateIndicesArgs& args,
                         const Launch& launch = {});
Status index_logits(const Context& context, const IndexLogitsArgs& args, const Launch& launch = {});
Status top_k(const Context& context, const TopKArgs& args, const Launch& launch = {});
Status select_keys(const Context& context, const SelectKeysArgs& args, const Launch& launch = {});

Result<int64_t> workspace_bytes(const Context& context, const TranslateIndicesArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const IndexLogitsArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const TopKArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const SelectKeysArgs& args);

Explanation explain(const Context& context, const TranslateIndicesArgs& args);
Explanation explain(const Context& context, const IndexLogitsArgs& args);
Explanation explain(const Context& context, const TopKArgs& args);
Explanation explain(const Context& context, const SelectKeysArgs& args);

}  // namespace lacuna
