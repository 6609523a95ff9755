// Validates the arguments of the attention operations once, then dispatches.
#include <algorithm>
#include <cmath>
#include <string>

#include "core/match.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kF16 = DType::kFloat16;
constexpr auto kI32 = DType::kInt32;

Status check_scale(double scale) {
  const float narrowed = static_cast<float>(scale);
  if (!std::isfinite(narrowed) || narrowed == 0.0f) {
    return invalid_argument("softmax_scale: " + std::to_string(scale) +
                            " is 0 or not finite in float32, expected a finite value other than 0");
  }
  return ok_status();
}

Status check_lse(const ConstTensorView& tensor, const char* name, Dim& rows, Dim& heads) {
  return tensor.empty() ? ok_status()
                        : match(tensor, name).shape({&rows, &heads}).dtypes({kF32}).status();
}

}  // namespace

Device Op<SparseMlaArgs>::device(const SparseMlaArgs& args) { return args.kv.device; }

bool Op<SparseMlaArgs>::nothing_to_do(const SparseMlaArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0;
}

Status Op<SparseMlaArgs>::validate(const SparseMlaArgs& args) {
  LACUNA_RETURN_IF_ERROR(check_cache(args.kv, "kv"));
  const KvLayout& layout = args.kv.layout;
  if (!layout.is_latent()) {
    return invalid_argument("kv: layout " + std::string(kv_format_name(layout.format)) +
                            " holds no attention keys, expected latent_bf16, latent_f32 or "
                            "fp8_ds_mla");
  }
  if (args.kv.num_blocks > 1 && args.kv.block_stride_bytes % args.kv.row_bytes != 0) {
    return invalid_argument("kv: block_stride_bytes " + std::to_string(args.kv.block_stride_bytes) +
                            " is not a whole number of rows of " +
                            std::to_string(args.kv.row_bytes) + " bytes");
  }
  LACUNA_RETURN_IF_ERROR(
      check_row_ids(args.kv.num_blocks, args.kv.block_size, args.kv.block_stride_rows(), "kv"));
  Dim rows("T"), heads("H"), width("W");
  Dim latent("latent", layout.latent, "kv.layout");
  Dim rope("rope", layout.rope, "kv.layout");
  Dim d_qk("latent + rope", layout.d_qk(), "kv.layout");
  const bool split = !args.q_nope.empty();
  if (args.q.empty() == !split) {
    return invalid_argument(
        "q: give either the fused query (q) or the split one (q_nope and q_rope), not both and "
        "not none");
  }
  if (split) {
    LACUNA_RETURN_IF_ERROR(match(args.q_nope, "q_nope")
                               .shape({&rows, &heads, &latent})
                               .dtypes({kBf16, kF16, kF32})
                               .last_contiguous()
                               .status());
    if (layout.rope > 0) {
      LACUNA_RETURN_IF_ERROR(match(args.q_rope, "q_rope")
                                 .shape({&rows, &heads, &rope})
                                 .dtypes({args.q_nope.dtype})
                                 .last_contiguous()
                                 .status());
    }
  } else {
    LACUNA_RETURN_IF_ERROR(match(args.q, "q")
                               .shape({&rows, &heads, &d_qk})
                               .dtypes({kBf16, kF16, kF32})
                               .last_contiguous()
                               .status());
  }
  if ((!split || layout.rope == 0) && !args.q_rope.empty()) {
    return invalid_argument("q_rope: given with " +
                            std::string(split ? "a layout without rope" : "a fused query") +
                            ", expected absent");
  }
  LACUNA_RETURN_IF_ERROR(match(args.indices, "indices")
                             .shape({&rows, &width})
                             .dtypes({kI32})
                             .last_contiguous()
                             .status());
  if (args.index_kind == IndexKind::kPositions) {
    Dim requests("R"), columns("max_blocks");
    LACUNA_RETURN_IF_ERROR(match(args.block_table, "block_table")
                               .shape({&requests, &columns})
                               .dtypes({kI32})
                               .last_contiguous()
                               .status());
    LACUNA_RETURN_IF_ERROR(
        match(args.request_ids, "request_ids").shape({&rows}).dtypes({kI32}).status());
    if (args.kv.num_blocks > 0 && args.kv.block_size <= 0) {
      return invalid_argument("kv: block_size " + std::to_string(args.kv.block_size) +
                              ", expected at least 1 for positions");
    }
  } else if (!args.block_table.empty() || !args.request_ids.empty()) {
    return invalid_argument(
        "block_table: given with index_kind kRows, expected absent (or index_kind kPositions)");
  }
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.valid_counts, "valid_counts", rows, false));
  LACUNA_RETURN_IF_ERROR(check_scale(args.softmax_scale));
  if (!args.sink.empty()) {
    LACUNA_RETURN_IF_ERROR(match(args.sink, "sink").shape({&heads}).dtypes({kF32}).status());
  }
  LACUNA_RETURN_IF_ERROR(match(args.out, "out")
                             .shape({&rows, &heads, &latent})
                             .dtypes({kBf16, kF16, kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_lse(args.lse, "lse", rows, heads));
  LACUNA_RETURN_IF_ERROR(check_lse(args.max_logits, "max_logits", rows, heads));
  if (args.rows_per_request < 1 || args.rows_per_request > 8) {
    return invalid_argument("rows_per_request: " + std::to_string(args.rows_per_request) +
                            ", expected 1 to 8");
  }
  if (args.valid_count_max < -1) {
    return invalid_argument("valid_count_max: " + std::to_string(args.valid_count_max) +
                            ", expected -1 (the list width) or a bound");
  }
  if (!args.schedule.empty()) {
    Dim entries("entries"), four("4", 4, "the schedule's format");
    LACUNA_RETURN_IF_ERROR(match(args.schedule, "schedule")
                               .shape({&entries, &four})
                               .dtypes({kI32})
                               .contiguous()
                               .status());
  }
  return check_devices(args.kv.device, {{args.q, "q"},
                                        {args.q_nope, "q_nope"},
                                        {args.q_rope, "q_rope"},
                                        {args.indices, "indices"},
                                        {args.block_table, "block_table"},
                                        {args.request_ids, "request_ids"},
                                        {args.valid_counts, "valid_counts"},
                                        {args.sink, "sink"},
                                        {args.schedule, "schedule"},
                                        {args.out, "out"},
                                        {args.lse, "lse"},
                                        {args.max_logits, "max_logits"}});
}

Device Op<SparseMlaScheduleArgs>::device(const SparseMlaScheduleArgs& args) {
  return args.schedule.device;
}

bool Op<SparseMlaScheduleArgs>::nothing_to_do(const SparseMlaScheduleArgs& args) {
  return args.num_rows == 0 && args.schedule.shape[0] == 0;
}

Status Op<SparseMlaScheduleArgs>::validate(const SparseMlaScheduleArgs& args) {
  if (args.num_rows < 0 || args.list_width < 0 || args.num_heads < 0 || args.d_qk < 0) {
    return invalid_argument(
        "num_rows, list_width, num_heads, d_qk: " + std::to_string(args.num_rows) + ", " +
        std::to_string(args.list_width) + ", " + std::to_string(args.num_heads) + ", " +
        std::to_string(args.d_qk) + " must not be negative");
  }
  Dim rows("num_rows", args.num_rows, "num_rows");
  Dim entries("entries"), four("4", 4, "the schedule's format");
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.valid_counts, "valid_counts", rows, false));
  LACUNA_RETURN_IF_ERROR(match(args.schedule, "schedule")
                             .shape({&entries, &four})
                             .dtypes({kI32})
                             .contiguous()
                             .status());
  return check_devices(args.schedule.device, {{args.valid_counts, "valid_counts"}});
}

Device Op<MhaArgs>::device(const MhaArgs& args) { return args.q.device; }

bool Op<MhaArgs>::nothing_to_do(const MhaArgs& args) {
  return args.q.shape[0] == 0 || args.q.shape[1] == 0;
}

Status Op<MhaArgs>::validate(const MhaArgs& args) {
  Dim rows("Tq"), keys("Tk"), heads("H"), d_qk("d_qk"), d_v("d_v"), batch("B"), starts("B + 1");
  LACUNA_RETURN_IF_ERROR(match(args.q, "q")
                             .shape({&rows, &heads, &d_qk})
                             .dtypes({kBf16, kF32})
                             .last_contiguous()
                             .status());
  const bool split = !args.k_nope.empty();
  if (args.k.empty() == !split) {
    return invalid_argument(
        "k: give either the fused keys (k) or the split ones (k_nope and k_rope), not both and "
        "not none");
  }
  const DType dtype = args.q.dtype;
  if (split) {
    Dim d_nope("d_nope"), d_rope("d_rope");
    LACUNA_RETURN_IF_ERROR(match(args.k_nope, "k_nope")
                               .shape({&keys, &heads, &d_nope})
                               .dtypes({dtype})
                               .last_contiguous()
                               .status());
    int64_t rope = 0;
    if (!args.k_rope.empty()) {
      LACUNA_RETURN_IF_ERROR(match(args.k_rope, "k_rope")
                                 .shape({&keys, &d_rope})
                                 .dtypes({dtype})
                                 .last_contiguous()
                                 .status());
      rope = d_rope.value();
    }
    if (d_nope.value() + rope != d_qk.value()) {
      return invalid_argument("k_nope: width " + std::to_string(d_nope.value()) + " and k_rope " +
                              std::to_string(rope) + " do not add up to the query's " +
                              std::to_string(d_qk.value()));
    }
  } else {
    if (!args.k_rope.empty()) {
      return invalid_argument("k_rope: given with fused keys, expected absent");
    }
    LACUNA_RETURN_IF_ERROR(match(args.k, "k")
                               .shape({&keys, &heads, &d_qk})
                               .dtypes({dtype})
                               .last_contiguous()
                               .status());
  }
  LACUNA_RETURN_IF_ERROR(
      match(args.v, "v").shape({&keys, &heads, &d_v}).dtypes({dtype}).last_contiguous().status());
  const bool by_starts = !args.cu_seqlens_q.empty() || !args.cu_seqlens_k.empty();
  const bool by_lengths = !args.seqlens_q.empty() || !args.seqlens_k.empty();
  if (by_starts == by_lengths) {
    return invalid_argument(
        "cu_seqlens_q: give either cu_seqlens_q and cu_seqlens_k, or seqlens_q and seqlens_k");
  }
  int64_t num_sequences = 0;
  if (by_starts) {
    LACUNA_RETURN_IF_ERROR(
        match(args.cu_seqlens_q, "cu_seqlens_q").shape({&starts}).dtypes({kI32}).status());
    LACUNA_RETURN_IF_ERROR(
        match(args.cu_seqlens_k, "cu_seqlens_k").shape({&starts}).dtypes({kI32}).status());
    if (starts.value() < 1) {
      return invalid_argument("cu_seqlens_q: no entries, expected at least the leading 0");
    }
    num_sequences = starts.value() - 1;
  } else {
    LACUNA_RETURN_IF_ERROR(
        match(args.seqlens_q, "seqlens_q").shape({&batch}).dtypes({kI32}).status());
    LACUNA_RETURN_IF_ERROR(
        match(args.seqlens_k, "seqlens_k").shape({&batch}).dtypes({kI32}).status());
    num_sequences = batch.value();
  }
  LACUNA_RETURN_IF_ERROR(check_scale(args.softmax_scale));
  if (!args.mask.empty()) {
    LACUNA_RETURN_IF_ERROR(check_bit_mask(args.mask, "mask", rows));
  }
  if (!args.key_start.empty()) {
    if (args.mask.empty()) {
      return invalid_argument("key_start: given without a mask, expected absent");
    }
    Dim sequences("B", num_sequences, "the sequences");
    LACUNA_RETURN_IF_ERROR(
        match(args.key_start, "key_start").shape({&sequences}).dtypes({kI32}).status());
  }
  if (args.seqlen_q_max < -1 || args.seqlen_k_max < -1) {
    return invalid_argument("seqlen_q_max, seqlen_k_max: " + std::to_string(args.seqlen_q_max) +
                            ", " + std::to_string(args.seqlen_k_max) +
                            ", expected -1 (all rows) or a bound");
  }
  LACUNA_RETURN_IF_ERROR(match(args.out, "out")
                             .shape({&rows, &heads, &d_v})
                             .dtypes({kBf16, kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_lse(args.lse, "lse", rows, heads));
  return check_devices(args.q.device, {{args.k, "k"},
                                       {args.k_nope, "k_nope"},
                                       {args.k_rope, "k_rope"},
                                       {args.v, "v"},
                                       {args.cu_seqlens_q, "cu_seqlens_q"},
                                       {args.cu_seqlens_k, "cu_seqlens_k"},
                                       {args.seqlens_q, "seqlens_q"},
                                       {args.seqlens_k, "seqlens_k"},
                                       {args.mask, "mask"},
                                       {args.key_start, "key_start"},
                                       {args.out, "out"},
                                       {args.lse, "lse"}});
}

Device Op<BuildMaskArgs>::device(const BuildMaskArgs& args) { return args.mask.device; }

bool Op<BuildMaskArgs>::nothing_to_do(const BuildMaskArgs& args) { return args.mask.shape[0] == 0; }

Status Op<BuildMaskArgs>::validate(const BuildMaskArgs& args) {
  Dim rows("T"), width("W");
  LACUNA_RETURN_IF_ERROR(match(args.indices, "indices")
                             .shape({&rows, &width})
                             .dtypes({kI32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.valid_counts, "valid_counts", rows, false));
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.key_begin, "key_begin", rows, false));
  LACUNA_RETURN_IF_ERROR(check_bit_mask(args.mask, "mask", rows));
  if (args.key_count < 0 || args.key_count > 32 * args.mask.shape[1]) {
    return invalid_argument("key_count: " + std::to_string(args.key_count) + ", expected 0 to " +
                            std::to_string(32 * args.mask.shape[1]) + " (32 bits a word)");
  }
  return check_devices(args.mask.device, {{args.indices, "indices"},
                                          {args.valid_counts, "valid_counts"},
                                          {args.key_begin, "key_begin"}});
}

Device Op<MergeStatesArgs>::device(const MergeStatesArgs& args) { return args.out.device; }

bool Op<MergeStatesArgs>::nothing_to_do(const MergeStatesArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0;
}

Status Op<MergeStatesArgs>::validate(const MergeStatesArgs& args) {
  if (args.states.empty() || args.states.size() > static_cast<size_t>(kMaxPartialStates)) {
    return invalid_argument("states: " + std::to_string(args.states.size()) +
                            " partial states, expected 1 to " + std::to_string(kMaxPartialStates) +
                            " (merge in rounds)");
  }
  Dim rows("T"), heads("H"), width("D");
  LACUNA_RETURN_IF_ERROR(match(args.out, "out")
                             .shape({&rows, &heads, &width})
                             .dtypes({kF32, kBf16, kF16})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_lse(args.lse, "lse", rows, heads));
  for (size_t i = 0; i < args.states.size(); ++i) {
    const std::string which = "states[" + std::to_string(i) + "]";
    const std::string out_name = which + ".out";
    const std::string lse_name = which + ".lse";
    LACUNA_RETURN_IF_ERROR(match(args.states[i].out, out_name.c_str())
                               .shape({&rows, &heads, &width})
                               .dtypes({kF32, kBf16, kF16})
                               .last_contiguous()
                               .device(args.out.device)
                               .status());
    LACUNA_RETURN_IF_ERROR(match(args.states[i].lse, lse_name.c_str())
                               .shape({&rows, &heads})
                               .dtypes({kF32})
                               .device(args.out.device)
                               .status());
  }
  return check_devices(args.out.device, {{args.lse, "lse"}});
}

Device Op<RescaleByLseArgs>::device(const RescaleByLseArgs& args) { return args.out.device; }

bool Op<RescaleByLseArgs>::nothing_to_do(const RescaleByLseArgs& args) {
  return args.out.shape[0] == 0 || args.out.shape[1] == 0;
}

Status Op<RescaleByLseArgs>::validate(const RescaleByLseArgs& args) {
  Dim ranks("N"), rows("T"), heads("H"), width("D");
  LACUNA_RETURN_IF_ERROR(match(args.out, "out")
                             .shape({&rows, &heads, &width})
                             .dtypes({kF32, kBf16, kF16})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(
      match(args.lse, "lse").shape({&ranks, &rows, &heads}).dtypes({kF32}).status());
  if (args.rank < 0 || args.rank >= ranks.value()) {
    return invalid_argument("rank: " + std::to_string(args.rank) + ", expected 0 to " +
                            std::to_string(ranks.value() - 1) + " (lse has " +
                            std::to_string(ranks.value()) + " ranks)");
  }
  LACUNA_RETURN_IF_ERROR(check_lse(args.merged_lse, "merged_lse", rows, heads));
  return check_devices(args.out.device, {{args.lse, "lse"}, {args.merged_lse, "merged_lse"}});
}

int64_t schedule_entries(const Context& context, int64_t num_rows, int64_t list_width) {
  // One entry a (row, split). Splits are never shorter than 64 keys, nor more than 64 a row, on any
  // backend; a ragged schedule may add one cut a worker.
  const int64_t splits = std::clamp<int64_t>((list_width + 63) / 64, 1, 64);
  int64_t workers = 0;
  for (const DeviceInfo& device : context.state().devices) {
    workers = std::max<int64_t>(workers, std::max(device.num_threads, 2 * device.sm_count));
  }
  return num_rows * splits + workers;
}

LACUNA_PUBLIC_OP(SparseMlaArgs, sparse_mla)
LACUNA_PUBLIC_OP(SparseMlaScheduleArgs, build_schedule)
LACUNA_PUBLIC_OP(MhaArgs, mha)
LACUNA_PUBLIC_OP(BuildMaskArgs, build_mask)
LACUNA_PUBLIC_OP(MergeStatesArgs, merge_states)
LACUNA_PUBLIC_OP(RescaleByLseArgs, rescale_by_lse)

}  // namespace lacuna
