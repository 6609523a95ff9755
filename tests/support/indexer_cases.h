// Named cases of the indexer's operations, and the problems they describe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lacuna/indexer.h"
#include "tests/reference/reference.h"
#include "tests/support/buffer_set.h"
#include "tests/support/problem.h"
#include "tests/support/random.h"

namespace lacuna::testing {

struct TranslateCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 8;
  int64_t width = 128;
  int64_t requests = 4;
  int64_t num_blocks = 10;
  int64_t block_size = 64;
  int64_t block_stride_rows = 0;
  bool counts = true;
  bool valid_counts = false;
  DcpShard dcp;
  bool compact = false;
  bool workspace = false;  // half of the rows are in workspace mode
  bool in_place = false;   // rows is indices
  bool strided = false;
};

std::vector<TranslateCase> translate_cases();

class TranslateProblem : public BasicProblem<TranslateIndicesArgs, TranslateCase> {
 public:
  TranslateProblem(const TranslateCase& test_case, const TestDevice& where);
  TranslateIndicesArgs args(Side side) const;
  std::string verify();

  TestTensor indices, request_ids, block_table, valid_counts, workspace_ids, workspace_starts;
  TestTensor rows, counts;
};

// A query, head weights and paged or ragged index keys: what index_logits and select_keys share.
struct ScoringCase {
  std::vector<int32_t> lengths = {100};  // keys of each request
  int64_t rows_per_request = 1;          // consecutive queries; each sees one key more
  int64_t heads = 8;
  KvLayout layout = KvLayout::index_bf16(128);
  DType q_dtype = DType::kBFloat16;
  int64_t block_size = 64;
  int64_t gap_rows = 0;
  bool ragged = false;  // key_starts instead of a block table
  bool bad_blocks = false;
  bool padding_row = false;
  // Small integers: float32 sums are exact, so scores tie often and their order is known.
  bool integers = false;
  int64_t kpool = 1;  // lengths count tokens, keys are pools
  bool strided = false;
};

struct ScoringTensors {
  TestTensor q, head_weights, request_ids, visible_lengths, block_table, key_starts;
  TestCache keys;
  int64_t num_rows = 0;
  int64_t length_max = 0;  // tokens
};

struct IndexLogitsCase {
  std::string name;
  uint64_t seed = 1;
  ScoringCase scoring;
  DType logits_dtype = DType::kFloat32;
  int64_t extra_columns = 0;  // beyond the longest row; negative: fewer than it sees
  bool hostile_lengths = false;
  int64_t scratch_bytes_max = 0;
};

std::vector<IndexLogitsCase> index_logits_cases();

class IndexLogitsProblem : public BasicProblem<IndexLogitsArgs, IndexLogitsCase> {
 public:
  IndexLogitsProblem(const IndexLogitsCase& test_case, const TestDevice& where);
  IndexLogitsArgs args(Side side) const;
  std::string verify();

  ScoringTensors tensors;
  TestTensor logits;
};

enum class ScoreFamily {
  kRandom,
  kSameLowBits,   // random in the upper bits, the low ten alike: radix selects
  kSameHighBits,  // differ in the last bits only
  kAscending,
  kDescending,
  kAllEqual,
  kManyTies,     // eight values
  kHalfTied,     // half of the row is one value, as a relu plateau
  kSpecial,      // NaN, both infinities, both zeros, and numbers
  kSignedZeros,  // both zeros in the middle of a few numbers
  kAllNan,
};

struct TopKCase {
  std::string name;
  uint64_t seed = 1;
  std::vector<int32_t> lengths = {100};  // one a row; tokens with kpool
  int64_t columns = 0;                   // 0: what the longest row needs
  int64_t k = 16;
  int kpool = 1;
  DType dtype = DType::kFloat32;
  ScoreFamily family = ScoreFamily::kRandom;
  bool absent_lengths = false;
  bool row_starts = false;  // random starts, NaN and +inf outside the ranges
  bool candidate_ids = false;
  bool indices = true;
  bool scores = true;
  bool counts = true;
  bool rows = false;
  bool mask = false;
  int64_t mask_words = 0;  // 0: enough
  int64_t extra_width = 0;
  bool strided = false;
};

std::vector<TopKCase> top_k_cases();

// The outputs that top_k and select_keys share, as tensors.
struct SelectionTensors {
  TestTensor indices, scores, counts, rows, mask, request_ids, block_table;
  int64_t num_blocks = 0;
  int64_t block_size = 0;
  int64_t block_stride_rows = 0;

  SelectionOutputs outputs(Side side) const;
  std::string verify(const reference::Selection& expected) const;
};

class TopKProblem : public BasicProblem<TopKArgs, TopKCase> {
 public:
  TopKProblem(const TopKCase& test_case, const TestDevice& where);
  TopKArgs args(Side side) const;
  std::string verify();

  TestTensor logits, row_starts, lengths, candidate_ids;
  SelectionTensors selection;
};

struct SelectKeysCase {
  std::string name;
  uint64_t seed = 1;
  ScoringCase scoring;
  int64_t k = 32;
  bool rows = true;
  bool mask = true;
  bool scores = false;  // only looked at with integer data and rows longer than k
  bool give_length_max = true;
  int64_t logits_bytes_max = 0;
};

std::vector<SelectKeysCase> select_keys_cases();

class SelectKeysProblem : public BasicProblem<SelectKeysArgs, SelectKeysCase> {
 public:
  SelectKeysProblem(const SelectKeysCase& test_case, const TestDevice& where);
  SelectKeysArgs args(Side side) const;
  std::string verify();

  ScoringTensors tensors;
  SelectionTensors selection;

 private:
  std::string verify_by_margin();
};

}  // namespace lacuna::testing
