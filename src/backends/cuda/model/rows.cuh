// Rows of f32 or bf16 elements, four neighbours a thread: one access of 16 or 8 bytes where every
// row is aligned for it, else one an element.
#pragma once

#include <cstdint>

#include "backends/cuda/device/element.cuh"
#include "lacuna/tensor.h"

namespace lacuna::cuda {

// Whether four elements from any multiple of four of any row are one aligned access. An absent
// tensor is.
template <class Void>
bool rows_of_fours(const BasicTensorView<Void>& view) {
  for (int d = 0; d + 1 < view.rank; ++d) {
    if (view.shape[d] > 1 && view.strides[d] % 4 != 0) {
      return false;
    }
  }
  return reinterpret_cast<uintptr_t>(view.data) % (4 * size_bytes(view.dtype)) == 0;
}

// How many of the four elements from `i` on a row of `width` has; below 1 when none.
__device__ inline int four_of(int64_t i, int64_t width) {
  return static_cast<int>(width - i < 4 ? width - i : 4);
}

// x[j] = from[j] for j < count, else 0.
__device__ inline void load_four(const float* from, int count, bool aligned, float (&x)[4]) {
  if (aligned && count == 4) {
    const float4 four = *reinterpret_cast<const float4*>(from);
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] = j < count ? from[j] : 0.0f;
  }
}

__device__ inline void load_four(const Bf16* from, int count, bool aligned, float (&x)[4]) {
  if (aligned && count == 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(from);
    const float2 low = unpack_bf16(four.x);
    const float2 high = unpack_bf16(four.y);
    x[0] = low.x;
    x[1] = low.y;
    x[2] = high.x;
    x[3] = high.y;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    x[j] = j < count ? load_float(from[j]) : 0.0f;
  }
}

// to[j] = x[j] for j < count.
__device__ inline void store_four(const float (&x)[4], int count, bool aligned, float* to) {
  if (aligned && count == 4) {
    *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < count) {
      to[j] = x[j];
    }
  }
}

__device__ inline void store_four(const float (&x)[4], int count, bool aligned, Bf16* to) {
  if (aligned && count == 4) {
    *reinterpret_cast<uint2*>(to) = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])};
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < count) {
      to[j] = from_float<Bf16>(x[j]);
    }
  }
}

}  // namespace lacuna::cuda
