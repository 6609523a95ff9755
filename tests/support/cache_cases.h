// Named cases of the cache operations, and the problems they describe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lacuna/kv_cache.h"
#include "tests/support/buffer_set.h"
#include "tests/support/problem.h"
#include "tests/support/random.h"

namespace lacuna::testing {

// What append_kv and append_index_keys are tried with.
struct AppendCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 9;
  KvLayout layout = KvLayout::latent_bf16(512, 64);
  DType dtype = DType::kBFloat16;  // of the input
  DType slot_dtype = DType::kInt64;
  int64_t num_blocks = 4;
  int64_t block_size = 64;
  int64_t gap_bytes = 0;
  int64_t row_pad_bytes = 0;
  Fp8ScaleRule scale_rule = Fp8ScaleRule::kPowerOfTwo;
  bool hadamard = false;      // index keys only; integers, so that the transform is exact
  bool hostile_slots = true;  // some are negative or beyond the cache
  bool scale_edges = false;   // rows whose largest value sits at an edge of the scale rule
  bool strided = false;
};

std::vector<AppendCase> append_kv_cases();
std::vector<AppendCase> append_index_keys_cases();

// Shared by the two operations: slots that no two rows share, and an image of the cache.
class AppendKvProblem : public BasicProblem<AppendKvArgs, AppendCase> {
 public:
  AppendKvProblem(const AppendCase& test_case, const TestDevice& where);
  AppendKvArgs args(Side side) const;
  std::string verify();

  TestTensor latent, rope, slot_mapping;
  TestCache cache;
};

class AppendIndexKeysProblem : public BasicProblem<AppendIndexKeysArgs, AppendCase> {
 public:
  AppendIndexKeysProblem(const AppendCase& test_case, const TestDevice& where);
  AppendIndexKeysArgs args(Side side) const;
  std::string verify();

  TestTensor keys, slot_mapping;
  TestCache cache;
};

struct GatherKvCase {
  std::string name;
  uint64_t seed = 1;
  KvLayout layout = KvLayout::latent_bf16(512, 64);
  DType out_dtype = DType::kBFloat16;
  int64_t block_size = 64;
  int64_t gap_rows = 0;
  std::vector<int32_t> seq_lens = {100, 65, 1};
  // The ranges: request, start, length. Output rows follow each other with gaps of `out_gap`.
  std::vector<int32_t> requests = {0, 1, 2};
  std::vector<int32_t> starts = {0, 0, 0};
  std::vector<int32_t> lengths = {100, 65, 1};
  int64_t out_gap = 2;
  int64_t out_rows = 0;  // 0: enough
  bool bad_blocks = false;
  bool strided = false;
  float latent_scale = 0;
  float rope_scale = 0;
};

std::vector<GatherKvCase> gather_kv_cases();

class GatherKvProblem : public BasicProblem<GatherKvArgs, GatherKvCase> {
 public:
  GatherKvProblem(const GatherKvCase& test_case, const TestDevice& where);
  GatherKvArgs args(Side side) const;
  std::string verify();

  TestTensor block_table, request_ids, starts, lengths, out_starts, out;
  TestTensor latent_scale, rope_scale;  // [1], in the cache's memory
  TestCache cache;
};

}  // namespace lacuna::testing
