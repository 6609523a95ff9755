// The floor under sparse attention on a GPU: a kernel that brings the listed rows of a cache into
// shared memory and does nothing with them, in several shapes of which the fastest counts.
#pragma once

#include <cstdint>
#include <string>

#include "ops/backend.h"

namespace lacuna::bench {

// One shape of the gather: stages of rows in flight, and how many listed rows a block brings.
struct GatherShape {
  int config = 0;  // 0 <= config < kGatherConfigs
  int64_t rows_per_block = 0;
};

inline constexpr int kGatherConfigs = 3;

// Enqueues one gather of all rows that `indices` [T, W] (int32, contiguous) names; a kernel that
// brings nothing when it names none. Rows must be multiples of 16 bytes and every entry a row of
// the cache.
Status gather_rows(const KvCacheView& kv, const ConstTensorView& indices, const GatherShape& shape,
                   const DeviceInfo& device, void* stream);

// Driver, runtime and clock limits in words, for the head of a table of measurements.
std::string describe_gpu(int device_idx);

}  // namespace lacuna::bench
