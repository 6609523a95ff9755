// One way to launch a kernel: grid, block, shared memory, programmatic dependent launch (PDL), and
// the error as Status.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <utility>

#include "backends/cuda/cuda_status.h"
#include "backends/cuda/extents.h"
#include "ops/backend.h"

namespace lacuna::cuda {

struct LaunchShape {
  // Only grid.x may depend on the number of rows: y and z end at 65,535.
  dim3 grid = {1, 1, 1};
  dim3 block = {1, 1, 1};
  int64_t smem_bytes = 0;  // dynamic; more than 48 KB is asked for with the driver once a kernel
  int cluster = 1;         // blocks along x that run as a cluster, at most 8; sm_90 and later
  // The kernel may start while its predecessor in the stream still runs; it calls
  // pdl_wait() (device/pdl.cuh) before it reads anything that the predecessor wrote.
  bool pdl = false;
};

inline constexpr int64_t kGridYMax = 65535;

// Raises a kernel's limit of dynamic shared memory where it is below `bytes`. What a device was
// asked for is remembered, so that a launch costs no driver call and no lock, and no call happens
// while a graph is captured after a first run.
Status allow_smem(const void* kernel, int device_idx, int64_t bytes);

// `name` is the kernel's name in messages. An empty grid launches nothing.
template <class... Params, class... Values>
Status launch(const char* name, void (*kernel)(Params...), const DeviceInfo& device,
              const Launch& where, const LaunchShape& shape, Values&&... values) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) {
    return ok_status();
  }
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device.device.index), name));
  LACUNA_RETURN_IF_ERROR(
      allow_smem(reinterpret_cast<const void*>(kernel), device.device.index, shape.smem_bytes));
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = static_cast<cudaStream_t>(where.stream);
  config.attrs = attributes;
  // Devices before sm_90 refuse the attributes.
  if (shape.pdl && device.compute_capability >= 90) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  return cuda_status(
      cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Values>(values))...),
      name);
}

}  // namespace lacuna::cuda
