// Which rows a step computes, and the batch that they make.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

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

TEST(Scheduler, APromptComesInChunksThenOneRowAStep) {
  BlockPool pool(20);
  Scheduler scheduler(5);
  scheduler.add(sequence_of(1, 12, &pool));
  Sequence* sequence = scheduler.find(1);
  ASSERT_NE(sequence, nullptr);
  std::vector<ScheduledRows> rows;
  struct Step {
    int64_t rows;
    bool samples;
    int blocks;
  };
  for (const Step step : {Step{5, false, 2}, {5, false, 3}, {2, true, 3}}) {
    EXPECT_FALSE(sequence->is_decoding());
    ASSERT_TRUE(scheduler.schedule(&rows).ok());
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].sequence, sequence);
    EXPECT_EQ(rows[0].num_rows, step.rows);
    EXPECT_EQ(rows[0].samples, step.samples);
    EXPECT_EQ(20 - pool.num_free(), step.blocks);
    sequence->num_computed += rows[0].num_rows;
  }
  for (int i = 0; i < 5; ++i) {
    sequence->tokens.push_back(7);
    EXPECT_TRUE(sequence->is_decoding());
    EXPECT_EQ(sequence->num_generated(), i + 1);
    ASSERT_TRUE(scheduler.schedule(&rows).ok());
    EXPECT_EQ(rows[0].num_rows, 1);
    EXPECT_TRUE(rows[0].samples);
    sequence->num_computed += 1;
  }
  EXPECT_EQ(20 - pool.num_free(), 5);  // 17 tokens in blocks of 4
}

TEST(Scheduler, FirstComeFirstServed) {
  BlockPool pool(20);
  Scheduler scheduler(100);
  std::vector<ScheduledRows> rows(3);
  ASSERT_TRUE(scheduler.schedule(&rows).ok());
  EXPECT_TRUE(rows.empty());
  EXPECT_TRUE(scheduler.empty());
  EXPECT_EQ(scheduler.front(), nullptr);
  for (const int64_t id : {7, 3, 5}) {
    scheduler.add(sequence_of(id, 4, &pool));
  }
  EXPECT_FALSE(scheduler.empty());
  for (const int64_t id : {7, 3, 5}) {
    EXPECT_EQ(scheduler.front()->id, id);
    ASSERT_TRUE(scheduler.schedule(&rows).ok());
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0].sequence->id, id);
    EXPECT_EQ(pool.num_free(), 19);  // the others have no blocks yet
    EXPECT_NE(scheduler.remove(id), nullptr);
    EXPECT_EQ(pool.num_free(), 20);
  }
  EXPECT_TRUE(scheduler.empty());
}

TEST(Scheduler, RemovesFromTheMiddleAndKnowsWhatItHas) {
  BlockPool pool(20);
  Scheduler scheduler(100);
  for (const int64_t id : {1, 2, 3}) {
    scheduler.add(sequence_of(id, 4, &pool));
  }
  EXPECT_EQ(scheduler.find(4), nullptr);
  EXPECT_EQ(scheduler.remove(4), nullptr);
  EXPECT_EQ(scheduler.remove(2)->id, 2);
  EXPECT_EQ(scheduler.find(2), nullptr);
  EXPECT_EQ(scheduler.find(3)->id, 3);
  scheduler.remove(1);
  EXPECT_EQ(scheduler.front()->id, 3);
}

TEST(Scheduler, SaysWhenTheCacheCanNotHoldTheStep) {
  BlockPool pool(2);
  Scheduler scheduler(100);
  scheduler.add(sequence_of(1, 12, &pool));
  std::vector<ScheduledRows> rows;
  const Status status = scheduler.schedule(&rows);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(status.message(), "kv cache: 3 more blocks of 4 tokens are needed, 2 of 2 are free");
  EXPECT_TRUE(rows.empty());
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

}  // namespace
}  // namespace lacuna
