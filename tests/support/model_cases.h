// Named cases of the engine's own operations, and the problems they describe. Those of the matrix
// products are made in model_product_cases.cc, of logits in model_logit_cases.cc, of the rest in
// model_cases.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/model_ops.h"
#include "tests/support/buffer_set.h"
#include "tests/support/problem.h"
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
  bool nan_weight = false;  // two elements of the weight are NaN, and so are their columns only
  bool zero_scale = false;  // one block of an FP8 weight has scale 0
};

std::vector<LinearCase> linear_cases();

class LinearProblem : public BasicProblem<LinearArgs, LinearCase> {
 public:
  LinearProblem(const LinearCase& test_case, const TestDevice& where);
  LinearArgs args(Side side) const;
  std::string verify();

  TestTensor x, weight, weight_scale, out;
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

class HeadLinearProblem : public BasicProblem<HeadLinearArgs, HeadLinearCase> {
 public:
  HeadLinearProblem(const HeadLinearCase& test_case, const TestDevice& where);
  HeadLinearArgs args(Side side) const;
  std::string verify();

  TestTensor x, weight, out;
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

class MoeExpertsProblem : public BasicProblem<MoeExpertsArgs, MoeExpertsCase> {
 public:
  MoeExpertsProblem(const MoeExpertsCase& test_case, const TestDevice& where);
  MoeExpertsArgs args(Side side) const;
  std::string verify();

  TestTensor x, ids, weights, out;
  TestTensor gate, up, down;                    // [E, ...]
  TestTensor gate_scale, up_scale, down_scale;  // [E, ...] with FP8

 private:
  // What the arguments' span points at.
  std::vector<ExpertWeights> host_experts_, device_experts_;
};

// ----------------------------------------------------------------------------------------- rows

// `gap`, everywhere: elements before the first and between rows; 0 is contiguous, 8 keeps 16 bytes
// of alignment, 3 keeps none.

struct EmbeddingCase {
  std::string name;
  uint64_t seed = 1;
  int64_t width = 64;
  DType table = DType::kBFloat16;
  int64_t gap = 0;
  bool no_rows = false;
};

std::vector<EmbeddingCase> embedding_cases();

class EmbeddingProblem : public BasicProblem<EmbeddingArgs, EmbeddingCase> {
 public:
  EmbeddingProblem(const EmbeddingCase& test_case, const TestDevice& where);
  EmbeddingArgs args(Side side) const;
  std::string verify();

  TestTensor ids, table, out;
};

// RMSNorm and LayerNorm.
struct NormCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t width = 64;
  DType weight = DType::kBFloat16;
  DType out = DType::kBFloat16;
  int64_t gap = 0;
  bool add = false;  // RMSNorm only
  float mean = 0;
  float scale = 1;  // of x
  double eps = 1e-6;
};

std::vector<NormCase> rms_norm_cases();

class RmsNormProblem : public BasicProblem<RmsNormArgs, NormCase> {
 public:
  RmsNormProblem(const NormCase& test_case, const TestDevice& where);
  RmsNormArgs args(Side side) const;
  std::string verify();

  TestTensor x, add, weight, out;
};

std::vector<NormCase> layer_norm_cases();

class LayerNormProblem : public BasicProblem<LayerNormArgs, NormCase> {
 public:
  LayerNormProblem(const NormCase& test_case, const TestDevice& where);
  LayerNormArgs args(Side side) const;
  std::string verify();

  TestTensor x, weight, bias, out;
};

struct SiluMulCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t width = 64;
  DType out = DType::kBFloat16;
  int64_t gap = 0;
};

std::vector<SiluMulCase> silu_mul_cases();

class SiluMulProblem : public BasicProblem<SiluMulArgs, SiluMulCase> {
 public:
  SiluMulProblem(const SiluMulCase& test_case, const TestDevice& where);
  SiluMulArgs args(Side side) const;
  std::string verify();

  TestTensor gate, up, out;
};

struct AddCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t width = 64;
  int64_t gap = 0;
};

std::vector<AddCase> add_cases();

class AddProblem : public BasicProblem<AddArgs, AddCase> {
 public:
  AddProblem(const AddCase& test_case, const TestDevice& where);
  AddArgs args(Side side) const;
  std::string verify();

  TestTensor x, out;
};

struct RopeCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t heads = 3;
  int64_t width = 64;
  int64_t pairs = 32;
  int64_t offset = 0;
  bool interleaved = false;
  DType out = DType::kFloat32;
  bool in_place = false;
  int64_t gap = 0;
};

std::vector<RopeCase> rope_cases();

class RopeProblem : public BasicProblem<RopeArgs, RopeCase> {
 public:
  RopeProblem(const RopeCase& test_case, const TestDevice& where);
  RopeArgs args(Side side) const;
  std::string verify();

  TestTensor x, positions, cos_table, sin_table, out;
};

// -------------------------------------------------------------------------------------- routing

struct MoeRouteCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t experts = 8;
  int64_t chosen = 2;
  int num_groups = 1;
  int groups_kept = 1;
  bool normalize = true;
  bool ties = false;  // few distinct choices
  int64_t gap = 0;
};

std::vector<MoeRouteCase> moe_route_cases();

class MoeRouteProblem : public BasicProblem<MoeRouteArgs, MoeRouteCase> {
 public:
  MoeRouteProblem(const MoeRouteCase& test_case, const TestDevice& where);
  MoeRouteArgs args(Side side) const;
  std::string verify();

  TestTensor logits, bias, ids, weights;
};

// -------------------------------------------------------------------------------------- logits

struct AdjustLogitsCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t vocabulary = 50;
  int64_t entries = 20;
  bool restore = false;
  int64_t gap = 0;
};

std::vector<AdjustLogitsCase> adjust_logits_cases();

class AdjustLogitsProblem : public BasicProblem<AdjustLogitsArgs, AdjustLogitsCase> {
 public:
  AdjustLogitsProblem(const AdjustLogitsCase& test_case, const TestDevice& where);
  AdjustLogitsArgs args(Side side) const;
  std::string verify();

  TestTensor logits, rows, ids, repetition, add, saved;
};

// Which tensor `out` is.
enum class PickInto { kOther, kGiven, kDrawn };

struct PickTokensCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 5;
  int64_t drawn = 8;
  PickInto into = PickInto::kOther;
  int64_t gap = 0;
};

std::vector<PickTokensCase> pick_tokens_cases();

class PickTokensProblem : public BasicProblem<PickTokensArgs, PickTokensCase> {
 public:
  PickTokensProblem(const PickTokensCase& test_case, const TestDevice& where);
  PickTokensArgs args(Side side) const;
  std::string verify();

  TestTensor given, sources, drawn, out;
};

// What a row of logits looks like.
enum class LogitShape {
  kBell,
  kIntegers,  // many ties
  kFlat,      // within a thousandth
  kPeaked,    // one token has nearly all of the mass
  kHoles,     // some are NaN and some -inf
  kInfinite,  // some are +inf
  kNothing,   // all are NaN or -inf
};

struct TokenLogprobsCase {
  std::string name;
  uint64_t seed = 1;
  int64_t rows = 3;
  int64_t vocabulary = 50;
  LogitShape shape = LogitShape::kBell;
  int64_t gap = 0;
};

std::vector<TokenLogprobsCase> token_logprobs_cases();

class TokenLogprobsProblem : public BasicProblem<TokenLogprobsArgs, TokenLogprobsCase> {
 public:
  TokenLogprobsProblem(const TokenLogprobsCase& test_case, const TestDevice& where);
  TokenLogprobsArgs args(Side side) const;
  std::string verify();

  TestTensor logits, ids, out;
};

// How one token is drawn.
struct SampleRow {
  float temperature = 1;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float uniform = 0;
};

struct SampleCase {
  std::string name;
  uint64_t seed = 1;
  int64_t vocabulary = 50;
  LogitShape shape = LogitShape::kBell;
  // One a row; each uniform is drawn anew.
  std::vector<SampleRow> rows = {};
  bool same_logits = false;  // in every row
  bool logprobs = true;
  int64_t gap = 0;
};

std::vector<SampleCase> sample_cases();

class SampleProblem : public BasicProblem<SampleArgs, SampleCase> {
 public:
  SampleProblem(const SampleCase& test_case, const TestDevice& where);
  SampleArgs args(Side side) const;
  std::string verify();

  TestTensor logits, temperature, top_k, top_p, min_p, uniform, ids, logprobs;
};

}  // namespace lacuna::testing
