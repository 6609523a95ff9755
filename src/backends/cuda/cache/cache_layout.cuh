// Where a token of a paged cache lies, in bytes: for the operations that take slots and positions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lacuna/dtype.h"
#include "lacuna/kv_cache.h"

namespace lacuna::cuda {

struct CacheAddress {
  char* data;
  int64_t block_size;
  int64_t block_stride_bytes;
  int64_t row_bytes;

  // Slots below 2^31 take the short division.
  __device__ int64_t block_of(int64_t slot) const {
    return ((slot | block_size) >> 31) == 0
               ? static_cast<uint32_t>(slot) / static_cast<uint32_t>(block_size)
               : slot / block_size;
  }

  __device__ char* record(int64_t block, int64_t offset) const {
    return data + block * block_stride_bytes + offset * row_bytes;
  }
  __device__ char* record(int64_t slot) const {
    const int64_t block = block_of(slot);
    return record(block, slot - block * block_size);
  }

  // A key of kIndexFp8: its values, and its scale behind all values of the block.
  struct Planar {
    Fp8E4M3* values;
    float* scale;
  };
  __device__ Planar planar(int64_t slot, int64_t dim) const {
    const int64_t block = block_of(slot);
    const int64_t offset = slot - block * block_size;
    char* base = data + block * block_stride_bytes;
    return {reinterpret_cast<Fp8E4M3*>(base + offset * dim),
            reinterpret_cast<float*>(base + block_size * dim) + offset};
  }
};

inline CacheAddress cache_address(const KvCacheView& kv) {
  return {.data = static_cast<char*>(kv.data),
          .block_size = kv.block_size,
          .block_stride_bytes = kv.block_stride_bytes,
          .row_bytes = kv.row_bytes};
}

// Whether every record of a layout that is not planar starts at a multiple of `bytes`.
inline bool has_aligned_records(const KvCacheView& kv, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(kv.data) % bytes == 0 && kv.row_bytes % bytes == 0 &&
         (kv.num_blocks <= 1 || kv.block_stride_bytes % bytes == 0);
}

}  // namespace lacuna::cuda
