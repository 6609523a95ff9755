// linear and head_linear through cuBLASLt. Its operands have one type: where one is f32 and the
// other bf16, the f32 one is taken apart into three bf16 matrices and three products are added up,
// which is exact up to the f32 sums. For many rows FP8 weights are multiplied out to bf16, a panel
// at a time: each weight is rounded once more, to 8 bits. Algorithms are asked for once a shape,
// rows rounded up: an engine's steps have any number of rows, and asking takes longer than most
// products.
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>

#include "backends/cuda/cuda_status.h"
#include "backends/cuda/model/cublaslt.h"
#include "backends/cuda/model/linear.h"
#include "backends/cuda/model/split_bf16.h"
#include "backends/cuda/model/widen_fp8.h"
#include "core/workspace.h"
#include "ops/row_steps.h"

namespace lacuna::cuda {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

// What cuBLASLt may use to share a long k between blocks: partial sums of a few copies of out. More
// than 32 MiB is of no use to it on any GPU.
constexpr int64_t kSplitCopies = 16;
constexpr int64_t kSplitBytesMin = int64_t{64} << 10;
constexpr int64_t kSplitBytesMax = int64_t{32} << 20;
// Of that memory; a workspace of ours is aligned to less.
constexpr int64_t kLtAlignment = 256;

struct Operand {
  const void* data;
  DType dtype;
  int64_t row_stride;  // of x: from t to t; of weight: from n to n, or from k to k
  int64_t head_stride;
};

// out[t, h] = weight[h] x[t, h].
struct Problem {
  int64_t rows;
  int64_t heads;
  int64_t columns;
  int64_t depth;
  Operand x;
  Operand weight;
  bool columns_contiguous;  // of the weight; otherwise its depth is
  void* out;
  DType out_dtype;
  int64_t out_stride;
  int64_t out_head_stride;

  bool mixed() const { return x.dtype != weight.dtype; }
  // From one part of the f32 operand to the next when the types differ: all are aligned alike.
  int64_t part_elements() const {
    return !mixed() ? 0 : (heads * depth * (x.dtype == kF32 ? rows : columns) + 31) / 32 * 32;
  }
};

Problem problem_of(const LinearArgs& args) {
  return {.rows = args.x.shape[0],
          .heads = 1,
          .columns = args.out.shape[1],
          .depth = args.x.shape[1],
          .x = {args.x.data, args.x.dtype, args.x.strides[0], 0},
          .weight = {args.weight.data, args.weight.dtype, args.weight.strides[0], 0},
          .columns_contiguous = false,
          .out = args.out.data,
          .out_dtype = args.out.dtype,
          .out_stride = args.out.strides[0],
          .out_head_stride = 0};
}

Problem problem_of(const HeadLinearArgs& args) {
  const bool columns_contiguous = args.weight.strides[2] != 1;
  return {.rows = args.x.shape[0],
          .heads = args.x.shape[1],
          .columns = args.out.shape[2],
          .depth = args.x.shape[2],
          .x = {args.x.data, args.x.dtype, args.x.strides[0], args.x.strides[1]},
          .weight = {args.weight.data, args.weight.dtype,
                     args.weight.strides[columns_contiguous ? 2 : 1], args.weight.strides[0]},
          .columns_contiguous = columns_contiguous,
          .out = args.out.data,
          .out_dtype = args.out.dtype,
          .out_stride = args.out.strides[0],
          .out_head_stride = args.out.strides[1]};
}

int64_t split_k_bytes(const Problem& problem) {
  return std::clamp(kSplitCopies * 4 * round_rows(problem.rows) * problem.heads * problem.columns,
                    kSplitBytesMin, kSplitBytesMax);
}

// ---- Descriptors ----

cudaDataType_t type_of(DType dtype) { return dtype == kF32 ? CUDA_R_32F : CUDA_R_16BF; }

// cuBLASLt counts in column-major matrices, in which out is [columns, rows]: the weight is its A, x
// its B.
struct Descriptors {
  cublasLtMatmulDescOpaque_t product;
  cublasLtMatrixLayoutOpaque_t a;
  cublasLtMatrixLayoutOpaque_t b;
  cublasLtMatrixLayoutOpaque_t c;
};

Status lt_status(cublasStatus_t status, const char* what) {
  return status == CUBLAS_STATUS_SUCCESS
             ? ok_status()
             : internal_error(std::string(what) + ": cuBLAS status " + std::to_string(status));
}

Status init_layout(const CublasLt& lt, DType dtype, int64_t rows, int64_t columns, int64_t stride,
                   int64_t heads, int64_t head_stride, cublasLtMatrixLayoutOpaque_t* layout) {
  // With one column the stride is never used, but it is checked.
  const int64_t ld = columns == 1 ? std::max(stride, rows) : stride;
  LACUNA_RETURN_IF_ERROR(
      lt_status(lt.init_layout(layout, sizeof(*layout), type_of(dtype), static_cast<uint64_t>(rows),
                               static_cast<uint64_t>(columns), ld),
                "cublasLtMatrixLayoutInit"));
  if (heads == 1) {
    return ok_status();
  }
  const int32_t batch = static_cast<int32_t>(heads);
  LACUNA_RETURN_IF_ERROR(
      lt_status(lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof(batch)),
                "cublasLtMatrixLayoutSetAttribute"));
  return lt_status(lt.set_layout(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &head_stride,
                                 sizeof(head_stride)),
                   "cublasLtMatrixLayoutSetAttribute");
}

Status describe(const CublasLt& lt, const Problem& p, Descriptors* to) {
  LACUNA_RETURN_IF_ERROR(
      lt_status(lt.init_product(&to->product, sizeof(to->product), CUBLAS_COMPUTE_32F, CUDA_R_32F),
                "cublasLtMatmulDescInit"));
  const cublasOperation_t op_a = p.columns_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T;
  LACUNA_RETURN_IF_ERROR(
      lt_status(lt.set_product(&to->product, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof(op_a)),
                "cublasLtMatmulDescSetAttribute"));
  LACUNA_RETURN_IF_ERROR(init_layout(lt, p.weight.dtype, p.columns_contiguous ? p.columns : p.depth,
                                     p.columns_contiguous ? p.depth : p.columns,
                                     p.weight.row_stride, p.heads, p.weight.head_stride, &to->a));
  LACUNA_RETURN_IF_ERROR(init_layout(lt, p.x.dtype, p.depth, p.rows, p.x.row_stride, p.heads,
                                     p.x.head_stride, &to->b));
  return init_layout(lt, p.out_dtype, p.columns, p.rows, p.out_stride, p.heads, p.out_head_stride,
                     &to->c);
}

// ---- Algorithms ----

// The largest power of two up to 16 that divides the address and the strides in bytes.
uint32_t alignment_of(const void* data, int64_t size, int64_t row_stride, int64_t head_stride) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(data) |
                        static_cast<uint64_t>(row_stride * size) |
                        static_cast<uint64_t>(head_stride * size) | 16;
  return static_cast<uint32_t>(bits & ~(bits - 1));
}

// Everything that the choice depends on.
using Key = std::array<int64_t, 16>;

struct Algorithm {
  Status status;  // not ok: cuBLASLt has none
  cublasLtMatmulAlgo_t algo;
};

Algorithm find_algorithm(const CublasLt& lt, const Problem& p, int device_idx,
                         const std::array<uint32_t, 3>& alignments) {
  Algorithm result = {};
  const Result<cublasLtHandle_t> handle = cublaslt_handle(device_idx);
  if (!handle.ok()) {
    result.status = handle.status();
    return result;
  }
  Descriptors descriptors;
  cublasLtMatmulPreferenceOpaque_t preference;
  result.status = describe(lt, p, &descriptors);
  if (!result.status.ok()) {
    return result;
  }
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (result.status.ok()) {
      result.status = lt_status(lt.set_preference(&preference, attribute, &value, sizeof(value)),
                                "cublasLtMatmulPreferenceSetAttribute");
    }
  };
  result.status = lt_status(lt.init_preference(&preference, sizeof(preference)),
                            "cublasLtMatmulPreferenceInit");
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(split_k_bytes(p)));
  // Partial sums stay f32, in the workspace, and are added in a separate step: always in one order.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignments[0]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignments[1]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignments[2]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignments[2]);
  if (!result.status.ok()) {
    return result;
  }
  cublasLtMatmulHeuristicResult_t heuristic = {};
  int found = 0;
  const cublasStatus_t status =
      lt.find_algorithms(*handle, &descriptors.product, &descriptors.a, &descriptors.b,
                         &descriptors.c, &descriptors.c, &preference, 1, &heuristic, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found < 1 || heuristic.state != CUBLAS_STATUS_SUCCESS) {
    result.status = unsupported(
        "cuBLASLt has no algorithm for [" + std::to_string(p.rows) + ", " +
        std::to_string(p.depth) + "] times [" + std::to_string(p.columns) + ", " +
        std::to_string(p.depth) + "] transposed, " + std::to_string(p.heads) +
        " times, in these types and strides (cuBLAS status " + std::to_string(status) + ")");
    return result;
  }
  result.algo = heuristic.algo;
  return result;
}

// For the problem with its rows rounded up, or `exact`. Never forgotten: there are only so many.
const Algorithm& algorithm(const CublasLt& lt, Problem p, int device_idx, bool exact = false) {
  p.rows = exact ? p.rows : round_rows(p.rows);
  static std::mutex mutex;
  static std::map<Key, Algorithm> known;
  const std::array<uint32_t, 3> alignments = {
      alignment_of(p.weight.data, size_bytes(p.weight.dtype), p.weight.row_stride,
                   p.weight.head_stride),
      alignment_of(p.x.data, size_bytes(p.x.dtype), p.x.row_stride, p.x.head_stride),
      alignment_of(p.out, size_bytes(p.out_dtype), p.out_stride, p.out_head_stride)};
  const int64_t types = static_cast<int64_t>(p.x.dtype) << 16 |
                        static_cast<int64_t>(p.weight.dtype) << 8 |
                        static_cast<int64_t>(p.out_dtype);
  const Key key = {device_idx,
                   p.rows,
                   p.heads,
                   p.columns,
                   p.depth,
                   p.x.row_stride,
                   p.x.head_stride,
                   p.weight.row_stride,
                   p.weight.head_stride,
                   p.columns_contiguous ? 1 : 0,
                   p.out_stride,
                   p.out_head_stride,
                   types,
                   alignments[0],
                   alignments[1],
                   alignments[2]};
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  return found != known.end()
             ? found->second
             : known.emplace(key, find_algorithm(lt, p, device_idx, alignments)).first->second;
}

// ---- Kernels ----

// The three bf16 parts of the f32 operand, one behind the other.
struct Parts {
  Bf16* data = nullptr;
  void* split_k = nullptr;
  int64_t used_bytes = 0;
};

Parts carve(const Problem& problem, Workspace workspace) {
  Parts parts;
  if (problem.mixed()) {
    parts.data = workspace.take<Bf16>(3 * problem.part_elements());
  }
  char* split_k = workspace.take<char>(split_k_bytes(problem) + kLtAlignment);
  const uintptr_t past = reinterpret_cast<uintptr_t>(split_k) % kLtAlignment;
  parts.split_k = split_k == nullptr ? nullptr : split_k + (kLtAlignment - past);
  parts.used_bytes = workspace.used_bytes();
  return parts;
}

// The problem with its f32 operand replaced by one of its parts.
Problem part_of(const Problem& problem, const Parts& parts, int i) {
  Problem part = problem;
  Operand& operand = problem.x.dtype == kF32 ? part.x : part.weight;
  const int64_t inner =
      problem.x.dtype != kF32 && problem.columns_contiguous ? problem.columns : problem.depth;
  operand.data = parts.data + i * problem.part_elements();
  operand.dtype = kBf16;
  operand.row_stride = problem.heads * inner;
  operand.head_stride = inner;
  return part;
}

Status check_operand(const Operand& operand, const char* name, int64_t rows, int64_t width) {
  // cuBLASLt has no overlapping rows.
  return rows == 1 || operand.row_stride >= width
             ? ok_status()
             : unsupported(std::string(name) + ": rows " + std::to_string(operand.row_stride) +
                           " elements apart overlap, cuBLASLt takes " + std::to_string(width) +
                           " or more");
}

Status supports_problem(const Problem& p, const DeviceInfo& device) {
  const Result<CublasLt>& lt = load_cublaslt();
  LACUNA_RETURN_IF_ERROR(lt.status());
  if (p.weight.dtype == DType::kFloat8E4M3) {
    return unsupported("weight: cuBLASLt does not multiply FP8 with 128 x 128 scales by bf16");
  }
  if (p.out_dtype == kBf16 && (p.x.dtype == kF32 || p.weight.dtype == kF32)) {
    return unsupported("out: cuBLASLt sums f32 operands in f32 only");
  }
  if (p.depth == 0) {
    return unsupported("x: nothing to sum");
  }
  LACUNA_RETURN_IF_ERROR(check_operand(p.x, "x", p.rows, p.depth));
  LACUNA_RETURN_IF_ERROR(check_operand(p.weight, "weight",
                                       p.columns_contiguous ? p.depth : p.columns,
                                       p.columns_contiguous ? p.columns : p.depth));
  // The parts of an f32 operand lie in the workspace, wherever that is: any aligned address.
  const Parts somewhere = {};
  return algorithm(*lt, p.mixed() ? part_of(p, somewhere, 0) : p, device.device.index).status;
}

Status run_product(const CublasLt& lt, const Problem& p, float beta, const Parts& parts,
                   const DeviceInfo& device, const Launch& where) {
  const Algorithm& chosen = algorithm(lt, p, device.device.index);
  LACUNA_RETURN_IF_ERROR(chosen.status);
  LACUNA_ASSIGN_OR_RETURN(cublasLtHandle_t handle, cublaslt_handle(device.device.index));
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device.device.index), "cuda/linear_cublaslt"));
  Descriptors descriptors;
  LACUNA_RETURN_IF_ERROR(describe(lt, p, &descriptors));
  const float alpha = 1;
  const auto multiply = [&](const Algorithm& with) {
    return lt.matmul(handle, &descriptors.product, &alpha, p.weight.data, &descriptors.a, p.x.data,
                     &descriptors.b, &beta, p.out, &descriptors.c, p.out, &descriptors.c,
                     &with.algo, parts.split_k, static_cast<size_t>(split_k_bytes(p)),
                     static_cast<cudaStream_t>(where.stream));
  };
  cublasStatus_t status = multiply(chosen);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE) {
    // Not for these rows after all.
    const Algorithm& own = algorithm(lt, p, device.device.index, true);
    LACUNA_RETURN_IF_ERROR(own.status);
    status = multiply(own);
  }
  return lt_status(status, "cublasLtMatmul");
}

Status run_problem(const Problem& p, const DeviceInfo& device, const Launch& where) {
  const Result<CublasLt>& lt = load_cublaslt();
  LACUNA_RETURN_IF_ERROR(lt.status());
  const Parts parts = carve(p, {where.workspace, where.workspace_bytes});
  if (!p.mixed()) {
    return run_product(*lt, p, 0, parts, device, where);
  }
  const bool split_x = p.x.dtype == kF32;
  const Operand& from = split_x ? p.x : p.weight;
  const int64_t outer = split_x ? p.rows : p.columns_contiguous ? p.depth : p.columns;
  const int64_t inner = !split_x && p.columns_contiguous ? p.columns : p.depth;
  LACUNA_RETURN_IF_ERROR(launch_split_bf16(static_cast<const float*>(from.data), outer, p.heads,
                                           inner, from.row_stride, from.head_stride, parts.data,
                                           p.part_elements(), device, where));
  // The small parts first, so that they are not lost beside the sum.
  for (int i = 2; i >= 0; --i) {
    LACUNA_RETURN_IF_ERROR(
        run_product(*lt, part_of(p, parts, i), i == 2 ? 0.0f : 1.0f, parts, device, where));
  }
  return ok_status();
}

// ---- FP8 weights ----

// Elements of a panel of weights as bf16: enough columns to fill a GPU.
constexpr int64_t kPanelElements = int64_t{32} << 20;

// The product of columns [begin, end) of out, with weights in the workspace.
Problem panel_of(const LinearArgs& args, int64_t begin, int64_t end, const Bf16* weight) {
  Problem panel = problem_of(args);
  panel.columns = end - begin;
  panel.weight = {weight, kBf16, args.x.shape[1], 0};
  panel.out = static_cast<char*>(args.out.data) + begin * size_bytes(args.out.dtype);
  return panel;
}

// Whole blocks of scales, or all there are.
int64_t panel_columns(const LinearArgs& args) {
  const int64_t blocks = kPanelElements / std::max<int64_t>(1, args.x.shape[1]) / kWeightScaleBlock;
  return std::clamp<int64_t>(std::max<int64_t>(1, blocks) * kWeightScaleBlock, 1,
                             std::max<int64_t>(1, args.out.shape[1]));
}

struct WidenedScratch {
  Bf16* weight;
  void* workspace;  // of the product
  int64_t workspace_bytes;
  int64_t used_bytes;
};

WidenedScratch carve_widened(const LinearArgs& args, Workspace workspace) {
  const int64_t columns = panel_columns(args);
  WidenedScratch scratch = {};
  scratch.weight = workspace.take<Bf16>(columns * args.x.shape[1]);
  scratch.workspace_bytes = carve(panel_of(args, 0, columns, nullptr), Workspace()).used_bytes;
  scratch.workspace = workspace.take<char>(scratch.workspace_bytes);
  scratch.used_bytes = workspace.used_bytes();
  return scratch;
}

}  // namespace

namespace cublaslt {

Status supports(const LinearArgs& args, const DeviceInfo& device) {
  return supports_problem(problem_of(args), device);
}
int64_t workspace(const LinearArgs& args, const DeviceInfo&) {
  return carve(problem_of(args), Workspace()).used_bytes;
}
Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  return run_problem(problem_of(args), device, where);
}

Status supports(const HeadLinearArgs& args, const DeviceInfo& device) {
  return supports_problem(problem_of(args), device);
}
int64_t workspace(const HeadLinearArgs& args, const DeviceInfo&) {
  return carve(problem_of(args), Workspace()).used_bytes;
}
Status run(const HeadLinearArgs& args, const DeviceInfo& device, const Launch& where) {
  return run_problem(problem_of(args), device, where);
}

}  // namespace cublaslt

namespace widened {

Status supports(const LinearArgs& args, const DeviceInfo& device) {
  if (args.x.dtype != kBf16 || args.weight.dtype != DType::kFloat8E4M3) {
    return unsupported("x, weight: this kernel multiplies bf16 x by FP8 weights");
  }
  const int64_t columns = args.out.shape[1];
  if (columns == 0) {
    return unsupported("weight: no rows");
  }
  const int64_t step = panel_columns(args);
  const int64_t last = (columns - 1) / step * step;
  LACUNA_RETURN_IF_ERROR(supports_problem(panel_of(args, 0, step, nullptr), device));
  return supports_problem(panel_of(args, last, columns, nullptr), device);
}

// Widening costs as much as reading the weights five times: it pays where a product takes longer.
bool preferred(const LinearArgs& args, const DeviceInfo&) {
  constexpr int64_t kRowsMin = 96;
  return args.x.shape[0] >= kRowsMin;
}

int64_t workspace(const LinearArgs& args, const DeviceInfo&) {
  return carve_widened(args, Workspace()).used_bytes;
}

Status run(const LinearArgs& args, const DeviceInfo& device, const Launch& where) {
  const WidenedScratch scratch = carve_widened(args, {where.workspace, where.workspace_bytes});
  const Launch inner = {.stream = where.stream,
                        .workspace = scratch.workspace,
                        .workspace_bytes = scratch.workspace_bytes};
  const int64_t columns = args.out.shape[1];
  const int64_t step = panel_columns(args);
  for (int64_t begin = 0; begin < columns; begin += step) {
    const int64_t end = std::min(begin + step, columns);
    LACUNA_RETURN_IF_ERROR(launch_widen_fp8(args.weight, args.weight_scale, begin, end - begin,
                                            scratch.weight, device, where));
    LACUNA_RETURN_IF_ERROR(run_problem(panel_of(args, begin, end, scratch.weight), device, inner));
  }
  return ok_status();
}

}  // namespace widened

}  // namespace lacuna::cuda
