// Which rows a step computes, and the batch that they make.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <vector>

#include "core/rng.h"

namespace lacuna {
namespace {

using Ints = std::vector<int32_t>;
const std::optional<Tokenizer> kNoTokenizer;

std::unique_ptr<Sequence> sequence_of(int64_t id, int64_t length, BlockPool* pool,
                                      int64_t block_size = 4) {
  Request request;
  request.prompt.resize(length);
  std::iota(request.prompt.begin(), request.prompt.end(), static_cast<int32_t>(100 * id));
  return std::make_unique<Sequence>(id, std::move(request), kNoTokenizer, pool, block_size);
}

// Runs a step: schedules, computes, and lets each sequence that samples have a token.
struct Stepper {
  explicit Stepper(const SchedulerLimits& limits) : scheduler(limits) {}
  const std::vector<ScheduledRows>& step() {
    scheduler.schedule(&rows, &stuck);
    // Taken down first: commit moves on.
    taken.clear();
    for (const ScheduledRows& r : rows) {
      taken.push_back({r.sequence->id, r.num_rows});
    }
    scheduler.commit(rows);
    for (const ScheduledRows& r : rows) {
      if (r.samples) {
        r.sequence->tokens.push_back(static_cast<int32_t>(7 + r.sequence->num_tokens()));
      }
    }
    return rows;
  }
  Scheduler scheduler;
  std::vector<ScheduledRows> rows;
  std::vector<std::pair<int64_t, int64_t>> taken;  // id, rows
  Sequence* stuck = nullptr;
};
using Taken = std::vector<std::pair<int64_t, int64_t>>;

TEST(Scheduler, APromptComesInChunksThenOneRowAStep) {
  BlockPool pool(20);
  Stepper stepper({.rows_max = 5});
  stepper.scheduler.add(sequence_of(1, 12, &pool));
  Sequence* sequence = stepper.scheduler.find(1);
  ASSERT_NE(sequence, nullptr);
  for (const int64_t rows : {5, 5, 2}) {
    EXPECT_FALSE(sequence->is_decoding());
    stepper.step();
    EXPECT_EQ(stepper.taken, (Taken{{1, rows}}));
  }
  EXPECT_EQ(pool.num_used(), 3);
  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(sequence->is_decoding());
    EXPECT_EQ(sequence->num_generated(), i + 1);
    stepper.step();
    EXPECT_EQ(stepper.taken, (Taken{{1, 1}}));
  }
  EXPECT_EQ(pool.num_used(), 5);  // 17 tokens in blocks of 4
}

TEST(Scheduler, DecodesComeFirstAndPromptsShareTheRestOfTheBudget) {
  BlockPool pool(100);
  Stepper stepper({.rows_max = 8, .sequences_max = 4});
  stepper.scheduler.add(sequence_of(1, 6, &pool));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 6}}));
  stepper.scheduler.add(sequence_of(2, 10, &pool));
  stepper.scheduler.add(sequence_of(3, 3, &pool));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 7}}));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 3}, {3, 3}}));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 1}, {3, 1}}));
}

TEST(Scheduler, RunsAtMostSoManyAndTheMostUrgentFirst) {
  BlockPool pool(100);
  Stepper stepper({.rows_max = 100, .sequences_max = 2});
  for (const int64_t id : {1, 2, 3, 4}) {
    auto sequence = sequence_of(id, 4, &pool);
    sequence->request.priority = id == 3 ? -1 : 0;
    stepper.scheduler.add(std::move(sequence));
  }
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{3, 4}, {1, 4}}));
  EXPECT_EQ(stepper.scheduler.num_running(), 2);
  EXPECT_EQ(stepper.scheduler.num_waiting(), 2);
  stepper.scheduler.remove(3);
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 4}}));
}

TEST(Scheduler, TheNewestGivesItsBlocksUpAndComesBack) {
  BlockPool pool(4);  // 16 tokens
  Stepper stepper({.rows_max = 100, .sequences_max = 4, .prefix_caching = false});
  stepper.scheduler.add(sequence_of(1, 7, &pool));
  stepper.scheduler.add(sequence_of(2, 8, &pool));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 7}, {2, 8}}));
  stepper.step();  // 1 has room for its eighth token, 2 would need a third block
  EXPECT_EQ(stepper.scheduler.num_preemptions(), 1);
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}}));
  EXPECT_EQ(stepper.scheduler.num_waiting(), 1);
  EXPECT_EQ(stepper.scheduler.find(2)->num_computed, 0);
  EXPECT_EQ(pool.num_used(), 2);
  stepper.scheduler.remove(1);
  stepper.step();  // its prompt and the token it had are computed anew
  EXPECT_EQ(stepper.taken, (Taken{{2, 9}}));
}

TEST(Scheduler, NamesTheSequenceThatCanNotGoOn) {
  BlockPool pool(2);
  Stepper stepper({.rows_max = 100});
  stepper.scheduler.add(sequence_of(1, 8, &pool));
  stepper.step();
  EXPECT_EQ(stepper.stuck, nullptr);
  stepper.step();
  EXPECT_TRUE(stepper.rows.empty());
  ASSERT_NE(stepper.stuck, nullptr);
  EXPECT_EQ(stepper.stuck->id, 1);
}

TEST(Scheduler, ASharedBeginningIsNotComputedAgain) {
  BlockPool pool(20);
  Stepper stepper({.rows_max = 100, .sequences_max = 4});
  stepper.scheduler.add(sequence_of(1, 12, &pool));
  stepper.step();
  auto twin = sequence_of(2, 12, &pool);
  twin->request.prompt = stepper.scheduler.find(1)->request.prompt;
  twin->tokens = twin->request.prompt;
  stepper.scheduler.add(std::move(twin));
  stepper.step();
  // The last token is computed again for its logits, so the third block can not be shared.
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 4}}));
  EXPECT_EQ(stepper.scheduler.prefix_queries(), 12 + 12);
  EXPECT_EQ(stepper.scheduler.prefix_hits(), 8);
  EXPECT_EQ(stepper.scheduler.find(2)->blocks.blocks()[0],
            stepper.scheduler.find(1)->blocks.blocks()[0]);
  // Log-probabilities of the prompt need every row.
  auto exact = sequence_of(3, 12, &pool);
  exact->request.prompt = stepper.scheduler.find(1)->request.prompt;
  exact->tokens = exact->request.prompt;
  exact->request.prompt_logprobs = true;
  stepper.scheduler.add(std::move(exact));
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{1, 1}, {2, 1}, {3, 12}}));
}

TEST(Scheduler, TakesCancelledSequencesOutWhereverTheyAre) {
  BlockPool pool(20);
  Stepper stepper({.rows_max = 6, .sequences_max = 1});
  for (const int64_t id : {1, 2, 3}) {
    stepper.scheduler.add(sequence_of(id, 8, &pool));
  }
  stepper.step();
  stepper.scheduler.find(1)->cancelled = true;
  stepper.scheduler.find(3)->cancelled = true;
  EXPECT_EQ(stepper.scheduler.take_cancelled().size(), 2u);
  EXPECT_EQ(pool.num_used(), 0);
  stepper.step();
  EXPECT_EQ(stepper.taken, (Taken{{2, 6}}));
}

// Random requests with shared beginnings, random cancels and a cache that is too small, against
// what must hold in every step whatever the schedule.
TEST(Scheduler, KeepsItsPromisesUnderRandomLoad) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    uint64_t counter = 0;
    const auto random = [&](int64_t n) {
      return static_cast<int64_t>(philox4x32(seed, counter++)[0] % static_cast<uint64_t>(n));
    };
    BlockPool pool(static_cast<int32_t>(12 + random(20)));
    const int64_t rows_max = 1 + random(20);
    const int64_t sequences_max = 1 + random(6);
    Scheduler scheduler(
        {.rows_max = rows_max, .sequences_max = sequences_max, .prefix_caching = random(2) == 0});
    std::map<int64_t, int64_t> wanted;  // id -> tokens it shall have in the end
    int64_t next_id = 1;
    int64_t finished = 0;
    std::vector<ScheduledRows> rows;
    Sequence* stuck = nullptr;
    for (int step = 0; step < 4000 && (finished < 60 || !scheduler.empty()); ++step) {
      if (next_id <= 60 && random(3) == 0) {
        const int64_t length = 1 + random(30);
        auto sequence = sequence_of(next_id, length, &pool);
        for (int64_t i = 0; i < length; ++i) {  // few different beginnings
          sequence->request.prompt[i] = static_cast<int32_t>(i < 16 ? next_id % 3 : random(50));
        }
        sequence->tokens = sequence->request.prompt;
        sequence->request.priority = static_cast<int>(random(2));
        wanted[next_id] = length + 1 + random(12);
        scheduler.add(std::move(sequence));
        ++next_id;
      }
      if (random(20) == 0 && next_id > 1) {
        if (Sequence* victim = scheduler.find(1 + random(next_id - 1))) {
          victim->cancelled = true;
          finished += static_cast<int64_t>(scheduler.take_cancelled().size());
        }
      }
      scheduler.schedule(&rows, &stuck);
      if (stuck != nullptr) {
        ASSERT_TRUE(rows.empty());
        ++finished;
        scheduler.remove(stuck->id);
        continue;
      }
      ASSERT_TRUE(!rows.empty() || scheduler.empty()) << "seed " << seed << " stands still";
      int64_t total = 0;
      bool prompts_begun = false;
      std::set<std::pair<int32_t, int64_t>> written;  // block and offset
      for (const ScheduledRows& r : rows) {
        ASSERT_GE(r.num_rows, 1);
        total += r.num_rows;
        ASSERT_LE(r.sequence->num_computed + r.num_rows, r.sequence->num_tokens());
        ASSERT_LE(r.sequence->num_computed + r.num_rows, r.sequence->blocks.capacity());
        ASSERT_EQ(r.samples, r.sequence->num_computed + r.num_rows == r.sequence->num_tokens());
        if (!r.sequence->is_decoding()) {
          prompts_begun = true;
        } else if (r.num_rows == 1 && r.sequence->num_generated() > 0) {
          // A sequence that came back may have a single row left among the prompts.
          ASSERT_TRUE(!prompts_begun || r.sequence->num_computed % 4 == 0);
        }
        for (int64_t i = 0; i < r.num_rows; ++i) {
          const int64_t slot = r.sequence->blocks.slot(r.sequence->num_computed + i);
          ASSERT_TRUE(written.insert({static_cast<int32_t>(slot / 4), slot % 4}).second)
              << "seed " << seed << ": two rows write one slot";
        }
      }
      ASSERT_LE(total, rows_max);
      ASSERT_LE(scheduler.num_running(), sequences_max);
      scheduler.commit(rows);
      std::vector<int64_t> done;
      for (const ScheduledRows& r : rows) {
        if (r.samples) {
          r.sequence->tokens.push_back(static_cast<int32_t>(random(50)));
          if (r.sequence->num_tokens() >= wanted[r.sequence->id]) {
            done.push_back(r.sequence->id);
          }
        }
      }
      for (const int64_t id : done) {
        ASSERT_NE(scheduler.remove(id), nullptr);
        ++finished;
      }
    }
    ASSERT_TRUE(scheduler.empty()) << "seed " << seed;
    ASSERT_EQ(finished, 60) << "seed " << seed;
    ASSERT_EQ(pool.num_used(), 0) << "seed " << seed << " leaks blocks";
    pool.clear_cached();
    ASSERT_EQ(pool.num_cached(), 0);
    ASSERT_EQ(pool.num_free(), pool.num_blocks());
  }
}

TEST(FillBatch, DecodesAndChunksTogether) {
  BlockPool pool(20);
  auto decode = sequence_of(1, 5, &pool);
  auto chunk = sequence_of(2, 11, &pool);
  auto last = sequence_of(3, 2, &pool);
  ASSERT_TRUE(chunk->blocks.reserve(4).ok());   // block 0
  ASSERT_TRUE(decode->blocks.reserve(6).ok());  // blocks 1, 2
  ASSERT_TRUE(chunk->blocks.reserve(9).ok());   // blocks 0, 3, 4
  ASSERT_TRUE(last->blocks.reserve(2).ok());    // block 5
  decode->num_computed = 5;
  decode->tokens.push_back(77);
  chunk->num_computed = 3;
  Batch batch;
  batch.token_ids = {1, 2, 3};  // of an earlier step
  batch.logits_rows = {9};
  batch.table_width = 50;
  batch.num_decodes = 4;
  fill_batch({{decode.get(), 1, true}, {chunk.get(), 6, false}, {last.get(), 2, true}}, &batch);
  EXPECT_EQ(batch.num_decodes, 1);
  EXPECT_EQ(batch.num_decode_rows(), 1);
  EXPECT_EQ(batch.num_requests(), 3);
  EXPECT_EQ(batch.token_ids, (Ints{77, 203, 204, 205, 206, 207, 208, 300, 301}));
  EXPECT_EQ(batch.positions, (Ints{5, 3, 4, 5, 6, 7, 8, 0, 1}));
  EXPECT_EQ(batch.visible_lengths, (Ints{6, 4, 5, 6, 7, 8, 9, 1, 2}));
  EXPECT_EQ(batch.request_ids, (Ints{0, 1, 1, 1, 1, 1, 1, 2, 2}));
  EXPECT_EQ(batch.slot_mapping, (std::vector<int64_t>{9, 3, 12, 13, 14, 15, 16, 20, 21}));
  EXPECT_EQ(batch.query_starts, (Ints{0, 1, 7, 9}));
  EXPECT_EQ(batch.seq_lens, (Ints{6, 9, 2}));
  EXPECT_EQ(batch.table_width, 3);
  EXPECT_EQ(batch.block_table, (Ints{1, 2, -1, 0, 3, 4, 5, -1, -1}));
  EXPECT_EQ(batch.logits_rows, (Ints{0, 8}));
}

TEST(FillBatch, OneTokenOfAFreshPrompt) {
  BlockPool pool(2);
  auto sequence = sequence_of(0, 1, &pool);
  ASSERT_TRUE(sequence->blocks.reserve(1).ok());
  Batch batch;
  fill_batch({{sequence.get(), 1, true}}, &batch);
  EXPECT_EQ(batch.num_decodes, 0);  // a prompt of one token is still a prompt
  EXPECT_EQ(batch.num_rows(), 1);
  EXPECT_EQ(batch.visible_lengths, Ints{1});
  EXPECT_EQ(batch.logits_rows, Ints{0});
}

TEST(FillBatch, ATokenThatIsNotKnownYetNamesTheRowThatDrawsIt) {
  BlockPool pool(20);
  auto known = sequence_of(1, 2, &pool);
  auto unknown = sequence_of(2, 3, &pool);
  ASSERT_TRUE(known->blocks.reserve(3).ok());
  ASSERT_TRUE(unknown->blocks.reserve(4).ok());
  known->num_computed = 2;
  known->tokens.push_back(9);
  unknown->num_computed = 3;
  unknown->tokens.push_back(-1);
  unknown->num_unknown = 1;
  unknown->drawn_row = 5;
  Batch batch;
  fill_batch({{known.get(), 1, true}}, &batch, 7);
  EXPECT_TRUE(batch.token_sources.empty());
  EXPECT_EQ(batch.table_width, 7);
  fill_batch({{known.get(), 1, true}, {unknown.get(), 1, true}, {known.get(), 1, true}}, &batch);
  EXPECT_EQ(batch.token_ids, (Ints{9, -1, 9}));
  EXPECT_EQ(batch.token_sources, (Ints{-1, 5, -1}));
}

TEST(PadBatch, AddsRequestsThatDoNothing) {
  BlockPool pool(4);
  auto sequence = sequence_of(1, 2, &pool);
  ASSERT_TRUE(sequence->blocks.reserve(2).ok());
  Batch batch;
  fill_batch({{sequence.get(), 2, true}}, &batch, 2);
  pad_batch(3, 2, &batch);
  EXPECT_EQ(batch.num_requests(), 3);
  EXPECT_EQ(batch.query_starts, (Ints{0, 2, 4, 6}));
  EXPECT_EQ(batch.seq_lens, (Ints{2, 0, 0}));
  EXPECT_EQ(batch.request_ids, (Ints{0, 0, -1, -1, -1, -1}));
  EXPECT_EQ(batch.slot_mapping, (std::vector<int64_t>{0, 1, -1, -1, -1, -1}));
  EXPECT_EQ(batch.visible_lengths, (Ints{1, 2, 0, 0, 0, 0}));
  EXPECT_EQ(batch.token_ids, (Ints{100, 101, 0, 0, 0, 0}));
  EXPECT_EQ(batch.positions, (Ints{0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(batch.block_table, (Ints{0, -1, -1, -1, -1, -1}));
  EXPECT_EQ(batch.logits_rows, Ints{1});
}

TEST(Scheduler, ASequenceWhoseLastTokenIsUnderWayIsNotScheduled) {
  BlockPool pool(8);
  Scheduler scheduler({.rows_max = 16, .sequences_max = 4});
  auto owned = sequence_of(1, 3, &pool);
  Sequence* sequence = owned.get();
  scheduler.add(std::move(owned));
  std::vector<ScheduledRows> rows;
  Sequence* stuck = nullptr;
  scheduler.schedule(&rows, &stuck);
  ASSERT_EQ(rows.size(), 1u);
  scheduler.commit(rows);
  sequence->tokens.push_back(-1);
  sequence->num_unknown = 1;
  sequence->drawn_row = 0;
  scheduler.schedule(&rows, &stuck);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].num_rows, 1);
  sequence->ends = true;
  scheduler.schedule(&rows, &stuck);
  EXPECT_TRUE(rows.empty());
  EXPECT_EQ(stuck, nullptr);
  EXPECT_FALSE(scheduler.empty());
}

}  // namespace
}  // namespace lacuna
