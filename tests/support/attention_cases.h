// Named cases of the attention operations, and the problems they describe: tensors filled with
// seeded data, NaN in every byte that may not be read. The conformance suite and the benchmarks
// share them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lacuna/attention.h"
#include "tests/reference/reference.h"
#include "tests/support/buffer_set.h"
#include "tests/support/compare.h"
#include "tests/support/problem.h"
#include "tests/support/random.h"

namespace lacuna::testing {

// What a row's list holds. Entries beyond the row's valid count always name rows of NaN.
enum class ListPattern {
  kShuffled,   // distinct tokens in random order
  kAscending,  // distinct tokens, ascending
  kModular,    // min(64, n) ids (i + 7t) mod n of the n visible tokens, then -1
  kHostile,    // shuffled, a third replaced: -1, duplicates, the bound and beyond, int32 extremes
  kEmptyRows,  // shuffled, but every third row (1, 4, ...) is -1 throughout
};

enum class CountPattern {
  kAbsent,
  kRagged,   // random in [0, W]
  kEdges,    // 0, 1, 127, 128, 129, 255, ... by row
  kHostile,  // negative, above W, int32 extremes
};

struct SparseMlaCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 4;
  int64_t heads = 16;
  int64_t width = 128;
  KvLayout layout = KvLayout::latent_bf16(512, 64);
  int64_t tokens = 0;  // in the cache; 0: a few more than the width
  int64_t block_size = 64;
  int64_t gap_rows = 0;  // between blocks
  int64_t row_pad_bytes = 0;
  DType q_dtype = DType::kBFloat16;
  DType out_dtype = DType::kBFloat16;
  bool split_q = false;
  ListPattern list = ListPattern::kShuffled;
  CountPattern counts = CountPattern::kAbsent;
  // Positions instead of rows: sequence lengths and query lengths of the requests; rows are their
  // last queries, in order, and `rows` and `tokens` follow from them.
  std::vector<int32_t> seq_lens;
  std::vector<int32_t> query_lens;
  bool padding_row = false;  // with positions: one more row, of request -1
  bool bad_blocks = false;   // with positions: some table entries are -1 or beyond num_blocks
  bool sink = false;
  bool lse = true;
  bool max_logits = true;
  double softmax_scale = 0;  // 0: (latent + rope)^-0.5
  float latent_scale = 0;    // 0: none
  float rope_scale = 0;
  bool uniform_data = false;  // uniform in [0, 1) instead of roughly normal
  int rows_per_request = 1;
  bool batch_invariant = false;
  bool give_count_max = false;  // the true upper bound of valid_counts
  // Views of wider buffers. 0: as small as possible.
  int64_t q_heads_wide = 0;
  int64_t out_heads_wide = 0;
  int64_t out_row_gap = 0;      // elements
  int64_t index_row_gap = 0;    // elements
  int64_t count_stride = 1;     // of valid_counts and request_ids
  int64_t lse_row_gap = 0;      // elements
  bool lse_head_major = false;  // strides (1, T)
  int64_t offset = 0;           // elements before q, out and indices: breaks vector alignment
};

std::vector<SparseMlaCase> sparse_mla_cases();

class SparseMlaProblem : public BasicProblem<SparseMlaArgs, SparseMlaCase> {
 public:
  SparseMlaProblem(const SparseMlaCase& test_case, const TestDevice& where);
  SparseMlaArgs args(Side side) const;
  // Compares the downloaded results with the oracle.
  std::string verify();
  const reference::AttentionResult& expected();

  TestTensor q, q_nope, q_rope, indices, block_table, request_ids, valid_counts, sink;
  TestTensor out, lse, max_logits;
  TestTensor latent_scale, rope_scale;  // [1], in the cache's memory
  TestCache cache;

 private:
  void make_lists(Random& random);
  void make_cache(Random& random);

  // Of each query row, the visible tokens: positions or rows, by number.
  int64_t visible(int64_t t) const;
  std::optional<reference::AttentionResult> expected_;
};

struct MhaCase {
  std::string name;
  uint64_t seed = 1;
  std::vector<int32_t> q_lens = {16};
  std::vector<int32_t> k_lens = {16};
  int64_t heads = 4;
  int64_t d_nope = 128;
  int64_t d_rope = 64;
  int64_t d_v = 128;
  DType dtype = DType::kBFloat16;
  DType out_dtype = DType::kFloat32;
  bool causal = true;
  bool split_k = false;
  bool by_lengths = false;
  int64_t mask_topk = 0;  // keep that many random visible keys a row; 0: no mask
  std::vector<int32_t> key_start;
  bool lse = true;
  bool strided = false;      // every tensor is a view of a wider one
  int64_t key_tail = 0;      // rows of NaN after the last key
  bool bad_keys = false;     // with a mask: every third key is NaN or infinite, and no row keeps it
  bool give_maxima = false;  // seqlen_q_max and seqlen_k_max
};

std::vector<MhaCase> mha_cases();

class MhaProblem : public BasicProblem<MhaArgs, MhaCase> {
 public:
  MhaProblem(const MhaCase& test_case, const TestDevice& where);
  MhaArgs args(Side side) const;
  std::string verify();

  TestTensor q, k, k_nope, k_rope, v, cu_q, cu_k, lens_q, lens_k, mask, key_start, out, lse;

 private:
  void make_mask(Random& random);
  bool is_bad_key(int64_t key_row) const { return case_.bad_keys && key_row % 3 == 0; }
  std::optional<reference::AttentionResult> expected_;
};

struct BuildMaskCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 4;
  int64_t width = 64;
  int64_t key_count = 128;
  int64_t words = 0;       // 0: just enough
  int64_t row_stride = 0;  // 0: words rounded up to 4
  bool counts = false;
  std::vector<int32_t> key_begin;
  int64_t index_row_gap = 0;
};

std::vector<BuildMaskCase> build_mask_cases();

class BuildMaskProblem : public BasicProblem<BuildMaskArgs, BuildMaskCase> {
 public:
  BuildMaskProblem(const BuildMaskCase& test_case, const TestDevice& where);
  BuildMaskArgs args(Side side) const;
  std::string verify();

  TestTensor indices, valid_counts, key_begin, mask;
};

struct MergeStatesCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 4;
  int64_t heads = 8;
  int64_t width = 128;
  int num_states = 2;
  DType state_dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  LseBase base = LseBase::kNatural;
  bool bad_lse = false;   // some of -inf, +inf and NaN, with NaN outputs
  bool in_place = false;  // out and lse are those of state 0
  bool lse = true;
  bool strided = false;
};

std::vector<MergeStatesCase> merge_states_cases();

class MergeStatesProblem : public BasicProblem<MergeStatesArgs, MergeStatesCase> {
 public:
  MergeStatesProblem(const MergeStatesCase& test_case, const TestDevice& where);
  MergeStatesArgs args(Side side) const;
  std::string verify();

  std::vector<TestTensor> state_out, state_lse;
  TestTensor out, lse;

 private:
  mutable std::vector<PartialState> views_[2];  // what the spans of args() point at
};

struct RescaleByLseCase {
  std::string name;
  uint64_t seed = 1;
  int64_t ranks = 2;
  int rank = 0;
  int64_t rows = 4;
  int64_t heads = 8;
  int64_t width = 128;
  DType dtype = DType::kFloat32;
  LseBase base = LseBase::kNatural;
  bool bad_lse = false;
  bool merged_lse = true;
  bool strided = false;
};

std::vector<RescaleByLseCase> rescale_by_lse_cases();

class RescaleByLseProblem : public BasicProblem<RescaleByLseArgs, RescaleByLseCase> {
 public:
  RescaleByLseProblem(const RescaleByLseCase& test_case, const TestDevice& where);
  RescaleByLseArgs args(Side side) const;
  std::string verify();

  TestTensor out, lse, merged_lse;
};

// Tolerance of an output that was computed in float32 and rounded once to `dtype`.
Tolerance rounding_tolerance(DType dtype);

}  // namespace lacuna::testing
