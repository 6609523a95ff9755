// linear and head_linear for every dtype, width, stride and alignment of their contracts.
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/linear.h"
#include "backends/cuda/model/product_simt.cuh"

namespace lacuna::cuda {
namespace {

struct Params {
  const void* x;
  DType x_dtype;
  int64_t x_stride;
  int64_t x_head_stride;
  SimtWeight weight;
  int64_t weight_head_stride;
  void* out;
  DType out_dtype;
  int64_t out_stride;
  int64_t out_head_stride;
  int64_t rows;
  int64_t columns;
  int64_t depth;
};

__global__ __launch_bounds__(kSimtThreads) void linear_generic_kernel(const Params p) {
  __shared__ SimtSmem smem;
  pdl_wait();
  const int64_t row0 = static_cast<int64_t>(blockIdx.x) * kSimtTile;
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * kSimtTile;
  const int64_t head = blockIdx.z;
  SimtWeight weight = p.weight;
  weight.data = static_cast<const char*>(weight.data) +
                head * p.weight_head_stride * size_bytes(weight.dtype);
  const auto load_x = [&](int row, int64_t k) {
    return load_any(p.x, p.x_dtype, (row0 + row) * p.x_stride + head * p.x_head_stride + k);
  };
  const int rows = static_cast<int>(min(p.rows - row0, static_cast<int64_t>(kSimtTile)));
  float acc[kSimtOutputs][kSimtOutputs] = {};
  simt_product(load_x, rows, weight, column0, p.columns, p.depth, smem, acc);
  for_each_simt_output(rows, column0, p.columns, [&](int row, int64_t column, int i, int j) {
    store_any(p.out, p.out_dtype, (row0 + row) * p.out_stride + head * p.out_head_stride + column,
              acc[i][j]);
  });
}

Status check_grid(int64_t columns, int64_t heads) {
  return ceil_div(columns, kSimtTile) <= kGridYMax && heads <= kGridYMax
             ? ok_status()
             : unsupported("out: " + std::to_string(heads) + " heads of " +
                           std::to_string(columns) + " columns, this kernel takes up to " +
                           std::to_string(kGridYMax) + " of " +
                           std::to_string(kGridYMax * kSimtTile));
}

Status launch_generic(const char* name, const Params& params, int64_t heads,
                      const DeviceInfo& device, const Launch& where) {
  return launch(name, linear_generic_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(params.rows, kSimtTile)),
                              static_cast<unsigned>(ceil_div(params.columns, kSimtTile)),
                              static_cast<unsigned>(heads)),
                 .block = dim3(kSimtThreads),
                 .pdl = true},
                params);
}

}  // namespace

namespace generic {

Status supports(const LinearArgs& args, const DeviceInfo&) {
  return check_grid(args.out.shape[1], 1);
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.x = args.x.data,
                         .x_dtype = args.x.dtype,
                         .x_stride = args.x.strides[0],
                         .x_head_stride = 0,
                         .weight = {.data = args.weight.data,
                                    .dtype = args.weight.dtype,
                                    .column_stride = args.weight.strides[0],
                                    .depth_stride = 1,
                                    .scale = args.weight_scale.as<float>(),
                                    .scale_stride = args.weight_scale.shape[1]},
                         .weight_head_stride = 0,
                         .out = args.out.data,
                         .out_dtype = args.out.dtype,
                         .out_stride = args.out.strides[0],
                         .out_head_stride = 0,
                         .rows = args.x.shape[0],
                         .columns = args.out.shape[1],
                         .depth = args.x.shape[1]};
  return launch_generic("cuda/linear_generic", params, 1, device, where);
}

Status supports(const HeadLinearArgs& args, const DeviceInfo&) {
  return check_grid(args.out.shape[2], args.out.shape[1]);
}

Status run(const HeadLinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.x = args.x.data,
                         .x_dtype = args.x.dtype,
                         .x_stride = args.x.strides[0],
                         .x_head_stride = args.x.strides[1],
                         .weight = {.data = args.weight.data,
                                    .dtype = args.weight.dtype,
                                    .column_stride = args.weight.strides[1],
                                    .depth_stride = args.weight.strides[2],
                                    .scale = nullptr,
                                    .scale_stride = 0},
                         .weight_head_stride = args.weight.strides[0],
                         .out = args.out.data,
                         .out_dtype = args.out.dtype,
                         .out_stride = args.out.strides[0],
                         .out_head_stride = args.out.strides[1],
                         .rows = args.x.shape[0],
                         .columns = args.out.shape[2],
                         .depth = args.x.shape[2]};
  return launch_generic("cuda/head_linear_generic", params, args.x.shape[1], device, where);
}

}  // namespace generic

}  // namespace lacuna::cuda
