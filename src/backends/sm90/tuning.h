// Measured constants of the Hopper kernels, each with its benchmark.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// sparse_mla_small_head: what the model of split_kv.cc counts, in SM cycles. H200, 16 heads of 576,
// 2026-12-01 (docs/kernels/sparse_mla_small_head.md). 2048 keys: 8 rows take 13.8 us with 8 splits
// and 14.7 with 16; 32 rows 28.5 us with 4 splits and 32.1 with 2; 64 rows 51.8 us whole, 47.7 with
// 2 splits, 45.3 with 2 splits in clusters; with 8 splits of 8 rows clusters take 14.9.
inline constexpr int64_t kTaskCycles = 3000;        // list, first key, last output
inline constexpr int64_t kTileCycles = 2300;        // a tile on its own
inline constexpr int64_t kTilePairCycles = 3000;    // one for each consumer
inline constexpr int64_t kNextTileCycles = 3100;    // as long as an SM alone takes
inline constexpr int64_t kTileMemoryCycles = 4400;  // keys from HBM, all SMs reading
inline constexpr int64_t kClusterJoinCycles = 2500;
inline constexpr int64_t kJoinCycles = 5000;  // a kernel more
inline constexpr int64_t kJoinBytesPerCycle = 2500;

// With fewer rows and fewer keys in all, cuda/sparse_mla_mma is faster, whose tile is smaller.
// H200, 2026-12-01, microseconds of it and of this kernel, 8 / 16 / 32 heads of 576, cold:
//   1 row x 2048   7.0 7.5  8.8    8.3  9.7 11.9      8 rows x 128   6.4  6.8  7.0    6.8  7.8  9.4
//   4 rows x 2048 10.5 10.8 13.9  10.5 11.9 14.1      8 rows x 640   9.2 11.4 11.6    9.2 10.2 12.1
//   8 rows x 2048 12.9 15.3 18.1  13.4 14.4 16.3     32 rows x 128   9.0  9.5 10.2    7.2  8.2  9.8
inline constexpr int64_t kSmallHeadRowsMin = 16;
inline constexpr int64_t kSmallHeadKeysMin = 16384;

}  // namespace lacuna::sm90
