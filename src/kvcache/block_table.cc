// Growing, sharing and releasing a sequence's blocks.
#include "kvcache/block_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/check.h"

namespace lacuna {

BlockTable::BlockTable(BlockTable&& other) noexcept
    : pool_(other.pool_),
      block_size_(other.block_size_),
      blocks_(std::move(other.blocks_)),
      hashes_(std::move(other.hashes_)) {
  other.blocks_.clear();
  other.hashes_.clear();
}

int64_t BlockTable::missing_blocks(int64_t num_tokens) const {
  const int64_t needed = (num_tokens + block_size_ - 1) / block_size_;
  return std::max<int64_t>(0, needed - static_cast<int64_t>(blocks_.size()));
}

bool BlockTable::can_reserve(int64_t num_tokens) const {
  return missing_blocks(num_tokens) <= pool_->num_free();
}

Status BlockTable::reserve(int64_t num_tokens) {
  const int64_t missing = missing_blocks(num_tokens);
  if (missing > pool_->num_free()) {
    return out_of_memory("kv cache: " + std::to_string(missing) + " more blocks of " +
                         std::to_string(block_size_) + " tokens are needed, " +
                         std::to_string(pool_->num_free()) + " of " +
                         std::to_string(pool_->num_blocks()) + " are free");
  }
  for (int64_t i = 0; i < missing; ++i) {
    const std::optional<int32_t> block = pool_->allocate();
    LACUNA_CHECK(block.has_value());
    blocks_.push_back(*block);
  }
  return ok_status();
}

void BlockTable::clear() {
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) {
    pool_->release(*block);
  }
  blocks_.clear();
  hashes_.clear();
}

int64_t BlockTable::share_prefix(std::span<const int32_t> tokens, int64_t tokens_max,
                                 uint64_t salt) {
  LACUNA_CHECK(blocks_.empty());
  const int64_t limit = std::min<int64_t>(tokens_max, static_cast<int64_t>(tokens.size()));
  BlockHash hash = root_hash(salt);
  for (int64_t begin = 0; begin + block_size_ <= limit; begin += block_size_) {
    hash = chain_hash(hash, tokens.subspan(begin, block_size_));
    const std::optional<int32_t> block = pool_->find(hash);
    if (!block.has_value()) {
      break;
    }
    pool_->retain(*block);
    blocks_.push_back(*block);
    hashes_.push_back(hash);
  }
  return capacity();
}

void BlockTable::publish_full(std::span<const int32_t> tokens, int64_t num_computed,
                              uint64_t salt) {
  for (int64_t block = static_cast<int64_t>(hashes_.size());
       (block + 1) * block_size_ <= num_computed; ++block) {
    const BlockHash parent = block == 0 ? root_hash(salt) : hashes_[block - 1];
    hashes_.push_back(chain_hash(parent, tokens.subspan(block * block_size_, block_size_)));
    pool_->publish(blocks_[block], hashes_.back());
  }
}

}  // namespace lacuna
