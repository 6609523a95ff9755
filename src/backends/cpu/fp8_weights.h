// FP8 weights in blocks of 128 x 128 that share a scale (see LinearArgs), widened for kernels that
// multiply f32.
#pragma once

#include <cstdint>

#include "ops/backend.h"

namespace lacuna::cpu {

// to[i, k] = weight[row_begin + i, k] * its block's scale, rounded to f32; `to` is contiguous.
void widen_fp8_rows(const ConstTensorView& weight, const ConstTensorView& scale, int64_t row_begin,
                    int64_t rows, float* to);

// linear with an FP8 weight: a panel of its rows is widened, then multiplied by all of x.
Status supports_fp8_weight(const LinearArgs& args, const DeviceInfo& device);
// For the kernels that do not.
Status refuses_fp8_weight(const LinearArgs& args, const DeviceInfo& device);
int64_t linear_fp8_workspace(const LinearArgs& args, const DeviceInfo& device);
Status linear_fp8(const LinearArgs& args, const DeviceInfo& device, const Launch& launch);

}  // namespace lacuna::cpu
