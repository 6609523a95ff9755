// moe_experts for every dtype, width and alignment of its contract, without tensor cores.
#include <algorithm>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/linear.h"
#include "backends/cuda/model/moe_experts.h"
#include "backends/cuda/model/product_simt.cuh"

namespace lacuna::cuda {
namespace {

struct Params {
  SimtWeight weight[2];  // gate and up, or down
  int64_t expert_stride[2];
  int64_t scale_expert_stride[2];
  const void* x;  // of the layer, or the hidden activations
  DType x_dtype;
  int64_t x_stride;
  const ExpertTile* tiles;
  const int32_t* num_tiles;
  const int32_t* entries;
  int chosen;
  int64_t columns;
  int64_t depth;
  void* out;
  int64_t out_stride;
};

__device__ SimtWeight weight_of(const Params& p, int which, int64_t expert) {
  SimtWeight weight = p.weight[which];
  weight.data = static_cast<const char*>(weight.data) +
                expert * p.expert_stride[which] * size_bytes(weight.dtype);
  if (weight.scale != nullptr) {
    weight.scale += expert * p.scale_expert_stride[which];
  }
  return weight;
}

// kGated: hidden = silu(gate x) * (up x) by slot; otherwise products = down hidden by entry.
template <bool kGated>
__global__ __launch_bounds__(kSimtThreads, 2) void moe_generic_kernel(const Params p) {
  __shared__ SimtSmem smem;
  pdl_wait();
  if (blockIdx.x >= static_cast<unsigned>(*p.num_tiles)) {
    return;
  }
  const ExpertTile tile = p.tiles[blockIdx.x];
  const int64_t column0 = static_cast<int64_t>(blockIdx.y) * kSimtTile;
  const auto load_x = [&](int row, int64_t k) {
    const int64_t slot = tile.begin + row;
    const int64_t x_row = kGated ? p.entries[slot] / p.chosen : slot;
    return load_any(p.x, p.x_dtype, x_row * p.x_stride + k);
  };
  float acc[kSimtOutputs][kSimtOutputs] = {};
  simt_product(load_x, tile.count, weight_of(p, 0, tile.expert), column0, p.columns, p.depth, smem,
               acc);
  float up[kSimtOutputs][kSimtOutputs] = {};
  if constexpr (kGated) {
    simt_product(load_x, tile.count, weight_of(p, 1, tile.expert), column0, p.columns, p.depth,
                 smem, up);
  }
  for_each_simt_output(tile.count, column0, p.columns, [&](int row, int64_t column, int i, int j) {
    const int64_t slot = tile.begin + row;
    if constexpr (kGated) {
      const float gate = acc[i][j];
      store_any(p.out, p.x_dtype, slot * p.out_stride + column,
                gate / (1.0f + expf(-gate)) * up[i][j]);
    } else {
      static_cast<float*>(p.out)[p.entries[slot] * p.out_stride + column] = acc[i][j];
    }
  });
}

SimtWeight simt_weight(const ConstTensorView& weight, const ConstTensorView& scale) {
  return {.data = weight.data,
          .dtype = weight.dtype,
          .column_stride = weight.shape[1],
          .depth_stride = 1,
          .scale = scale.as<float>(),
          .scale_stride = scale.shape[1]};
}

}  // namespace

namespace generic {

Status supports(const MoeExpertsArgs& args, const DeviceInfo&) {
  const MoeShape shape(args);
  if (std::max(shape.width, shape.hidden) > kGridYMax * kSimtTile) {
    return unsupported("experts: this kernel takes widths up to " +
                       std::to_string(kGridYMax * kSimtTile));
  }
  return expert_strides(args).status();
}

int64_t workspace(const MoeExpertsArgs& args, const DeviceInfo&) {
  return carve_moe(args, Workspace()).used_bytes;
}

Status run(const MoeExpertsArgs& args, const DeviceInfo& device, const Launch& where) {
  const MoeShape shape(args);
  const ExpertWeights& expert = args.experts[0];
  const MoeScratch scratch = carve_moe(args, {where.workspace, where.workspace_bytes});
  LACUNA_ASSIGN_OR_RETURN(const ExpertStrides strides, expert_strides(args));
  const int64_t chunk = shape.chunk_rows();
  for (int64_t begin = 0; begin < shape.rows; begin += chunk) {
    const int64_t rows = std::min(chunk, shape.rows - begin);
    LACUNA_RETURN_IF_ERROR(launch_route(args, begin, rows, kSimtTile, scratch, device, where));
    const auto grid = [&](int64_t columns) {
      return dim3(static_cast<unsigned>(shape.tiles_max(rows, kSimtTile)),
                  static_cast<unsigned>(ceil_div(columns, kSimtTile)));
    };
    Params params = {.weight = {simt_weight(expert.gate, expert.gate_scale),
                                simt_weight(expert.up, expert.up_scale)},
                     .expert_stride = {strides.gate, strides.up},
                     .scale_expert_stride = {strides.gate_scale, strides.up_scale},
                     .x = args.x.as<char>() + begin * args.x.strides[0] * size_bytes(args.x.dtype),
                     .x_dtype = args.x.dtype,
                     .x_stride = args.x.strides[0],
                     .tiles = scratch.tiles,
                     .num_tiles = scratch.num_tiles,
                     .entries = scratch.entries,
                     .chosen = static_cast<int>(shape.chosen),
                     .columns = shape.hidden,
                     .depth = shape.width,
                     .out = scratch.hidden,
                     .out_stride = shape.hidden};
    LACUNA_RETURN_IF_ERROR(
        launch("cuda/moe_experts_generic: gate and up", moe_generic_kernel<true>, device, where,
               {.grid = grid(shape.hidden), .block = dim3(kSimtThreads), .pdl = true}, params));
    params.weight[0] = simt_weight(expert.down, expert.down_scale);
    params.expert_stride[0] = strides.down;
    params.scale_expert_stride[0] = strides.down_scale;
    params.x = scratch.hidden;
    params.x_stride = shape.hidden;
    params.columns = shape.width;
    params.depth = shape.hidden;
    params.out = scratch.products;
    params.out_stride = shape.width;
    LACUNA_RETURN_IF_ERROR(
        launch("cuda/moe_experts_generic: down", moe_generic_kernel<false>, device, where,
               {.grid = grid(shape.width), .block = dim3(kSimtThreads), .pdl = true}, params));
    LACUNA_RETURN_IF_ERROR(launch_combine(args, begin, rows, scratch, device, where));
  }
  return ok_status();
}

}  // namespace generic

}  // namespace lacuna::cuda
