// How each lane is made of operations.
#include "attention/lanes.h"

#include <algorithm>
#include <array>

#include "ops/row_steps.h"

namespace lacuna {
namespace {

// Attention of the piece's rows over its keys; `lse` is empty when the piece is the only one.
Status attend_piece(OpRunner& run, const MhaPiece& piece, const BatchTensors& tensors,
                    const KvCacheView& latent, const MhaInputs& inputs, TensorView out,
                    TensorView lse) {
  const int64_t heads = inputs.out.shape[1];
  const int64_t head_width = inputs.qk_nope_head_dim + inputs.v_head_dim;
  const int64_t d_latent = latent.layout.latent;
  const int64_t count = piece.num_sequences;
  const TensorView keys = inputs.keys.slice(0, 0, piece.num_keys);
  const TensorView keys_up = inputs.keys_up.slice(0, 0, piece.num_keys);
  const ConstTensorView starts = tensors.mha_starts.slice(0, piece.list_begin, count);
  const ConstTensorView cu_seqlens_k = tensors.cu_seqlens_k.slice(0, piece.cu_begin, count + 1);
  LACUNA_RETURN_IF_ERROR(
      run(GatherKvArgs{.kv = latent,
                       .block_table = tensors.block_table,
                       .request_ids = tensors.mha_request_ids.slice(0, piece.list_begin, count),
                       .starts = starts,
                       .lengths = tensors.mha_lengths.slice(0, piece.list_begin, count),
                       .out_starts = cu_seqlens_k.slice(0, 0, count),
                       .out = keys}));
  LACUNA_RETURN_IF_ERROR(
      run(LinearArgs{.x = keys.slice(1, 0, d_latent), .weight = inputs.kv_b, .out = keys_up}));
  // [keys, H * (nope + v)] seen as [keys, H, nope] and [keys, H, v].
  ConstTensorView k_nope = keys_up;
  k_nope.rank = 3;
  k_nope.shape = {piece.num_keys, heads, inputs.qk_nope_head_dim};
  k_nope.strides = {keys_up.strides[0], head_width, 1};
  ConstTensorView v = k_nope;
  v.data = k_nope.as<char>() + inputs.qk_nope_head_dim * size_bytes(v.dtype);
  v.shape[2] = inputs.v_head_dim;
  MhaArgs args = {.q = inputs.q.slice(0, piece.first_row, piece.num_rows),
                  .k_nope = k_nope,
                  .k_rope = latent.layout.rope > 0
                                ? ConstTensorView(keys.slice(1, d_latent, latent.layout.rope))
                                : ConstTensorView(),
                  .v = v,
                  .cu_seqlens_q = tensors.cu_seqlens_q.slice(0, piece.cu_begin, count + 1),
                  .cu_seqlens_k = cu_seqlens_k,
                  .softmax_scale = inputs.softmax_scale,
                  .causal = piece.causal,
                  .seqlen_q_max = piece.seqlen_q_max,
                  .seqlen_k_max = piece.seqlen_k_max,
                  .out = out,
                  .lse = lse};
  if (!inputs.mask.empty()) {
    // Bit p of a row's mask is position p; the piece's first key is bit `start`.
    args.mask = inputs.mask.slice(0, piece.first_row, piece.num_rows);
    args.key_start = starts;
  }
  return run(args);
}

}  // namespace

Status select_group_keys(OpRunner& run, const AttentionPlan& plan, const Batch& batch,
                         const BatchTensors& tensors, const IndexerInputs& inputs,
                         const KvCacheView& index_keys, const KvCacheView& latent,
                         const SelectionSource& source, int layer, int64_t k, IndexLists* lists) {
  lists->leader = layer;
  const int64_t mqa_rows = plan.num_mqa_rows;
  const int64_t list_rows = plan.num_list_rows;
  if (source.kind != SelectionSource::Kind::kIndexer) {
    if (!run.measuring()) {
      const std::span<const int32_t> visible(batch.visible_lengths.data(), list_rows);
      if (lists->writer == nullptr) {
        choose_keys(source, layer, k, visible, lists->positions, lists->counts);
      } else {
        LACUNA_RETURN_IF_ERROR(
            lists->writer->write(source, layer, k, visible, lists->positions, lists->counts));
      }
    }
    if (mqa_rows > 0) {
      LACUNA_RETURN_IF_ERROR(
          run(TranslateIndicesArgs{.indices = lists->positions.slice(0, 0, mqa_rows),
                                   .request_ids = tensors.request_ids.slice(0, 0, mqa_rows),
                                   .block_table = tensors.block_table,
                                   .num_blocks = latent.num_blocks,
                                   .block_size = latent.block_size,
                                   .block_stride_rows = latent.block_stride_rows(),
                                   .rows = lists->rows}));
    }
  } else {
    // The MQA rows, then those of the masked lane, which need no rows of the cache.
    for (const auto& [begin, count] :
         {std::array{int64_t{0}, mqa_rows}, std::array{mqa_rows, list_rows - mqa_rows}}) {
      if (count == 0) {
        continue;
      }
      const bool is_mqa = begin == 0 && mqa_rows > 0;
      SelectKeysArgs args = {
          .q = inputs.q.slice(0, begin, count),
          .head_weights = inputs.head_weights.slice(0, begin, count),
          .keys = index_keys,
          .request_ids = tensors.request_ids.slice(0, begin, count),
          .visible_lengths = tensors.visible_lengths.slice(0, begin, count),
          .block_table = tensors.block_table,
          .next_n = is_mqa ? plan.rows_per_request : 1,
          .visible_length_max = is_mqa ? plan.visible_length_max : plan.seqlen_k_max,
          .k = k,
          .outputs = {.indices = lists->positions.slice(0, begin, count),
                      .counts = lists->counts.slice(0, begin, count)}};
      if (is_mqa) {
        args.outputs.rows = lists->rows;
        args.outputs.block_table = tensors.block_table;
        args.outputs.num_blocks = latent.num_blocks;
        args.outputs.block_size = latent.block_size;
        args.outputs.block_stride_rows = latent.block_stride_rows();
      }
      LACUNA_RETURN_IF_ERROR(run(args));
    }
  }
  if (list_rows == mqa_rows) {
    return ok_status();
  }
  return run(BuildMaskArgs{.indices = lists->positions.slice(0, mqa_rows, list_rows - mqa_rows),
                           .valid_counts = lists->counts.slice(0, mqa_rows, list_rows - mqa_rows),
                           .key_count = plan.seqlen_k_max,
                           .mask = lists->mask});
}

Status sparse_mqa_lane(OpRunner& run, const AttentionPlan& plan, const KvCacheView& latent,
                       const IndexLists& lists, const MqaInputs& inputs) {
  return run(
      SparseMlaArgs{.q_nope = inputs.q_nope,
                    .q_rope = inputs.q_rope,
                    .kv = latent,
                    .indices = lists.rows,
                    .valid_counts = lists.counts.slice(0, 0, plan.num_mqa_rows),
                    .softmax_scale = inputs.softmax_scale,
                    .out = inputs.out,
                    .rows_per_request = plan.rows_per_request,
                    .valid_count_max = std::min(plan.visible_length_max, lists.rows.shape[1])});
}

Status mha_lane(OpRunner& run, const AttentionPlan& plan, const BatchTensors& tensors,
                const KvCacheView& latent, const MhaInputs& inputs) {
  // Chunks come in every size, and another number of rows may be another kernel's. It is enough to
  // run them all once, beside the largest.
  if (run.measuring() || (run.warming_up() && plan.num_mha_keys == inputs.keys.shape[0])) {
    for (int64_t keys = 1; keys < plan.num_mha_keys; keys = next_rows(keys, plan.num_mha_keys)) {
      LACUNA_RETURN_IF_ERROR(
          run(LinearArgs{.x = inputs.keys.slice(0, 0, keys).slice(1, 0, latent.layout.latent),
                         .weight = inputs.kv_b,
                         .out = inputs.keys_up.slice(0, 0, keys)}));
    }
  }
  if (plan.mha_pieces.size() == 1) {
    return attend_piece(run, plan.mha_pieces[0], tensors, latent, inputs, inputs.out, {});
  }
  for (const MhaPiece& piece : plan.mha_pieces) {
    const TensorView merged_out = inputs.merged_out.slice(0, piece.first_row, piece.num_rows);
    const TensorView merged_lse = inputs.merged_lse.slice(0, piece.first_row, piece.num_rows);
    if (piece.causal) {
      LACUNA_RETURN_IF_ERROR(
          attend_piece(run, piece, tensors, latent, inputs, merged_out, merged_lse));
      continue;
    }
    const TensorView out = inputs.piece_out.slice(0, 0, piece.num_rows);
    const TensorView lse = inputs.piece_lse.slice(0, 0, piece.num_rows);
    LACUNA_RETURN_IF_ERROR(attend_piece(run, piece, tensors, latent, inputs, out, lse));
    const std::array states = {PartialState{merged_out, merged_lse}, PartialState{out, lse}};
    LACUNA_RETURN_IF_ERROR(
        run(MergeStatesArgs{.states = states, .out = merged_out, .lse = merged_lse}));
  }
  // One state joined with nothing: the conversion to the type of the activations.
  const std::array whole = {PartialState{inputs.merged_out, inputs.merged_lse}};
  return run(MergeStatesArgs{.states = whole, .out = inputs.out});
}

}  // namespace lacuna
