// The MHA kernels of this backend, as mha.cc lists them.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// Tensor cores, bf16: mha_mma.cu.
Status supports_mha_mma(const MhaArgs& args, const DeviceInfo& device);
Status run_mha_mma(const MhaArgs& args, const DeviceInfo& device, const Launch& where);

// Everything: mha_simt.cu.
Status run_mha_simt(const MhaArgs& args, const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
