// The device memory of all layers' caches. One block id names the same tokens in every layer: a
// latent block in each layer, and an index-key block in each layer that has an indexer.
#pragma once

#include <cstdint>
#include <vector>

#include "core/device_memory.h"
#include "lacuna/kv_cache.h"

namespace lacuna {

struct PagedKvCacheOptions {
  Device device = {};
  KvLayout latent_layout = {};
  KvLayout index_layout = {};
  std::vector<bool> layer_has_indexer = {};  // one entry a layer
  int64_t num_blocks = 0;
  int64_t block_size = 64;  // tokens
  // From one latent block to the next, a whole number of rows; 0: blocks back to back.
  int64_t latent_block_stride_bytes = 0;
};

class PagedKvCache {
 public:
  static Result<PagedKvCache> create(const Runtime* runtime, const PagedKvCacheOptions& options);
  // Bytes that one block takes over all layers.
  static int64_t block_bytes(const PagedKvCacheOptions& options);

  int64_t num_blocks() const { return options_.num_blocks; }
  int64_t block_size() const { return options_.block_size; }
  KvCacheView latent(int layer) const { return latent_[layer]; }
  // Empty for a layer without an indexer.
  KvCacheView index(int layer) const { return index_[layer]; }

 private:
  PagedKvCacheOptions options_;
  DeviceMemory memory_;
  std::vector<KvCacheView> latent_;
  std::vector<KvCacheView> index_;
};

}  // namespace lacuna
