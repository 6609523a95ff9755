// x weight^T for a few rows and any dtypes without tensor cores: f32 arithmetic, and f32 weights
// that a bf16 x meets (the indexer's head weights). A block a column of out, its threads along k.
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/linear.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsMax = 16;

struct Params {
  const void* x;
  int64_t x_stride;
  const void* weight;
  int64_t weight_stride;
  const float* scale;
  int64_t scale_stride;
  void* out;
  int64_t out_stride;
  bool out_is_bf16;
  int rows;
  int64_t depth;
};

template <class X, class W>
__global__ __launch_bounds__(kThreads) void few_rows_fma_kernel(const Params p) {
  __shared__ float sums[kWarps][kRowsMax];
  pdl_wait();
  const int64_t column = blockIdx.x;
  const X* x = static_cast<const X*>(p.x);
  const W* weight = static_cast<const W*>(p.weight) + column * p.weight_stride;
  const float* scale = nullptr;
  if constexpr (sizeof(W) == 1) {
    scale = p.scale + column / kWeightScaleBlock * p.scale_stride;
  }
  float acc[kRowsMax] = {};
  for (int64_t k = threadIdx.x; k < p.depth; k += kThreads) {
    float w = load_float(weight[k]);
    if constexpr (sizeof(W) == 1) {
      w *= scale[k / kWeightScaleBlock];
    }
#pragma unroll
    for (int row = 0; row < kRowsMax; ++row) {
      if (row < p.rows) {
        acc[row] = fmaf(load_float(x[row * p.x_stride + k]), w, acc[row]);
      }
    }
  }
  pdl_launch_dependents();
#pragma unroll
  for (int row = 0; row < kRowsMax; ++row) {
    if (row < p.rows) {
      const float sum = reduce_warp(acc[row], Sum());
      if (threadIdx.x % kWarp == 0) {
        sums[threadIdx.x / kWarp][row] = sum;
      }
    }
  }
  __syncthreads();
  const int row = static_cast<int>(threadIdx.x);
  if (row < p.rows) {
    float sum = sums[0][row];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      sum += sums[w][row];
    }
    const int64_t at = row * p.out_stride + column;
    if (p.out_is_bf16) {
      static_cast<Bf16*>(p.out)[at] = from_float<Bf16>(sum);
    } else {
      static_cast<float*>(p.out)[at] = sum;
    }
  }
}

template <class X>
auto kernel_of(DType weight) {
  return weight == DType::kFloat32    ? few_rows_fma_kernel<X, float>
         : weight == DType::kBFloat16 ? few_rows_fma_kernel<X, Bf16>
                                      : few_rows_fma_kernel<X, Fp8E4M3>;
}

}  // namespace

namespace few_rows_fma {

Status supports(const LinearArgs& args, const DeviceInfo&) {
  return args.x.shape[0] <= kRowsMax
             ? ok_status()
             : unsupported("x: " + std::to_string(args.x.shape[0]) +
                           " rows, this kernel takes up to " + std::to_string(kRowsMax));
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.x = args.x.data,
                         .x_stride = args.x.strides[0],
                         .weight = args.weight.data,
                         .weight_stride = args.weight.strides[0],
                         .scale = args.weight_scale.as<float>(),
                         .scale_stride = args.weight_scale.shape[1],
                         .out = args.out.data,
                         .out_stride = args.out.strides[0],
                         .out_is_bf16 = args.out.dtype == DType::kBFloat16,
                         .rows = static_cast<int>(args.x.shape[0]),
                         .depth = args.x.shape[1]};
  return launch("cuda/linear_few_rows_fma",
                args.x.dtype == DType::kFloat32 ? kernel_of<float>(args.weight.dtype)
                                                : kernel_of<Bf16>(args.weight.dtype),
                device, where,
                {.grid = dim3(static_cast<unsigned>(args.out.shape[1])),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

}  // namespace few_rows_fma

}  // namespace lacuna::cuda
