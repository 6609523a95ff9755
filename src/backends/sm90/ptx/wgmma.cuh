// wgmma: products of a warpgroup, C [64 x N] += A [64 x 16] B [16 x N] in bf16 with f32 sums, both
// operands in shared memory. C of warp w and lane 4 r + c: c[4 j + i] is row 16 w + r + 8 (i / 2),
// column 8 j + 2 c + i % 2.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// Where an operand lies. Layouts of 8 x 16-byte atoms, by what the address bits are permuted with.
enum class Swizzle : uint32_t { kNone = 0, k128 = 1, k64 = 2, k32 = 3 };

// `leading_bytes`, `stride_bytes`: between atoms along the two directions (PTX ISA, matrix
// descriptor); the former is ignored where one atom covers its direction.
constexpr uint64_t descriptor_bits(uint32_t leading_bytes, uint32_t stride_bytes, Swizzle swizzle) {
  return uint64_t{leading_bytes >> 4} << 16 | uint64_t{stride_bytes >> 4} << 32 |
         uint64_t{static_cast<uint32_t>(swizzle)} << 62;
}
__device__ inline uint64_t descriptor(uint64_t bits, uint32_t smem) {
  return bits | ((smem & 0x3ffff) >> 4);
}

// What the compiler computed into these registers stays before the next asm, a wgmma_fence().
template <int kFloats>
__device__ inline void pin_registers(float (&c)[kFloats]) {
#pragma unroll
  for (int i = 0; i < kFloats; ++i) {
    asm volatile("" : "+f"(c[i])::"memory");
  }
}

// Registers that wgmma will read or write have been written.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most `kPending` groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// An operand is K-major (rows of M or N along which K runs), or transposed: MN-major.
template <bool kTransposeA, bool kTransposeB, int kFloats>
__device__ inline void wgmma(float (&c)[kFloats], uint64_t a, uint64_t b) {
  if constexpr (kFloats == 4) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, %6, %7;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
  } else if constexpr (kFloats == 8) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, %10, %11;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7])
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
  } else if constexpr (kFloats == 16) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, "
        "1, %18, %19;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),
          "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),
          "+f"(c[14]), "+f"(c[15])
        : "l"(a), "l"(b), "n"(kTransposeA), "n"(kTransposeB));
  } else {
    static_assert(kFloats == 4, "N is 8, 16 or 32");
  }
}

}  // namespace lacuna::sm90
