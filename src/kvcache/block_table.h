// Logical position -> block -> slot, for one sequence. Owns a reference to each of its blocks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/block_pool.h"

namespace lacuna {

class BlockTable {
 public:
  BlockTable(BlockPool* pool, int64_t block_size) : pool_(pool), block_size_(block_size) {}
  ~BlockTable() { clear(); }
  BlockTable(BlockTable&& other) noexcept;
  BlockTable& operator=(BlockTable&&) = delete;

  // Makes room for positions [0, num_tokens). All or nothing: on failure the table is as before,
  // and the status says how many blocks were missing.
  Status reserve(int64_t num_tokens);
  // Whether reserve would succeed.
  bool can_reserve(int64_t num_tokens) const;
  // Blocks become available again, the last one first: those with a longer beginning are evicted
  // sooner.
  void clear();

  // The longest known beginning of `tokens` (whole blocks, at most `tokens_max` tokens): its blocks
  // become this table's, which must be empty. Returns the number of tokens.
  int64_t share_prefix(std::span<const int32_t> tokens, int64_t tokens_max, uint64_t salt);
  // Publishes the blocks that are full now that `num_computed` leading tokens are cached.
  void publish_full(std::span<const int32_t> tokens, int64_t num_computed, uint64_t salt);

  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * block_size_; }
  int64_t slot(int64_t position) const {
    return blocks_[position / block_size_] * block_size_ + position % block_size_;
  }
  std::span<const int32_t> blocks() const { return blocks_; }

 private:
  int64_t missing_blocks(int64_t num_tokens) const;

  BlockPool* pool_;
  int64_t block_size_;
  std::vector<int32_t> blocks_;
  // Hashes of the leading full blocks that were shared or published.
  std::vector<BlockHash> hashes_;
};

}  // namespace lacuna
