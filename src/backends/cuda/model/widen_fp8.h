// FP8 weights in blocks of 128 x 128 multiplied out to bf16.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// to [rows, depth] bf16, contiguous: rows [row_begin, row_begin + rows) of the weight, each value
// times its block's scale rounded once.
Status launch_widen_fp8(const ConstTensorView& weight, const ConstTensorView& scale,
                        int64_t row_begin, int64_t rows, Bf16* to, const DeviceInfo& device,
                        const Launch& where);

}  // namespace lacuna::cuda
