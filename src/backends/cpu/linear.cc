// Dense layers: x weight^T with a few rows (decode, bound by reading the weights) or many (prefill,
// a GEMM), and the per-head products of absorbed MLA.
#include <algorithm>
#include <cstdint>

#include "backends/cpu/fp8_weights.h"
#include "backends/cpu/gemm.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

namespace lacuna::cpu {
namespace {

// ---- linear ----

// Weights of one task of the few-rows kernel: a quarter of a 1 MiB L2, so that the second block of
// rows finds them there, and enough to pay for the task.
constexpr int64_t kGemvTaskBytes = int64_t{128} << 10;
// And multiplications of one, of which several rows make more of the same weights: one or two us.
constexpr int64_t kGemvTaskProducts = int64_t{64} << 10;

// Tile of the GEMM kernel: rows and columns of out a task. The transposed weights (columns * K
// floats) are kept at half of L2.
constexpr int64_t kGemmRows = 256;
constexpr int64_t kGemmPanelFloats = int64_t{128} << 10;

constexpr int64_t kGemmColumnsMin = 96;
constexpr int64_t kGemmColumnsMax = 384;

// A multiple of 48, which oneDNN's register tiles divide.
int64_t gemm_columns(int64_t k) {
  return std::clamp(kGemmPanelFloats / std::max<int64_t>(1, k) / 48 * 48, kGemmColumnsMin,
                    kGemmColumnsMax);
}

// Bounds gemm_columns(k) * k and, unlike it, grows with k.
int64_t gemm_panel_floats(int64_t k) {
  return std::clamp(kGemmPanelFloats, kGemmColumnsMin * k, kGemmColumnsMax * k);
}

struct LinearWorkspace {
  float* x;        // [T, K], packed or widened; null when it is taken as it is
  float* scratch;  // per worker
  int64_t scratch_floats;
  int64_t used_bytes;
};

bool needs_widening(const ConstTensorView& x) {
  return x.dtype != DType::kFloat32 || (x.shape[0] > 1 && x.strides[0] < x.shape[1]);
}

LinearWorkspace carve_linear(const LinearArgs& args, const DeviceInfo& device, bool gemm,
                             Workspace workspace) {
  const int64_t rows = args.x.shape[0];
  const int64_t k = args.x.shape[1];
  LinearWorkspace result = {};
  if (!gemm || needs_widening(args.x)) {
    result.x = workspace.take<float>(rows * k);
  }
  if (gemm) {
    result.scratch_floats = round_up(gemm_panel_floats(k), 16) + kGemmRows * kGemmColumnsMax;
    result.scratch = workspace.take<float>(result.scratch_floats * device.num_threads);
  }
  result.used_bytes = workspace.used_bytes();
  return result;
}

template <bool kGemm>
int64_t linear_workspace(const LinearArgs& args, const DeviceInfo& device) {
  return carve_linear(args, device, kGemm, Workspace()).used_bytes;
}

// x as f32 rows: itself, or a copy in the workspace.
ConstTensorView widened_x(const LinearArgs& args, const DeviceInfo& device, float* to) {
  if (to == nullptr) {
    return args.x;
  }
  const int64_t k = args.x.shape[1];
  parallel_ranges(device, args.x.shape[0], grain_rows(4 * k), [&](int64_t begin, int64_t end, int) {
    const ConstTensorView rows = args.x.slice(0, begin, end - begin);
    widen_rows(rows.data, rows.dtype, rows.strides[0], end - begin, k, to + begin * k);
  });
  return view_of(static_cast<const float*>(to), {args.x.shape[0], k});
}

Product linear_product(const ConstTensorView& x, const LinearArgs& args, int64_t row_begin,
                       int64_t row_end, int64_t column_begin, int64_t column_end) {
  const ConstTensorView rows = x.slice(0, row_begin, row_end - row_begin);
  const ConstTensorView weight = args.weight.slice(0, column_begin, column_end - column_begin);
  const TensorView out = args.out.slice(0, row_begin, row_end - row_begin)
                             .slice(1, column_begin, column_end - column_begin);
  return {.m = row_end - row_begin,
          .n = column_end - column_begin,
          .k = x.shape[1],
          .a = rows.data,
          .a_dtype = rows.dtype,
          .a_stride = rows.strides[0],
          .b = weight.data,
          .b_dtype = weight.dtype,
          .b_stride = weight.strides[0],
          .c = out.data,
          .c_dtype = out.dtype,
          .c_stride = out.strides[0]};
}

Status linear_gemv(const LinearArgs& args, const DeviceInfo& device, const Launch& launch) {
  const LinearWorkspace workspace =
      carve_linear(args, device, false, {launch.workspace, launch.workspace_bytes});
  const int64_t rows = args.x.shape[0];
  const int64_t k = args.x.shape[1];
  const int64_t columns = args.out.shape[1];
  parallel_ranges(
      device, div_up(rows, kRowBlock), grain_rows(4 * kRowBlock * k),
      [&](int64_t begin, int64_t end, int) {
        const int64_t row = begin * kRowBlock;
        pack_rows_of(linear_product(args.x, args, row, std::min(end * kRowBlock, rows), 0, columns),
                     workspace.x + row * k);
      });
  // Whole groups of 16 columns: the width of the register tile is at most that.
  const int64_t row_bytes = std::max<int64_t>(1, k * size_bytes(args.weight.dtype));
  const int64_t group_products = std::max<int64_t>(1, 16 * rows * k);
  const int64_t grain = std::max<int64_t>(
      1, std::min(kGemvTaskBytes / (16 * row_bytes), kGemvTaskProducts / group_products));
  parallel_ranges(device, div_up(columns, 16), grain, [&](int64_t begin, int64_t end, int) {
    // Narrow panels, so that the weights stay in cache from one block of rows to the next.
    const int64_t step = 16 * std::max<int64_t>(1, kGemvTaskBytes / (16 * row_bytes));
    const int64_t column_end = std::min(16 * end, columns);
    for (int64_t column = 16 * begin; column < column_end; column += step) {
      multiply_packed_rows(
          linear_product(args.x, args, 0, rows, column, std::min(column + step, column_end)),
          workspace.x);
    }
  });
  return ok_status();
}

Status linear_gemm(const LinearArgs& args, const DeviceInfo& device, const Launch& launch) {
  const LinearWorkspace workspace =
      carve_linear(args, device, true, {launch.workspace, launch.workspace_bytes});
  const ConstTensorView x = widened_x(args, device, workspace.x);
  const int64_t rows = x.shape[0];
  const int64_t columns = args.out.shape[1];
  const int64_t row_tiles = div_up(rows, kGemmRows);
  const int64_t column_step = gemm_columns(x.shape[1]);
  FirstFailure failure;
  device.thread_pool->parallel_for(
      row_tiles * div_up(columns, column_step), [&](int64_t task, int worker) {
        const int64_t row = task % row_tiles * kGemmRows;
        const int64_t column = task / row_tiles * column_step;
        const Product product = linear_product(x, args, row, std::min(row + kGemmRows, rows),
                                               column, std::min(column + column_step, columns));
        failure.note(
            multiply_many_rows(product, workspace.scratch + worker * workspace.scratch_floats));
      });
  return failure.take();
}

bool has_few_rows(const LinearArgs& args, const DeviceInfo&) { return args.x.shape[0] <= kFewRows; }

// ---- head_linear ----

// Rows of one task: enough for a GEMM, few enough for the widened operands to stay in L2.
constexpr int64_t kHeadRows = 128;

int64_t head_scratch(const HeadLinearArgs& args) {
  const int64_t rows = std::min(kHeadRows, args.x.shape[0]);
  return product_scratch(rows, args.out.shape[2], args.x.shape[2]);
}

int64_t head_linear_workspace(const HeadLinearArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  workspace.take<float>(head_scratch(args) * device.num_threads);
  return workspace.used_bytes();
}

Status head_linear(const HeadLinearArgs& args, const DeviceInfo& device, const Launch& launch) {
  Workspace workspace(launch.workspace, launch.workspace_bytes);
  const int64_t scratch_floats = head_scratch(args);
  float* scratch = workspace.take<float>(scratch_floats * device.num_threads);
  const int64_t rows = args.x.shape[0];
  const int64_t heads = args.x.shape[1];
  const int64_t row_tiles = div_up(rows, kHeadRows);
  const bool columns_contiguous = args.weight.strides[2] != 1;
  FirstFailure failure;
  device.thread_pool->parallel_for(heads * row_tiles, [&](int64_t task, int worker) {
    const int64_t head = task / row_tiles;
    const int64_t row = task % row_tiles * kHeadRows;
    const int64_t count = std::min(kHeadRows, rows - row);
    const ConstTensorView x = args.x.slice(0, row, count).slice(1, head, 1);
    const ConstTensorView weight = args.weight.slice(0, head, 1);
    const TensorView out = args.out.slice(0, row, count).slice(1, head, 1);
    const Product product = {.m = count,
                             .n = args.out.shape[2],
                             .k = args.x.shape[2],
                             .a = x.data,
                             .a_dtype = x.dtype,
                             .a_stride = x.strides[0],
                             .b = weight.data,
                             .b_dtype = weight.dtype,
                             .b_stride = weight.strides[columns_contiguous ? 2 : 1],
                             .b_columns_contiguous = columns_contiguous,
                             .c = out.data,
                             .c_dtype = out.dtype,
                             .c_stride = out.strides[0]};
    failure.note(multiply(product, scratch + worker * scratch_floats));
  });
  return failure.take();
}

}  // namespace

const Kernel<LinearArgs> kLinear[3] = {
    {
        .name = "cpu/linear_gemv",
        .supports = refuses_fp8_weight,
        .preferred = has_few_rows,
        .workspace_bytes = linear_workspace<false>,
        .run = linear_gemv,
    },
    {
        .name = "cpu/linear_gemm",
        .supports = refuses_fp8_weight,
        .workspace_bytes = linear_workspace<true>,
        .run = linear_gemm,
    },
    {
        .name = "cpu/linear_fp8",
        .supports = supports_fp8_weight,
        .workspace_bytes = linear_fp8_workspace,
        .run = linear_fp8,
    },
};

const Kernel<HeadLinearArgs> kHeadLinear = {
    .name = "cpu/head_linear",
    .supports = supports_all<HeadLinearArgs>,
    .workspace_bytes = head_linear_workspace,
    .run = head_linear,
};

}  // namespace lacuna::cpu
