// From positions of a request to rows of a cache, through a block table. Used by every kernel that
// takes positions, so that they agree with translate_indices.
#pragma once

#include <cstdint>

#include "backends/cuda/device/strided.h"

namespace lacuna::cuda {

struct PositionsToRows {
  Strided2<const int32_t> block_table;  // [num_requests, num_columns]
  int64_t num_requests = 0;
  int64_t num_columns = 0;
  int64_t num_blocks = 0;
  int32_t block_size = 1;
  int64_t block_stride_rows = 0;

  // -1 where the request is none, or the position has no valid block. Row ids fit int32: validation
  // refuses larger caches.
  LACUNA_HOST_DEVICE int32_t operator()(int32_t request, int32_t position) const {
    if (position < 0 || request < 0 || request >= num_requests) {
      return -1;
    }
    const int32_t column = position / block_size;
    if (column >= num_columns) {
      return -1;
    }
    const int32_t block = block_table(request, column);
    if (block < 0 || block >= num_blocks) {
      return -1;
    }
    return static_cast<int32_t>(block * block_stride_rows + (position - column * block_size));
  }
};

inline PositionsToRows positions_to_rows(const ConstTensorView& block_table, int64_t num_blocks,
                                         int64_t block_size, int64_t block_stride_rows) {
  return {.block_table = strided2<const int32_t>(block_table),
          .num_requests = block_table.shape[0],
          .num_columns = block_table.shape[1],
          .num_blocks = num_blocks,
          .block_size = static_cast<int32_t>(block_size),
          .block_stride_rows = block_stride_rows == 0 ? block_size : block_stride_rows};
}

}  // namespace lacuna::cuda
