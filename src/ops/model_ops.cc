// Validates the arguments of the engine's own operations once, then dispatches. Their caller is the
// engine, so the checks guard shapes and types; they are cheap enough for every call.
#include "ops/model_ops.h"

#include <initializer_list>
#include <string>

#include "core/match.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;
constexpr auto kFp8 = DType::kFloat8E4M3;

using Dims = std::initializer_list<Dim*>;
using DTypes = std::initializer_list<DType>;

// Elements of a row lie side by side; rows may be anywhere.
Status check_rows(const ConstTensorView& tensor, const char* name, Dims dims, DTypes dtypes) {
  return match(tensor, name).shape(dims).dtypes(dtypes).last_contiguous().status();
}

Status check_contiguous(const ConstTensorView& tensor, const char* name, Dims dims, DTypes dtypes) {
  return match(tensor, name).shape(dims).dtypes(dtypes).contiguous().status();
}

// One value a row, at any stride.
Status check_column(const ConstTensorView& tensor, const char* name, Dim& rows, DType dtype) {
  return match(tensor, name).shape({&rows}).dtypes({dtype}).status();
}

// The scales of an FP8 weight, which others have not.
Status check_weight_scale(const ConstTensorView& weight, const ConstTensorView& scale,
                          const char* name) {
  if (weight.dtype != kFp8) {
    return scale.empty() ? ok_status()
                         : invalid_argument(std::string(name) + ": given with a " +
                                            std::string(dtype_name(weight.dtype)) +
                                            " weight, expected only with a float8_e4m3 one");
  }
  const auto blocks = [&](int dim) {
    return (weight.shape[dim] + kWeightScaleBlock - 1) / kWeightScaleBlock;
  };
  Dim rows("N / 128", blocks(0), "weight"), columns("K / 128", blocks(1), "weight");
  return check_contiguous(scale, name, {&rows, &columns}, {kF32});
}

}  // namespace

Device Op<EmbeddingArgs>::device(const EmbeddingArgs& args) { return args.out.device; }
bool Op<EmbeddingArgs>::nothing_to_do(const EmbeddingArgs& args) { return args.out.shape[0] == 0; }
Status Op<EmbeddingArgs>::validate(const EmbeddingArgs& args) {
  Dim rows("T"), vocab("V"), width("D");
  LACUNA_RETURN_IF_ERROR(check_column(args.ids, "ids", rows, kI32));
  LACUNA_RETURN_IF_ERROR(check_contiguous(args.table, "table", {&vocab, &width}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32}));
  return check_devices(device(args), {{args.ids, "ids"}, {args.table, "table"}});
}

Device Op<RmsNormArgs>::device(const RmsNormArgs& args) { return args.x.device; }
bool Op<RmsNormArgs>::nothing_to_do(const RmsNormArgs& args) { return args.x.shape[0] == 0; }
Status Op<RmsNormArgs>::validate(const RmsNormArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &width}, {kF32}));
  if (!args.add.empty()) {
    LACUNA_RETURN_IF_ERROR(check_rows(args.add, "add", {&rows, &width}, {kF32}));
  }
  LACUNA_RETURN_IF_ERROR(check_rows(args.weight, "weight", {&width}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32, kBf16}));
  return check_devices(device(args),
                       {{args.add, "add"}, {args.weight, "weight"}, {args.out, "out"}});
}

Device Op<LayerNormArgs>::device(const LayerNormArgs& args) { return args.x.device; }
bool Op<LayerNormArgs>::nothing_to_do(const LayerNormArgs& args) { return args.x.shape[0] == 0; }
Status Op<LayerNormArgs>::validate(const LayerNormArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &width}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.weight, "weight", {&width}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.bias, "bias", {&width}, {args.weight.dtype}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32, kBf16}));
  return check_devices(device(args),
                       {{args.weight, "weight"}, {args.bias, "bias"}, {args.out, "out"}});
}

Device Op<RopeArgs>::device(const RopeArgs& args) { return args.x.device; }
bool Op<RopeArgs>::nothing_to_do(const RopeArgs& args) {
  return args.x.shape[0] == 0 || args.x.shape[1] == 0;
}
Status Op<RopeArgs>::validate(const RopeArgs& args) {
  Dim rows("T"), heads("H"), width("width"), positions("P"), pairs("width / 2");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &heads, &width}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_column(args.positions, "positions", rows, kI32));
  LACUNA_RETURN_IF_ERROR(
      check_contiguous(args.cos_table, "cos_table", {&positions, &pairs}, {kF32}));
  LACUNA_RETURN_IF_ERROR(
      check_contiguous(args.sin_table, "sin_table", {&positions, &pairs}, {kF32}));
  if (args.offset < 0 || args.offset > width.value() ||
      pairs.value() > (width.value() - args.offset) / 2) {
    return invalid_argument("cos_table: " + std::to_string(pairs.value()) + " pairs from offset " +
                            std::to_string(args.offset) + " do not fit a head of " +
                            std::to_string(width.value()));
  }
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &heads, &width}, {kF32, kBf16}));
  return check_devices(device(args), {{args.positions, "positions"},
                                      {args.cos_table, "cos_table"},
                                      {args.sin_table, "sin_table"},
                                      {args.out, "out"}});
}

Device Op<LinearArgs>::device(const LinearArgs& args) { return args.out.device; }
bool Op<LinearArgs>::nothing_to_do(const LinearArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0;
}
Status Op<LinearArgs>::validate(const LinearArgs& args) {
  Dim rows("T"), in("K"), out("N");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &in}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.weight, "weight", {&out, &in}, {kF32, kBf16, kFp8}));
  LACUNA_RETURN_IF_ERROR(check_weight_scale(args.weight, args.weight_scale, "weight_scale"));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &out}, {kF32, kBf16}));
  return check_devices(
      device(args), {{args.x, "x"}, {args.weight, "weight"}, {args.weight_scale, "weight_scale"}});
}

Device Op<HeadLinearArgs>::device(const HeadLinearArgs& args) { return args.out.device; }
bool Op<HeadLinearArgs>::nothing_to_do(const HeadLinearArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0 || args.out.shape[2] == 0;
}
Status Op<HeadLinearArgs>::validate(const HeadLinearArgs& args) {
  Dim rows("T"), heads("H"), in("K"), out("N");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &heads, &in}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(
      match(args.weight, "weight").shape({&heads, &out, &in}).dtypes({kF32, kBf16}).status());
  if (args.weight.strides[1] != 1 && args.weight.strides[2] != 1) {
    return invalid_argument("weight: strides " + std::to_string(args.weight.strides[1]) + " and " +
                            std::to_string(args.weight.strides[2]) +
                            " of the last two dimensions, expected one of them to be 1");
  }
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &heads, &out}, {kF32, kBf16}));
  return check_devices(device(args), {{args.x, "x"}, {args.weight, "weight"}});
}

Device Op<SiluMulArgs>::device(const SiluMulArgs& args) { return args.out.device; }
bool Op<SiluMulArgs>::nothing_to_do(const SiluMulArgs& args) { return args.out.shape[0] == 0; }
Status Op<SiluMulArgs>::validate(const SiluMulArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(check_rows(args.gate, "gate", {&rows, &width}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.up, "up", {&rows, &width}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32, kBf16}));
  return check_devices(device(args), {{args.gate, "gate"}, {args.up, "up"}});
}

Device Op<MoeRouteArgs>::device(const MoeRouteArgs& args) { return args.ids.device; }
bool Op<MoeRouteArgs>::nothing_to_do(const MoeRouteArgs& args) { return args.ids.shape[0] == 0; }
Status Op<MoeRouteArgs>::validate(const MoeRouteArgs& args) {
  Dim rows("T"), experts("E"), chosen("experts_per_token");
  LACUNA_RETURN_IF_ERROR(check_rows(args.logits, "logits", {&rows, &experts}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.bias, "bias", {&experts}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_contiguous(args.ids, "ids", {&rows, &chosen}, {kI32}));
  LACUNA_RETURN_IF_ERROR(check_contiguous(args.weights, "weights", {&rows, &chosen}, {kF32}));
  const int64_t num_experts = experts.value();
  if (args.num_groups < 1 || num_experts % args.num_groups != 0 || args.groups_kept < 1 ||
      args.groups_kept > args.num_groups ||
      (args.num_groups > 1 && num_experts / args.num_groups < 2) ||
      chosen.value() > num_experts / args.num_groups * args.groups_kept) {
    return invalid_argument("num_groups: " + std::to_string(args.num_groups) + " groups, " +
                            std::to_string(args.groups_kept) + " kept, for " +
                            std::to_string(chosen.value()) + " of " + std::to_string(num_experts) +
                            " experts does not divide");
  }
  return check_devices(device(args),
                       {{args.logits, "logits"}, {args.bias, "bias"}, {args.weights, "weights"}});
}

Device Op<MoeExpertsArgs>::device(const MoeExpertsArgs& args) { return args.out.device; }
bool Op<MoeExpertsArgs>::nothing_to_do(const MoeExpertsArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<MoeExpertsArgs>::validate(const MoeExpertsArgs& args) {
  Dim rows("T"), width("D"), chosen("experts_per_token"), hidden("F");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &width}, {kF32, kBf16}));
  LACUNA_RETURN_IF_ERROR(check_contiguous(args.ids, "ids", {&rows, &chosen}, {kI32}));
  LACUNA_RETURN_IF_ERROR(check_contiguous(args.weights, "weights", {&rows, &chosen}, {kF32}));
  if (args.experts.empty()) {
    return invalid_argument("experts: none given");
  }
  LACUNA_RETURN_IF_ERROR(
      match(args.experts[0].gate, "experts.gate").dtypes({kF32, kBf16, kFp8}).status());
  const DType dtype = args.experts[0].gate.dtype;
  for (const ExpertWeights& expert : args.experts) {
    LACUNA_RETURN_IF_ERROR(
        check_contiguous(expert.gate, "experts.gate", {&hidden, &width}, {dtype}));
    LACUNA_RETURN_IF_ERROR(check_contiguous(expert.up, "experts.up", {&hidden, &width}, {dtype}));
    LACUNA_RETURN_IF_ERROR(
        check_contiguous(expert.down, "experts.down", {&width, &hidden}, {dtype}));
    LACUNA_RETURN_IF_ERROR(
        check_weight_scale(expert.gate, expert.gate_scale, "experts.gate_scale"));
    LACUNA_RETURN_IF_ERROR(check_weight_scale(expert.up, expert.up_scale, "experts.up_scale"));
    LACUNA_RETURN_IF_ERROR(
        check_weight_scale(expert.down, expert.down_scale, "experts.down_scale"));
    LACUNA_RETURN_IF_ERROR(
        check_devices(device(args), {{expert.gate, "experts.gate"},
                                     {expert.up, "experts.up"},
                                     {expert.down, "experts.down"},
                                     {expert.gate_scale, "experts.gate_scale"},
                                     {expert.up_scale, "experts.up_scale"},
                                     {expert.down_scale, "experts.down_scale"}}));
  }
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32}));
  return check_devices(device(args), {{args.x, "x"}, {args.ids, "ids"}, {args.weights, "weights"}});
}

Device Op<SampleArgs>::device(const SampleArgs& args) { return args.ids.device; }
bool Op<SampleArgs>::nothing_to_do(const SampleArgs& args) { return args.ids.shape[0] == 0; }
Status Op<SampleArgs>::validate(const SampleArgs& args) {
  Dim rows("T"), vocab("V");
  LACUNA_RETURN_IF_ERROR(check_rows(args.logits, "logits", {&rows, &vocab}, {kF32}));
  if (vocab.value() < 1) {
    return invalid_argument("logits: no columns, expected at least one token");
  }
  LACUNA_RETURN_IF_ERROR(check_column(args.temperature, "temperature", rows, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.top_k, "top_k", rows, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.top_p, "top_p", rows, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.min_p, "min_p", rows, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.uniform, "uniform", rows, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.ids, "ids", rows, kI32));
  if (!args.logprobs.empty()) {
    LACUNA_RETURN_IF_ERROR(check_column(args.logprobs, "logprobs", rows, kF32));
  }
  return check_devices(device(args), {{args.logits, "logits"},
                                      {args.temperature, "temperature"},
                                      {args.top_k, "top_k"},
                                      {args.top_p, "top_p"},
                                      {args.min_p, "min_p"},
                                      {args.uniform, "uniform"},
                                      {args.logprobs, "logprobs"}});
}

Device Op<AddArgs>::device(const AddArgs& args) { return args.out.device; }
bool Op<AddArgs>::nothing_to_do(const AddArgs& args) { return args.out.shape[0] == 0; }
Status Op<AddArgs>::validate(const AddArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(check_rows(args.x, "x", {&rows, &width}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_rows(args.out, "out", {&rows, &width}, {kF32}));
  return check_devices(device(args), {{args.x, "x"}});
}

Device Op<AdjustLogitsArgs>::device(const AdjustLogitsArgs& args) { return args.logits.device; }
bool Op<AdjustLogitsArgs>::nothing_to_do(const AdjustLogitsArgs& args) {
  return args.rows.shape[0] == 0;
}
Status Op<AdjustLogitsArgs>::validate(const AdjustLogitsArgs& args) {
  Dim rows("T"), vocab("V"), entries("N");
  LACUNA_RETURN_IF_ERROR(check_rows(args.logits, "logits", {&rows, &vocab}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_column(args.rows, "rows", entries, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.ids, "ids", entries, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.repetition, "repetition", entries, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.add, "add", entries, kF32));
  LACUNA_RETURN_IF_ERROR(check_column(args.saved, "saved", entries, kF32));
  return check_devices(device(args), {{args.rows, "rows"},
                                      {args.ids, "ids"},
                                      {args.repetition, "repetition"},
                                      {args.add, "add"},
                                      {args.saved, "saved"}});
}

Device Op<TokenLogprobsArgs>::device(const TokenLogprobsArgs& args) { return args.out.device; }
bool Op<TokenLogprobsArgs>::nothing_to_do(const TokenLogprobsArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<TokenLogprobsArgs>::validate(const TokenLogprobsArgs& args) {
  Dim rows("T"), vocab("V");
  LACUNA_RETURN_IF_ERROR(check_rows(args.logits, "logits", {&rows, &vocab}, {kF32}));
  LACUNA_RETURN_IF_ERROR(check_column(args.ids, "ids", rows, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.out, "out", rows, kF32));
  return check_devices(device(args), {{args.logits, "logits"}, {args.ids, "ids"}});
}

Device Op<PickTokensArgs>::device(const PickTokensArgs& args) { return args.out.device; }
bool Op<PickTokensArgs>::nothing_to_do(const PickTokensArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<PickTokensArgs>::validate(const PickTokensArgs& args) {
  Dim rows("T"), drawn("N");
  LACUNA_RETURN_IF_ERROR(check_column(args.given, "given", rows, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.sources, "sources", rows, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.drawn, "drawn", drawn, kI32));
  LACUNA_RETURN_IF_ERROR(check_column(args.out, "out", rows, kI32));
  return check_devices(device(args),
                       {{args.given, "given"}, {args.sources, "sources"}, {args.drawn, "drawn"}});
}

LACUNA_PUBLIC_OP(AddArgs, add)
LACUNA_PUBLIC_OP(AdjustLogitsArgs, adjust_logits)
LACUNA_PUBLIC_OP(TokenLogprobsArgs, token_logprobs)
LACUNA_PUBLIC_OP(EmbeddingArgs, embedding)
LACUNA_PUBLIC_OP(RmsNormArgs, rms_norm)
LACUNA_PUBLIC_OP(LayerNormArgs, layer_norm)
LACUNA_PUBLIC_OP(RopeArgs, rope)
LACUNA_PUBLIC_OP(LinearArgs, linear)
LACUNA_PUBLIC_OP(HeadLinearArgs, head_linear)
LACUNA_PUBLIC_OP(SiluMulArgs, silu_mul)
LACUNA_PUBLIC_OP(MoeRouteArgs, moe_route)
LACUNA_PUBLIC_OP(MoeExpertsArgs, moe_experts)
LACUNA_PUBLIC_OP(SampleArgs, sample)
LACUNA_PUBLIC_OP(PickTokensArgs, pick_tokens)

}  // namespace lacuna
