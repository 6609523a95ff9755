// mbarrier: counts arrivals in shared memory; its phase ends when all have come.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

__device__ inline void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After the initialisations of a thread and before the block's barrier.
__device__ inline void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives when all cp.async of this thread so far have landed.
__device__ inline void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits until the phase of this parity has ended: phases are 0, 1, 0, ..; a fresh barrier counts as
// one whose phase of parity 1 has ended.
__device__ inline void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni end;\n"
      "bra.uni again;\n"
      "end:\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace lacuna::sm90
