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
  void clear();

  int64_t capacity() const { return static_cast<int64_t>(blocks_.size()) * block_size_; }
  int64_t slot(int64_t position) const {
    return blocks_[position / block_size_] * block_size_ + position % block_size_;
  }
  std::span<const int32_t> blocks() const { return blocks_; }

 private:
  BlockPool* pool_;
  int64_t block_size_;
  std::vector<int32_t> blocks_;
};

}  // namespace lacuna
