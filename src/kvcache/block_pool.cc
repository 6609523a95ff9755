// Lists threaded through the blocks, so that nothing is allocated after construction but hash map
// nodes.
#include "kvcache/block_pool.h"

#include "core/check.h"

namespace lacuna {
namespace {

// The finaliser of MurmurHash3 (Appleby, public domain): each input bit reaches each output bit.
uint64_t mix(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  x ^= x >> 33;
  return x;
}

}  // namespace

BlockHash root_hash(uint64_t salt) { return {mix(salt + 1), mix(salt ^ 0x9e3779b97f4a7c15ull)}; }

BlockHash chain_hash(const BlockHash& parent, std::span<const int32_t> tokens) {
  // Two 64-bit chains with different multipliers: 128 bits make an accidental match a matter of
  // 2^64 blocks.
  BlockHash hash = parent;
  for (const int32_t token : tokens) {
    const uint64_t value = static_cast<uint32_t>(token);
    hash.lo = mix(hash.lo ^ (value + 0x9e3779b97f4a7c15ull));
    hash.hi = mix(hash.hi * 0xd6e8feb86659fd93ull + value + 1);
  }
  return hash;
}

BlockPool::BlockPool(int32_t num_blocks) : blocks_(num_blocks) {
  by_hash_.reserve(num_blocks);
  for (int32_t block = num_blocks - 1; block >= 0; --block) {
    push_free(block);  // block 0 is given first
  }
}

void BlockPool::push_free(int32_t block) {
  blocks_[block].next = free_top_;
  free_top_ = block;
  ++num_blank_;
}

void BlockPool::unlink_cached(int32_t block) {
  Block& b = blocks_[block];
  (b.previous >= 0 ? blocks_[b.previous].next : oldest_cached_) = b.next;
  (b.next >= 0 ? blocks_[b.next].previous : newest_cached_) = b.previous;
  b.previous = -1;
  b.next = -1;
  --num_cached_;
}

void BlockPool::forget(int32_t block) {
  by_hash_.erase(blocks_[block].hash);
  blocks_[block].has_hash = false;
}

std::optional<int32_t> BlockPool::allocate() {
  int32_t block = free_top_;
  if (block >= 0) {
    free_top_ = blocks_[block].next;
    blocks_[block].next = -1;
    --num_blank_;
  } else if (oldest_cached_ >= 0) {
    block = oldest_cached_;
    unlink_cached(block);
    forget(block);
    ++num_evictions_;
  } else {
    return std::nullopt;
  }
  LACUNA_CHECK(blocks_[block].ref_count == 0 && !blocks_[block].has_hash);
  blocks_[block].ref_count = 1;
  return block;
}

void BlockPool::retain(int32_t block) {
  LACUNA_CHECK(block >= 0 && block < num_blocks());
  Block& b = blocks_[block];
  if (b.ref_count == 0) {
    LACUNA_CHECK(b.has_hash);  // a free block has no content to share
    unlink_cached(block);
  }
  ++b.ref_count;
}

void BlockPool::release(int32_t block) {
  LACUNA_CHECK(block >= 0 && block < num_blocks() && blocks_[block].ref_count > 0);
  Block& b = blocks_[block];
  if (--b.ref_count > 0) {
    return;
  }
  if (!b.has_hash) {
    push_free(block);
    return;
  }
  b.previous = newest_cached_;
  b.next = -1;
  (newest_cached_ >= 0 ? blocks_[newest_cached_].next : oldest_cached_) = block;
  newest_cached_ = block;
  ++num_cached_;
}

void BlockPool::publish(int32_t block, const BlockHash& hash) {
  LACUNA_CHECK(block >= 0 && block < num_blocks() && blocks_[block].ref_count > 0);
  Block& b = blocks_[block];
  if (!b.has_hash && by_hash_.emplace(hash, block).second) {
    b.has_hash = true;
    b.hash = hash;
  }
}

std::optional<int32_t> BlockPool::find(const BlockHash& hash) const {
  const auto found = by_hash_.find(hash);
  return found == by_hash_.end() ? std::nullopt : std::optional<int32_t>(found->second);
}

void BlockPool::clear_cached() {
  while (oldest_cached_ >= 0) {
    const int32_t block = oldest_cached_;
    unlink_cached(block);
    push_free(block);
  }
  // Used blocks keep their owners but can not be found any more.
  for (Block& b : blocks_) {
    b.has_hash = false;
  }
  by_hash_.clear();
}

}  // namespace lacuna
