// See fp8_weights.h. Plain loops that compilers turn into SIMD of any width.
#include "backends/cpu/fp8_weights.h"

#include <algorithm>
#include <bit>
#include <string>

#include "backends/cpu/gemm.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

namespace lacuna::cpu {
namespace {

// to_float(Fp8E4M3) without branches. Normal values move exponent and mantissa to their places; a
// subnormal one would be 2^-7 (1 + m / 8) there instead of 2^-6 (m / 8).
inline float decode(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  const float moved = std::bit_cast<float>((magnitude << 20) + (120u << 23));
  const float value = magnitude < 8 ? 2 * (moved - 0x1p-7f) : moved;
  const uint32_t nan = magnitude == 0x7fu ? 0x7fc00000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | nan |
                              static_cast<uint32_t>(bits & 0x80u) << 24);
}

// Rows of weights a task, widened: half of L2. Rows of x that meet them at once.
constexpr int64_t kPanelFloats = int64_t{128} << 10;
constexpr int64_t kPanelColumnsMin = 16;
constexpr int64_t kPanelColumnsMax = 256;
constexpr int64_t kPanelRows = 256;

int64_t panel_columns(int64_t k) {
  return std::clamp(kPanelFloats / std::max<int64_t>(1, k) / 16 * 16, kPanelColumnsMin,
                    kPanelColumnsMax);
}

struct PanelScratch {
  float* data;           // per worker: the panel, then what a product needs
  int64_t panel_floats;  // bounds panel_columns(k) * k and, unlike it, grows with k
  int64_t worker_floats;
  int64_t used_bytes;
};

PanelScratch carve(const LinearArgs& args, const DeviceInfo& device, Workspace workspace) {
  const int64_t k = args.x.shape[1];
  PanelScratch scratch = {};
  scratch.panel_floats =
      round_up(std::clamp(kPanelFloats, kPanelColumnsMin * k, kPanelColumnsMax * k), 16);
  scratch.worker_floats =
      scratch.panel_floats + product_scratch(std::min(kPanelRows, args.x.shape[0]),
                                             std::max(panel_columns(k), kPanelColumnsMax), k);
  scratch.data = workspace.take<float>(scratch.worker_floats * device.num_threads);
  scratch.used_bytes = workspace.used_bytes();
  return scratch;
}

}  // namespace

void widen_fp8_rows(const ConstTensorView& weight, const ConstTensorView& scale, int64_t row_begin,
                    int64_t rows, float* to) {
  const int64_t width = weight.shape[1];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t n = row_begin + i;
    const uint8_t* from = weight.as<uint8_t>() + n * weight.strides[0];
    const float* scales = scale.as<float>() + n / kWeightScaleBlock * scale.shape[1];
    for (int64_t begin = 0; begin < width; begin += kWeightScaleBlock) {
      const int64_t end = std::min(begin + kWeightScaleBlock, width);
      const float factor = scales[begin / kWeightScaleBlock];
      for (int64_t k = begin; k < end; ++k) {
        to[i * width + k] = decode(from[k]) * factor;
      }
    }
  }
}

Status supports_fp8_weight(const LinearArgs& args, const DeviceInfo&) {
  return args.weight.dtype == DType::kFloat8E4M3
             ? ok_status()
             : unsupported("weight: " + std::string(dtype_name(args.weight.dtype)) +
                           ", this kernel is for float8_e4m3");
}

Status refuses_fp8_weight(const LinearArgs& args, const DeviceInfo&) {
  return args.weight.dtype != DType::kFloat8E4M3
             ? ok_status()
             : unsupported("weight: float8_e4m3, this kernel is for float32 and bfloat16");
}

int64_t linear_fp8_workspace(const LinearArgs& args, const DeviceInfo& device) {
  return carve(args, device, Workspace()).used_bytes;
}

Status linear_fp8(const LinearArgs& args, const DeviceInfo& device, const Launch& launch) {
  const PanelScratch scratch = carve(args, device, {launch.workspace, launch.workspace_bytes});
  const int64_t rows = args.x.shape[0];
  const int64_t k = args.x.shape[1];
  const int64_t columns = args.out.shape[1];
  const int64_t step = panel_columns(k);
  FirstFailure failure;
  device.thread_pool->parallel_for(div_up(columns, step), [&](int64_t task, int worker) {
    float* panel = scratch.data + worker * scratch.worker_floats;
    const int64_t column = task * step;
    const int64_t n = std::min(step, columns - column);
    widen_fp8_rows(args.weight, args.weight_scale, column, n, panel);
    for (int64_t row = 0; row < rows; row += kPanelRows) {
      const int64_t m = std::min(kPanelRows, rows - row);
      const ConstTensorView x = args.x.slice(0, row, m);
      const TensorView out = args.out.slice(0, row, m).slice(1, column, n);
      failure.note(multiply({.m = m,
                             .n = n,
                             .k = k,
                             .a = x.data,
                             .a_dtype = x.dtype,
                             .a_stride = x.strides[0],
                             .b = panel,
                             .b_stride = k,
                             .c = out.data,
                             .c_dtype = out.dtype,
                             .c_stride = out.strides[0]},
                            panel + scratch.panel_floats));
    }
  });
  return failure.take();
}

}  // namespace lacuna::cpu
