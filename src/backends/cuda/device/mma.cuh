// Tensor core instructions of sm_80 and later, one warp: ldmatrix and mma.sync m16n8k16 over bf16
// with f32 accumulators. Fragments, with lane = 4 * g + t:
//   A [16 x 16] row-major: a[0] = (g, 2t..2t+1), a[1] = (g + 8, ..), a[2] = (g, 2t+8..), a[3] = (g
//   + 8, 2t+8..) B [16 x 8]: b[0] = (k 2t..2t+1, n g), b[1] = (k 2t+8.., n g) C [16 x 8]: c[0..1] =
//   (g, 2t..2t+1), c[2..3] = (g + 8, 2t..2t+1)
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// c += a b.
__device__ inline void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8i..8i+7 give the addresses of the rows of matrix
// i.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

// The same, each matrix transposed.
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem)
               : "memory");
}

}  // namespace lacuna::cuda
