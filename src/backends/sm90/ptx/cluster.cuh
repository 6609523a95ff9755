// Clusters: blocks that run at the same time and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace lacuna::sm90 {

// Every thread of every block of the cluster arrives; what was written before is seen after.
__device__ inline void cluster_sync() {
  __syncwarp();
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The same place in the shared memory of block `rank` of the cluster.
__device__ inline uint32_t cluster_address(uint32_t smem, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(rank));
  return address;
}

__device__ inline void cluster_store(uint32_t address, const float4& value) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(value.x),
               "f"(value.y), "f"(value.z), "f"(value.w)
               : "memory");
}
__device__ inline void cluster_store(uint32_t address, const float2& value) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(value.x),
               "f"(value.y)
               : "memory");
}

}  // namespace lacuna::sm90
