// Validates the arguments of the cache operations once, then dispatches.
#include <string>

#include "core/match.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;

Status check_slots(const ConstTensorView& slots, Dim& rows) {
  return match(slots, "slot_mapping").shape({&rows}).dtypes({DType::kInt64, kI32}).status();
}

Status check_slot_cache(const KvCacheView& kv) {
  LACUNA_RETURN_IF_ERROR(check_cache(kv, "kv"));
  if (kv.block_size < 1) {
    return invalid_argument("kv: block_size " + std::to_string(kv.block_size) +
                            ", expected at least 1");
  }
  return ok_status();
}

}  // namespace

Device Op<AppendKvArgs>::device(const AppendKvArgs& args) { return args.kv.device; }

bool Op<AppendKvArgs>::nothing_to_do(const AppendKvArgs& args) { return args.latent.shape[0] == 0; }

Status Op<AppendKvArgs>::validate(const AppendKvArgs& args) {
  LACUNA_RETURN_IF_ERROR(check_slot_cache(args.kv));
  const KvLayout& layout = args.kv.layout;
  if (!layout.is_latent()) {
    return invalid_argument("kv: layout " + std::string(kv_format_name(layout.format)) +
                            ", expected latent_bf16, latent_f32 or fp8_ds_mla");
  }
  Dim rows("T"), latent("latent", layout.latent, "kv.layout"),
      rope("rope", layout.rope, "kv.layout");
  LACUNA_RETURN_IF_ERROR(match(args.latent, "latent")
                             .shape({&rows, &latent})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  if (layout.rope > 0) {
    LACUNA_RETURN_IF_ERROR(match(args.rope, "rope")
                               .shape({&rows, &rope})
                               .dtypes({args.latent.dtype})
                               .last_contiguous()
                               .status());
  } else if (!args.rope.empty()) {
    return invalid_argument("rope: given for a layout without rope, expected absent");
  }
  LACUNA_RETURN_IF_ERROR(check_slots(args.slot_mapping, rows));
  return check_devices(
      args.kv.device,
      {{args.latent, "latent"}, {args.rope, "rope"}, {args.slot_mapping, "slot_mapping"}});
}

Device Op<AppendIndexKeysArgs>::device(const AppendIndexKeysArgs& args) { return args.kv.device; }

bool Op<AppendIndexKeysArgs>::nothing_to_do(const AppendIndexKeysArgs& args) {
  return args.keys.shape[0] == 0;
}

Status Op<AppendIndexKeysArgs>::validate(const AppendIndexKeysArgs& args) {
  LACUNA_RETURN_IF_ERROR(check_slot_cache(args.kv));
  const KvLayout& layout = args.kv.layout;
  if (!layout.is_index()) {
    return invalid_argument("kv: layout " + std::string(kv_format_name(layout.format)) +
                            ", expected index_f32, index_bf16 or index_fp8");
  }
  Dim rows("T"), dim("dim", layout.latent, "kv.layout");
  LACUNA_RETURN_IF_ERROR(match(args.keys, "keys")
                             .shape({&rows, &dim})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  if (args.hadamard && (dim.value() & (dim.value() - 1)) != 0) {
    return invalid_argument("hadamard: dim " + std::to_string(dim.value()) +
                            " is not a power of two");
  }
  LACUNA_RETURN_IF_ERROR(check_slots(args.slot_mapping, rows));
  return check_devices(args.kv.device, {{args.keys, "keys"}, {args.slot_mapping, "slot_mapping"}});
}

Device Op<GatherKvArgs>::device(const GatherKvArgs& args) { return args.kv.device; }

bool Op<GatherKvArgs>::nothing_to_do(const GatherKvArgs& args) {
  return args.request_ids.shape[0] == 0 || args.out.shape[0] == 0;
}

Status Op<GatherKvArgs>::validate(const GatherKvArgs& args) {
  LACUNA_RETURN_IF_ERROR(check_slot_cache(args.kv));
  if (!args.kv.layout.is_latent()) {
    return invalid_argument("kv: layout " + std::string(kv_format_name(args.kv.layout.format)) +
                            ", expected latent_bf16, latent_f32 or fp8_ds_mla");
  }
  Dim ranges("N"), requests("R"), columns("max_blocks"), rows("rows");
  Dim d_qk("latent + rope", args.kv.layout.d_qk(), "kv.layout");
  LACUNA_RETURN_IF_ERROR(match(args.block_table, "block_table")
                             .shape({&requests, &columns})
                             .dtypes({kI32})
                             .last_contiguous()
                             .status());
  struct Range {
    const ConstTensorView& tensor;
    const char* name;
  };
  for (const Range& range :
       {Range{args.request_ids, "request_ids"}, Range{args.starts, "starts"},
        Range{args.lengths, "lengths"}, Range{args.out_starts, "out_starts"}}) {
    LACUNA_RETURN_IF_ERROR(
        match(range.tensor, range.name).shape({&ranges}).dtypes({kI32}).status());
  }
  LACUNA_RETURN_IF_ERROR(match(args.out, "out")
                             .shape({&rows, &d_qk})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  return check_devices(args.kv.device, {{args.block_table, "block_table"},
                                        {args.request_ids, "request_ids"},
                                        {args.starts, "starts"},
                                        {args.lengths, "lengths"},
                                        {args.out_starts, "out_starts"},
                                        {args.out, "out"}});
}

LACUNA_PUBLIC_OP(AppendKvArgs, append_kv)
LACUNA_PUBLIC_OP(AppendIndexKeysArgs, append_index_keys)
LACUNA_PUBLIC_OP(GatherKvArgs, gather_kv)

}  // namespace lacuna
