// x weight^T for a few rows of bf16 x, bound by reading the weights: tensor cores with the weights
// as the tall operand, straight from global memory. The warps of a block share 16 or 32 columns of
// out and take turns along k; their sums are added in a fixed order. A row's result does not depend
// on the other rows. More than 16 rows are multiplied 16 at a time, by neighbouring blocks that
// find the weights in L2.
#include <algorithm>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/alignment.h"
#include "backends/cuda/model/fragments.cuh"
#include "backends/cuda/model/linear.h"

namespace lacuna::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTileColumns = 16;  // columns of out, rows of weight: the tall side of an instruction
constexpr int kTileRows = 8;      // rows of out
constexpr int kBlockRows = 2 * kTileRows;

// Measured on an H200. bf16: up to here it beats cuBLASLt. FP8: up to kFp8RowsPreferred it beats
// the kernels that bring weights through shared memory, and up to kFp8RowsMax where those have too
// few tiles of 128 columns for a GPU. Small weights: a short kernel is what counts.
constexpr int64_t kRowsPreferred = 8;
constexpr int64_t kFp8RowsPreferred = 16;
constexpr int64_t kFp8RowsMax = 64;
constexpr int64_t kSmallRowsPreferred = 64;
constexpr int64_t kSmallWeight = int64_t{1} << 19;  // elements

struct Params {
  const Bf16* x;
  int64_t x_stride;
  int64_t x_head_stride;
  const void* weight;
  int64_t weight_stride;
  int64_t weight_head_stride;
  const float* scale;  // of FP8 weights
  int64_t scale_stride;
  void* out;
  int64_t out_stride;
  int64_t out_head_stride;
  bool out_is_bf16;
  int64_t rows;
  unsigned row_blocks;
  int64_t columns;
  int64_t depth;
};

__device__ void load_16(uint32_t (&to)[4], const void* at, bool valid) {
  const uint4 four = valid ? __ldg(static_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// Adds the products of this warp's part of k to `acc`. bf16: a step is 32 k, 8 a lane.
template <int kColumnTiles, int kRowTiles>
__device__ void accumulate(const Params& p, const Bf16* const (&weight)[2 * kColumnTiles],
                           const Bf16* const (&x)[kRowTiles], int64_t, int warp_idx, int lane_k,
                           float (&acc)[kColumnTiles][kRowTiles][4]) {
  constexpr int kStep = 32;
  constexpr int kUnroll = kColumnTiles * kRowTiles == 4 ? 2 : 4;
  for (int64_t begin = warp_idx * kStep; begin < p.depth; begin += kUnroll * kWarps * kStep) {
    uint32_t w[kUnroll][2 * kColumnTiles][4];
    uint32_t b[kUnroll][kRowTiles][4];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t k = begin + u * kWarps * kStep + 8 * lane_k;
      const bool valid = k < p.depth;
#pragma unroll
      for (int i = 0; i < 2 * kColumnTiles; ++i) {
        load_16(w[u][i], weight[i] + k, valid);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        load_16(b[u][i], x[i] + k, valid);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int i = 0; i < kColumnTiles; ++i) {
        const uint32_t* low = w[u][2 * i];
        const uint32_t* high = w[u][2 * i + 1];
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) {
          mma_pairs(acc[i][j], low, high, b[u][j]);
          mma_pairs(acc[i][j], low + 2, high + 2, b[u][j] + 2);
        }
      }
    }
  }
}

// FP8: a step is one block of scales, 128 k, 16 a lane and half.
template <int kColumnTiles, int kRowTiles>
__device__ void accumulate(const Params& p, const Fp8E4M3* const (&weight)[2 * kColumnTiles],
                           const Bf16* const (&x)[kRowTiles], int64_t column, int warp_idx,
                           int lane_k, float (&acc)[kColumnTiles][kRowTiles][4]) {
  constexpr int kStep = static_cast<int>(kWeightScaleBlock);
  // A tile of 16 columns begins at a multiple of 16: one row of blocks has its scales.
  const float* scales[kColumnTiles];
#pragma unroll
  for (int i = 0; i < kColumnTiles; ++i) {
    const int64_t first = min(column + i * kTileColumns, p.columns - 1);
    scales[i] = p.scale + first / kWeightScaleBlock * p.scale_stride;
  }
  for (int64_t block = warp_idx; block * kStep < p.depth; block += kWarps) {
    uint32_t w[2][2 * kColumnTiles][4];
    uint32_t b[2][kRowTiles][2][4];
    float scale[kColumnTiles];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t k = block * kStep + half * (kStep / 2) + 16 * lane_k;
      const bool valid = k < p.depth;
#pragma unroll
      for (int i = 0; i < 2 * kColumnTiles; ++i) {
        load_16(w[half][i], weight[i] + k, valid);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        load_16(b[half][i][0], x[i] + k, valid);
        load_16(b[half][i][1], x[i] + k + 8, valid);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      scale[i] = __ldg(scales[i] + block);
    }
#pragma unroll
    for (int i = 0; i < kColumnTiles; ++i) {
      float part[kRowTiles][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t* low = w[half][2 * i];
        const uint32_t* high = w[half][2 * i + 1];
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          uint32_t low_pairs[2];
          uint32_t high_pairs[2];
          widen_fp8(low[q], low_pairs);
          widen_fp8(high[q], high_pairs);
#pragma unroll
          for (int j = 0; j < kRowTiles; ++j) {
            mma_pairs(part[j], low_pairs, high_pairs, b[half][j][q / 2] + q % 2 * 2);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          acc[i][j][c] = fmaf(scale[i], part[j][c], acc[i][j][c]);
        }
      }
    }
  }
}

// Asked for explicitly: by itself the compiler aims at more blocks an SM and loads less at once.
template <int kColumnTiles>
constexpr int kBlocks = kColumnTiles == 2 ? 1 : 2;

template <class W, int kColumnTiles, int kRowTiles>
__global__ __launch_bounds__(kThreads, kBlocks<kColumnTiles>) void few_rows_kernel(const Params p) {
  constexpr int kColumns = kColumnTiles * kTileColumns;
  constexpr int kRows = kRowTiles * kTileRows;
  __shared__ float sums[kWarps][kRows][kColumns + 1];
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int g = lane_idx / 4;
  const int t = lane_idx % 4;
  const int64_t column = static_cast<int64_t>(blockIdx.x / p.row_blocks) * kColumns;
  const int64_t row0 = static_cast<int64_t>(blockIdx.x % p.row_blocks) * kRows;
  const int64_t head = blockIdx.y;
  pdl_wait();
  // What lies beyond the last column or row reads the last one; its sums go nowhere.
  const W* weight[2 * kColumnTiles];
#pragma unroll
  for (int i = 0; i < 2 * kColumnTiles; ++i) {
    const int64_t row = min(column + 8 * i + g, p.columns - 1);
    weight[i] =
        static_cast<const W*>(p.weight) + head * p.weight_head_stride + row * p.weight_stride;
  }
  const Bf16* x[kRowTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    x[i] = p.x + head * p.x_head_stride + min(row0 + kTileRows * i + g, p.rows - 1) * p.x_stride;
  }
  float acc[kColumnTiles][kRowTiles][4] = {};
  accumulate<kColumnTiles, kRowTiles>(p, weight, x, column, warp_idx, t, acc);
  pdl_launch_dependents();
#pragma unroll
  for (int i = 0; i < kColumnTiles; ++i) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        sums[warp_idx][j * kTileRows + 2 * t + c % 2][i * kTileColumns + g + c / 2 * 8] =
            acc[i][j][c];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const int row = i / kColumns;
    const int c = i % kColumns;
    if (row0 + row >= p.rows || column + c >= p.columns) {
      continue;
    }
    float sum = sums[0][row][c];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      sum += sums[w][row][c];
    }
    const int64_t at = head * p.out_head_stride + (row0 + row) * p.out_stride + column + c;
    if (p.out_is_bf16) {
      static_cast<Bf16*>(p.out)[at] = from_float<Bf16>(sum);
    } else {
      static_cast<float*>(p.out)[at] = sum;
    }
  }
}

template <class W, int kColumnTiles>
Status launch_tiles(const Params& params, int64_t heads, const DeviceInfo& device,
                    const Launch& where) {
  const auto kernel = params.rows <= kTileRows ? few_rows_kernel<W, kColumnTiles, 1>
                                               : few_rows_kernel<W, kColumnTiles, 2>;
  const int64_t blocks = ceil_div(params.columns, kColumnTiles * kTileColumns) * params.row_blocks;
  return launch("cuda/linear_few_rows", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(heads)),
                 .block = dim3(kThreads),
                 .pdl = true},
                params);
}

template <class W>
Status launch_few_rows(const Params& params, int64_t heads, const DeviceInfo& device,
                       const Launch& where) {
  // Wide blocks read x half as often; narrow ones are enough to fill the GPU.
  return ceil_div(params.columns, 2 * kTileColumns) * heads >= device.sm_count
             ? launch_tiles<W, 2>(params, heads, device, where)
             : launch_tiles<W, 1>(params, heads, device, where);
}

Status check_depth(const ConstTensorView& weight, int64_t depth) {
  const int64_t step = 16 / size_bytes(weight.dtype);
  return depth % step == 0
             ? ok_status()
             : unsupported("weight: depth " + std::to_string(depth) +
                           ", this kernel needs a multiple of " + std::to_string(step));
}

}  // namespace

namespace few_rows {

Status supports(const LinearArgs& args, const DeviceInfo&) {
  if (args.x.dtype != DType::kBFloat16 || args.weight.dtype == DType::kFloat32) {
    return unsupported("x, weight: this kernel multiplies bf16 x by bf16 or FP8 weights");
  }
  LACUNA_RETURN_IF_ERROR(check_depth(args.weight, args.x.shape[1]));
  LACUNA_RETURN_IF_ERROR(check_aligned(args.x, "x", 1));
  return check_aligned(args.weight, "weight", 1);
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.x = args.x.as<Bf16>(),
                         .x_stride = args.x.strides[0],
                         .x_head_stride = 0,
                         .weight = args.weight.data,
                         .weight_stride = args.weight.strides[0],
                         .weight_head_stride = 0,
                         .scale = args.weight_scale.as<float>(),
                         .scale_stride = args.weight_scale.shape[1],
                         .out = args.out.data,
                         .out_stride = args.out.strides[0],
                         .out_head_stride = 0,
                         .out_is_bf16 = args.out.dtype == DType::kBFloat16,
                         .rows = args.x.shape[0],
                         .row_blocks = static_cast<unsigned>(ceil_div(args.x.shape[0], kBlockRows)),
                         .columns = args.out.shape[1],
                         .depth = args.x.shape[1]};
  return args.weight.dtype == DType::kBFloat16 ? launch_few_rows<Bf16>(params, 1, device, where)
                                               : launch_few_rows<Fp8E4M3>(params, 1, device, where);
}

Status supports(const HeadLinearArgs& args, const DeviceInfo&) {
  if (args.x.dtype != DType::kBFloat16 || args.weight.dtype != DType::kBFloat16) {
    return unsupported("x, weight: this kernel multiplies bf16 by bf16");
  }
  if (args.weight.strides[2] != 1) {
    return unsupported("weight: this kernel needs its last dimension contiguous");
  }
  if (args.x.shape[1] > kGridYMax) {
    return unsupported("x: " + std::to_string(args.x.shape[1]) +
                       " heads, this kernel takes up to " + std::to_string(kGridYMax));
  }
  LACUNA_RETURN_IF_ERROR(check_depth(args.weight, args.x.shape[2]));
  LACUNA_RETURN_IF_ERROR(check_aligned(args.x, "x", 2));
  return check_aligned(args.weight, "weight", 2);
}

Status run(const HeadLinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.x = args.x.as<Bf16>(),
                         .x_stride = args.x.strides[0],
                         .x_head_stride = args.x.strides[1],
                         .weight = args.weight.data,
                         .weight_stride = args.weight.strides[1],
                         .weight_head_stride = args.weight.strides[0],
                         .scale = nullptr,
                         .scale_stride = 0,
                         .out = args.out.data,
                         .out_stride = args.out.strides[0],
                         .out_head_stride = args.out.strides[1],
                         .out_is_bf16 = args.out.dtype == DType::kBFloat16,
                         .rows = args.x.shape[0],
                         .row_blocks = static_cast<unsigned>(ceil_div(args.x.shape[0], kBlockRows)),
                         .columns = args.out.shape[2],
                         .depth = args.x.shape[2]};
  return launch_few_rows<Bf16>(params, args.x.shape[1], device, where);
}

bool preferred(const LinearArgs& args, const DeviceInfo& device) {
  const int64_t rows = args.x.shape[0];
  if (rows <= kSmallRowsPreferred && args.weight.num_elements() <= kSmallWeight) {
    return true;
  }
  if (args.weight.dtype == DType::kBFloat16) {
    return rows <= kRowsPreferred;
  }
  const bool few_tiles = ceil_div(args.out.shape[1], 128) < device.sm_count;
  return rows <= (few_tiles ? kFp8RowsMax : kFp8RowsPreferred);
}

// cuBLASLt is as fast from one row on, but its kernels are longer.
bool preferred(const HeadLinearArgs& args, const DeviceInfo&) {
  return args.x.shape[0] <= kSmallRowsPreferred && args.weight.num_elements() <= kSmallWeight;
}

}  // namespace few_rows

}  // namespace lacuna::cuda
