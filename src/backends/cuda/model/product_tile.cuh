// The kernel of product_tile.h. Weights are the tall operand of the instructions, so that a tile
// may have few rows of x. Both operands go through shared memory by cp.async, 64 of k a stage; FP8
// weights stay FP8 there and are widened exactly on the way to the registers, and the sums of each
// block of 128 are multiplied by its scale in f32.
#pragma once

#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/fragments.cuh"
#include "backends/cuda/model/product_tile.h"

namespace lacuna::cuda {

inline constexpr int kTileThreads = 128;
inline constexpr int kTileWeightRows = 128;
inline constexpr int kTileDepth = 64;

// Stages that keep enough bytes on their way, within 96 KB.
template <class W, int kRows>
constexpr int kTileStages = kRows >= 128 ? 3 : 4;

template <class W, int kRows>
constexpr int kTileStageBytes =
    kTileWeightRows* kTileDepth* static_cast<int>(sizeof(W)) + kRows* kTileDepth * 2;

template <class W, int kRows>
constexpr int kTileSmemBytes = kTileStages<W, kRows>* kTileStageBytes<W, kRows>;

// Rows of 128 bytes (bf16): the upper half of odd rows comes first, so that the eight lanes of two
// rows read different banks.
__device__ inline int swizzle_bf16(int row, int chunk) {
  return row * 8 + (chunk ^ ((row & 1) * 4));
}
// Rows of 64 bytes (FP8): the same for every second pair of rows.
__device__ inline int swizzle_fp8(int row, int chunk) {
  return row * 4 + (chunk ^ ((row >> 1 & 1) * 2));
}

__device__ inline void load_shared_16(uint32_t (&to)[4], const uint8_t* at) {
  const uint4 four = *reinterpret_cast<const uint4*>(at);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// Weights of row `row` and 32 k (8 a lane) as four pairs.
template <class W>
__device__ inline void load_weights(uint32_t (&to)[4], const uint8_t* stage, int row, int step,
                                    int lane_k) {
  if constexpr (sizeof(W) == 2) {
    load_shared_16(to, stage + 16 * swizzle_bf16(row, 4 * step + lane_k));
  } else {
    const uint2 eight = *reinterpret_cast<const uint2*>(
        stage + 16 * swizzle_fp8(row, 2 * step + lane_k / 2) + 8 * (lane_k % 2));
    uint32_t pairs[2];
    widen_fp8(eight.x, pairs);
    to[0] = pairs[0];
    to[1] = pairs[1];
    widen_fp8(eight.y, pairs);
    to[2] = pairs[0];
    to[3] = pairs[1];
  }
}

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

// Blocks an SM that the registers should allow.
template <int kRows>
constexpr int kTileBlocks = kRows >= 64 ? 2 : 4;

template <class W, int kRows, bool kGated>
__global__ __launch_bounds__(kTileThreads,
                             kTileBlocks<kRows>) void product_kernel(const ProductParams p) {
  constexpr bool kFp8 = sizeof(W) == 1;
  constexpr int kStages = kTileStages<W, kRows>;
  constexpr int kStageBytes = kTileStageBytes<W, kRows>;
  constexpr int kWeightBytes = kTileWeightRows * kTileDepth * static_cast<int>(sizeof(W));
  constexpr int kWeightChunks = kWeightBytes / 16 / kTileWeightRows;  // 16 bytes each, of a row
  constexpr int kWeightLoads = kTileWeightRows * kWeightChunks / kTileThreads;
  constexpr int kXLoads = (kRows * 8 + kTileThreads - 1) / kTileThreads;
  constexpr int kRowTiles = kRows / 8;
  constexpr int kColumns = kGated ? kTileWeightRows / 2 : kTileWeightRows;
  extern __shared__ __align__(128) uint8_t smem[];

  pdl_wait();
  int64_t expert = 0;
  int64_t slot = static_cast<int64_t>(blockIdx.x) * kRows;
  int count = 0;
  if (p.tiles != nullptr) {
    if (blockIdx.x >= static_cast<unsigned>(*p.num_tiles)) {
      return;
    }
    const ExpertTile tile = p.tiles[blockIdx.x];
    expert = tile.expert;
    slot = tile.begin;
    count = tile.count;
  } else {
    count = static_cast<int>(min(static_cast<int64_t>(kRows), p.rows - slot));
  }
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * kColumns;

  // Sources of this thread's chunks, in units of 16 bytes: a kernel with 64 sums has no registers
  // for pointers. What lies beyond the last row or column reads the last one: its sums go nowhere.
  constexpr int kChunk = 16 / static_cast<int>(sizeof(W));  // elements
  const int weight_chunk = static_cast<int>(threadIdx.x) % kWeightChunks;
  const int weight_row = static_cast<int>(threadIdx.x) / kWeightChunks;
  // Gate and up alternate in tiles of 16 rows, which one warp multiplies both. From one load of a
  // thread to the next it is the other one's turn (16 rows on), or always the same one's (32).
  constexpr int kWeightStep = kTileThreads / kWeightChunks;
  static_assert(kWeightStep % 16 == 0);
  const W* weight_from[kGated ? 2 : 1];
#pragma unroll
  for (int i = 0; i < (kGated ? 2 : 1); ++i) {
    const int which = kGated ? (weight_row + i * kWeightStep) / 16 % 2 : 0;
    weight_from[i] = static_cast<const W*>(p.weight[which]) +
                     expert * p.weight_expert_stride[which] + column0 * p.weight_stride +
                     weight_chunk * kChunk;
  }
  uint32_t weight_rows[kWeightLoads];
#pragma unroll
  for (int i = 0; i < kWeightLoads; ++i) {
    const int row = weight_row + i * kWeightStep;
    const int64_t column =
        min(static_cast<int64_t>(kGated ? row / 32 * 16 + row % 16 : row), p.columns - 1 - column0);
    weight_rows[i] = static_cast<uint32_t>(column * p.weight_stride / kChunk);
  }
  const int x_chunk = static_cast<int>(threadIdx.x) % 8;
  const int x_row = static_cast<int>(threadIdx.x) / 8;
  const Bf16* x_from = p.x + x_chunk * 8;
  uint32_t x_rows[kXLoads];
#pragma unroll
  for (int i = 0; i < kXLoads; ++i) {
    const int64_t s = slot + min(x_row + i * (kTileThreads / 8), count - 1);
    const int64_t row = p.x_rows == nullptr ? s : p.x_rows[s] / p.x_divisor;
    x_rows[i] = static_cast<uint32_t>(row * p.x_stride / 8);
  }
  const int num_steps = static_cast<int>((p.depth + kTileDepth - 1) / kTileDepth);
  const int depth = static_cast<int>(p.depth);
  // The swizzles are the same for all rows of a thread.
  const uint32_t weight_to =
      smem_address(smem) +
      16 * (kFp8 ? swizzle_fp8(weight_row, weight_chunk) : swizzle_bf16(weight_row, weight_chunk));
  const uint32_t x_to = smem_address(smem) + kWeightBytes + 16 * swizzle_bf16(x_row, x_chunk);
  const auto load_stage = [&](int step, int stage) {
    if (step < num_steps) {
      const int k = step * kTileDepth;
      const bool weight_valid = k + weight_chunk * kChunk < depth;
      const bool x_valid = k + x_chunk * 8 < depth;
#pragma unroll
      for (int i = 0; i < kWeightLoads; ++i) {
        cp_async_16(
            weight_to + stage * kStageBytes + i * (kTileThreads * 16),
            weight_from[kGated ? i % 2 : 0] + k + static_cast<int64_t>(weight_rows[i]) * kChunk,
            weight_valid);
      }
#pragma unroll
      for (int i = 0; i < kXLoads; ++i) {
        if (kRows * 8 >= kTileThreads || x_row < kRows) {
          cp_async_16(x_to + stage * kStageBytes + i * (kTileThreads * 16),
                      x_from + k + static_cast<int64_t>(x_rows[i]) * 8, x_valid);
        }
      }
    }
    cp_async_commit();
  };

  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane_idx / 4;
  const int t = lane_idx % 4;
  // A warp multiplies 32 rows of weights by all rows of x: FP8 is widened once.
  const int weight_row0 = warp_idx * 32;

  // Scales of the warp's two tiles of 16 weight rows, which lie in one row of blocks each.
  const float* scales[2] = {};
  if constexpr (kFp8) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int which = kGated ? m : 0;
      const int64_t column =
          min(column0 + (kGated ? weight_row0 / 2 : weight_row0 + 16 * m), p.columns - 1);
      scales[m] = p.scale[which] + expert * p.scale_expert_stride[which] +
                  column / kWeightScaleBlock * p.scale_stride;
    }
  }

#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    load_stage(s, s);
  }
  float acc[2][kRowTiles][4] = {};
  float part[2][kRowTiles][4] = {};  // FP8: the sums of one block
  float scale[2] = {};
  int stage_idx = 0;
  for (int step = 0; step < num_steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();
    load_stage(step + kStages - 1, stage_idx == 0 ? kStages - 1 : stage_idx - 1);
    const uint8_t* stage = smem + stage_idx * kStageBytes;
    stage_idx = stage_idx == kStages - 1 ? 0 : stage_idx + 1;
    if constexpr (kFp8) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        scale[m] = __ldg(scales[m] + step / (static_cast<int>(kWeightScaleBlock) / kTileDepth));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t w[2][2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        load_weights<W>(w[m][0], stage, weight_row0 + 16 * m + g, half, t);
        load_weights<W>(w[m][1], stage, weight_row0 + 16 * m + 8 + g, half, t);
      }
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        uint32_t b[4];
        load_shared_16(b, stage + kWeightBytes + 16 * swizzle_bf16(8 * n + g, 4 * half + t));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          auto& sums = kFp8 ? part[m][n] : acc[m][n];
          mma_pairs(sums, w[m][0], w[m][1], b);
          mma_pairs(sums, w[m][0] + 2, w[m][1] + 2, b + 2);
        }
      }
    }
    if constexpr (kFp8) {
      constexpr int kStepsABlock = static_cast<int>(kWeightScaleBlock) / kTileDepth;
      if (step % kStepsABlock == kStepsABlock - 1 || step == num_steps - 1) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              acc[m][n][c] = fmaf(scale[m], part[m][n][c], acc[m][n][c]);
              part[m][n][c] = 0;
            }
          }
        }
      }
    }
  }
  pdl_launch_dependents();

  const auto store = [&](int row, int64_t column, float value) {
    if (row < count && column < p.columns) {
      const int64_t out_row = p.out_rows == nullptr ? slot + row : p.out_rows[slot + row];
      const int64_t at = out_row * p.out_stride + column;
      if (p.out_is_bf16) {
        static_cast<Bf16*>(p.out)[at] = from_float<Bf16>(value);
      } else {
        static_cast<float*>(p.out)[at] = value;
      }
    }
  };
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int row = 8 * n + 2 * t + c % 2;
      if constexpr (kGated) {
        store(row, column0 + weight_row0 / 2 + g + c / 2 * 8, silu(acc[0][n][c]) * acc[1][n][c]);
      } else {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          store(row, column0 + weight_row0 + 16 * m + g + c / 2 * 8, acc[m][n][c]);
        }
      }
    }
  }
}

template <class W, int kRows, bool kGated>
Status launch_product_tiles(const char* name, const ProductParams& params, int64_t tiles_max,
                            const DeviceInfo& device, const Launch& where) {
  constexpr int kColumns = kGated ? kTileWeightRows / 2 : kTileWeightRows;
  return launch(name, product_kernel<W, kRows, kGated>, device, where,
                {.grid = dim3(static_cast<unsigned>(tiles_max),
                              static_cast<unsigned>(ceil_div(params.columns, kColumns))),
                 .block = dim3(kTileThreads),
                 .smem_bytes = kTileSmemBytes<W, kRows>,
                 .pdl = true},
                params);
}

}  // namespace lacuna::cuda
