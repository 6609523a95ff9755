// Ownership of cache blocks: reference counts, and what full blocks hold, so that a later sequence
// with the same beginning can share them. A block is free (no content), used (referenced), or
// cached: nobody references it but its content is known; cached blocks are evicted, least recently
// used first, when no free block is left. Knows nothing of layers: a block's latent and index keys
// live and die together.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

// Identifies the content of a full block and of everything before it: a chain over blocks, started
// from a salt.
struct BlockHash {
  uint64_t lo = 0;
  uint64_t hi = 0;
  friend bool operator==(const BlockHash&, const BlockHash&) = default;
};

BlockHash root_hash(uint64_t salt);
BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens);

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(blocks_.size()); }
  // Blocks that allocate() can give: free and cached ones.
  int32_t num_free() const { return num_blank_ + num_cached_; }
  int32_t num_used() const { return num_blocks() - num_free(); }
  int32_t num_cached() const { return num_cached_; }
  int64_t num_evictions() const { return num_evictions_; }

  // A block with one reference and no content, or nothing when all are used.
  std::optional<int32_t> allocate();
  // One more owner of a block that is used or cached.
  void retain(int32_t block);
  // One owner less; the last one makes it cached (if its content is known) or free.
  void release(int32_t block);

  // Says what a used block holds. Does nothing when another block is known to hold the same.
  void publish(int32_t block, const BlockHash& hash);
  // The block that holds this content; not retained.
  std::optional<int32_t> find(const BlockHash& hash) const;
  // Forgets all content (weights or cache contents changed): cached blocks become free.
  void clear_cached();

 private:
  struct Block {
    int32_t ref_count = 0;
    bool has_hash = false;
    BlockHash hash;
    // Neighbours in the free stack or in the list of cached blocks, oldest first; -1: none.
    int32_t previous = -1;
    int32_t next = -1;
  };
  struct HashOfHash {
    size_t operator()(const BlockHash& hash) const { return static_cast<size_t>(hash.lo); }
  };
  void unlink_cached(int32_t block);
  void push_free(int32_t block);
  void forget(int32_t block);

  std::vector<Block> blocks_;
  std::unordered_map<BlockHash, int32_t, HashOfHash> by_hash_;
  int32_t free_top_ = -1;
  int32_t oldest_cached_ = -1;
  int32_t newest_cached_ = -1;
  int32_t num_blank_ = 0;
  int32_t num_cached_ = 0;
  int64_t num_evictions_ = 0;
};

}  // namespace lacuna
