// Views over a batch.
#include "attention/batch.h"

namespace lacuna {

void Batch::clear() {
  for (std::vector<int32_t>* list : {&token_ids, &positions, &request_ids, &visible_lengths,
                                     &query_starts, &seq_lens, &block_table, &logits_rows}) {
    list->clear();
  }
  slot_mapping.clear();
  num_decodes = 0;
  table_width = 0;
}

BatchTensors host_tensors(const Batch& batch) {
  const int64_t rows = batch.num_rows();
  return {
      .token_ids = view_of(batch.token_ids.data(), {rows}),
      .positions = view_of(batch.positions.data(), {rows}),
      .request_ids = view_of(batch.request_ids.data(), {rows}),
      .visible_lengths = view_of(batch.visible_lengths.data(), {rows}),
      .slot_mapping = view_of(batch.slot_mapping.data(), {rows}),
      .block_table = view_of(batch.block_table.data(), {batch.num_requests(), batch.table_width}),
      .logits_rows =
          view_of(batch.logits_rows.data(), {static_cast<int64_t>(batch.logits_rows.size())})};
}

}  // namespace lacuna
