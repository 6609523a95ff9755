// See widen_fp8.h. A thread a run of 16 elements, by one load and two stores where rows are
// aligned.
#include "backends/cuda/model/widen_fp8.h"

#include <algorithm>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/alignment.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRun = 16;

struct Params {
  const Fp8E4M3* weight;
  int64_t stride;
  const float* scale;
  int64_t scale_stride;
  int64_t row_begin;
  int64_t rows;
  int64_t depth;
  int64_t runs;  // of a row
  bool aligned;
  Bf16* to;
};

__global__ __launch_bounds__(kThreads) void widen_fp8_kernel(const Params p) {
  pdl_wait();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = i / p.runs;
  const int64_t k = i % p.runs * kRun;
  if (row >= p.rows) {
    return;
  }
  const int64_t n = p.row_begin + row;
  const Fp8E4M3* from = p.weight + n * p.stride + k;
  Bf16* to = p.to + row * p.depth + k;
  // A run lies in one block.
  const float scale = p.scale[n / kWeightScaleBlock * p.scale_stride + k / kWeightScaleBlock];
  if (!p.aligned) {
    for (int64_t j = 0; j < min(static_cast<int64_t>(kRun), p.depth - k); ++j) {
      to[j] = from_float<Bf16>(load_float(from[j]) * scale);
    }
    return;
  }
  const uint4 packed = *reinterpret_cast<const uint4*>(from);
  const auto widen = [scale](uint32_t low, uint32_t high) {
    const float4 a = unpack_fp8(low);
    const float4 b = unpack_fp8(high);
    return uint4{pack_bf16(a.x * scale, a.y * scale), pack_bf16(a.z * scale, a.w * scale),
                 pack_bf16(b.x * scale, b.y * scale), pack_bf16(b.z * scale, b.w * scale)};
  };
  reinterpret_cast<uint4*>(to)[0] = widen(packed.x, packed.y);
  reinterpret_cast<uint4*>(to)[1] = widen(packed.z, packed.w);
}

}  // namespace

Status launch_widen_fp8(const ConstTensorView& weight, const ConstTensorView& scale,
                        int64_t row_begin, int64_t rows, Bf16* to, const DeviceInfo& device,
                        const Launch& where) {
  const int64_t depth = weight.shape[1];
  const Params params = {.weight = weight.as<Fp8E4M3>(),
                         .stride = weight.strides[0],
                         .scale = scale.as<float>(),
                         .scale_stride = scale.shape[1],
                         .row_begin = row_begin,
                         .rows = rows,
                         .depth = depth,
                         .runs = ceil_div(depth, kRun),
                         .aligned = depth % kRun == 0 && check_aligned(weight, "weight", 1).ok(),
                         .to = to};
  return launch("cuda/linear_widened: weights", widen_fp8_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(rows * params.runs, kThreads))),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

}  // namespace lacuna::cuda
