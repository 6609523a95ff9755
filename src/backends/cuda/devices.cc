// Finds the GPUs and describes them. Asking must work on a machine without a GPU or a driver.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/cuda/backend.h"

namespace lacuna::cuda {
namespace {

// What the portable kernels need: cp.async and bf16 tensor cores.
constexpr int kComputeCapabilityMin = 80;

}  // namespace

std::vector<DeviceInfo> devices(std::string* status) {
  std::vector<DeviceInfo> found;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    cudaGetLastError();
    *status = error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice
                  ? "no GPU or no driver for it was found"
                  : std::string("the CUDA runtime says: ") + cudaGetErrorString(error);
    return found;
  }
  status->clear();
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) {
      cudaGetLastError();
      *status += "cuda:" + std::to_string(i) + " does not answer; ";
      continue;
    }
    const int capability = 10 * properties.major + properties.minor;
    if (capability < kComputeCapabilityMin) {
      *status += "cuda:" + std::to_string(i) + " (" + properties.name +
                 ") has compute capability " + std::to_string(properties.major) + "." +
                 std::to_string(properties.minor) + ", 8.0 or later is needed; ";
      continue;
    }
    found.push_back(
        {.device = {DeviceKind::kCuda, i},
         .name = properties.name,
         .memory_bytes = static_cast<int64_t>(properties.totalGlobalMem),
         .sm_count = properties.multiProcessorCount,
         .compute_capability = capability,
         .smem_optin_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin),
         .l2_bytes = properties.l2CacheSize,
         .clusters_max = has_two_teams(capability) ? sparse_mla_clusters_max : nullptr});
  }
  if (found.empty() && status->empty()) {
    *status = "no GPU was found";
  }
  return found;
}

}  // namespace lacuna::cuda
