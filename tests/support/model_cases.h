// Named cases of the engine's own operations, and the problems they describe. The matrix products
// are in model_product_cases.cc, sampling in model_sample_cases.cc, the rest in model_cases.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/model_ops.h"
#include "tests/support/buffer_set.h"
#include "tests/support/random.h"

namespace lacuna::testing {

// ------------------------------------------------------------------------------------- products

struct LinearCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 1;
  int64_t columns = 1;  // N
  int64_t depth = 1;    // K
  DType x = DType::kBFloat16;
  DType weight = DType::kBFloat16;
  DType out = DType::kBFloat16;
  // Elements before the first and between rows, of x, weight and out: 0 is contiguous, 8 keeps 16
  // bytes of alignment, 3 keeps none.
  int64_t gap = 0;
  bool nan_row = false;     // the first row of x is NaN, and only that of the output may be
  bool zero_scale = false;  // one block of an FP8 weight has scale 0
};

std::vector<LinearCase> linear_cases();

class LinearProblem {
 public:
  using Args = LinearArgs;
  LinearProblem(const LinearCase& test_case, const TestDevice& where);

  const LinearCase& test_case() const { return case_; }
  LinearArgs args(Side side) const;
  std::string verify();

  BufferSet buffers;
  TestTensor x, weight, weight_scale, out;

 private:
  LinearCase case_;
};

struct HeadLinearCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 1;
  int64_t heads = 3;
  int64_t columns = 1;
  int64_t depth = 1;
  DType x = DType::kBFloat16;
  DType weight = DType::kBFloat16;
  DType out = DType::kBFloat16;
  bool columns_contiguous = false;  // the weight's N, not its K
  int64_t gap = 0;                  // as in LinearCase, between heads too
};

std::vector<HeadLinearCase> head_linear_cases();

class HeadLinearProblem {
 public:
  using Args = HeadLinearArgs;
  HeadLinearProblem(const HeadLinearCase& test_case, const TestDevice& where);

  const HeadLinearCase& test_case() const { return case_; }
  HeadLinearArgs args(Side side) const;
  std::string verify();

  BufferSet buffers;
  TestTensor x, weight, out;

 private:
  HeadLinearCase case_;
};

struct MoeExpertsCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 1;
  int64_t width = 64;   // D
  int64_t hidden = 32;  // F
  int64_t chosen = 2;
  int64_t experts = 4;
  DType x = DType::kBFloat16;
  DType weight = DType::kBFloat16;
  // Elements between one expert's matrix and the next one's. Experts lie at equal distances, as the
  // contract lets a kernel ask.
  int64_t expert_gap = 0;
  int64_t gap = 0;           // between rows of x and of out
  bool one_expert = false;   // every entry goes to the last expert
  bool skip_some = true;     // some ids are negative
  bool skip_all = false;     // all are
  bool hot_experts = false;  // most entries go to the first two
};

std::vector<MoeExpertsCase> moe_experts_cases();

class MoeExpertsProblem {
 public:
  using Args = MoeExpertsArgs;
  MoeExpertsProblem(const MoeExpertsCase& test_case, const TestDevice& where);

  const MoeExpertsCase& test_case() const { return case_; }
  MoeExpertsArgs args(Side side) const;
  std::string verify();

  BufferSet buffers;
  TestTensor x, ids, weights, out;
  TestTensor gate, up, down;                    // [E, ...]
  TestTensor gate_scale, up_scale, down_scale;  // [E, ...] with FP8

 private:
  MoeExpertsCase case_;
  // What the arguments' span points at.
  std::vector<ExpertWeights> host_experts_, device_experts_;
};

}  // namespace lacuna::testing
