// Reference counts over a stack of free blocks.
#include "kvcache/block_pool.h"

#include "core/check.h"

namespace lacuna {

BlockPool::BlockPool(int32_t num_blocks) : ref_counts_(num_blocks, 0) {
  free_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) {
    free_.push_back(block);  // block 0 is given first
  }
}

std::optional<int32_t> BlockPool::allocate() {
  if (free_.empty()) {
    return std::nullopt;
  }
  const int32_t block = free_.back();
  free_.pop_back();
  LACUNA_CHECK(ref_counts_[block] == 0);
  ref_counts_[block] = 1;
  return block;
}

void BlockPool::retain(int32_t block) {
  LACUNA_CHECK(block >= 0 && block < num_blocks() && ref_counts_[block] > 0);
  ++ref_counts_[block];
}

void BlockPool::release(int32_t block) {
  LACUNA_CHECK(block >= 0 && block < num_blocks() && ref_counts_[block] > 0);
  if (--ref_counts_[block] == 0) {
    free_.push_back(block);
  }
}

}  // namespace lacuna
