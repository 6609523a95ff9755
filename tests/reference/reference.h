// The oracle: every public operation in double precision, written to be obviously right and nothing
// else. One file per operation. All tensors and caches of the arguments must be host memory; output
// tensors are read for their shape only, unless a function says that it writes.
#pragma once

#include <cstdint>
#include <vector>

#include "lacuna/attention.h"
#include "lacuna/indexer.h"
#include "lacuna/kv_cache.h"

namespace lacuna::reference {

// Where a latent or index record lies, and its values: latent | rope, dequantised, with the cache's
// per-tensor scales applied. `values` gets layout.d_qk() numbers.
void read_cached_row(const KvCacheView& kv, int64_t block, int64_t offset,
                     std::vector<double>* values);

// The block and offset of a row id; false when the id names none.
struct CachedPlace {
  int64_t block = 0;
  int64_t offset = 0;
};
bool find_row(const KvCacheView& kv, int64_t row, CachedPlace* place);
// The same for position `position` of request `request`.
bool find_position(const KvCacheView& kv, const ConstTensorView& block_table, int64_t request,
                   int64_t position, CachedPlace* place);

// Sum of products. Eight partial sums, because the oracle spends most of its time here.
double dot(const double* a, const double* b, int64_t n);

struct AttentionResult {
  std::vector<double> out;         // [T, H, d_v], contiguous
  std::vector<double> lse;         // [T, H]
  std::vector<double> max_logits;  // [T, H]; empty for mha
  // Largest over the keys of softmax_scale * sum_i |q_i k_i|: what rounding errors of a score are
  // measured against. [T, H]
  std::vector<double> score_scale;
  // Root of the sum over the keys of (weight * value)^2: what independent relative errors of the
  // weights are measured against. [T, H, d_v]
  std::vector<double> weight_scale;
};
AttentionResult sparse_mla(const SparseMlaArgs& args);
AttentionResult mha(const MhaArgs& args);

// [T, row stride] words, the padding of the stride included.
std::vector<int32_t> build_mask(const BuildMaskArgs& args);

struct MergedState {
  std::vector<double> out;  // [T, H, D]
  std::vector<double> lse;  // [T, H]
};
MergedState merge_states(const MergeStatesArgs& args);
// Reads the host `args.out`, does not write it.
MergedState rescale_by_lse(const RescaleByLseArgs& args);

struct TranslatedRows {
  std::vector<int32_t> rows;    // [T, W]
  std::vector<int32_t> counts;  // [T]
};
TranslatedRows translate_indices(const TranslateIndicesArgs& args);

struct IndexLogits {
  std::vector<double> logits;  // [T, C]
  // sum_h |weight_h| * sum_i |q_i k_i| * key scale: what rounding errors are measured against.
  std::vector<double> scale;  // [T, C]
};
IndexLogits index_logits(const IndexLogitsArgs& args);

struct Selection {
  int64_t width = 0;             // of indices, scores and rows
  std::vector<int32_t> indices;  // [T, width]
  std::vector<double> scores;    // [T, width]
  std::vector<int32_t> counts;   // [T]
  std::vector<int32_t> rows;     // [T, width]; empty unless asked for
  std::vector<int32_t> mask;     // [T, row stride]; empty unless asked for
};
Selection top_k(const TopKArgs& args);
// `logits`, when given, receives the scores of all visible columns (identity rows included).
Selection select_keys(const SelectKeysArgs& args, IndexLogits* logits = nullptr);

// These two write the records into the host cache `args.kv`.
void append_kv(const AppendKvArgs& args);
void append_index_keys(const AppendIndexKeysArgs& args);

struct GatheredRows {
  std::vector<double> rows;   // [out rows, latent + rope]
  std::vector<bool> written;  // [out rows]
};
GatheredRows gather_kv(const GatherKvArgs& args);

}  // namespace lacuna::reference
