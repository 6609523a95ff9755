// Operands of mma.sync taken along k: a lane reads neighbouring elements of a row, 8 or 16 of them,
// and hands them to consecutive instructions. Both operands number their k alike, so the sums are
// those of the plain order.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/mma.cuh"

namespace lacuna::cuda {

// Four e4m3 values (lowest first) as two pairs of bf16, exactly: the bits of exponent and mantissa
// are moved to where bf16 has its own, which is off by 2^120, subnormals included. NaN, which is no
// weight (model_ops.h), becomes 480: the three instructions a pair that would keep it made products
// 4 to 24 % slower on an H200.
__device__ inline void widen_fp8(uint32_t four, uint32_t* pairs) {
  const __nv_bfloat162 factor =
      __halves2bfloat162(__ushort_as_bfloat16(0x7b80), __ushort_as_bfloat16(0x7b80));  // 2^120
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    // Each value in the upper byte of a half.
    const uint32_t spread = __byte_perm(four, 0, i == 0 ? 0x1404 : 0x3424);
    const uint32_t bits = (spread & 0x80008000u) | ((spread >> 4) & 0x07f007f0u);
    const __nv_bfloat162 scaled = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&bits), factor);
    pairs[i] = *reinterpret_cast<const uint32_t*>(&scaled);
  }
}

// c += a b over 16 k: rows g and g + 8 of a by row g of b, each given as two pairs.
__device__ inline void mma_pairs(float (&c)[4], const uint32_t* a_low, const uint32_t* a_high,
                                 const uint32_t* b) {
  const uint32_t a[4] = {a_low[0], a_high[0], a_low[1], a_high[1]};
  mma_16816(c, a, b[0], b[1]);
}

}  // namespace lacuna::cuda
