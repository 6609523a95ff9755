// Lays the layers of a cache out, one after the other.
#include "kvcache/paged_kv_cache.h"

#include <string>

#include "core/check.h"

namespace lacuna {

int64_t PagedKvCache::block_bytes(const PagedKvCacheOptions& options) {
  int64_t bytes = 0;
  for (const bool has_indexer : options.layer_has_indexer) {
    bytes += options.block_size * options.latent_layout.record_bytes();
    bytes += has_indexer ? options.block_size * options.index_layout.record_bytes() : 0;
  }
  return bytes;
}

Result<PagedKvCache> PagedKvCache::create(const Runtime* runtime,
                                          const PagedKvCacheOptions& options) {
  if (options.num_blocks < 1 || options.block_size < 1) {
    return invalid_argument("kv cache: " + std::to_string(options.num_blocks) + " blocks of " +
                            std::to_string(options.block_size) +
                            " tokens, expected at least one of each");
  }
  PagedKvCache cache;
  cache.options_ = options;
  const int64_t bytes = options.num_blocks * block_bytes(options);
  LACUNA_ASSIGN_OR_RETURN(cache.memory_,
                          DeviceMemory::allocate(runtime, options.device.index, bytes));
  char* at = static_cast<char*>(cache.memory_.data());
  for (const bool has_indexer : options.layer_has_indexer) {
    KvCacheView latent = paged_rows(at, options.latent_layout, options.num_blocks,
                                    options.block_size, options.device);
    at += options.num_blocks * latent.block_stride_bytes;
    cache.latent_.push_back(latent);
    KvCacheView index;
    if (has_indexer) {
      index = paged_rows(at, options.index_layout, options.num_blocks, options.block_size,
                         options.device);
      at += options.num_blocks * index.block_stride_bytes;
    }
    cache.index_.push_back(index);
  }
  return cache;
}

}  // namespace lacuna
