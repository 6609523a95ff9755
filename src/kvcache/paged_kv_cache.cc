// Lays the layers of a cache out, one after the other.
#include "kvcache/paged_kv_cache.h"

#include <string>

#include "core/check.h"

namespace lacuna {

namespace {

int64_t latent_block_stride(const PagedKvCacheOptions& options) {
  return options.latent_block_stride_bytes != 0
             ? options.latent_block_stride_bytes
             : options.block_size * options.latent_layout.record_bytes();
}

}  // namespace

int64_t PagedKvCache::block_bytes(const PagedKvCacheOptions& options) {
  int64_t bytes = 0;
  for (const bool has_indexer : options.layer_has_indexer) {
    bytes += latent_block_stride(options);
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
  // Index lists name rows: between two blocks there must be a whole number of them.
  const int64_t row_bytes = options.latent_layout.record_bytes();
  const int64_t stride = latent_block_stride(options);
  if (stride < options.block_size * row_bytes || stride % row_bytes != 0) {
    return invalid_argument("kv cache: latent_block_stride_bytes " + std::to_string(stride) +
                            ", expected a multiple of the " + std::to_string(row_bytes) +
                            " bytes of a row and at least " +
                            std::to_string(options.block_size * row_bytes) + ", a block's");
  }
  PagedKvCache cache;
  cache.options_ = options;
  const int64_t bytes = options.num_blocks * block_bytes(options);
  LACUNA_ASSIGN_OR_RETURN(cache.memory_,
                          DeviceMemory::allocate(runtime, options.device.index, bytes));
  if (options.device.kind != DeviceKind::kCpu) {
    // Finite, also where a warm-up reads blocks that nothing was written to.
    LACUNA_RETURN_IF_ERROR(runtime->fill_bytes(cache.memory_.data(), 0, bytes, nullptr));
    LACUNA_RETURN_IF_ERROR(runtime->synchronize(options.device.index, nullptr));
  }
  char* at = static_cast<char*>(cache.memory_.data());
  for (const bool has_indexer : options.layer_has_indexer) {
    KvCacheView latent = paged_rows(at, options.latent_layout, options.num_blocks,
                                    options.block_size, options.device);
    latent.block_stride_bytes = stride;
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
