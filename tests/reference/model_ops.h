// The oracle of the engine's own operations (ops/model_ops.h), in double precision, one file per
// operation. All tensors of the arguments must be host memory; outputs are read for their shape
// only, unless a function says otherwise.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/model_ops.h"

namespace lacuna::reference {

std::vector<double> embedding(const EmbeddingArgs& args);  // [T, D]

struct Normalized {
  std::vector<double> sum;  // [T, D]: x + add, rounded to float as it is stored
  std::vector<double> out;  // [T, D]
};
Normalized rms_norm(const RmsNormArgs& args);

struct LayerNormalized {
  std::vector<double> out;     // [T, D]
  std::vector<double> scaled;  // [T, D]: out without the bias
};
LayerNormalized layer_norm(const LayerNormArgs& args);

// A result and what its rounding errors are measured against: the sum of the magnitudes of the
// products that it is made of.
struct Product {
  std::vector<double> out;
  std::vector<double> scale;
};
Product rope(const RopeArgs& args);               // [T, H, width]; scale 0: a copy
Product linear(const LinearArgs& args);           // [T, N]
Product head_linear(const HeadLinearArgs& args);  // [T, H, N]

std::vector<double> silu_mul(const SiluMulArgs& args);  // [T, D]

struct Routed {
  std::vector<int32_t> ids;     // [T, experts_per_token]
  std::vector<double> weights;  // [T, experts_per_token]
};
Routed moe_route(const MoeRouteArgs& args);

struct ExpertsOutput {
  std::vector<double> out;  // [T, D]; the hidden activation is not rounded
  // sum_k weight * sum_f |down * hidden|: for errors that are relative to a hidden activation.
  std::vector<double> hidden_scale;  // [T, D]
  // The same with, for |hidden|, how far an error of the two first products, relative to the sum of
  // their magnitudes, moves it.
  std::vector<double> input_scale;  // [T, D]
};
ExpertsOutput moe_experts(const MoeExpertsArgs& args);

std::vector<double> add(const AddArgs& args);  // [T, D]; reads out

struct AdjustedLogits {
  std::vector<double> logits;  // [T, V]
  std::vector<double> saved;   // [N]
};
AdjustedLogits adjust_logits(const AdjustLogitsArgs& args);  // reads logits and saved

std::vector<int32_t> pick_tokens(const PickTokensArgs& args);  // [T]

std::vector<double> token_logprobs(const TokenLogprobsArgs& args);  // [T]

// What a row of `sample` may give: the distribution after temperature and filters, and the log
// probability of each token before them.
struct SampledRow {
  bool greedy = false;
  int64_t best = 0;              // the greedy token
  std::vector<double> p;         // [V]; empty when greedy
  std::vector<double> logprobs;  // [V]
};
SampledRow sample_row(const SampleArgs& args, int64_t t);

}  // namespace lacuna::reference
