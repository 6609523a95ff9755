// RMSNorm and LayerNorm, one block of threads a row. The first elements of a row stay in registers
// between the passes; those of very wide rows are read again.
#include <cstdint>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/rows.cuh"

namespace lacuna::cuda {
namespace {

// Fours of a row that a thread keeps. With 512 threads that is all of 8,192 elements, and every
// released model's hidden state is narrower.
constexpr int kKept = 4;
// Narrower rows (the indexer's keys, the latents) leave most of 512 threads without work.
constexpr int64_t kNarrow = 128 * 4 * kKept;

template <class W, class Out>
struct NormParams {
  Strided2<float> x;  // LayerNorm only reads it
  Strided2<const float> add;
  const W* weight;
  const W* bias;
  Strided2<Out> out;
  int64_t width;
  float eps;
  bool aligned;
};

// A row in fours: visit(i, count, kept) for each of this thread's, where `kept` are registers that
// hold x from the first call of `load` on.
template <int kThreads>
struct RowFours {
  int64_t width;
  float kept[kKept][4];

  // load(i, count, x) fills x, then use(i, count, x) sees it.
  template <class Load, class Use>
  __device__ void first(Load&& load, Use&& use) {
#pragma unroll
    for (int v = 0; v < kKept; ++v) {
      const int64_t i = 4 * (static_cast<int64_t>(threadIdx.x) + v * kThreads);
      if (i < width) {
        load(i, four_of(i, width), kept[v]);
        use(i, four_of(i, width), kept[v]);
      }
    }
    rest(load, use);
  }

  // The same for what `first` loaded; `load` is called only for what was not kept.
  template <class Load, class Use>
  __device__ void again(Load&& load, Use&& use) {
#pragma unroll
    for (int v = 0; v < kKept; ++v) {
      const int64_t i = 4 * (static_cast<int64_t>(threadIdx.x) + v * kThreads);
      if (i < width) {
        use(i, four_of(i, width), kept[v]);
      }
    }
    rest(load, use);
  }

  template <class Load, class Use>
  __device__ void rest(Load&& load, Use&& use) {
    for (int64_t i = 4 * (static_cast<int64_t>(threadIdx.x) + kKept * kThreads); i < width;
         i += 4 * kThreads) {
      float x[4];
      load(i, four_of(i, width), x);
      use(i, four_of(i, width), x);
    }
  }
};

template <int kThreads, class W, class Out>
__global__ __launch_bounds__(kThreads) void rms_norm_kernel(const NormParams<W, Out> p) {
  __shared__ float scratch[kThreads / kWarp];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x;
  float* x_row = p.x.row(t);
  const float* add_row = p.add ? p.add.row(t) : nullptr;
  RowFours<kThreads> row = {.width = p.width};
  float squares = 0;
  const auto load = [&](int64_t i, int count, float(&x)[4]) {
    load_four(x_row + i, count, p.aligned, x);
  };
  row.first(
      [&](int64_t i, int count, float(&x)[4]) {
        load(i, count, x);
        if (add_row != nullptr) {
          float more[4];
          load_four(add_row + i, count, p.aligned, more);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            x[j] += more[j];
          }
          store_four(x, count, p.aligned, x_row + i);
        }
      },
      [&](int64_t, int, const float(&x)[4]) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {  // elements beyond the row are 0
          squares += x[j] * x[j];
        }
      });
  const float sum = reduce_block<kThreads>(squares, Sum(), scratch);
  const float inverse = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
  // What was not kept is read again as this very thread wrote it.
  row.again(load, [&](int64_t i, int count, const float(&x)[4]) {
    float weight[4];
    load_four(p.weight + i, count, p.aligned, weight);
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] = x[j] * inverse * weight[j];
    }
    store_four(y, count, p.aligned, p.out.row(t) + i);
  });
}

template <int kThreads, class W, class Out>
__global__ __launch_bounds__(kThreads) void layer_norm_kernel(const NormParams<W, Out> p) {
  __shared__ float scratch[kThreads / kWarp];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x;
  const float* x_row = p.x.row(t);
  RowFours<kThreads> row = {.width = p.width};
  const auto load = [&](int64_t i, int count, float(&x)[4]) {
    load_four(x_row + i, count, p.aligned, x);
  };
  const float count_all = static_cast<float>(p.width);
  float sum = 0;
  row.first(load, [&](int64_t, int, const float(&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      sum += x[j];
    }
  });
  // The mean as a float near it and a correction: together they lose nothing when the mean is large
  // against the deviation.
  const float mean = reduce_block<kThreads>(sum, Sum(), scratch) / count_all;
  float first = 0;
  float second = 0;
  row.again(load, [&](int64_t, int count, const float(&x)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float centred = j < count ? x[j] - mean : 0.0f;
      first += centred;
      second += centred * centred;
    }
  });
  const float correction = reduce_block<kThreads>(first, Sum(), scratch) / count_all;
  const float mean_square = reduce_block<kThreads>(second, Sum(), scratch) / count_all;
  const float variance = fmaxf(mean_square - correction * correction, 0.0f);
  const float inverse = 1.0f / sqrtf(variance + p.eps);
  row.again(load, [&](int64_t i, int count, const float(&x)[4]) {
    float weight[4];
    float y[4];
    load_four(p.weight + i, count, p.aligned, weight);
    load_four(p.bias + i, count, p.aligned, y);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      y[j] += (x[j] - mean - correction) * inverse * weight[j];
    }
    store_four(y, count, p.aligned, p.out.row(t) + i);
  });
}

template <class W, class Out>
Status launch_rms(const RmsNormArgs& args, const DeviceInfo& device, const Launch& where) {
  const NormParams<W, Out> params = {.x = strided2<float>(args.x),
                                     .add = strided2<const float>(args.add),
                                     .weight = static_cast<const W*>(args.weight.data),
                                     .out = strided2<Out>(args.out),
                                     .width = args.x.shape[1],
                                     .eps = static_cast<float>(args.eps),
                                     .aligned = rows_of_fours(args.x) && rows_of_fours(args.add) &&
                                                rows_of_fours(args.weight) &&
                                                rows_of_fours(args.out)};
  const bool narrow = params.width <= kNarrow;
  return launch("cuda/rms_norm",
                narrow ? rms_norm_kernel<128, W, Out> : rms_norm_kernel<512, W, Out>, device, where,
                {.grid = dim3(static_cast<unsigned>(args.x.shape[0])),
                 .block = dim3(narrow ? 128 : 512),
                 .pdl = true},
                params);
}

template <class W, class Out>
Status launch_layer(const LayerNormArgs& args, const DeviceInfo& device, const Launch& where) {
  const NormParams<W, Out> params = {
      .x = {const_cast<float*>(static_cast<const float*>(args.x.data)),
            {args.x.strides[0], args.x.strides[1]}},
      .weight = static_cast<const W*>(args.weight.data),
      .bias = static_cast<const W*>(args.bias.data),
      .out = strided2<Out>(args.out),
      .width = args.x.shape[1],
      .eps = static_cast<float>(args.eps),
      .aligned = rows_of_fours(args.x) && rows_of_fours(args.weight) && rows_of_fours(args.bias) &&
                 rows_of_fours(args.out)};
  const bool narrow = params.width <= kNarrow;
  return launch("cuda/layer_norm",
                narrow ? layer_norm_kernel<128, W, Out> : layer_norm_kernel<512, W, Out>, device,
                where,
                {.grid = dim3(static_cast<unsigned>(args.x.shape[0])),
                 .block = dim3(narrow ? 128 : 512),
                 .pdl = true},
                params);
}

constexpr auto kBf16 = DType::kBFloat16;

Status run_rms_norm(const RmsNormArgs& args, const DeviceInfo& device, const Launch& where) {
  if (args.weight.dtype == kBf16) {
    return args.out.dtype == kBf16 ? launch_rms<Bf16, Bf16>(args, device, where)
                                   : launch_rms<Bf16, float>(args, device, where);
  }
  return args.out.dtype == kBf16 ? launch_rms<float, Bf16>(args, device, where)
                                 : launch_rms<float, float>(args, device, where);
}

Status run_layer_norm(const LayerNormArgs& args, const DeviceInfo& device, const Launch& where) {
  if (args.weight.dtype == kBf16) {
    return args.out.dtype == kBf16 ? launch_layer<Bf16, Bf16>(args, device, where)
                                   : launch_layer<Bf16, float>(args, device, where);
  }
  return args.out.dtype == kBf16 ? launch_layer<float, Bf16>(args, device, where)
                                 : launch_layer<float, float>(args, device, where);
}

}  // namespace

const Kernel<RmsNormArgs> kRmsNorm = {
    .name = "cuda/rms_norm", .supports = supports_all<RmsNormArgs>, .run = run_rms_norm};
const Kernel<LayerNormArgs> kLayerNorm = {
    .name = "cuda/layer_norm", .supports = supports_all<LayerNormArgs>, .run = run_layer_norm};

}  // namespace lacuna::cuda
