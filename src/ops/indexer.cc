// Validates the arguments of the indexer's operations once, then dispatches.
#include <string>

#include "core/match.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;

Status check_table(const ConstTensorView& table) {
  Dim requests("R"), columns("max_blocks");
  return match(table, "block_table")
      .shape({&requests, &columns})
      .dtypes({kI32})
      .last_contiguous()
      .status();
}

Status check_addressing(int64_t num_blocks, int64_t block_size, int64_t block_stride_rows) {
  if (num_blocks < 0) {
    return invalid_argument("num_blocks: " + std::to_string(num_blocks) + " must not be negative");
  }
  if (block_size < 1) {
    return invalid_argument("block_size: " + std::to_string(block_size) + ", expected at least 1");
  }
  if (block_stride_rows != 0 && block_stride_rows < block_size) {
    return invalid_argument("block_stride_rows: " + std::to_string(block_stride_rows) +
                            ", expected 0 or at least block_size " + std::to_string(block_size));
  }
  return check_row_ids(num_blocks, block_size,
                       block_stride_rows == 0 ? block_size : block_stride_rows, "num_blocks");
}

// Query, weights, keys and addressing: what index_logits and select_keys share.
template <class Args>
Status check_scoring(const Args& args, Dim& rows) {
  LACUNA_RETURN_IF_ERROR(check_cache(args.keys, "keys"));
  if (!args.keys.layout.is_index()) {
    return invalid_argument("keys: layout " + std::string(kv_format_name(args.keys.layout.format)) +
                            " holds no index keys, expected index_f32, index_bf16 or index_fp8");
  }
  Dim heads("Hi"), dim("dim", args.keys.layout.latent, "keys.layout");
  LACUNA_RETURN_IF_ERROR(match(args.q, "q")
                             .shape({&rows, &heads, &dim})
                             .dtypes({kF32, kBf16, DType::kFloat8E4M3})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(match(args.head_weights, "head_weights")
                             .shape({&rows, &heads})
                             .dtypes({kF32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.request_ids, "request_ids", rows, true));
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.visible_lengths, "visible_lengths", rows, true));
  const bool paged = !args.block_table.empty();
  if (paged == !args.key_starts.empty()) {
    return invalid_argument(
        "block_table: give either block_table (paged keys) or key_starts (ragged keys), not both "
        "and not none");
  }
  if (paged) {
    LACUNA_RETURN_IF_ERROR(check_table(args.block_table));
    if (args.keys.num_blocks > 0 && args.keys.block_size < 1) {
      return invalid_argument("keys: block_size " + std::to_string(args.keys.block_size) +
                              ", expected at least 1");
    }
  } else {
    Dim requests("R");
    LACUNA_RETURN_IF_ERROR(
        match(args.key_starts, "key_starts").shape({&requests}).dtypes({kI32}).status());
    if (args.keys.num_blocks > 1) {
      return invalid_argument("keys: " + std::to_string(args.keys.num_blocks) +
                              " blocks with key_starts, expected one (flat_rows)");
    }
  }
  if (args.next_n < 1) {
    return invalid_argument("next_n: " + std::to_string(args.next_n) + ", expected at least 1");
  }
  return check_devices(args.keys.device, {{args.q, "q"},
                                          {args.head_weights, "head_weights"},
                                          {args.request_ids, "request_ids"},
                                          {args.visible_lengths, "visible_lengths"},
                                          {args.block_table, "block_table"},
                                          {args.key_starts, "key_starts"}});
}

Status check_k(int64_t k, int kpool) {
  if (kpool < 1) {
    return invalid_argument("kpool: " + std::to_string(kpool) + ", expected at least 1");
  }
  if (k < 1 || k % kpool != 0) {
    return invalid_argument("k: " + std::to_string(k) + ", expected a positive multiple of kpool " +
                            std::to_string(kpool));
  }
  return ok_status();
}

Status check_outputs(const SelectionOutputs& outputs, int64_t k, int kpool, Device device,
                     Dim& rows, bool request_ids_given) {
  if (outputs.indices.empty() && outputs.rows.empty() && outputs.mask.empty()) {
    return invalid_argument("outputs: none of indices, rows and mask is given");
  }
  const int64_t width_min = selection_width(k, kpool);
  struct List {
    const ConstTensorView tensor;
    const char* name;
    DType dtype;
  };
  for (const List& list :
       {List{outputs.indices, "outputs.indices", kI32},
        List{outputs.scores, "outputs.scores", kF32}, List{outputs.rows, "outputs.rows", kI32}}) {
    if (list.tensor.empty()) {
      continue;
    }
    Dim width("W");
    LACUNA_RETURN_IF_ERROR(match(list.tensor, list.name)
                               .shape({&rows, &width})
                               .dtypes({list.dtype})
                               .last_contiguous()
                               .device(device)
                               .status());
    if (width.value() < width_min) {
      return invalid_argument(std::string(list.name) + ": width " + std::to_string(width.value()) +
                              ", expected at least " + std::to_string(width_min) +
                              " (k + kpool - 1)");
    }
  }
  LACUNA_RETURN_IF_ERROR(check_row_ints(outputs.counts, "outputs.counts", rows, false));
  if (!outputs.rows.empty()) {
    LACUNA_RETURN_IF_ERROR(
        check_row_ints(outputs.request_ids, "outputs.request_ids", rows, !request_ids_given));
    LACUNA_RETURN_IF_ERROR(check_table(outputs.block_table));
    LACUNA_RETURN_IF_ERROR(
        check_addressing(outputs.num_blocks, outputs.block_size, outputs.block_stride_rows));
  }
  if (!outputs.mask.empty()) {
    LACUNA_RETURN_IF_ERROR(check_bit_mask(outputs.mask, "outputs.mask", rows));
  }
  return check_devices(device, {{outputs.counts, "outputs.counts"},
                                {outputs.request_ids, "outputs.request_ids"},
                                {outputs.block_table, "outputs.block_table"},
                                {outputs.mask, "outputs.mask"}});
}

}  // namespace

Device Op<TranslateIndicesArgs>::device(const TranslateIndicesArgs& args) {
  return args.rows.device;
}

bool Op<TranslateIndicesArgs>::nothing_to_do(const TranslateIndicesArgs& args) {
  return args.rows.shape[0] == 0;
}

Status Op<TranslateIndicesArgs>::validate(const TranslateIndicesArgs& args) {
  Dim rows("T"), width("W");
  LACUNA_RETURN_IF_ERROR(match(args.indices, "indices")
                             .shape({&rows, &width})
                             .dtypes({kI32})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.request_ids, "request_ids", rows, true));
  LACUNA_RETURN_IF_ERROR(check_table(args.block_table));
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.valid_counts, "valid_counts", rows, false));
  LACUNA_RETURN_IF_ERROR(
      check_addressing(args.num_blocks, args.block_size, args.block_stride_rows));
  const DcpShard& dcp = args.dcp;
  if (dcp.size < 1 || dcp.rank < 0 || dcp.rank >= dcp.size || dcp.interleave < 1) {
    return invalid_argument("dcp: size " + std::to_string(dcp.size) + ", rank " +
                            std::to_string(dcp.rank) + ", interleave " +
                            std::to_string(dcp.interleave) +
                            "; expected size >= 1, 0 <= rank < size, interleave >= 1");
  }
  if (args.workspace_ids.empty() != args.workspace_starts.empty()) {
    return invalid_argument("workspace_starts: workspace_ids and workspace_starts go together");
  }
  if (!args.workspace_ids.empty()) {
    Dim starts("P");
    LACUNA_RETURN_IF_ERROR(check_row_ints(args.workspace_ids, "workspace_ids", rows, true));
    LACUNA_RETURN_IF_ERROR(
        match(args.workspace_starts, "workspace_starts").shape({&starts}).dtypes({kI32}).status());
  }
  LACUNA_RETURN_IF_ERROR(
      match(args.rows, "rows").shape({&rows, &width}).dtypes({kI32}).last_contiguous().status());
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.counts, "counts", rows, false));
  return check_devices(args.rows.device, {{args.indices, "indices"},
                                          {args.request_ids, "request_ids"},
                                          {args.block_table, "block_table"},
                                          {args.valid_counts, "valid_counts"},
                                          {args.workspace_ids, "workspace_ids"},
                                          {args.workspace_starts, "workspace_starts"},
                                          {args.counts, "counts"}});
}

Device Op<IndexLogitsArgs>::device(const IndexLogitsArgs& args) { return args.logits.device; }

bool Op<IndexLogitsArgs>::nothing_to_do(const IndexLogitsArgs& args) {
  return args.logits.shape[0] == 0 || args.logits.shape[1] == 0;
}

Status Op<IndexLogitsArgs>::validate(const IndexLogitsArgs& args) {
  Dim rows("T"), columns("C");
  LACUNA_RETURN_IF_ERROR(check_scoring(args, rows));
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &columns})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .device(args.keys.device)
                             .status());
  if (args.scratch_bytes_max < 0) {
    return invalid_argument("scratch_bytes_max: " + std::to_string(args.scratch_bytes_max) +
                            ", expected 0 (no cap) or a size");
  }
  return ok_status();
}

Device Op<TopKArgs>::device(const TopKArgs& args) { return args.logits.device; }

bool Op<TopKArgs>::nothing_to_do(const TopKArgs& args) { return args.logits.shape[0] == 0; }

Status Op<TopKArgs>::validate(const TopKArgs& args) {
  Dim rows("T"), columns("C");
  LACUNA_RETURN_IF_ERROR(match(args.logits, "logits")
                             .shape({&rows, &columns})
                             .dtypes({kF32, kBf16})
                             .last_contiguous()
                             .status());
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.row_starts, "row_starts", rows, false));
  LACUNA_RETURN_IF_ERROR(check_row_ints(args.lengths, "lengths", rows, false));
  LACUNA_RETURN_IF_ERROR(check_k(args.k, args.kpool));
  if (!args.candidate_ids.empty()) {
    LACUNA_RETURN_IF_ERROR(match(args.candidate_ids, "candidate_ids")
                               .shape({&rows, &columns})
                               .dtypes({kI32})
                               .last_contiguous()
                               .status());
    if (args.kpool != 1) {
      return invalid_argument("candidate_ids: not possible with kpool " +
                              std::to_string(args.kpool) + ", expected kpool 1");
    }
  }
  LACUNA_RETURN_IF_ERROR(
      check_outputs(args.outputs, args.k, args.kpool, args.logits.device, rows, false));
  return check_devices(args.logits.device, {{args.row_starts, "row_starts"},
                                            {args.lengths, "lengths"},
                                            {args.candidate_ids, "candidate_ids"}});
}

Device Op<SelectKeysArgs>::device(const SelectKeysArgs& args) { return args.keys.device; }

bool Op<SelectKeysArgs>::nothing_to_do(const SelectKeysArgs& args) { return args.q.shape[0] == 0; }

Status Op<SelectKeysArgs>::validate(const SelectKeysArgs& args) {
  Dim rows("T");
  LACUNA_RETURN_IF_ERROR(check_scoring(args, rows));
  LACUNA_RETURN_IF_ERROR(check_k(args.k, args.kpool));
  if (args.visible_length_max < -1 || args.logits_bytes_max < 0) {
    return invalid_argument(
        "visible_length_max, logits_bytes_max: " + std::to_string(args.visible_length_max) + ", " +
        std::to_string(args.logits_bytes_max) + ", expected -1 or a bound, and 0 or a size");
  }
  return check_outputs(args.outputs, args.k, args.kpool, args.keys.device, rows, true);
}

LACUNA_PUBLIC_OP(TranslateIndicesArgs, translate_indices)
LACUNA_PUBLIC_OP(IndexLogitsArgs, index_logits)
LACUNA_PUBLIC_OP(TopKArgs, top_k)
LACUNA_PUBLIC_OP(SelectKeysArgs, select_keys)

}  // namespace lacuna
