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
inline constexpr int64_t kClusterJoinCycles = 2500;
inline constexpr int64_t kJoinCycles = 5000;  // a kernel more
inline constexpr int64_t kJoinBytesPerCycle = 2500;

// With fewer rows and fewer keys in all, cuda/sparse_mla_mma is faster, whose blocks start and end
// sooner. H200, 2026-12-01, microseconds of it and of this kernel, 8, 16 and 32 heads of 576, cold:
//    8 rows x 2048: 12.6 12.7   12.8 13.3   15.8 16.0
//   16 rows x 2048: 18.6 17.6   19.3 19.0   24.1 23.1
//   32 rows x 2048: 27.2 26.9   28.1 28.4   39.2 33.5
//   64 rows x 2048: 45.3 43.0   46.0 45.1   71.6 49.3
//  128 rows x 2048: 83.1 75.5   84.0 76.8  133.5 79.4
//   32 rows x 640:  13.6 13.3   13.9 15.2   16.7 19.9
//   48 rows x 640:  17.4 16.7   17.6 18.6   26.1 22.1
//   96 rows x 640:  28.0 24.5   28.9 25.3   45.9 26.6
//   32 rows x 128:   7.5  6.3    7.3  7.0    7.6  8.8
//   96 rows x 128:   9.4  8.8   10.3  9.5   13.9 11.1
//    8 rows x 8192: 27.3 27.9   28.3 30.4   41.0 35.9
struct SmallHeadPays {
  int64_t heads_max;
  int64_t list_max;  // for lists of at most so many keys
  int64_t keys_min;  // in all; or
  int64_t rows_min;  // -1: more than half of the SMs, so that rows stay whole
};
inline constexpr SmallHeadPays kSmallHeadPays[] = {
    {.heads_max = 8, .list_max = INT64_MAX, .keys_min = 98304, .rows_min = 16},
    {.heads_max = 16, .list_max = 256, .keys_min = INT64_MAX, .rows_min = 32},
    {.heads_max = 16, .list_max = INT64_MAX, .keys_min = 98304, .rows_min = -1},
    {.heads_max = 32, .list_max = INT64_MAX, .keys_min = 30720, .rows_min = -1}};

}  // namespace lacuna::sm90
