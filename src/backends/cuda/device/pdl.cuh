// Programmatic dependent launch: a kernel's prologue overlaps its predecessor's tail. Before sm_90
// both are nothing.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// Brings a kernel's parameters into the constant caches: where they are first read, each line of
// theirs is waited for. For the time before pdl_wait().
template <class Params>
__device__ inline void prefetch_params(const Params& params) {
  constexpr int kLineWords = 16;
  const auto* words = reinterpret_cast<const uint32_t*>(&params);
  uint32_t all = 0;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Params) / 4); i += kLineWords) {
    all |= words[i];
  }
  // Loads that nothing depends on would be left out.
  asm volatile(
      "{\n\t.reg .pred never;\n\tsetp.eq.u32 never, %0, 0xffffffff;\n\t"
      "@never nanosleep.u32 1;\n\t}" ::"r"(all));
}

// Asks L2 for a line that is read soon. It reads nothing, so it may stand before pdl_wait(): what a
// predecessor yet writes there is seen.
__device__ inline void prefetch_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Waits until what the predecessor wrote can be seen. Before it nothing may be read that a kernel
// wrote, and nothing may be written.
__device__ inline void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The successor may be scheduled.
__device__ inline void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace lacuna::cuda
