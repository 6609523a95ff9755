// An f32 matrix as the sum of three bf16 ones, so that tensor cores multiply it by bf16 exactly.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// from: [rows, heads, width] f32 with the given strides. to: three of [rows, heads,
// width] bf16, part_elements apart: the leading 8 bits of each value, the next 8, the last 8.
Status launch_split_bf16(const float* from, int64_t rows, int64_t heads, int64_t width,
                         int64_t row_stride, int64_t head_stride, Bf16* to, int64_t part_elements,
                         const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
