// Operations that treat each element by itself: residual additions, SiLU times up, embedding rows,
// edits of single logits. Memory-bound; a thread takes four neighbours of a row.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/rows.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 4 * kThreads;               // elements of a row that a block takes at once
constexpr int64_t kBlocksMax = int64_t{1} << 20;  // beyond it a block takes several tiles

// Calls body(row, i, count) for the four (or the last) elements from i on that are this thread's.
template <class Body>
__device__ void for_each_four(int64_t rows, int64_t width, Body&& body) {
  const int64_t tiles = (width + kTile - 1) / kTile;
  for (int64_t task = blockIdx.x; task < rows * tiles; task += gridDim.x) {
    const int64_t row = task / tiles;
    const int64_t i = (task - row * tiles) * kTile + 4 * static_cast<int64_t>(threadIdx.x);
    if (i < width) {
      body(row, i, four_of(i, width));
    }
  }
}

LaunchShape grid_of(int64_t rows, int64_t width) {
  return {.grid = dim3(static_cast<unsigned>(std::min(rows * ceil_div(width, kTile), kBlocksMax))),
          .block = dim3(kThreads),
          .pdl = true};
}

// ---- add ----

struct AddParams {
  Strided2<const float> x;
  Strided2<float> out;
  int64_t rows;
  int64_t width;
  bool aligned;
};

__global__ __launch_bounds__(kThreads) void add_kernel(const AddParams p) {
  pdl_launch_dependents();
  pdl_wait();
  for_each_four(p.rows, p.width, [&](int64_t t, int64_t i, int count) {
    float x[4];
    float y[4];
    load_four(p.x.row(t) + i, count, p.aligned, x);
    load_four(p.out.row(t) + i, count, p.aligned, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] += x[j];
    }
    store_four(y, count, p.aligned, p.out.row(t) + i);
  });
}

Status run_add(const AddArgs& args, const DeviceInfo& device, const Launch& where) {
  const AddParams params = {.x = strided2<const float>(args.x),
                            .out = strided2<float>(args.out),
                            .rows = args.out.shape[0],
                            .width = args.out.shape[1],
                            .aligned = rows_of_fours(args.x) && rows_of_fours(args.out)};
  return launch("cuda/add", add_kernel, device, where, grid_of(params.rows, params.width), params);
}

// ---- silu_mul ----

template <class Out>
struct SiluMulParams {
  Strided2<const float> gate;
  Strided2<const float> up;
  Strided2<Out> out;
  int64_t rows;
  int64_t width;
  bool aligned;
};

template <class Out>
__global__ __launch_bounds__(kThreads) void silu_mul_kernel(const SiluMulParams<Out> p) {
  pdl_launch_dependents();
  pdl_wait();
  for_each_four(p.rows, p.width, [&](int64_t t, int64_t i, int count) {
    float gate[4];
    float up[4];
    load_four(p.gate.row(t) + i, count, p.aligned, gate);
    load_four(p.up.row(t) + i, count, p.aligned, up);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      up[j] *= gate[j] / (1.0f + expf(-gate[j]));
    }
    store_four(up, count, p.aligned, p.out.row(t) + i);
  });
}

template <class Out>
Status run_silu_mul_typed(const SiluMulArgs& args, const DeviceInfo& device, const Launch& where) {
  const SiluMulParams<Out> params = {
      .gate = strided2<const float>(args.gate),
      .up = strided2<const float>(args.up),
      .out = strided2<Out>(args.out),
      .rows = args.out.shape[0],
      .width = args.out.shape[1],
      .aligned = rows_of_fours(args.gate) && rows_of_fours(args.up) && rows_of_fours(args.out)};
  return launch("cuda/silu_mul", silu_mul_kernel<Out>, device, where,
                grid_of(params.rows, params.width), params);
}

Status run_silu_mul(const SiluMulArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.out.dtype == DType::kBFloat16 ? run_silu_mul_typed<Bf16>(args, device, where)
                                            : run_silu_mul_typed<float>(args, device, where);
}

// ---- embedding ----

template <class T>
struct EmbeddingParams {
  Strided1<const int32_t> ids;
  const T* table;
  int64_t vocabulary;
  Strided2<float> out;
  int64_t rows;
  int64_t width;
  bool aligned;
};

template <class T>
__global__ __launch_bounds__(kThreads) void embedding_kernel(const EmbeddingParams<T> p) {
  pdl_launch_dependents();
  pdl_wait();
  for_each_four(p.rows, p.width, [&](int64_t t, int64_t i, int count) {
    const int64_t id = p.ids(t);
    float x[4] = {};
    if (id >= 0 && id < p.vocabulary) {
      load_four(p.table + id * p.width + i, count, p.aligned, x);
    }
    store_four(x, count, p.aligned, p.out.row(t) + i);
  });
}

template <class T>
Status run_embedding_typed(const EmbeddingArgs& args, const DeviceInfo& device,
                           const Launch& where) {
  const EmbeddingParams<T> params = {
      .ids = strided1<const int32_t>(args.ids),
      .table = static_cast<const T*>(args.table.data),
      .vocabulary = args.table.shape[0],
      .out = strided2<float>(args.out),
      .rows = args.out.shape[0],
      .width = args.out.shape[1],
      // A table of one row may have any stride, but its width is what rows are counted by here.
      .aligned =
          rows_of_fours(args.table) && args.table.shape[1] % 4 == 0 && rows_of_fours(args.out)};
  return launch("cuda/embedding", embedding_kernel<T>, device, where,
                grid_of(params.rows, params.width), params);
}

Status run_embedding(const EmbeddingArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.table.dtype == DType::kBFloat16 ? run_embedding_typed<Bf16>(args, device, where)
                                              : run_embedding_typed<float>(args, device, where);
}

// ---- adjust_logits ----

struct AdjustParams {
  Strided2<float> logits;
  int64_t num_rows;
  int64_t vocabulary;
  Strided1<const int32_t> rows;
  Strided1<const int32_t> ids;
  Strided1<const float> repetition;
  Strided1<const float> add;
  Strided1<float> saved;
  int64_t entries;
  bool restore;
};

__global__ __launch_bounds__(kThreads) void adjust_logits_kernel(const AdjustParams p) {
  pdl_launch_dependents();
  pdl_wait();
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < p.entries;
       i += gridDim.x * int64_t{kThreads}) {
    const int32_t row = p.rows(i);
    const int32_t id = p.ids(i);
    if (row < 0 || row >= p.num_rows || id < 0 || id >= p.vocabulary) {
      continue;
    }
    float& x = p.logits.row(row)[id];
    if (p.restore) {
      x = p.saved(i);
      continue;
    }
    p.saved(i) = x;
    const float repetition = p.repetition(i);
    // Two roundings, as on every other device: a fused product would give other bits.
    x = __fadd_rn(x > 0 ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition), p.add(i));
  }
}

Status run_adjust_logits(const AdjustLogitsArgs& args, const DeviceInfo& device,
                         const Launch& where) {
  const AdjustParams params = {.logits = strided2<float>(args.logits),
                               .num_rows = args.logits.shape[0],
                               .vocabulary = args.logits.shape[1],
                               .rows = strided1<const int32_t>(args.rows),
                               .ids = strided1<const int32_t>(args.ids),
                               .repetition = strided1<const float>(args.repetition),
                               .add = strided1<const float>(args.add),
                               .saved = strided1<float>(args.saved),
                               .entries = args.rows.shape[0],
                               .restore = args.restore};
  const int64_t blocks = std::min(ceil_div(params.entries, kThreads), kBlocksMax);
  return launch("cuda/adjust_logits", adjust_logits_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true},
                params);
}

}  // namespace

const Kernel<AddArgs> kAdd = {
    .name = "cuda/add", .supports = supports_all<AddArgs>, .run = run_add};
const Kernel<SiluMulArgs> kSiluMul = {
    .name = "cuda/silu_mul", .supports = supports_all<SiluMulArgs>, .run = run_silu_mul};
const Kernel<EmbeddingArgs> kEmbedding = {
    .name = "cuda/embedding", .supports = supports_all<EmbeddingArgs>, .run = run_embedding};
const Kernel<AdjustLogitsArgs> kAdjustLogits = {.name = "cuda/adjust_logits",
                                                .supports = supports_all<AdjustLogitsArgs>,
                                                .run = run_adjust_logits};

}  // namespace lacuna::cuda
