// Who may join an index group, and what is said to who may not.
#include "attention/index_group.h"

#include <gtest/gtest.h>

#include <new>

#include "core/runtime.h"
#include "kvcache/paged_kv_cache.h"

namespace lacuna {
namespace {

class IndexGroupTest : public ::testing::Test {
 protected:
  GroupMember member(int layer) {
    KvCacheView latent =
        paged_rows(memory_, KvLayout::latent_f32(8, 0), /*num_blocks=*/5, /*block_size=*/4);
    latent.block_stride_bytes += 3 * latent.row_bytes;
    return {.layer = layer,
            .latent = latent,
            .block_table = view_of(static_cast<const int32_t*>(table_), {2, 3}),
            .request_ids = view_of(static_cast<const int32_t*>(ids_), {6})};
  }
  static std::string refusal(const GroupMember& leader, const GroupMember& follower) {
    IndexGroup group(leader);
    const Status status = group.join(follower);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(group.layers().size(), 1u);
    return status.message();
  }

  char memory_[64] = {};
  int32_t table_[6] = {};
  int32_t ids_[12] = {};
};

TEST_F(IndexGroupTest, LayersOfOneShapeJoin) {
  IndexGroup group(member(3));
  GroupMember other = member(4);
  other.latent.data = memory_ + 32;  // another layer's memory, other formats of a row
  other.latent.layout = KvLayout::latent_bf16(16, 0);
  EXPECT_TRUE(group.join(other).ok());
  EXPECT_TRUE(group.join(member(5)).ok());
  EXPECT_EQ(group.leader(), 3);
  EXPECT_EQ(group.layers(), (std::vector<int>{3, 4, 5}));
}

TEST_F(IndexGroupTest, WhatDiffersIsNamed) {
  const std::string end = "; rows of one are not rows of the other";
  GroupMember other = member(7);
  other.latent.block_size = 2;
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has block_size 2, its leader 3 has 4" + end);
  other = member(7);
  other.latent.num_blocks = 6;
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has num_blocks 6, its leader 3 has 5" + end);
  other = member(7);
  other.latent.block_stride_bytes += other.latent.row_bytes;
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has block_stride_rows 8, its leader 3 has 7" + end);
  other = member(7);
  other.block_table = view_of(static_cast<const int32_t*>(table_), {3, 2});
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has block_table [3, 2], its leader 3 has [2, 3]" + end);
  other = member(7);
  other.request_ids = view_of(static_cast<const int32_t*>(ids_) + 6, {6});
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has request_ids of another address, type or stride than its "
            "leader 3" +
                end);
  other = member(7);
  other.request_ids = {};
  EXPECT_EQ(refusal(member(3), other),
            "index group: layer 7 has request_ids (none), its leader 3 has [6]" + end);
}

const Runtime kTestRuntime = {
    .name = "test",
    .allocate = [](int, int64_t bytes) -> Result<void*> {
      return static_cast<void*>(::operator new (bytes, std::align_val_t{256}));
    },
    .free = [](int, void* data) { ::operator delete (data, std::align_val_t{256}); },
};

TEST(FormIndexGroups, FollowersBelongToTheLeaderBeforeThem) {
  const std::vector<bool> layers = {true, false, true, true, false, false};
  const Result<PagedKvCache> cache =
      PagedKvCache::create(&kTestRuntime, {.latent_layout = KvLayout::latent_bf16(32, 8),
                                           .index_layout = KvLayout::index_bf16(16),
                                           .layer_has_indexer = layers,
                                           .num_blocks = 5,
                                           .block_size = 4});
  ASSERT_TRUE(cache.ok());
  const Result<std::vector<IndexGroup>> groups = form_index_groups(layers, *cache);
  ASSERT_TRUE(groups.ok()) << groups.status().message();
  ASSERT_EQ(groups->size(), 3u);
  EXPECT_EQ((*groups)[0].layers(), (std::vector<int>{0, 1}));
  EXPECT_EQ((*groups)[1].layers(), (std::vector<int>{2}));
  EXPECT_EQ((*groups)[2].layers(), (std::vector<int>{3, 4, 5}));
  const Result<std::vector<IndexGroup>> none = form_index_groups({false, true}, *cache);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.status().message(),
            "index group: layer 0 has no indexer and no layer before it has one; the first layer "
            "must lead");
}

}  // namespace
}  // namespace lacuna
