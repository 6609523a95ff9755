// The portable CUDA backend's declarations: what the registry needs. Includes no CUDA header.
#pragma once

#include <string>
#include <vector>

#include "ops/backend.h"

namespace lacuna::cuda {

extern const Backend kBackend;

// The GPUs of this machine that the backend's kernels run on. `status` says in words what was
// found: why there is none, or which GPU was left out and why.
std::vector<DeviceInfo> devices(std::string* status);

}  // namespace lacuna::cuda
