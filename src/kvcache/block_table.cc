// Growing and releasing a sequence's blocks.
#include "kvcache/block_table.h"

#include <string>
#include <utility>

#include "core/check.h"

namespace lacuna {

BlockTable::BlockTable(BlockTable&& other) noexcept
    : pool_(other.pool_), block_size_(other.block_size_), blocks_(std::move(other.blocks_)) {
  other.blocks_.clear();
}

Status BlockTable::reserve(int64_t num_tokens) {
  const int64_t needed = (num_tokens + block_size_ - 1) / block_size_;
  const int64_t missing = needed - static_cast<int64_t>(blocks_.size());
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
  for (int32_t block : blocks_) {
    pool_->release(block);
  }
  blocks_.clear();
}

}  // namespace lacuna
