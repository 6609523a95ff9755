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

// Leaves 16 bytes in the shared memory of another block, at an address of cluster_address(), and
// counts them at the barrier there.
__device__ inline void cluster_send(uint32_t to, const float4& values, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier)
      : "memory");
}
// Makes a barrier (8 bytes) of one phase, which ends when so many bytes have been sent to this
// block. By one thread; a cluster_arrive() that follows tells the others.
__device__ inline void expect_bytes(uint32_t barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\n"
      "fence.mbarrier_init.release.cluster;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}
// Waits until they have come. After a cluster_wait().
__device__ inline void await_bytes(uint32_t barrier) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
      "@!done bra again;\n}" ::"r"(barrier)
      : "memory");
}

}  // namespace lacuna::cuda
