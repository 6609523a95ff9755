// The block pool against a model of it: counts, order, exhaustion, and many owners of one block.
#include "kvcache/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace lacuna {
namespace {

TEST(BlockPool, GivesEveryBlockOnceAndThenNothing) {
  BlockPool pool(4);
  EXPECT_EQ(pool.num_blocks(), 4);
  EXPECT_EQ(pool.num_free(), 4);
  for (int32_t i = 0; i < 4; ++i) {
    EXPECT_EQ(pool.allocate(), std::optional<int32_t>(i));
    EXPECT_EQ(pool.num_free(), 3 - i);
  }
  EXPECT_EQ(pool.allocate(), std::nullopt);
  EXPECT_EQ(pool.allocate(), std::nullopt);
  EXPECT_EQ(pool.num_free(), 0);
  EXPECT_EQ(pool.num_blocks(), 4);
  pool.release(2);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.allocate(), std::optional<int32_t>(2));
}

TEST(BlockPool, TheBlockReleasedLastIsGivenFirst) {
  BlockPool pool(5);
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(pool.allocate().has_value());
  }
  for (const int32_t block : {1, 4, 0}) {
    pool.release(block);
  }
  EXPECT_EQ(pool.allocate(), std::optional<int32_t>(0));
  EXPECT_EQ(pool.allocate(), std::optional<int32_t>(4));
  EXPECT_EQ(pool.allocate(), std::optional<int32_t>(1));
  EXPECT_EQ(pool.allocate(), std::nullopt);
}

TEST(BlockPool, ABlockIsFreeWhenItsLastOwnerLetsGo) {
  BlockPool pool(2);
  const int32_t block = *pool.allocate();
  pool.retain(block);
  pool.retain(block);
  pool.release(block);
  pool.release(block);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.allocate(), std::optional<int32_t>(1 - block));
  EXPECT_EQ(pool.allocate(), std::nullopt);
  pool.release(block);
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(BlockPool, AnEmptyPoolGivesNothing) {
  BlockPool pool(0);
  EXPECT_EQ(pool.num_blocks(), 0);
  EXPECT_EQ(pool.allocate(), std::nullopt);
}

TEST(BlockPoolDeathTest, WrongOwnersAreCaught) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  BlockPool pool(2);
  const int32_t block = *pool.allocate();
  EXPECT_DEATH(pool.release(1 - block), "ref_counts_");
  EXPECT_DEATH(pool.retain(1 - block), "ref_counts_");
  EXPECT_DEATH(pool.release(2), "num_blocks");
  EXPECT_DEATH(pool.release(-1), "block >= 0");
}

TEST(BlockPool, RandomSchedulesAgreeWithAModel) {
  for (const uint32_t seed : {1u, 2u, 3u}) {
    constexpr int kBlocks = 13;
    BlockPool pool(kBlocks);
    std::vector<int> owners(kBlocks, 0);
    std::vector<int32_t> free_stack;
    for (int32_t block = kBlocks - 1; block >= 0; --block) {
      free_stack.push_back(block);
    }
    std::vector<int32_t> held;  // one entry for each reference
    std::mt19937 random(seed);
    int exhausted = 0;
    for (int step = 0; step < 20000; ++step) {
      // Phases that mostly take and phases that mostly give, so that both ends are reached.
      const int give = step / 100 % 2 == 0 ? 2 : 6;
      const int draw = static_cast<int>(random() % 10);
      if (!held.empty() && draw < give) {
        const size_t at = random() % held.size();
        const int32_t block = held[at];
        held.erase(held.begin() + static_cast<int64_t>(at));
        pool.release(block);
        if (--owners[block] == 0) {
          free_stack.push_back(block);
        }
      } else if (!held.empty() && draw < give + 1) {
        const int32_t block = held[random() % held.size()];
        pool.retain(block);
        ++owners[block];
        held.push_back(block);
      } else {
        const std::optional<int32_t> block = pool.allocate();
        if (free_stack.empty()) {
          ++exhausted;
          ASSERT_EQ(block, std::nullopt) << "step " << step;
        } else {
          ASSERT_EQ(block, std::optional<int32_t>(free_stack.back())) << "step " << step;
          ASSERT_EQ(owners[*block], 0);
          free_stack.pop_back();
          owners[*block] = 1;
          held.push_back(*block);
        }
      }
      ASSERT_EQ(pool.num_free(), static_cast<int32_t>(free_stack.size())) << "step " << step;
      ASSERT_EQ(pool.num_free() +
                    static_cast<int32_t>(std::set<int32_t>(held.begin(), held.end()).size()),
                kBlocks);
    }
    EXPECT_GT(exhausted, 100);
  }
}

}  // namespace
}  // namespace lacuna
