// One way to launch a kernel: grid, block, shared memory, programmatic dependent launch (PDL), and
// the error as Status.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "backends/cuda/cuda_status.h"
#include "ops/backend.h"

namespace lacuna::cuda {

struct LaunchShape {
  // Only grid.x may depend on the number of rows: y and z end at 65,535.
  dim3 grid = {1, 1, 1};
  dim3 block = {1, 1, 1};
  int64_t smem_bytes = 0;  // dynamic; more than 48 KB is asked for with the driver once a kernel
  // The kernel may start while its predecessor in the stream still runs; it calls
  // pdl_wait() (device/pdl.cuh) before it reads anything that the predecessor wrote.
  bool pdl = false;
};

inline constexpr int64_t kGridYMax = 65535;

// Blocks of `tile` that cover `count`.
constexpr int64_t ceil_div(int64_t count, int64_t tile) { return (count + tile - 1) / tile; }

// Raises a kernel's limit of dynamic shared memory. Remembers per device what it asked for, so that
// a launch costs no driver call and none happens while a graph is captured after a first run.
template <class... Params>
Status allow_smem(void (*kernel)(Params...), int device_idx, int64_t bytes) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, std::pair<int, int64_t>>> allowed;
  if (bytes <= 48 * 1024) {
    return ok_status();
  }
  const auto key =
      std::make_pair(reinterpret_cast<const void*>(kernel), std::make_pair(device_idx, bytes));
  const std::lock_guard lock(mutex);
  if (allowed.count(key) > 0) {
    return ok_status();
  }
  // Never lowered: another call of the same kernel may need more.
  cudaFuncAttributes attributes = {};
  LACUNA_RETURN_IF_ERROR(cuda_status(
      cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "launch"));
  if (attributes.maxDynamicSharedSizeBytes < bytes) {
    LACUNA_RETURN_IF_ERROR(cuda_status(
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "launch: shared memory"));
  }
  allowed.insert(key);
  return ok_status();
}

// `name` is the kernel's name in messages. An empty grid launches nothing.
template <class... Params, class... Values>
Status launch(const char* name, void (*kernel)(Params...), const DeviceInfo& device,
              const Launch& where, const LaunchShape& shape, Values&&... values) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) {
    return ok_status();
  }
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device.device.index), name));
  LACUNA_RETURN_IF_ERROR(allow_smem(kernel, device.device.index, shape.smem_bytes));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = static_cast<size_t>(shape.smem_bytes);
  config.stream = static_cast<cudaStream_t>(where.stream);
  // Devices before sm_90 refuse the attribute.
  if (shape.pdl && device.compute_capability >= 90) {
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cuda_status(
      cudaLaunchKernelEx(&config, kernel, static_cast<Params>(std::forward<Values>(values))...),
      name);
}

}  // namespace lacuna::cuda
