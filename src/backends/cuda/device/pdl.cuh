// Programmatic dependent launch: a kernel's prologue overlaps its predecessor's tail. Before sm_90
// both are nothing.
#pragma once

namespace lacuna::cuda {

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
