// Clusters (sm_90 and later): blocks that run at the same time and reach each other's shared
// memory.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// Every thread of every block of the cluster arrives, by whole warps; who waits sees what was
// written before, and that what was read before is no longer needed.
__device__ inline void cluster_sync() {
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// The same in two steps.
__device__ inline void cluster_arrive() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ inline uint32_t cluster_address(uint32_t smem, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

__device__ inline void cluster_load(uint32_t address, float4& value) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
}
__device__ inline void cluster_load(uint32_t address, float2& value) {
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "r"(address)
               : "memory");
}

}  // namespace lacuna::cuda
