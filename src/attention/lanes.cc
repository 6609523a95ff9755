// How each lane is made of operations.
#include "attention/lanes.h"

namespace lacuna {
namespace {

ConstTensorView host_view(const std::vector<int32_t>& list, Device device) {
  return view_of(list.data(), {static_cast<int64_t>(list.size())}, device);
}

}  // namespace

Status select_group_keys(OpRunner& run, const AttentionPlan& plan, const Batch& batch,
                         const BatchTensors& tensors, const IndexerInputs& inputs,
                         const KvCacheView& index_keys, const KvCacheView& latent,
                         const SelectionSource& source, int layer, int64_t k, IndexGroup* group) {
  group->leader = layer;
  const int64_t rows = plan.num_mqa_rows;
  const ConstTensorView request_ids = tensors.request_ids.slice(0, 0, rows);
  const ConstTensorView visible_lengths = tensors.visible_lengths.slice(0, 0, rows);
  if (source.kind != SelectionSource::Kind::kIndexer) {
    if (!run.measuring()) {
      choose_keys(source, layer, k, {batch.visible_lengths.data(), static_cast<size_t>(rows)},
                  group->positions, group->counts);
    }
    return run(TranslateIndicesArgs{.indices = group->positions,
                                    .request_ids = request_ids,
                                    .block_table = tensors.block_table,
                                    .num_blocks = latent.num_blocks,
                                    .block_size = latent.block_size,
                                    .block_stride_rows = latent.block_stride_rows(),
                                    .rows = group->rows});
  }
  return run(SelectKeysArgs{.q = inputs.q,
                            .head_weights = inputs.head_weights,
                            .keys = index_keys,
                            .request_ids = request_ids,
                            .visible_lengths = visible_lengths,
                            .block_table = tensors.block_table,
                            .next_n = plan.rows_per_request,
                            .visible_length_max = plan.visible_length_max,
                            .k = k,
                            .outputs = {.indices = group->positions,
                                        .counts = group->counts,
                                        .rows = group->rows,
                                        .block_table = tensors.block_table,
                                        .num_blocks = latent.num_blocks,
                                        .block_size = latent.block_size,
                                        .block_stride_rows = latent.block_stride_rows()}});
}

Status sparse_mqa_lane(OpRunner& run, const AttentionPlan& plan, const KvCacheView& latent,
                       const IndexGroup& group, const MqaInputs& inputs) {
  return run(
      SparseMlaArgs{.q_nope = inputs.q_nope,
                    .q_rope = inputs.q_rope,
                    .kv = latent,
                    .indices = group.rows,
                    .valid_counts = group.counts,
                    .softmax_scale = inputs.softmax_scale,
                    .out = inputs.out,
                    .rows_per_request = plan.rows_per_request,
                    .valid_count_max = std::min(plan.visible_length_max, group.rows.shape[1])});
}

Status dense_mha_lane(OpRunner& run, const AttentionPlan& plan, const BatchTensors& tensors,
                      const KvCacheView& latent, const MhaInputs& inputs) {
  const Device device = inputs.out.device;
  const int64_t num_sequences = static_cast<int64_t>(plan.mha_request_ids.size());
  const int64_t heads = inputs.out.shape[1];
  const int64_t head_width = inputs.qk_nope_head_dim + inputs.v_head_dim;
  const int64_t d_latent = latent.layout.latent;
  LACUNA_RETURN_IF_ERROR(run(
      GatherKvArgs{.kv = latent,
                   .block_table = tensors.block_table,
                   .request_ids = host_view(plan.mha_request_ids, device),
                   .starts = host_view(plan.mha_starts, device),
                   .lengths = host_view(plan.mha_lengths, device),
                   .out_starts = host_view(plan.cu_seqlens_k, device).slice(0, 0, num_sequences),
                   .out = inputs.keys}));
  LACUNA_RETURN_IF_ERROR(run(LinearArgs{
      .x = inputs.keys.slice(1, 0, d_latent), .weight = inputs.kv_b, .out = inputs.keys_up}));
  // [keys, H * (nope + v)] seen as [keys, H, nope] and [keys, H, v].
  ConstTensorView k_nope = inputs.keys_up;
  k_nope.rank = 3;
  k_nope.shape = {plan.num_mha_keys, heads, inputs.qk_nope_head_dim};
  k_nope.strides = {inputs.keys_up.strides[0], head_width, 1};
  ConstTensorView v = k_nope;
  v.data = k_nope.as<char>() + inputs.qk_nope_head_dim * size_bytes(v.dtype);
  v.shape[2] = inputs.v_head_dim;
  return run(MhaArgs{.q = inputs.q,
                     .k_nope = k_nope,
                     .k_rope = latent.layout.rope > 0 ? ConstTensorView(inputs.keys.slice(
                                                            1, d_latent, latent.layout.rope))
                                                      : ConstTensorView(),
                     .v = v,
                     .cu_seqlens_q = host_view(plan.cu_seqlens_q, device),
                     .cu_seqlens_k = host_view(plan.cu_seqlens_k, device),
                     .softmax_scale = inputs.softmax_scale,
                     .causal = true,
                     .seqlen_q_max = plan.seqlen_q_max,
                     .seqlen_k_max = plan.seqlen_k_max,
                     .out = inputs.out});
}

}  // namespace lacuna
