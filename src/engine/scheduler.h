// Which rows of which sequences a step computes: the oldest sequence alone, its prompt in chunks of
// the token budget, then one row a step. Everything below takes batches of any number of sequences;
// only schedule() decides for one.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "attention/batch.h"
#include "engine/sequence.h"

namespace lacuna {

// A sequence's part of a step: `num_rows` rows from its first token that is not computed.
struct ScheduledRows {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;
  bool samples = false;  // its last row yields a token
};

class Scheduler {
 public:
  explicit Scheduler(int64_t rows_max) : rows_max_(rows_max) {}

  void add(std::unique_ptr<Sequence> sequence) { queue_.push_back(std::move(sequence)); }
  bool empty() const { return queue_.empty(); }
  Sequence* find(int64_t id);
  std::unique_ptr<Sequence> remove(int64_t id);

  // Chooses the rows of the next step and reserves their blocks. Fails when the cache can not hold
  // them.
  Status schedule(std::vector<ScheduledRows>* rows);
  // The sequence that schedule() would take next, or null.
  Sequence* front() { return queue_.empty() ? nullptr : queue_.front().get(); }

 private:
  int64_t rows_max_;
  std::deque<std::unique_ptr<Sequence>> queue_;
};

// Fills a batch from scheduled rows, decode sequences first as given.
void fill_batch(const std::vector<ScheduledRows>& scheduled, Batch* batch);

}  // namespace lacuna
