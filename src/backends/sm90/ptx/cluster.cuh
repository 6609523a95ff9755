// Stores into the shared memory of another block of the cluster.
#pragma once

#include <cstdint>

#include "backends/cuda/device/cluster.cuh"

namespace lacuna::sm90 {

using cuda::cluster_address;
using cuda::cluster_sync;

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
