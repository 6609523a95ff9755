// The layers of a cache: sizes, places that do not overlap, layers without an indexer, refusals.
#include "kvcache/paged_kv_cache.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

namespace lacuna {
namespace {

// Host memory that is counted, with a limit.
struct Heap {
  int64_t live = 0;
  int64_t last_bytes = 0;
  int64_t limit = int64_t{1} << 30;
  char* last = nullptr;
} heap;

const Runtime kTestRuntime = {
    .name = "test",
    .allocate = [](int, int64_t bytes) -> Result<void*> {
      if (bytes > heap.limit) {
        return out_of_memory("test heap: " + std::to_string(bytes) + " bytes, there are " +
                             std::to_string(heap.limit));
      }
      ++heap.live;
      heap.last_bytes = bytes;
      heap.last = static_cast<char*>(::operator new (bytes, std::align_val_t{256}));
      return static_cast<void*>(heap.last);
    },
    .free =
        [](int, void* data) {
          --heap.live;
          ::operator delete (data, std::align_val_t{256});
        },
};

PagedKvCacheOptions options_of(std::vector<bool> layers) {
  return {.latent_layout = KvLayout::latent_bf16(32, 8),
          .index_layout = KvLayout::index_bf16(16),
          .layer_has_indexer = std::move(layers),
          .num_blocks = 5,
          .block_size = 4};
}

TEST(PagedKvCache, BytesOfABlock) {
  // A token: 2 * (32 + 8) bytes of latent in each layer, 2 * 16 of index key where there is one.
  EXPECT_EQ(PagedKvCache::block_bytes(options_of({true})), 4 * (80 + 32));
  EXPECT_EQ(PagedKvCache::block_bytes(options_of({false})), 4 * 80);
  EXPECT_EQ(PagedKvCache::block_bytes(options_of({true, false, true})), 4 * (3 * 80 + 2 * 32));
  EXPECT_EQ(PagedKvCache::block_bytes(options_of({})), 0);
  PagedKvCacheOptions options = options_of({true, false});
  options.latent_layout = KvLayout::fp8_ds_mla();
  options.index_layout = KvLayout::index_fp8();
  options.block_size = 64;
  EXPECT_EQ(PagedKvCache::block_bytes(options), 64 * (2 * 656 + 132));
}

struct Range {
  const char* begin;
  const char* end;
};

Range range_of(const KvCacheView& view) {
  const char* begin = static_cast<const char*>(view.data);
  return {begin, begin + (view.num_blocks - 1) * view.block_stride_bytes +
                     view.block_size * view.row_bytes};
}

TEST(PagedKvCache, LayersLieInTheMemoryAndDoNotOverlap) {
  for (const KvLayout& latent :
       {KvLayout::latent_bf16(32, 8), KvLayout::latent_f32(24, 0), KvLayout::fp8_ds_mla()}) {
    for (const KvLayout& index : {KvLayout::index_bf16(16), KvLayout::index_fp8()}) {
      PagedKvCacheOptions options = options_of({true, false, true, false});
      options.latent_layout = latent;
      options.index_layout = index;
      Result<PagedKvCache> cache = PagedKvCache::create(&kTestRuntime, options);
      ASSERT_TRUE(cache.ok()) << cache.status().message();
      EXPECT_EQ(cache->num_blocks(), 5);
      EXPECT_EQ(cache->block_size(), 4);
      EXPECT_EQ(heap.last_bytes, 5 * PagedKvCache::block_bytes(options));
      std::vector<Range> ranges;
      int64_t bytes = 0;
      for (int layer = 0; layer < 4; ++layer) {
        const KvCacheView view = cache->latent(layer);
        EXPECT_EQ(view.layout, latent);
        EXPECT_EQ(view.num_blocks, 5);
        EXPECT_EQ(view.block_size, 4);
        EXPECT_EQ(view.row_bytes, latent.record_bytes());
        EXPECT_GE(view.block_stride_bytes, 4 * latent.record_bytes());
        ranges.push_back(range_of(view));
        const KvCacheView keys = cache->index(layer);
        EXPECT_EQ(keys.empty(), layer % 2 == 1) << layer;
        if (!keys.empty()) {
          EXPECT_EQ(keys.layout, index);
          EXPECT_EQ(keys.num_blocks, 5);
          EXPECT_EQ(keys.block_size, 4);
          ranges.push_back(range_of(keys));
        }
      }
      for (size_t i = 0; i < ranges.size(); ++i) {
        EXPECT_GE(ranges[i].begin, heap.last);
        EXPECT_LE(ranges[i].end, heap.last + heap.last_bytes);
        bytes += ranges[i].end - ranges[i].begin;
        for (size_t j = 0; j < i; ++j) {
          EXPECT_TRUE(ranges[i].end <= ranges[j].begin || ranges[j].end <= ranges[i].begin)
              << i << " and " << j;
        }
      }
      EXPECT_EQ(bytes, heap.last_bytes);  // nothing is wasted
    }
  }
  EXPECT_EQ(heap.live, 0);
}

// One translation of positions to rows serves all layers of a group.
TEST(PagedKvCache, AllLatentCachesShareBlocksAndStrides) {
  const Result<PagedKvCache> cache =
      PagedKvCache::create(&kTestRuntime, options_of({true, true, false}));
  ASSERT_TRUE(cache.ok());
  for (int layer = 1; layer < 3; ++layer) {
    EXPECT_EQ(cache->latent(layer).block_stride_rows(), cache->latent(0).block_stride_rows());
    EXPECT_EQ(cache->latent(layer).num_rows(), cache->latent(0).num_rows());
  }
}

TEST(PagedKvCache, BadSizesAreRefusedWithTheirNumbers) {
  for (const auto& [blocks, size] : {std::pair<int64_t, int64_t>{0, 4}, {-3, 4}, {5, 0}}) {
    PagedKvCacheOptions options = options_of({true});
    options.num_blocks = blocks;
    options.block_size = size;
    const Result<PagedKvCache> cache = PagedKvCache::create(&kTestRuntime, options);
    ASSERT_FALSE(cache.ok());
    EXPECT_EQ(cache.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(cache.status().message(), "kv cache: " + std::to_string(blocks) + " blocks of " +
                                            std::to_string(size) +
                                            " tokens, expected at least one of each");
  }
  EXPECT_EQ(heap.live, 0);
}

TEST(PagedKvCache, ABlockStrideIsAWholeNumberOfRows) {
  PagedKvCacheOptions options = options_of({true, false});  // rows of 80 bytes, 4 a block
  options.latent_block_stride_bytes = 6 * 80;
  {
    const Result<PagedKvCache> cache = PagedKvCache::create(&kTestRuntime, options);
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    EXPECT_EQ(heap.last_bytes, 5 * (2 * 6 * 80 + 4 * 32));
    for (int layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(cache->latent(layer).block_stride_rows(), 6);
      EXPECT_EQ(cache->latent(layer).num_rows(), 4 * 6 + 4);
    }
    EXPECT_LE(range_of(cache->latent(0)).end, range_of(cache->index(0)).begin);
    EXPECT_LE(range_of(cache->index(0)).end, range_of(cache->latent(1)).begin);
    EXPECT_LE(range_of(cache->latent(1)).end, heap.last + heap.last_bytes);
  }
  for (const int64_t stride : {6 * 80 - 1, 6 * 80 + 16, 3 * 80, 80, 1, -320}) {
    options.latent_block_stride_bytes = stride;
    const Result<PagedKvCache> cache = PagedKvCache::create(&kTestRuntime, options);
    ASSERT_FALSE(cache.ok()) << stride;
    EXPECT_EQ(cache.status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(cache.status().message(),
              "kv cache: latent_block_stride_bytes " + std::to_string(stride) +
                  ", expected a multiple of the 80 bytes of a row and at least 320, a block's");
  }
  EXPECT_EQ(heap.live, 0);
}

TEST(PagedKvCache, TheRuntimesRefusalIsPassedOn) {
  heap.limit = 100;
  const Result<PagedKvCache> cache = PagedKvCache::create(&kTestRuntime, options_of({true}));
  heap.limit = int64_t{1} << 30;
  ASSERT_FALSE(cache.ok());
  EXPECT_EQ(cache.status().code(), StatusCode::kOutOfMemory);
  EXPECT_EQ(cache.status().message(), "test heap: 2240 bytes, there are 100");
}

TEST(PagedKvCache, AMoveKeepsTheViewsAndTheMemory) {
  {
    Result<PagedKvCache> made = PagedKvCache::create(&kTestRuntime, options_of({true, false}));
    ASSERT_TRUE(made.ok());
    const void* data = made->latent(1).data;
    const PagedKvCache cache = std::move(made).value();
    EXPECT_EQ(cache.latent(1).data, data);
    EXPECT_EQ(heap.live, 1);
  }
  EXPECT_EQ(heap.live, 0);
}

}  // namespace
}  // namespace lacuna
