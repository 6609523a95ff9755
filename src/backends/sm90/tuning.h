// Measured constants of the Hopper kernels, each with its benchmark.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// sparse_mla_small_head: what the model of split_kv.cc counts, in SM cycles. H200, 16 heads of 576,
// 2026-12-01 (docs/kernels/sparse_mla_small_head.md). 2048 keys: 8 rows take 13.8 us with 8 splits
// and 14.7 with 16; 32 rows 28.5 us with 4 splits and 32.1 with 2; 64 rows 51.8 us whole, 47.7 with
// 2 splits, 42.8 with 2 splits in clusters; with 8 splits of 8 rows clusters take 14.9. 32 rows
// with 3 splits in clusters 26.0, 28 rows with 4 23.0, without 27.6 and 25.3.
inline constexpr int64_t kTaskCycles = 3000;        // list, first key, last output
inline constexpr int64_t kTileCycles = 2300;        // a tile on its own
inline constexpr int64_t kTilePairCycles = 3000;    // one for each consumer
inline constexpr int64_t kNextTileCycles = 3100;    // as long as an SM alone takes
inline constexpr int64_t kTileMemoryCycles = 4400;  // keys from HBM, all SMs reading
// The same in clusters of two on more than half of the SMs. 2048 keys, 8, 16 and 32 heads: 32 rows
// take 25.7, 27.6 and 33.4 us so, 38 rows 35.9, 36.8 and 38.6, and 29.4, 31.4 and 36.4 with 3
// splits and a joining kernel; 1024 keys, 38 rows: 20.6, 21.3 and 22.8, and 18.9, 20.4 and 24.9.
inline constexpr int64_t kNeighbourTileCycles = 3850;
// The same in clusters of three and four, which leave SMs idle: 32 rows of 8192 keys, 8 and 32
// heads, take 81.4 and 85.8 us in clusters of three, 78.3 and 88.2 with 4 splits.
inline constexpr int64_t kFewBlocksTileCycles = 3380;
inline constexpr int64_t kClusterJoinCycles = 2500;
inline constexpr int64_t kJoinCycles = 5000;  // a kernel more
inline constexpr int64_t kJoinBytesPerCycle = 2500;

// With fewer rows cuda/sparse_mla_mma is faster, whose blocks start and end sooner. H200,
// 2026-12-01, microseconds of it and of this kernel, 8, 16 and 32 heads of 576, cold:
//    8 rows x 2048: 12.5 12.7   12.9 13.3   15.8 15.9
//    8 rows x 2176:                         16.5 20.3
//   16 rows x 640:   9.8 10.0   10.6 10.7   11.8 13.0
//   16 rows x 2048: 18.4 17.6   19.1 18.6   24.1 21.6
//   24 rows x 640:  10.6 10.8   11.3 11.8   15.9 15.0
//   24 rows x 1024: 14.8 13.6   15.5 14.7   22.1 16.7
//   24 rows x 8192: 67.3 63.4   68.0 64.4  132.4 66.8
//   30 rows x 128:   5.3  6.2    6.1  6.7    7.5  8.4
//   30 rows x 640:  11.6 12.3   12.2 13.4   16.4 15.9
//   30 rows x 1024: 15.4 16.0   16.3 16.6   22.6 19.5
//   32 rows x 128:   7.4  6.3    7.3  6.7    7.6  8.4
//   32 rows x 2048: 26.9 25.4   27.9 26.4   39.1 29.2
//   36 rows x 128:   7.5  6.4    7.8  6.9    9.1  8.6
//   48 rows x 2048: 41.3 37.4   41.8 38.5   70.2 39.5
// and earlier: 8 rows x 8192: 27.3 27.9   28.3 30.4   41.0 35.9
struct SmallHeadPays {
  int64_t heads_max;
  int64_t rows_min;  // on 132 SMs; or
  int64_t few_rows_min;
  int64_t keys_min;  // in all, from few_rows_min rows on
};
inline constexpr int64_t kSmallHeadPaysSms = 132;
inline constexpr SmallHeadPays kSmallHeadPays[] = {
    {.heads_max = 16, .rows_min = 31, .few_rows_min = 16, .keys_min = 24576},
    {.heads_max = 32, .rows_min = 33, .few_rows_min = 8, .keys_min = 20480}};

}  // namespace lacuna::sm90
