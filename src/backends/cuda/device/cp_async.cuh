// Asynchronous copies of 16 bytes from global to shared memory (sm_80 and later).
#pragma once

#include <cstdint>

namespace lacuna::cuda {

__device__ inline uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Past L1, with the neighbouring 128 bytes prefetched into L2. With `valid` false nothing is read
// and zeros are written.
__device__ inline void cp_async_16(uint32_t smem, const void* gmem, bool valid = true) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(gmem),
               "r"(bytes)
               : "memory");
}

// 4 bytes, through L1; for what is too scattered or too short for 16.
__device__ inline void cp_async_4(uint32_t smem, const void* gmem, bool valid = true) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(gmem), "r"(bytes)
               : "memory");
}

__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kPending` of the thread's groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace lacuna::cuda
