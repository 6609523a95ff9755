// Which rows of which sequences a step computes: continuous batching with chunked prefill under a
// token budget. Decoding sequences come first, a row each; then sequences whose prompt is under
// way, then waiting ones, in order of priority and arrival, in chunks of what is left of the
// budget. When blocks run out the newest running sequence gives its own up and waits again; its
// tokens are computed anew later, as a prompt. Decisions use host-side lengths only.
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

struct SchedulerLimits {
  int64_t rows_max = 0;       // of a step
  int64_t sequences_max = 1;  // that run at a time
  bool prefix_caching = true;
  uint64_t prefix_salt = 0;
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerLimits& limits) : limits_(limits) {}

  void add(std::unique_ptr<Sequence> sequence);
  bool empty() const { return waiting_.empty() && running_.empty(); }
  int64_t num_waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t num_running() const { return static_cast<int64_t>(running_.size()); }
  Sequence* find(int64_t id);
  std::unique_ptr<Sequence> remove(int64_t id);
  // Sequences that were cancelled, taken out.
  std::vector<std::unique_ptr<Sequence>> take_cancelled();

  // Chooses the rows of the next step, decoding sequences first, and reserves their blocks. Empty
  // only if nothing waits or runs, or if the one sequence that is left can not get a block (`stuck`
  // names it: it can not go on).
  void schedule(std::vector<ScheduledRows>* rows, Sequence** stuck);
  // After the launch of the step: its rows are computed before those of any later step, so full
  // blocks of known tokens may be shared.
  void commit(const std::vector<ScheduledRows>& rows);
  // Shares the full blocks of a sequence that has learnt its tokens.
  void publish(Sequence& sequence);

  int64_t num_preemptions() const { return num_preemptions_; }
  int64_t prefix_queries() const { return prefix_queries_; }
  int64_t prefix_hits() const { return prefix_hits_; }

 private:
  // Blocks for the sequence's next `num_rows` rows, taken from newer running sequences if need be;
  // false when only the sequence itself is left to take from.
  bool make_room(Sequence* sequence, int64_t num_rows);
  void preempt_newest();
  void insert_waiting(std::unique_ptr<Sequence> sequence);

  SchedulerLimits limits_;
  std::deque<std::unique_ptr<Sequence>> waiting_;   // by priority, then arrival
  std::vector<std::unique_ptr<Sequence>> running_;  // by priority, then arrival
  int64_t num_preemptions_ = 0;
  int64_t prefix_queries_ = 0;
  int64_t prefix_hits_ = 0;
};

// Fills a batch from scheduled rows, decode sequences first as given. Rows of the block table are
// as wide as the longest, and at least `table_width_min`.
void fill_batch(const std::vector<ScheduledRows>& scheduled, Batch* batch,
                int64_t table_width_min = 0);

// Adds requests of `query_len` rows that do nothing (request id -1, slot -1, no visible key) until
// there are `num_requests`.
void pad_batch(int64_t num_requests, int64_t query_len, Batch* batch);

}  // namespace lacuna
