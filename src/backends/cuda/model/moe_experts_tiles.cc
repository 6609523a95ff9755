// moe_experts on tensor cores: bf16 x, bf16 or FP8 experts.
#include <algorithm>
#include <tuple>

#include "backends/cuda/launch.h"
#include "backends/cuda/model/alignment.h"
#include "backends/cuda/model/linear.h"
#include "backends/cuda/model/moe_experts.h"

namespace lacuna::cuda {
namespace {

int tile_rows_of(const MoeExpertsArgs& args) {
  const MoeShape shape(args);
  return product_tile_rows(args.experts[0].gate.dtype,
                           ceil_div(shape.chunk_rows() * shape.chosen, shape.experts));
}

}  // namespace

namespace tiles {

Status supports(const MoeExpertsArgs& args, const DeviceInfo&) {
  const ExpertWeights& expert = args.experts[0];
  const DType weight = expert.gate.dtype;
  const MoeShape shape(args);
  if (args.x.dtype != DType::kBFloat16 || weight == DType::kFloat32) {
    return unsupported("x, experts: this kernel multiplies bf16 x by bf16 or FP8 weights");
  }
  LACUNA_RETURN_IF_ERROR(check_product("experts.gate", weight, shape.width, shape.width,
                                       shape.rows * args.x.strides[0]));
  LACUNA_RETURN_IF_ERROR(check_product("experts.down", weight, shape.hidden, shape.hidden,
                                       shape.chunk_rows() * shape.chosen * shape.hidden));
  LACUNA_RETURN_IF_ERROR(check_aligned(args.x, "x", 1));
  LACUNA_ASSIGN_OR_RETURN(const ExpertStrides strides, expert_strides(args));
  const int64_t size = size_bytes(weight);
  for (const auto& [view, stride, name] :
       {std::tuple(&expert.gate, strides.gate, "experts.gate"),
        std::tuple(&expert.up, strides.up, "experts.up"),
        std::tuple(&expert.down, strides.down, "experts.down")}) {
    LACUNA_RETURN_IF_ERROR(check_aligned(*view, name, 1));
    if (stride * size % 16 != 0) {
      return unsupported(std::string(name) + ": this kernel needs experts aligned to 16 bytes");
    }
  }
  return ok_status();
}

int64_t workspace(const MoeExpertsArgs& args, const DeviceInfo&) {
  return carve_moe(args, Workspace()).used_bytes;
}

Status run(const MoeExpertsArgs& args, const DeviceInfo& device, const Launch& where) {
  const MoeShape shape(args);
  const ExpertWeights& expert = args.experts[0];
  const DType weight = expert.gate.dtype;
  const int tile_rows = tile_rows_of(args);
  const MoeScratch scratch = carve_moe(args, {where.workspace, where.workspace_bytes});
  LACUNA_ASSIGN_OR_RETURN(const ExpertStrides strides, expert_strides(args));
  const int64_t chunk = shape.chunk_rows();
  for (int64_t begin = 0; begin < shape.rows; begin += chunk) {
    const int64_t rows = std::min(chunk, shape.rows - begin);
    const int64_t tiles_max = shape.tiles_max(rows, tile_rows);
    LACUNA_RETURN_IF_ERROR(launch_route(args, begin, rows, tile_rows, scratch, device, where));

    ProductParams up;
    up.weight[0] = expert.gate.data;
    up.weight[1] = expert.up.data;
    up.scale[0] = expert.gate_scale.as<float>();
    up.scale[1] = expert.up_scale.as<float>();
    up.weight_stride = shape.width;
    up.weight_expert_stride[0] = strides.gate;
    up.weight_expert_stride[1] = strides.up;
    up.scale_stride = ceil_div(shape.width, kWeightScaleBlock);
    up.scale_expert_stride[0] = strides.gate_scale;
    up.scale_expert_stride[1] = strides.up_scale;
    up.x = args.x.as<Bf16>() + begin * args.x.strides[0];
    up.x_stride = args.x.strides[0];
    up.tiles = scratch.tiles;
    up.num_tiles = scratch.num_tiles;
    up.x_rows = scratch.entries;
    up.x_divisor = static_cast<int32_t>(shape.chosen);
    up.columns = shape.hidden;
    up.depth = shape.width;
    up.out = scratch.hidden;
    up.out_stride = shape.hidden;
    up.out_is_bf16 = true;
    LACUNA_RETURN_IF_ERROR(launch_product("cuda/moe_experts_tiles: gate and up", up, weight, true,
                                          tile_rows, tiles_max, device, where));

    ProductParams down;
    down.weight[0] = expert.down.data;
    down.scale[0] = expert.down_scale.as<float>();
    down.weight_stride = shape.hidden;
    down.weight_expert_stride[0] = strides.down;
    down.scale_stride = ceil_div(shape.hidden, kWeightScaleBlock);
    down.scale_expert_stride[0] = strides.down_scale;
    down.x = static_cast<const Bf16*>(scratch.hidden);
    down.x_stride = shape.hidden;
    down.tiles = scratch.tiles;
    down.num_tiles = scratch.num_tiles;
    down.out_rows = scratch.entries;
    down.columns = shape.width;
    down.depth = shape.hidden;
    down.out = scratch.products;
    down.out_stride = shape.width;
    LACUNA_RETURN_IF_ERROR(launch_product("cuda/moe_experts_tiles: down", down, weight, false,
                                          tile_rows, tiles_max, device, where));
    LACUNA_RETURN_IF_ERROR(launch_combine(args, begin, rows, scratch, device, where));
  }
  return ok_status();
}

}  // namespace tiles

}  // namespace lacuna::cuda
