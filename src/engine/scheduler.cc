// Continuous batching: decode first, then prompts in order, preemption of the newest.
#include "engine/scheduler.h"

#include <algorithm>

#include "core/check.h"

namespace lacuna {
namespace {

bool runs_before(const Sequence& a, const Sequence& b) {
  return a.request.priority != b.request.priority ? a.request.priority < b.request.priority
                                                  : a.id < b.id;
}

template <class List>
auto find_id(List& list, int64_t id) {
  return std::find_if(list.begin(), list.end(),
                      [id](const auto& sequence) { return sequence->id == id; });
}

template <class List>
void insert_in_order(List& list, std::unique_ptr<Sequence> sequence) {
  const auto at =
      std::upper_bound(list.begin(), list.end(), sequence,
                       [](const auto& a, const auto& b) { return runs_before(*a, *b); });
  list.insert(at, std::move(sequence));
}

}  // namespace

void Scheduler::add(std::unique_ptr<Sequence> sequence) { insert_waiting(std::move(sequence)); }

void Scheduler::insert_waiting(std::unique_ptr<Sequence> sequence) {
  insert_in_order(waiting_, std::move(sequence));
}

Sequence* Scheduler::find(int64_t id) {
  if (const auto found = find_id(running_, id); found != running_.end()) {
    return found->get();
  }
  const auto found = find_id(waiting_, id);
  return found == waiting_.end() ? nullptr : found->get();
}

std::unique_ptr<Sequence> Scheduler::remove(int64_t id) {
  std::unique_ptr<Sequence> sequence;
  if (const auto found = find_id(running_, id); found != running_.end()) {
    sequence = std::move(*found);
    running_.erase(found);
  } else if (const auto queued = find_id(waiting_, id); queued != waiting_.end()) {
    sequence = std::move(*queued);
    waiting_.erase(queued);
  }
  return sequence;
}

std::vector<std::unique_ptr<Sequence>> Scheduler::take_cancelled() {
  std::vector<std::unique_ptr<Sequence>> cancelled;
  const auto take = [&](auto& list) {
    for (auto& sequence : list) {
      if (sequence->cancelled) {
        cancelled.push_back(std::move(sequence));
      }
    }
    std::erase_if(list, [](const auto& sequence) { return sequence == nullptr; });
  };
  take(running_);
  take(waiting_);
  return cancelled;
}

void Scheduler::preempt_newest() {
  std::unique_ptr<Sequence> sequence = std::move(running_.back());
  running_.pop_back();
  sequence->blocks.clear();
  sequence->num_computed = 0;
  sequence->record.selected_keys.clear();  // recorded anew
  ++num_preemptions_;
  insert_waiting(std::move(sequence));
}

bool Scheduler::make_room(Sequence* sequence, int64_t num_rows) {
  while (!sequence->blocks.can_reserve(sequence->num_computed + num_rows)) {
    if (running_.back().get() == sequence) {
      return false;
    }
    preempt_newest();
  }
  const Status reserved = sequence->blocks.reserve(sequence->num_computed + num_rows);
  LACUNA_CHECK(reserved.ok());
  return true;
}

void Scheduler::schedule(std::vector<ScheduledRows>* rows, Sequence** stuck) {
  rows->clear();
  *stuck = nullptr;
  int64_t budget = limits_.rows_max;
  const int64_t preemptions_before = num_preemptions_;
  // Decoding sequences, oldest first. A victim of preemption is newer than the one in hand, so it
  // has no rows yet.
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    Sequence* sequence = running_[i].get();
    if (!sequence->is_decoding() || sequence->ends) {
      continue;
    }
    if (!make_room(sequence, 1)) {
      if (i == 0) {
        *stuck = sequence;  // alone, and the cache is full of it
        return;
      }
      preempt_newest();
      break;
    }
    rows->push_back({sequence, 1, true});
    --budget;
  }
  // Prompts under way.
  for (size_t i = 0; i < running_.size() && budget > 0; ++i) {
    Sequence* sequence = running_[i].get();
    if (sequence->is_decoding() || sequence->ends) {
      continue;
    }
    const int64_t remaining = sequence->num_tokens() - sequence->num_computed;
    const int64_t num_rows = std::min(remaining, budget);
    // A prompt does not push decoding sequences out: it waits for blocks unless nothing else runs.
    if (!sequence->blocks.can_reserve(sequence->num_computed + num_rows)) {
      if (!rows->empty()) {
        continue;
      }
      if (!make_room(sequence, num_rows)) {
        if (i == 0) {
          *stuck = sequence;
          return;
        }
        preempt_newest();
        break;
      }
    } else {
      LACUNA_CHECK(sequence->blocks.reserve(sequence->num_computed + num_rows).ok());
    }
    rows->push_back({sequence, num_rows, num_rows == remaining});
    budget -= num_rows;
  }
  // Waiting sequences, unless blocks just ran out.
  while (budget > 0 && !waiting_.empty() && num_preemptions_ == preemptions_before &&
         num_running() < limits_.sequences_max) {
    Sequence* sequence = waiting_.front().get();
    const bool shares = limits_.prefix_caching && !sequence->request.prompt_logprobs &&
                        !sequence->request.record_selection;
    if (shares) {
      // The last token is always computed: its row yields the logits.
      sequence->num_computed = sequence->blocks.share_prefix(
          sequence->tokens, sequence->num_tokens() - 1, limits_.prefix_salt);
    }
    const int64_t remaining = sequence->num_tokens() - sequence->num_computed;
    const int64_t num_rows = std::min(remaining, budget);
    if (!sequence->blocks.can_reserve(sequence->num_computed + num_rows)) {
      sequence->blocks.clear();
      sequence->num_computed = 0;
      if (running_.empty()) {
        *stuck = sequence;
      }
      break;
    }
    LACUNA_CHECK(sequence->blocks.reserve(sequence->num_computed + num_rows).ok());
    if (shares && sequence->num_generated() == 0) {
      prefix_queries_ += sequence->num_tokens();
      prefix_hits_ += sequence->num_computed;
      sequence->num_cached = sequence->num_computed;
    }
    rows->push_back({sequence, num_rows, num_rows == remaining});
    budget -= num_rows;
    insert_in_order(running_, std::move(waiting_.front()));
    waiting_.pop_front();
  }
}

void Scheduler::commit(const std::vector<ScheduledRows>& rows) {
  for (const ScheduledRows& r : rows) {
    r.sequence->num_computed += r.num_rows;
    publish(*r.sequence);
  }
}

void Scheduler::publish(Sequence& sequence) {
  if (limits_.prefix_caching) {
    sequence.blocks.publish_full(sequence.tokens,
                                 std::min(sequence.num_computed, sequence.num_known()),
                                 limits_.prefix_salt);
  }
}

void fill_batch(const std::vector<ScheduledRows>& scheduled, Batch* batch,
                int64_t table_width_min) {
  batch->clear();
  batch->table_width = table_width_min;
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
      const int32_t token = sequence.tokens[position];
      if (token < 0) {
        LACUNA_CHECK(position + 1 == sequence.num_tokens() && sequence.drawn_row >= 0);
        batch->token_sources.resize(batch->token_ids.size(), -1);
        batch->token_sources.push_back(sequence.drawn_row);
      }
      batch->token_ids.push_back(token);
      batch->positions.push_back(static_cast<int32_t>(position));
      batch->visible_lengths.push_back(static_cast<int32_t>(position + 1));
      batch->request_ids.push_back(request_idx);
      batch->slot_mapping.push_back(sequence.blocks.slot(position));
    }
    batch->query_starts.push_back(static_cast<int32_t>(batch->num_rows()));
    batch->seq_lens.push_back(static_cast<int32_t>(sequence.num_computed + rows.num_rows));
    if (sequence.is_decoding() && batch->num_decodes == request_idx) {
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
  if (!batch->token_sources.empty()) {
    batch->token_sources.resize(batch->token_ids.size(), -1);
  }
}

void pad_batch(int64_t num_requests, int64_t query_len, Batch* batch) {
  const int64_t requests_before = batch->num_requests();
  const int64_t rows = batch->num_rows() + (num_requests - requests_before) * query_len;
  for (int64_t r = requests_before; r < num_requests; ++r) {
    batch->seq_lens.push_back(0);
    batch->query_starts.push_back(static_cast<int32_t>(batch->query_starts.back() + query_len));
  }
  batch->token_ids.resize(rows, 0);
  batch->positions.resize(rows, 0);
  batch->visible_lengths.resize(rows, 0);
  batch->request_ids.resize(rows, -1);
  batch->slot_mapping.resize(rows, -1);
  if (!batch->token_sources.empty()) {
    batch->token_sources.resize(rows, -1);
  }
  batch->block_table.resize(num_requests * batch->table_width, -1);
}

}  // namespace lacuna
