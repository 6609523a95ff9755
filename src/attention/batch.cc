// Views over a batch.
#include "attention/batch.h"

#include "attention/plan.h"

namespace lacuna {
namespace {

ConstTensorView list_view(const std::vector<int32_t>& list) {
  return view_of(list.data(), {static_cast<int64_t>(list.size())});
}

}  // namespace

void Batch::clear() {
  for (std::vector<int32_t>* list :
       {&token_ids, &positions, &request_ids, &visible_lengths, &token_sources, &query_starts,
        &seq_lens, &block_table, &logits_rows}) {
    list->clear();
  }
  slot_mapping.clear();
  num_decodes = 0;
  table_width = 0;
}

BatchTensors host_tensors(const Batch& batch, const AttentionPlan& plan) {
  return {
      .token_ids = list_view(batch.token_ids),
      .positions = list_view(batch.positions),
      .request_ids = list_view(batch.request_ids),
      .visible_lengths = list_view(batch.visible_lengths),
      .slot_mapping = view_of(batch.slot_mapping.data(), {batch.num_rows()}),
      .block_table = view_of(batch.block_table.data(), {batch.num_requests(), batch.table_width}),
      .logits_rows = list_view(batch.logits_rows),
      .mha_request_ids = list_view(plan.mha_request_ids),
      .mha_starts = list_view(plan.mha_starts),
      .mha_lengths = list_view(plan.mha_lengths),
      .cu_seqlens_q = list_view(plan.cu_seqlens_q),
      .cu_seqlens_k = list_view(plan.cu_seqlens_k)};
}

}  // namespace lacuna
