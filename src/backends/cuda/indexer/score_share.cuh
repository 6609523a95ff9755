// The part of a row's columns that one block of threads scores, known only on the device: a row is
// cut evenly by its own length, so that a short row costs little whatever the widest could be.
#pragma once

#include <cstdint>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/indexer/even_range.cuh"
#include "backends/cuda/indexer/score.h"

namespace lacuna::cuda {

struct ScoreShare {
  int64_t t;
  uint32_t split;   // which of the row's blocks this is
  int64_t columns;  // of the whole row
  int64_t begin, end;
};

// Columns go to blocks in units of `unit`; a block has at least one unit or nothing.
__device__ inline ScoreShare score_share(const ScoreParams& p, int unit) {
  ScoreShare share;
  const uint32_t num_rows = static_cast<uint32_t>(p.num_rows);
  share.t = blockIdx.x % num_rows;
  share.split = blockIdx.x / num_rows;
  const int64_t scored = p.lengths.scored_columns(share.t);
  share.columns = scored < p.num_columns ? scored : p.num_columns;
  const uint32_t units = (static_cast<uint32_t>(share.columns) + unit - 1) / unit;
  const uint32_t splits = static_cast<uint32_t>(p.splits);
  const uint32_t active = units < splits ? units : splits;
  share.begin = 0;
  share.end = 0;
  if (share.split < active) {
    const Range range = even_range(units, share.split, active);
    share.begin = range.begin * unit;
    const int64_t end = range.end * unit;
    share.end = end < share.columns ? end : share.columns;
  }
  return share;
}

__device__ inline void store_logit(const ScoreParams& p, int64_t t, int64_t column, float value) {
  const int64_t at = t * p.logits_row_stride + column;
  if (p.logits_dtype == DType::kBFloat16) {
    static_cast<Bf16*>(p.logits)[at] = from_float<Bf16>(value);
  } else {
    static_cast<float*>(p.logits)[at] = value;
  }
}

// This block's part of the columns that are not scored.
__device__ inline void fill_unscored(const ScoreParams& p, const ScoreShare& share) {
  if (!p.fill) {
    return;
  }
  const Range range = even_range(static_cast<uint32_t>(p.num_columns - share.columns), share.split,
                                 static_cast<uint32_t>(p.splits));
  for (int64_t j = share.columns + range.begin + threadIdx.x; j < share.columns + range.end;
       j += blockDim.x) {
    store_logit(p, share.t, j, -INFINITY);
  }
}

// max(x, 0), and NaN stays NaN.
__device__ inline float relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace lacuna::cuda
