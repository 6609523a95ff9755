// Ownership of cache blocks: a free list and reference counts. Knows nothing of what a block holds;
// addresses are the block table's business.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

class BlockPool {
 public:
  explicit BlockPool(int32_t num_blocks);

  int32_t num_blocks() const { return static_cast<int32_t>(ref_counts_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

  // A block with one reference, or nothing when all are taken. The block released last is given
  // first (its memory is the warmest).
  std::optional<int32_t> allocate();
  // One more owner of a block that is in use.
  void retain(int32_t block);
  // One owner less; the last one frees the block.
  void release(int32_t block);

 private:
  std::vector<int32_t> ref_counts_;
  std::vector<int32_t> free_;
};

}  // namespace lacuna
