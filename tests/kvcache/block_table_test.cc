// Block tables: slots, growth that is all or nothing, and blocks that come back.
#include "kvcache/block_table.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>
#include <vector>

namespace lacuna {
namespace {

std::vector<int32_t> blocks_of(const BlockTable& table) {
  return {table.blocks().begin(), table.blocks().end()};
}

TEST(BlockTable, ReservesWholeBlocksAndNoMore) {
  BlockPool pool(10);
  BlockTable table(&pool, 4);
  EXPECT_EQ(table.capacity(), 0);
  struct Step {
    int64_t tokens, blocks;
  };
  for (const Step step : {Step{0, 0}, {1, 1}, {4, 1}, {5, 2}, {3, 2}, {8, 2}, {9, 3}, {40, 10}}) {
    ASSERT_TRUE(table.reserve(step.tokens).ok()) << step.tokens;
    EXPECT_EQ(static_cast<int64_t>(table.blocks().size()), step.blocks) << step.tokens;
    EXPECT_EQ(table.capacity(), 4 * step.blocks);
    EXPECT_EQ(pool.num_free(), 10 - step.blocks);
  }
}

TEST(BlockTable, SlotsFollowTheBlocks) {
  BlockPool pool(6);
  BlockTable first(&pool, 3);
  BlockTable second(&pool, 3);
  // Interleaved growth: blocks 0 and 2 are the first's, 1 and 3 the second's.
  for (int64_t tokens = 1; tokens <= 6; ++tokens) {
    ASSERT_TRUE(first.reserve(tokens).ok());
    ASSERT_TRUE(second.reserve(tokens).ok());
  }
  EXPECT_EQ(blocks_of(first), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(blocks_of(second), (std::vector<int32_t>{1, 3}));
  const std::vector<int64_t> expected = {0, 1, 2, 6, 7, 8};
  for (int64_t position = 0; position < 6; ++position) {
    EXPECT_EQ(first.slot(position), expected[position]);
    EXPECT_EQ(second.slot(position), expected[position] + 3);
  }
}

TEST(BlockTable, AFailureSaysHowManyAreMissingAndChangesNothing) {
  BlockPool pool(5);
  BlockTable other(&pool, 16);
  ASSERT_TRUE(other.reserve(32).ok());
  BlockTable table(&pool, 16);
  ASSERT_TRUE(table.reserve(16).ok());
  const std::vector<int32_t> before = blocks_of(table);
  const Status status = table.reserve(80);
  EXPECT_EQ(status.code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(status.message(), "kv cache: 4 more blocks of 16 tokens are needed, 2 of 5 are free");
  EXPECT_EQ(blocks_of(table), before);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_TRUE(table.reserve(48).ok());
  EXPECT_EQ(pool.num_free(), 0);
  // Nothing more is wanted, so an empty pool is no obstacle.
  EXPECT_TRUE(table.reserve(48).ok());
  EXPECT_FALSE(table.reserve(49).ok());
  other.clear();
  EXPECT_TRUE(table.reserve(49).ok());
}

TEST(BlockTable, ClearAndDestructionGiveBlocksBack) {
  BlockPool pool(4);
  {
    BlockTable table(&pool, 8);
    ASSERT_TRUE(table.reserve(20).ok());
    EXPECT_EQ(pool.num_free(), 1);
    table.clear();
    EXPECT_EQ(pool.num_free(), 4);
    EXPECT_EQ(table.capacity(), 0);
    table.clear();
    EXPECT_EQ(pool.num_free(), 4);
    ASSERT_TRUE(table.reserve(32).ok());
    EXPECT_EQ(pool.num_free(), 0);
  }
  EXPECT_EQ(pool.num_free(), 4);
}

TEST(BlockTable, ClearKeepsBlocksThatOthersOwn) {
  BlockPool pool(3);
  BlockTable table(&pool, 2);
  ASSERT_TRUE(table.reserve(6).ok());
  const int32_t shared = table.blocks()[1];
  pool.retain(shared);
  table.clear();
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_NE(*pool.allocate(), shared);
  EXPECT_NE(*pool.allocate(), shared);
  EXPECT_EQ(pool.allocate(), std::nullopt);
}

TEST(BlockTable, AMoveTakesTheBlocksAlong) {
  BlockPool pool(4);
  {
    BlockTable from(&pool, 2);
    ASSERT_TRUE(from.reserve(5).ok());
    const std::vector<int32_t> blocks = blocks_of(from);
    BlockTable to(std::move(from));
    EXPECT_EQ(blocks_of(to), blocks);
    EXPECT_EQ(to.slot(3), blocks[1] * 2 + 1);
    EXPECT_EQ(pool.num_free(), 1);
    EXPECT_TRUE(to.reserve(8).ok());
    EXPECT_EQ(pool.num_free(), 0);
  }
  EXPECT_EQ(pool.num_free(), 4);  // once, not twice
}

TEST(BlockTable, SlotsOfTablesNeverMeet) {
  BlockPool pool(40);
  std::vector<BlockTable> tables;
  for (int i = 0; i < 7; ++i) {
    tables.emplace_back(&pool, 5);
  }
  for (int round = 1; round <= 5; ++round) {
    for (size_t i = 0; i < tables.size(); ++i) {
      ASSERT_TRUE(tables[i].reserve(static_cast<int64_t>(i + 1) * round).ok());
    }
    tables[round].clear();
  }
  std::set<int64_t> slots;
  int64_t count = 0;
  for (const BlockTable& table : tables) {
    for (int64_t position = 0; position < table.capacity(); ++position, ++count) {
      slots.insert(table.slot(position));
    }
  }
  EXPECT_GT(count, 0);
  EXPECT_EQ(static_cast<int64_t>(slots.size()), count);
  EXPECT_EQ(count / 5 + pool.num_free(), 40);
}

}  // namespace
}  // namespace lacuna
