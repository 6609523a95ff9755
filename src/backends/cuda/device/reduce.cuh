// Reductions over a warp and over a block, in a fixed order: the same inputs give the same bits.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

inline constexpr int kWarp = 32;

struct Sum {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <class T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

// Every lane of a group of `kWidth` neighbouring lanes gets the result.
template <int kWidth = kWarp, class T, class Op>
__device__ inline T reduce_warp(T value, Op op) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value = op(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// Every thread of a block of `kThreads` gets the result. `scratch` holds kThreads / 32 values and
// may be used again at once.
template <int kThreads, class T, class Op>
__device__ inline T reduce_block(T value, Op op, T* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  value = reduce_warp(value, op);
  if constexpr (kWarps == 1) {
    return value;
  } else {
    const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
    __syncthreads();
    if (threadIdx.x % kWarp == 0) {
      scratch[warp_idx] = value;
    }
    __syncthreads();
    T result = scratch[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      result = op(result, scratch[i]);
    }
    return result;
  }
}

}  // namespace lacuna::cuda
