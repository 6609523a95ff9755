// CUDA's error codes as Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "core/check.h"
#include "lacuna/status.h"

namespace lacuna::cuda {

// `what` names the call for the person who reads the message.
inline Status cuda_status(cudaError_t error, const char* what) {
  if (error == cudaSuccess) {
    return ok_status();
  }
  // An error that is not sticky would otherwise be reported again by the next launch.
  cudaGetLastError();
  const std::string text =
      std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")";
  return error == cudaErrorMemoryAllocation ? out_of_memory(text) : internal_error(text);
}

}  // namespace lacuna::cuda
