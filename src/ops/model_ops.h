// The engine's own operations: what a transformer layer needs around attention. Not part of the
// public library. Activations are f32 or bf16; weights are f32, bf16 or FP8 with scales (widened
// exactly); accumulation is f32. Shapes: T rows.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "lacuna/context.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

// out[t] = table[ids[t]]. An id outside [0, V) gives a row of zeros.
struct EmbeddingArgs {
  ConstTensorView ids;    // [T] int32
  ConstTensorView table;  // [V, D] f32 or bf16, contiguous
  TensorView out;         // [T, D] f32, last dimension contiguous
  std::string_view kernel = {};
};

// h = x + add (written back to x when add is present); out = h / sqrt(mean(h^2) + eps) * weight,
// rounded once.
struct RmsNormArgs {
  TensorView x;            // [T, D] f32, last dimension contiguous
  ConstTensorView add;     // [T, D] f32, optional
  ConstTensorView weight;  // [D] f32 or bf16
  double eps = 0;
  TensorView out;  // [T, D] f32 or bf16, last dimension contiguous
  std::string_view kernel = {};
};

// out = (x - mean) / sqrt(var + eps) * weight + bias.
struct LayerNormArgs {
  ConstTensorView x;  // [T, D] f32, last dimension contiguous
  ConstTensorView weight;
  ConstTensorView bias;
  double eps = 0;
  TensorView out;  // [T, D] f32 or bf16
  std::string_view kernel = {};
};

// Rotates elements [offset, offset + width) of each head, width = 2 * the tables' width. Pair i is
// (2i, 2i + 1) when interleaved, else (i, i + width / 2); its angle at row t is that of table row
// positions[t]. out may be x.
struct RopeArgs {
  ConstTensorView x;          // [T, H, >= width] f32, last dimension contiguous
  ConstTensorView positions;  // [T] int32, 0 <= position < P
  ConstTensorView cos_table;  // [P, width / 2] f32, contiguous
  ConstTensorView sin_table;  // [P, width / 2] f32, contiguous
  bool interleaved = false;
  int64_t offset = 0;
  TensorView out;  // [T, H, >= width] f32 or bf16
  std::string_view kernel = {};
};

// Side of the square blocks of an FP8 weight that share one scale (DeepSeek-V3's
// "weight_scale_inv": the factor that restores the values). Blocks at the edges may be partial. An
// FP8 weight is a number: NaN may count as 480.
inline constexpr int64_t kWeightScaleBlock = 128;

// out = x weight^T.
struct LinearArgs {
  ConstTensorView x;       // [T, K] f32 or bf16, last dimension contiguous
  ConstTensorView weight;  // [N, K] f32, bf16 or fp8 e4m3, last dimension contiguous
  // Only with an fp8 weight: weight[n, k] stands for weight[n, k] * weight_scale[n / 128, k / 128].
  // A kernel may round that product to bf16 where x is bf16.
  ConstTensorView weight_scale;  // [ceil(N / 128), ceil(K / 128)] f32, contiguous
  TensorView out;                // [T, N] f32 or bf16, last dimension contiguous
  std::string_view kernel = {};
};

// out[t, h] = weight[h] x[t, h]: one matrix a head (the absorbed projections W_UK^T and W_UV).
struct HeadLinearArgs {
  ConstTensorView x;  // [T, H, K] f32 or bf16, last dimension contiguous
  ConstTensorView
      weight;      // [H, N, K] f32 or bf16; N or K contiguous (either of the last two strides is 1)
  TensorView out;  // [T, H, N] f32 or bf16, last dimension contiguous
  std::string_view kernel = {};
};

// out = silu(gate) * up, the product in f32.
struct SiluMulArgs {
  ConstTensorView gate;  // [T, D] f32
  ConstTensorView up;    // [T, D] f32
  TensorView out;        // [T, D] f32 or bf16
  std::string_view kernel = {};
};

// DeepSeek-V3 router (noaux_tc): s = sigmoid(logits), choice = s + bias. With num_groups > 1 the
// group score is the sum of its two largest choices and only the best groups_kept groups compete.
// The best experts_per_token by choice (ties: lowest id) are emitted in ascending order of id with
// weights s, divided by (their sum + 1e-20) when `normalize`, times `scale`.
struct MoeRouteArgs {
  ConstTensorView logits;  // [T, E] f32
  ConstTensorView bias;    // [E] f32
  int num_groups = 1;
  int groups_kept = 1;
  bool normalize = true;
  double scale = 1;
  TensorView ids;      // [T, experts_per_token] int32, contiguous
  TensorView weights;  // [T, experts_per_token] f32, contiguous
  std::string_view kernel = {};
};

// out += x.
struct AddArgs {
  ConstTensorView x;  // [T, D] f32, last dimension contiguous
  TensorView out;     // [T, D] f32, last dimension contiguous
  std::string_view kernel = {};
};

// Edits single logits, N of them (each row and id at most once): saved[i] = x, then x = x > 0 ? x /
// repetition[i] : x * repetition[i], then x += add[i]. With `restore`, puts saved[i] back instead.
// A row or id out of range is skipped.
struct AdjustLogitsArgs {
  TensorView logits;           // [T, V] f32, last dimension contiguous
  ConstTensorView rows;        // [N] int32
  ConstTensorView ids;         // [N] int32
  ConstTensorView repetition;  // [N] f32
  ConstTensorView add;         // [N] f32
  TensorView saved;            // [N] f32
  bool restore = false;
  std::string_view kernel = {};
};

// out[t] = log softmax(logits[t])[ids[t]]; -inf for an id outside [0, V).
struct TokenLogprobsArgs {
  ConstTensorView logits;  // [T, V] f32, last dimension contiguous
  ConstTensorView ids;     // [T] int32
  TensorView out;          // [T] f32
  std::string_view kernel = {};
};

// Matrices are f32, bf16 or fp8 e4m3, all of one type; the scales are there with fp8 only, as in
// LinearArgs.
struct ExpertWeights {
  ConstTensorView gate;  // [F, D]
  ConstTensorView up;    // [F, D]
  ConstTensorView down;  // [D, F]
  ConstTensorView gate_scale;
  ConstTensorView up_scale;
  ConstTensorView down_scale;
};

// out[t] = sum_k weights[t, k] * down_e(silu(gate_e x[t]) * up_e x[t]) with e = ids[t, k]; a
// negative id is skipped. The hidden activation is rounded to x's dtype (it is a GEMM input). out
// is overwritten. A kernel may ask that the experts lie at equal distances in memory (on a GPU,
// where they are loaded one behind the other).
struct MoeExpertsArgs {
  ConstTensorView x;        // [T, D] f32 or bf16, last dimension contiguous
  ConstTensorView ids;      // [T, K] int32, contiguous
  ConstTensorView weights;  // [T, K] f32, contiguous
  std::span<const ExpertWeights> experts;
  TensorView out;  // [T, D] f32, last dimension contiguous
  std::string_view kernel = {};
};

// Draws one token a row. temperature 0: argmax (ties: lowest id). Otherwise p = softmax(logits /
// temperature) over the tokens that survive top_k (0: off; exactly k stay, ties by lowest id), then
// top_p (the smallest set of most likely tokens whose mass reaches top_p, the crossing token
// included; >= 1: off), then min_p (p >= min_p * max p; 0: off); the survivors are renormalised and
// the token is where the running sum in id order passes uniform[t]. NaN logits count as -inf; a row
// of only -inf gives token 0.
struct SampleArgs {
  ConstTensorView logits;       // [T, V] f32, last dimension contiguous
  ConstTensorView temperature;  // [T] f32
  ConstTensorView top_k;        // [T] int32
  ConstTensorView top_p;        // [T] f32
  ConstTensorView min_p;        // [T] f32
  ConstTensorView uniform;      // [T] f32 in [0, 1)
  TensorView ids;               // [T] int32
  TensorView
      logprobs;  // [T] f32, optional: log softmax(logits)[id], before temperature and filters
  std::string_view kernel = {};
};

// out[t] = drawn[sources[t]], or given[t] where the source is no row of `drawn`: tokens that the
// host does not know yet, taken where they were drawn. `out` may be `given`; it may be `drawn` when
// every source is its own row or none.
struct PickTokensArgs {
  ConstTensorView given;    // [T] int32
  ConstTensorView sources;  // [T] int32
  ConstTensorView drawn;    // [N] int32
  TensorView out;           // [T] int32
  std::string_view kernel = {};
};

Status adjust_logits(const Context& context, const AdjustLogitsArgs& args,
                     const Launch& launch = {});
Status add(const Context& context, const AddArgs& args, const Launch& launch = {});
Status token_logprobs(const Context& context, const TokenLogprobsArgs& args,
                      const Launch& launch = {});
Status embedding(const Context& context, const EmbeddingArgs& args, const Launch& launch = {});
Status rms_norm(const Context& context, const RmsNormArgs& args, const Launch& launch = {});
Status layer_norm(const Context& context, const LayerNormArgs& args, const Launch& launch = {});
Status rope(const Context& context, const RopeArgs& args, const Launch& launch = {});
Status linear(const Context& context, const LinearArgs& args, const Launch& launch = {});
Status head_linear(const Context& context, const HeadLinearArgs& args, const Launch& launch = {});
Status silu_mul(const Context& context, const SiluMulArgs& args, const Launch& launch = {});
Status moe_route(const Context& context, const MoeRouteArgs& args, const Launch& launch = {});
Status moe_experts(const Context& context, const MoeExpertsArgs& args, const Launch& launch = {});
Status sample(const Context& context, const SampleArgs& args, const Launch& launch = {});
Status pick_tokens(const Context& context, const PickTokensArgs& args, const Launch& launch = {});

Result<int64_t> workspace_bytes(const Context& context, const AdjustLogitsArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const AddArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const TokenLogprobsArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const EmbeddingArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const RmsNormArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const LayerNormArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const RopeArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const LinearArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const HeadLinearArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const SiluMulArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const MoeRouteArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const MoeExpertsArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const SampleArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const PickTokensArgs& args);

Explanation explain(const Context& context, const AdjustLogitsArgs& args);
Explanation explain(const Context& context, const AddArgs& args);
Explanation explain(const Context& context, const TokenLogprobsArgs& args);
Explanation explain(const Context& context, const EmbeddingArgs& args);
Explanation explain(const Context& context, const RmsNormArgs& args);
Explanation explain(const Context& context, const LayerNormArgs& args);
Explanation explain(const Context& context, const RopeArgs& args);
Explanation explain(const Context& context, const LinearArgs& args);
Explanation explain(const Context& context, const HeadLinearArgs& args);
Explanation explain(const Context& context, const SiluMulArgs& args);
Explanation explain(const Context& context, const MoeRouteArgs& args);
Explanation explain(const Context& context, const MoeExpertsArgs& args);
Explanation explain(const Context& context, const SampleArgs& args);
Explanation explain(const Context& context, const PickTokensArgs& args);

}  // namespace lacuna
