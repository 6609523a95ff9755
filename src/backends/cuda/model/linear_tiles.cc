// x weight^T for many rows of bf16 x on our own tensor core kernel: what cuBLASLt has no kernel
// for, FP8 weights with scales of 128 x 128 blocks and bf16 x, and bf16 where there is no cuBLASLt.
#include "backends/cuda/launch.h"
#include "backends/cuda/model/alignment.h"
#include "backends/cuda/model/linear.h"
#include "backends/cuda/model/product_tile.h"

namespace lacuna::cuda {
namespace tiles {

Status supports(const LinearArgs& args, const DeviceInfo&) {
  if (args.x.dtype != DType::kBFloat16 || args.weight.dtype == DType::kFloat32) {
    return unsupported("x, weight: this kernel multiplies bf16 x by bf16 or FP8 weights");
  }
  if (args.out.shape[1] > kGridYMax * 128) {
    return unsupported("weight: " + std::to_string(args.out.shape[1]) +
                       " rows, this kernel takes up to " + std::to_string(kGridYMax * 128));
  }
  LACUNA_RETURN_IF_ERROR(check_product("weight", args.weight.dtype, args.x.shape[1],
                                       args.weight.strides[0],
                                       args.x.shape[0] * args.x.strides[0]));
  LACUNA_RETURN_IF_ERROR(check_aligned(args.x, "x", 1));
  return check_aligned(args.weight, "weight", 1);
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  ProductParams params;
  params.weight[0] = args.weight.data;
  params.scale[0] = args.weight_scale.as<float>();
  params.weight_stride = args.weight.strides[0];
  params.scale_stride = args.weight_scale.shape[1];
  params.x = args.x.as<Bf16>();
  params.x_stride = args.x.strides[0];
  params.rows = args.x.shape[0];
  params.columns = args.out.shape[1];
  params.depth = args.x.shape[1];
  params.out = args.out.data;
  params.out_stride = args.out.strides[0];
  params.out_is_bf16 = args.out.dtype == DType::kBFloat16;
  const int tile_rows = product_tile_rows(args.weight.dtype, params.rows);
  return launch_product("cuda/linear_tiles", params, args.weight.dtype, false, tile_rows,
                        ceil_div(params.rows, tile_rows), device, where);
}

}  // namespace tiles

}  // namespace lacuna::cuda
