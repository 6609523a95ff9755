// x weight^T for a few rows and any dtypes without tensor cores: f32 arithmetic, and f32 weights
// that a bf16 x meets (the indexer's head weights). A block a column of out and a few rows, its
// threads along k.
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/linear.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRowsPreferred = 16;
constexpr int kUnroll = 4;  // elements of a row that a thread loads before it uses them

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
  int64_t rows;
  unsigned row_blocks;
  int64_t depth;
};

template <class X, class W, int kRows>
__global__ __launch_bounds__(kThreads) void few_rows_fma_kernel(const Params p) {
  __shared__ float sums[kWarps][kRows];
  pdl_wait();
  const int64_t column = blockIdx.x / p.row_blocks;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x % p.row_blocks) * kRows;
  const W* weight = static_cast<const W*>(p.weight) + column * p.weight_stride;
  const float* scale = nullptr;
  if constexpr (sizeof(W) == 1) {
    scale = p.scale + column / kWeightScaleBlock * p.scale_stride;
  }
  // What lies beyond the last row reads it; its sums go nowhere.
  const X* x[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    x[row] = static_cast<const X*>(p.x) + min(row0 + row, p.rows - 1) * p.x_stride;
  }
  float acc[kRows] = {};
  for (int64_t begin = threadIdx.x; begin < p.depth; begin += kUnroll * kThreads) {
    float w[kUnroll];
    float v[kUnroll][kRows];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = begin + u * kThreads;
      const bool valid = k < p.depth;
      w[u] = valid ? load_float(weight[k]) : 0.0f;
      if constexpr (sizeof(W) == 1) {
        w[u] *= valid ? scale[k / kWeightScaleBlock] : 0.0f;
      }
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        v[u][row] = valid ? load_float(x[row][k]) : 0.0f;
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        acc[row] = fmaf(v[u][row], w[u], acc[row]);
      }
    }
  }
  pdl_launch_dependents();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const float sum = reduce_warp(acc[row], Sum());
    if (threadIdx.x % kWarp == 0) {
      sums[threadIdx.x / kWarp][row] = sum;
    }
  }
  __syncthreads();
  const int64_t row = row0 + threadIdx.x;
  if (threadIdx.x < kRows && row < p.rows) {
    float sum = sums[0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      sum += sums[w][threadIdx.x];
    }
    const int64_t at = row * p.out_stride + column;
    if (p.out_is_bf16) {
      static_cast<Bf16*>(p.out)[at] = from_float<Bf16>(sum);
    } else {
      static_cast<float*>(p.out)[at] = sum;
    }
  }
}

template <class X, int kRows>
auto kernel_of(DType weight) {
  return weight == DType::kFloat32    ? few_rows_fma_kernel<X, float, kRows>
         : weight == DType::kBFloat16 ? few_rows_fma_kernel<X, Bf16, kRows>
                                      : few_rows_fma_kernel<X, Fp8E4M3, kRows>;
}

template <class X>
auto kernel_of(DType weight, int rows) {
  return rows == 1 ? kernel_of<X, 1>(weight) : kernel_of<X, 4>(weight);
}

}  // namespace

namespace few_rows_fma {

Status supports(const LinearArgs&, const DeviceInfo&) { return ok_status(); }

bool preferred(const LinearArgs& args, const DeviceInfo&) {
  return args.x.shape[0] <= kRowsPreferred;
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const int block_rows = args.x.shape[0] == 1 ? 1 : 4;
  const int64_t row_blocks = ceil_div(args.x.shape[0], block_rows);
  const Params params = {.x = args.x.data,
                         .x_stride = args.x.strides[0],
                         .weight = args.weight.data,
                         .weight_stride = args.weight.strides[0],
                         .scale = args.weight_scale.as<float>(),
                         .scale_stride = args.weight_scale.shape[1],
                         .out = args.out.data,
                         .out_stride = args.out.strides[0],
                         .out_is_bf16 = args.out.dtype == DType::kBFloat16,
                         .rows = args.x.shape[0],
                         .row_blocks = static_cast<unsigned>(row_blocks),
                         .depth = args.x.shape[1]};
  return launch("cuda/linear_few_rows_fma",
                args.x.dtype == DType::kFloat32 ? kernel_of<float>(args.weight.dtype, block_rows)
                                                : kernel_of<Bf16>(args.weight.dtype, block_rows),
                device, where,
                {.grid = dim3(static_cast<unsigned>(args.out.shape[1] * row_blocks)),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

}  // namespace few_rows_fma

}  // namespace lacuna::cuda
