// Measured constants of the Hopper kernels, each with its benchmark.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// sparse_mla_small_head: what the model of split_kv.cc counts, in SM cycles.
inline constexpr int64_t kBlockCycles = 3000;       // launch, list, first key, last output
inline constexpr int64_t kTileCycles = 1250;        // a tile, two consumers at work
inline constexpr int64_t kLoneTileCycles = 2300;    // a tile on its own
inline constexpr int64_t kTileMemoryCycles = 4400;  // its keys from HBM, all SMs reading
inline constexpr int64_t kCombineCycles = 2500;
inline constexpr int64_t kCombineBytesPerCycle = 2500;

}  // namespace lacuna::sm90
