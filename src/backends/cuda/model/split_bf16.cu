// See split_bf16.h.
#include "backends/cuda/model/split_bf16.h"

#include <algorithm>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 1 << 16;

__global__ __launch_bounds__(kThreads) void split_bf16_kernel(const float* from, int64_t count,
                                                              int64_t heads, int64_t width,
                                                              int64_t row_stride,
                                                              int64_t head_stride, Bf16* to,
                                                              int64_t part_elements) {
  pdl_wait();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const int64_t row = i / width / heads;
    const float value = from[row * row_stride + i / width % heads * head_stride + i % width];
    const Bf16 first = from_float<Bf16>(value);
    // Nothing is left of what is not finite.
    const float rest = isfinite(load_float(first)) ? value - load_float(first) : 0.0f;
    const Bf16 second = from_float<Bf16>(rest);
    to[i] = first;
    to[part_elements + i] = second;
    to[2 * part_elements + i] = from_float<Bf16>(rest - load_float(second));
  }
}

}  // namespace

Status launch_split_bf16(const float* from, int64_t rows, int64_t heads, int64_t width,
                         int64_t row_stride, int64_t head_stride, Bf16* to, int64_t part_elements,
                         const DeviceInfo& device, const Launch& where) {
  const int64_t count = rows * heads * width;
  return launch(
      "cuda/linear_cublaslt: split", split_bf16_kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(std::min(ceil_div(count, kThreads), kBlocksMax))),
       .block = dim3(kThreads),
       .pdl = true},
      from, count, heads, width, row_stride, head_stride, to, part_elements);
}

}  // namespace lacuna::cuda
