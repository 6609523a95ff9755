// First come, first served, one at a time.
#include "engine/scheduler.h"

#include <algorithm>

#include "core/check.h"

namespace lacuna {

Sequence* Scheduler::find(int64_t id) {
  for (const std::unique_ptr<Sequence>& sequence : queue_) {
    if (sequence->id == id) {
      return sequence.get();
    }
  }
  return nullptr;
}

std::unique_ptr<Sequence> Scheduler::remove(int64_t id) {
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if ((*it)->id == id) {
      std::unique_ptr<Sequence> sequence = std::move(*it);
      queue_.erase(it);
      return sequence;
    }
  }
  return nullptr;
}

Status Scheduler::schedule(std::vector<ScheduledRows>* rows) {
  rows->clear();
  if (queue_.empty()) {
    return ok_status();
  }
  Sequence* sequence = queue_.front().get();
  const int64_t remaining = sequence->num_tokens() - sequence->num_computed;
  const int64_t num_rows = std::min(remaining, rows_max_);
  LACUNA_RETURN_IF_ERROR(sequence->blocks.reserve(sequence->num_computed + num_rows));
  rows->push_back({sequence, num_rows, num_rows == remaining});
  return ok_status();
}

void fill_batch(const std::vector<ScheduledRows>& scheduled, Batch* batch) {
  batch->clear();
  batch->query_starts.push_back(0);
  for (const ScheduledRows& rows : scheduled) {
    batch->table_width =
        std::max(batch->table_width, static_cast<int64_t>(rows.sequence->blocks.blocks().size()));
  }
  for (const ScheduledRows& rows : scheduled) {
    const Sequence& sequence = *rows.sequence;
    const int32_t request_idx = static_cast<int32_t>(batch->seq_lens.size());
    for (int64_t i = 0; i < rows.num_rows; ++i) {
      const int64_t position = sequence.num_computed + i;
      batch->token_ids.push_back(sequence.tokens[position]);
      batch->positions.push_back(static_cast<int32_t>(position));
      batch->visible_lengths.push_back(static_cast<int32_t>(position + 1));
      batch->request_ids.push_back(request_idx);
      batch->slot_mapping.push_back(sequence.blocks.slot(position));
    }
    batch->query_starts.push_back(static_cast<int32_t>(batch->num_rows()));
    batch->seq_lens.push_back(static_cast<int32_t>(sequence.num_computed + rows.num_rows));
    if (sequence.is_decoding()) {
      LACUNA_CHECK(batch->num_decodes == request_idx);  // decode sequences come first
      ++batch->num_decodes;
    }
    for (const int32_t block : sequence.blocks.blocks()) {
      batch->block_table.push_back(block);
    }
    batch->block_table.resize((request_idx + 1) * batch->table_width, -1);
    if (rows.samples) {
      batch->logits_rows.push_back(static_cast<int32_t>(batch->num_rows() - 1));
    }
  }
}

}  // namespace lacuna
