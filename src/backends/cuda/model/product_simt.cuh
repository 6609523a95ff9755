// Products without tensor cores, for every dtype, width and alignment: a block of 256 threads and a
// tile of 64 x 64 outputs, each summed in f32 in the order of k.
#pragma once

#include "backends/cuda/device/element.cuh"
#include "ops/model_ops.h"

namespace lacuna::cuda {

inline constexpr int kSimtThreads = 256;
inline constexpr int kSimtTile = 64;
inline constexpr int kSimtDepth = 16;
inline constexpr int kSimtOutputs = 4;  // a thread has 4 x 4

// A matrix of weights; `scale` with FP8 only.
struct SimtWeight {
  const void* data;
  DType dtype;
  int64_t column_stride;
  int64_t depth_stride;
  const float* scale;
  int64_t scale_stride;

  __device__ float operator()(int64_t column, int64_t k) const {
    const float value = load_any(data, dtype, column * column_stride + k * depth_stride);
    return scale == nullptr
               ? value
               : value * scale[column / kWeightScaleBlock * scale_stride + k / kWeightScaleBlock];
  }
};

struct SimtSmem {
  float x[kSimtDepth][kSimtTile + 1];
  float weight[kSimtDepth][kSimtTile + 1];
};

// Where the outputs of a thread begin in the tile.
__device__ inline int simt_row() { return static_cast<int>(threadIdx.x) / 16 * kSimtOutputs; }
__device__ inline int simt_column() { return static_cast<int>(threadIdx.x) % 16 * kSimtOutputs; }

// acc[i][j] is row simt_row() + i, column simt_column() + j of the tile. `load_x(row, k)` is asked
// for rows of the tile below `rows`.
template <class LoadX>
__device__ inline void simt_product(const LoadX& load_x, int rows, const SimtWeight& weight,
                                    int64_t column0, int64_t columns, int64_t depth, SimtSmem& smem,
                                    float (&acc)[kSimtOutputs][kSimtOutputs]) {
  const int row0 = simt_row();
  const int out0 = simt_column();
  for (int64_t begin = 0; begin < depth; begin += kSimtDepth) {
    __syncthreads();
    for (int i = threadIdx.x; i < kSimtTile * kSimtDepth; i += kSimtThreads) {
      const int k = i % kSimtDepth;
      const int row = i / kSimtDepth;
      smem.x[k][row] = row < rows && begin + k < depth ? load_x(row, begin + k) : 0.0f;
      // Neighbouring threads along what is contiguous.
      const bool along_k = weight.depth_stride == 1;
      const int weight_k = along_k ? k : i / kSimtTile;
      const int column = along_k ? row : i % kSimtTile;
      smem.weight[weight_k][column] = column0 + column < columns && begin + weight_k < depth
                                          ? weight(column0 + column, begin + weight_k)
                                          : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kSimtDepth; ++k) {
      float x[kSimtOutputs];
      float w[kSimtOutputs];
#pragma unroll
      for (int i = 0; i < kSimtOutputs; ++i) {
        x[i] = smem.x[k][row0 + i];
        w[i] = smem.weight[k][out0 + i];
      }
#pragma unroll
      for (int i = 0; i < kSimtOutputs; ++i) {
#pragma unroll
        for (int j = 0; j < kSimtOutputs; ++j) {
          acc[i][j] = fmaf(x[i], w[j], acc[i][j]);
        }
      }
    }
  }
}

// Calls store(row of the tile, column, i, j) for the outputs of this thread that exist.
template <class Store>
__device__ inline void for_each_simt_output(int rows, int64_t column0, int64_t columns,
                                            Store&& store) {
#pragma unroll
  for (int i = 0; i < kSimtOutputs; ++i) {
#pragma unroll
    for (int j = 0; j < kSimtOutputs; ++j) {
      const int row = simt_row() + i;
      const int64_t column = column0 + simt_column() + j;
      if (row < rows && column < columns) {
        store(row, column, i, j);
      }
    }
  }
}

}  // namespace lacuna::cuda
