// Validates the arguments of the engine's own operations once, then dispatches. Their caller is the
// engine, so the checks guard shapes and types; they are cheap enough for every call.
#include "ops/model_ops.h"

#include <string>

#include "core/match.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;

}  // namespace

Device Op<EmbeddingArgs>::device(const EmbeddingArgs& args) { return args.out.device; }
bool Op<EmbeddingArgs>::nothing_to_do(const EmbeddingArgs& args) { return args.out.shape[0] == 0; }
Status Op<EmbeddingArgs>::validate(const EmbeddingArgs& args) {
  Dim rows("T"), vocab("V"), width("D");
  LACUNA_RETURN_IF_ERROR(match(args.ids, "ids").shape({&rows}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.table, "table")
                             .shape({&vocab, &width})
                             .dtypes({kF32, kBf16})
                             .contiguous()
                             .status());
  return match(args.out, "out").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status();
}

Device Op<RmsNormArgs>::device(const RmsNormArgs& args) { return args.x.device; }
bool Op<RmsNormArgs>::nothing_to_do(const RmsNormArgs& args) { return args.x.shape[0] == 0; }
Status Op<RmsNormArgs>::validate(const RmsNormArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  if (!args.add.empty()) {
    LACUNA_RETURN_IF_ERROR(
        match(args.add, "add").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  }
  LACUNA_RETURN_IF_ERROR(match(args.weight, "weight")
                             .shape({&width})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  return match(args.out, "out")
      .shape({&rows, &width})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<LayerNormArgs>::device(const LayerNormArgs& args) { return args.x.device; }
bool Op<LayerNormArgs>::nothing_to_do(const LayerNormArgs& args) { return args.x.shape[0] == 0; }
Status Op<LayerNormArgs>::validate(const LayerNormArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(match(args.weight, "weight")
                             .shape({&width})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(match(args.bias, "bias")
                             .shape({&width})
                             .dtypes({args.weight.dtype})
                             .last_contiguous()
                             .status());
  return match(args.out, "out")
      .shape({&rows, &width})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<RopeArgs>::device(const RopeArgs& args) { return args.x.device; }
bool Op<RopeArgs>::nothing_to_do(const RopeArgs& args) {
  return args.x.shape[0] == 0 || args.x.shape[1] == 0;
}
Status Op<RopeArgs>::validate(const RopeArgs& args) {
  Dim rows("T"), heads("H"), width("width"), positions("P"), pairs("width / 2");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &heads, &width}).dtypes({kF32}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(match(args.positions, "positions").shape({&rows}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.cos_table, "cos_table")
                             .shape({&positions, &pairs})
                             .dtypes({kF32})
                             .contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(match(args.sin_table, "sin_table")
                             .shape({&positions, &pairs})
                             .dtypes({kF32})
                             .contiguous()
                             .status());
  if (args.offset < 0 || args.offset + 2 * pairs.value() > width.value()) {
    return invalid_argument("cos_table: " + std::to_string(pairs.value()) + " pairs from offset " +
                            std::to_string(args.offset) + " do not fit a head of " +
                            std::to_string(width.value()));
  }
  return match(args.out, "out")
      .shape({&rows, &heads, &width})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<LinearArgs>::device(const LinearArgs& args) { return args.out.device; }
bool Op<LinearArgs>::nothing_to_do(const LinearArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0;
}
Status Op<LinearArgs>::validate(const LinearArgs& args) {
  Dim rows("T"), in("K"), out("N");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &in}).dtypes({kF32, kBf16}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(match(args.weight, "weight")
                             .shape({&out, &in})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  return match(args.out, "out")
      .shape({&rows, &out})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<HeadLinearArgs>::device(const HeadLinearArgs& args) { return args.out.device; }
bool Op<HeadLinearArgs>::nothing_to_do(const HeadLinearArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0 || args.out.shape[2] == 0;
}
Status Op<HeadLinearArgs>::validate(const HeadLinearArgs& args) {
  Dim rows("T"), heads("H"), in("K"), out("N");
  LACUNA_RETURN_IF_ERROR(match(args.x, "x")
                             .shape({&rows, &heads, &in})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(
      match(args.weight, "weight").shape({&heads, &out, &in}).dtypes({kF32, kBf16}).status());
  if (args.weight.strides[1] != 1 && args.weight.strides[2] != 1) {
    return invalid_argument("weight: strides " + std::to_string(args.weight.strides[1]) + " and " +
                            std::to_string(args.weight.strides[2]) +
                            " of the last two dimensions, expected one of them to be 1");
  }
  return match(args.out, "out")
      .shape({&rows, &heads, &out})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<SiluMulArgs>::device(const SiluMulArgs& args) { return args.out.device; }
bool Op<SiluMulArgs>::nothing_to_do(const SiluMulArgs& args) { return args.out.shape[0] == 0; }
Status Op<SiluMulArgs>::validate(const SiluMulArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(
      match(args.gate, "gate").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(
      match(args.up, "up").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  return match(args.out, "out")
      .shape({&rows, &width})
      .dtypes({kF32, kBf16})
      .last_contiguous()
      .status();
}

Device Op<MoeRouteArgs>::device(const MoeRouteArgs& args) { return args.ids.device; }
bool Op<MoeRouteArgs>::nothing_to_do(const MoeRouteArgs& args) { return args.ids.shape[0] == 0; }
Status Op<MoeRouteArgs>::validate(const MoeRouteArgs& args) {
  Dim rows("T"), experts("E"), chosen("experts_per_token");
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &experts})
                             .dtypes({kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(
      match(args.bias, "bias").shape({&experts}).dtypes({kF32}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(
      match(args.ids, "ids").shape({&rows, &chosen}).dtypes({kI32}).contiguous().status());
  LACUNA_RETURN_IF_ERROR(
      match(args.weights, "weights").shape({&rows, &chosen}).dtypes({kF32}).contiguous().status());
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
  return ok_status();
}

Device Op<MoeExpertsArgs>::device(const MoeExpertsArgs& args) { return args.out.device; }
bool Op<MoeExpertsArgs>::nothing_to_do(const MoeExpertsArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<MoeExpertsArgs>::validate(const MoeExpertsArgs& args) {
  Dim rows("T"), width("D"), chosen("experts_per_token"), hidden("F");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &width}).dtypes({kF32, kBf16}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(
      match(args.ids, "ids").shape({&rows, &chosen}).dtypes({kI32}).contiguous().status());
  LACUNA_RETURN_IF_ERROR(
      match(args.weights, "weights").shape({&rows, &chosen}).dtypes({kF32}).contiguous().status());
  if (args.experts.empty()) {
    return invalid_argument("experts: none given");
  }
  const DType dtype = args.experts[0].gate.dtype;
  for (const ExpertWeights& expert : args.experts) {
    LACUNA_RETURN_IF_ERROR(match(expert.gate, "experts.gate")
                               .shape({&hidden, &width})
                               .dtypes({dtype})
                               .contiguous()
                               .status());
    LACUNA_RETURN_IF_ERROR(match(expert.up, "experts.up")
                               .shape({&hidden, &width})
                               .dtypes({dtype})
                               .contiguous()
                               .status());
    LACUNA_RETURN_IF_ERROR(match(expert.down, "experts.down")
                               .shape({&width, &hidden})
                               .dtypes({dtype})
                               .contiguous()
                               .status());
  }
  LACUNA_RETURN_IF_ERROR(
      match(args.experts[0].gate, "experts.gate").dtypes({kF32, kBf16}).status());
  return match(args.out, "out").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status();
}

Device Op<SampleArgs>::device(const SampleArgs& args) { return args.ids.device; }
bool Op<SampleArgs>::nothing_to_do(const SampleArgs& args) { return args.ids.shape[0] == 0; }
Status Op<SampleArgs>::validate(const SampleArgs& args) {
  Dim rows("T"), vocab("V");
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &vocab})
                             .dtypes({kF32})
                             .last_contiguous()
                             .status());
  if (vocab.value() < 1) {
    return invalid_argument("logits: no columns, expected at least one token");
  }
  LACUNA_RETURN_IF_ERROR(
      match(args.temperature, "temperature").shape({&rows}).dtypes({kF32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.top_k, "top_k").shape({&rows}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.top_p, "top_p").shape({&rows}).dtypes({kF32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.min_p, "min_p").shape({&rows}).dtypes({kF32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.uniform, "uniform").shape({&rows}).dtypes({kF32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.ids, "ids").shape({&rows}).dtypes({kI32}).status());
  return args.logprobs.empty()
             ? ok_status()
             : match(args.logprobs, "logprobs").shape({&rows}).dtypes({kF32}).status();
}

Device Op<AddArgs>::device(const AddArgs& args) { return args.out.device; }
bool Op<AddArgs>::nothing_to_do(const AddArgs& args) { return args.out.shape[0] == 0; }
Status Op<AddArgs>::validate(const AddArgs& args) {
  Dim rows("T"), width("D");
  LACUNA_RETURN_IF_ERROR(
      match(args.x, "x").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status());
  return match(args.out, "out").shape({&rows, &width}).dtypes({kF32}).last_contiguous().status();
}

Device Op<AdjustLogitsArgs>::device(const AdjustLogitsArgs& args) { return args.logits.device; }
bool Op<AdjustLogitsArgs>::nothing_to_do(const AdjustLogitsArgs& args) {
  return args.rows.shape[0] == 0;
}
Status Op<AdjustLogitsArgs>::validate(const AdjustLogitsArgs& args) {
  Dim rows("T"), vocab("V"), entries("N");
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &vocab})
                             .dtypes({kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(match(args.rows, "rows").shape({&entries}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.ids, "ids").shape({&entries}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(
      match(args.repetition, "repetition").shape({&entries}).dtypes({kF32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.add, "add").shape({&entries}).dtypes({kF32}).status());
  return match(args.saved, "saved").shape({&entries}).dtypes({kF32}).status();
}

Device Op<TokenLogprobsArgs>::device(const TokenLogprobsArgs& args) { return args.out.device; }
bool Op<TokenLogprobsArgs>::nothing_to_do(const TokenLogprobsArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<TokenLogprobsArgs>::validate(const TokenLogprobsArgs& args) {
  Dim rows("T"), vocab("V");
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &vocab})
                             .dtypes({kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(match(args.ids, "ids").shape({&rows}).dtypes({kI32}).status());
  return match(args.out, "out").shape({&rows}).dtypes({kF32}).status();
}

Device Op<PickTokensArgs>::device(const PickTokensArgs& args) { return args.out.device; }
bool Op<PickTokensArgs>::nothing_to_do(const PickTokensArgs& args) {
  return args.out.shape[0] == 0;
}
Status Op<PickTokensArgs>::validate(const PickTokensArgs& args) {
  Dim rows("T"), drawn("N");
  LACUNA_RETURN_IF_ERROR(match(args.given, "given").shape({&rows}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.sources, "sources").shape({&rows}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.drawn, "drawn").shape({&drawn}).dtypes({kI32}).status());
  LACUNA_RETURN_IF_ERROR(match(args.out, "out").shape({&rows}).dtypes({kI32}).status());
  return check_devices(args.out.device, {{args.given, "given"},
                                         {args.sources, "sources"},
                                         {args.drawn, "drawn"},
                                         {args.out, "out"}});
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
