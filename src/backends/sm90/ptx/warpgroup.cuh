// What warps of a warpgroup (4 warps, the first at a multiple of 4) do together, besides products:
// registers, barriers of part of a block, proxies, and 8 x 8 matrices of 16-bit elements.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// Registers of each thread of the warpgroup from here on. The sum over the block must fit what it
// was launched with, or `claim` waits forever.
template <int kRegisters>
__device__ inline void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `id` (1..15; 0 is __syncthreads') of `threads` threads.
__device__ inline void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same; true for all when it is for one.
__device__ inline bool barrier_any(int id, int threads, bool value) {
  uint32_t any = 0;
  asm volatile(
      "{\n"
      ".reg .pred one, all;\n"
      "setp.ne.u32 one, %3, 0;\n"
      "barrier.cta.red.or.pred all, %1, %2, one;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value))
      : "memory");
  return any != 0;
}

// Shared memory that was written by ordinary stores and copies can now be read by wgmma. By each
// thread that wrote, before the barrier; for cp.async by each that waited for it.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Stores 8 x 8 matrices whose rows are 16 bytes; lanes 8i..8i+7 give the addresses of the rows of
// matrix i. Lane 4 r + c holds columns 2 c and 2 c + 1 of row r.
__device__ inline void stmatrix_x2(uint32_t smem, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(r0),
               "r"(r1)
               : "memory");
}
// The same, each matrix transposed.
__device__ inline void stmatrix_x2_trans(uint32_t smem, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem),
               "r"(r0), "r"(r1)
               : "memory");
}

// Transposes an 8 x 8 matrix in registers.
__device__ inline uint32_t movmatrix_trans(uint32_t r) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(r));
  return result;
}

}  // namespace lacuna::sm90
