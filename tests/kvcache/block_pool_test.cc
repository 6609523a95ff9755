// The block pool against a model of it: counts, order, exhaustion, and many owners of one block.
#include "kvcache/block_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "core/rng.h"

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
  EXPECT_DEATH(pool.release(1 - block), "ref_count");
  EXPECT_DEATH(pool.retain(1 - block), "has_hash");
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

TEST(BlockPool, KnownContentIsKeptUntilItsBlockIsNeeded) {
  BlockPool pool(2);
  const BlockHash first = chain_hash(root_hash(1), std::vector<int32_t>{1, 2});
  const BlockHash second = chain_hash(first, std::vector<int32_t>{3, 4});
  const int32_t a = *pool.allocate();
  const int32_t b = *pool.allocate();
  pool.publish(a, first);
  pool.publish(b, second);
  EXPECT_EQ(pool.find(first), a);
  pool.release(b);
  pool.release(a);
  EXPECT_EQ(pool.num_cached(), 2);
  EXPECT_EQ(pool.num_free(), 2);
  EXPECT_EQ(pool.num_used(), 0);
  pool.retain(b);  // shared again: no longer the oldest
  pool.release(b);
  EXPECT_EQ(*pool.allocate(), a);  // least recently used
  EXPECT_EQ(pool.find(first), std::nullopt);
  EXPECT_EQ(pool.find(second), b);
  EXPECT_EQ(pool.num_evictions(), 1);
}

TEST(BlockPool, TheSameContentIsKnownOnce) {
  BlockPool pool(3);
  const BlockHash hash = chain_hash(root_hash(1), std::vector<int32_t>{5});
  const int32_t a = *pool.allocate();
  const int32_t b = *pool.allocate();
  pool.publish(a, hash);
  pool.publish(b, hash);
  EXPECT_EQ(pool.find(hash), a);
  pool.release(b);  // without known content: free, not cached
  EXPECT_EQ(pool.num_cached(), 0);
  pool.release(a);
  EXPECT_EQ(pool.num_cached(), 1);
  pool.clear_cached();
  EXPECT_EQ(pool.find(hash), std::nullopt);
  EXPECT_EQ(pool.num_cached(), 0);
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(BlockHash, DependsOnSaltOrderAndEveryTokenBefore) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  std::set<std::pair<uint64_t, uint64_t>> seen;
  const auto add = [&](const BlockHash& hash) {
    EXPECT_TRUE(seen.insert({hash.lo, hash.hi}).second);
  };
  add(chain_hash(root_hash(0), tokens));
  add(chain_hash(root_hash(1), tokens));
  add(chain_hash(root_hash(0), std::vector<int32_t>{3, 2, 1}));
  add(chain_hash(root_hash(0), std::vector<int32_t>{1, 2}));
  add(chain_hash(chain_hash(root_hash(0), tokens), tokens));
  add(chain_hash(root_hash(0), std::vector<int32_t>{0, 1, 2, 3}));
  add(chain_hash(root_hash(0), std::vector<int32_t>{-1, 2, 3}));
}

// Random allocations, shares, publications and releases, against a model of owners and contents.
TEST(BlockPool, SharedContentAgreesWithAModelUnderRandomSchedules) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    uint64_t counter = 0;
    const auto random = [&](int64_t n) {
      return static_cast<int64_t>(philox4x32(seed, counter++)[0] % static_cast<uint64_t>(n));
    };
    const int32_t num_blocks = static_cast<int32_t>(1 + random(12));
    BlockPool pool(num_blocks);
    std::vector<int> owners(num_blocks, 0);
    std::map<int64_t, int32_t> content;  // key -> block
    std::vector<int64_t> key_of(num_blocks, -1);
    std::vector<int32_t> unused_order;  // blocks with content and no owner, oldest first
    const auto hash_of = [](int64_t key) {
      return chain_hash(root_hash(7), std::vector<int32_t>{static_cast<int32_t>(key)});
    };
    for (int step = 0; step < 3000; ++step) {
      const int64_t action = random(5);
      if (action == 0) {
        const std::optional<int32_t> block = pool.allocate();
        const int64_t owned =
            std::count_if(owners.begin(), owners.end(), [](int n) { return n > 0; });
        ASSERT_EQ(block.has_value(), owned < num_blocks);
        if (block.has_value()) {
          ASSERT_EQ(owners[*block], 0);
          if (key_of[*block] >=
              0) {  // evicted: it must have been the oldest, and no block was blank
            ASSERT_EQ(unused_order.front(), *block);
            ASSERT_EQ(owned + static_cast<int64_t>(unused_order.size()), num_blocks);
            unused_order.erase(unused_order.begin());
            content.erase(key_of[*block]);
            key_of[*block] = -1;
          }
          owners[*block] = 1;
        }
      } else if (action == 1) {
        const int64_t key = random(10);
        const std::optional<int32_t> block = pool.find(hash_of(key));
        ASSERT_EQ(block.has_value(), content.count(key) == 1);
        if (block.has_value()) {
          ASSERT_EQ(*block, content[key]);
          pool.retain(*block);
          if (owners[*block]++ == 0) {
            std::erase(unused_order, *block);
          }
        }
      } else if (action == 2) {
        const int32_t block = static_cast<int32_t>(random(num_blocks));
        if (owners[block] > 0) {
          const int64_t key = random(10);
          pool.publish(block, hash_of(key));
          if (key_of[block] < 0 && content.count(key) == 0) {
            content[key] = block;
            key_of[block] = key;
          }
        }
      } else {
        const int32_t block = static_cast<int32_t>(random(num_blocks));
        if (owners[block] > 0) {
          pool.release(block);
          if (--owners[block] == 0 && key_of[block] >= 0) {
            unused_order.push_back(block);
          }
        }
      }
      const int64_t owned =
          std::count_if(owners.begin(), owners.end(), [](int n) { return n > 0; });
      ASSERT_EQ(pool.num_used(), owned) << "seed " << seed;
      ASSERT_EQ(pool.num_free(), num_blocks - owned);
      ASSERT_EQ(pool.num_cached(), static_cast<int32_t>(unused_order.size()));
    }
  }
}

}  // namespace
}  // namespace lacuna
