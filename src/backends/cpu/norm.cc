// Row-wise kernels of the engine: embedding, RMSNorm, LayerNorm, SiLU times up. Memory-bound: one
// pass to reduce, one to write.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/norm.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/silu-inl.h"
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// h = x + add, written back; returns the sum of squares of h. `add` may be null.
float add_and_sum_squares(float* x, const float* add, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  float tail = 0;
  int64_t i = 0;
  if (add != nullptr) {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto h0 = hn::Add(hn::LoadU(d, x + i), hn::LoadU(d, add + i));
      const auto h1 = hn::Add(hn::LoadU(d, x + i + lanes), hn::LoadU(d, add + i + lanes));
      hn::StoreU(h0, d, x + i);
      hn::StoreU(h1, d, x + i + lanes);
      sum0 = hn::MulAdd(h0, h0, sum0);
      sum1 = hn::MulAdd(h1, h1, sum1);
    }
    for (; i < n; ++i) {
      x[i] += add[i];
      tail += x[i] * x[i];
    }
  } else {
    for (; i + 2 * lanes <= n; i += 2 * lanes) {
      const auto h0 = hn::LoadU(d, x + i);
      const auto h1 = hn::LoadU(d, x + i + lanes);
      sum0 = hn::MulAdd(h0, h0, sum0);
      sum1 = hn::MulAdd(h1, h1, sum1);
    }
    for (; i < n; ++i) {
      tail += x[i] * x[i];
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(sum0, sum1))) + tail;
}

// What LayerNorm subtracts and multiplies. The mean is a float near it and a correction, which
// together lose nothing when the mean is large against the deviation.
struct Moments {
  float mean = 0;
  float correction = 0;
  float inverse = 0;
};

// out = (x - mean) * inverse * weight + bias; `bias` may be null. out may be x.
template <class W, class Out>
void normalize_row(const float* x, const Moments& moments, const W* weight, const W* bias, Out* out,
                   int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto mean_v = hn::Set(d, moments.mean);
  const auto correction_v = hn::Set(d, moments.correction);
  const auto inverse_v = hn::Set(d, moments.inverse);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto centred = hn::Sub(hn::Sub(hn::LoadU(d, x + i), mean_v), correction_v);
    auto y = hn::Mul(hn::Mul(centred, inverse_v), load_float(d, weight + i));
    if (bias != nullptr) {
      y = hn::Add(y, load_float(d, bias + i));
    }
    store_float(y, d, out + i);
  }
  for (; i < n; ++i) {
    float y = (x[i] - moments.mean - moments.correction) * moments.inverse * to_float(weight[i]);
    if (bias != nullptr) {
      y += to_float(bias[i]);
    }
    store_scalar(y, out + i);
  }
}

template <class W, class Out>
void rms_norm_rows_typed(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.x.shape[1];
  for (int64_t t = begin; t < end; ++t) {
    float* x = args.x.as<float>() + t * args.x.strides[0];
    const float* add = args.add.empty() ? nullptr : args.add.as<float>() + t * args.add.strides[0];
    const double mean_square = static_cast<double>(add_and_sum_squares(x, add, n)) / n;
    const float inverse = static_cast<float>(1.0 / std::sqrt(mean_square + args.eps));
    const W* no_bias = nullptr;
    normalize_row(x, {.inverse = inverse}, args.weight.as<W>(), no_bias,
                  args.out.as<Out>() + t * args.out.strides[0], n);
  }
}

void rms_norm_rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const bool bf16_out = args.out.dtype == DType::kBFloat16;
  if (args.weight.dtype == DType::kBFloat16) {
    bf16_out ? rms_norm_rows_typed<Bf16, Bf16>(args, begin, end)
             : rms_norm_rows_typed<Bf16, float>(args, begin, end);
  } else {
    bf16_out ? rms_norm_rows_typed<float, Bf16>(args, begin, end)
             : rms_norm_rows_typed<float, float>(args, begin, end);
  }
}

// Sums of x - origin and of its square.
struct Sums {
  double first;
  double second;
};

Sums sums_about(const float* x, float origin, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto origin_v = hn::Set(d, origin);
  auto first = hn::Zero(d);
  auto second = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto centred = hn::Sub(hn::LoadU(d, x + i), origin_v);
    first = hn::Add(first, centred);
    second = hn::MulAdd(centred, centred, second);
  }
  Sums sums = {hn::GetLane(hn::SumOfLanes(d, first)), hn::GetLane(hn::SumOfLanes(d, second))};
  for (; i < n; ++i) {
    const float centred = x[i] - origin;
    sums.first += centred;
    sums.second += centred * centred;
  }
  return sums;
}

Moments moments_of(const float* x, int64_t n, double eps) {
  const double count = static_cast<double>(n);
  Moments moments;
  moments.mean = static_cast<float>(sums_about(x, 0.0f, n).first / count);
  const Sums sums = sums_about(x, moments.mean, n);
  const double correction = sums.first / count;
  const double variance = std::max(sums.second / count - correction * correction, 0.0);
  moments.correction = static_cast<float>(correction);
  moments.inverse = static_cast<float>(1.0 / std::sqrt(variance + eps));
  return moments;
}

template <class W, class Out>
void layer_norm_rows_typed(const LayerNormArgs& args, int64_t begin, int64_t end) {
  const int64_t n = args.x.shape[1];
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.as<float>() + t * args.x.strides[0];
    normalize_row(x, moments_of(x, n, args.eps), args.weight.as<W>(), args.bias.as<W>(),
                  args.out.as<Out>() + t * args.out.strides[0], n);
  }
}

// Weight and bias have one dtype.
void layer_norm_rows(const LayerNormArgs& args, int64_t begin, int64_t end) {
  const bool bf16_out = args.out.dtype == DType::kBFloat16;
  if (args.weight.dtype == DType::kBFloat16) {
    bf16_out ? layer_norm_rows_typed<Bf16, Bf16>(args, begin, end)
             : layer_norm_rows_typed<Bf16, float>(args, begin, end);
  } else {
    bf16_out ? layer_norm_rows_typed<float, Bf16>(args, begin, end)
             : layer_norm_rows_typed<float, float>(args, begin, end);
  }
}

template <class T>
void embedding_rows_typed(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  const int64_t vocabulary = args.table.shape[0];
  const int64_t width = args.table.shape[1];
  for (int64_t t = begin; t < end; ++t) {
    const int64_t id = args.ids.as<int32_t>()[t * args.ids.strides[0]];
    float* out = args.out.as<float>() + t * args.out.strides[0];
    if (id < 0 || id >= vocabulary) {
      std::memset(out, 0, static_cast<size_t>(width) * sizeof(float));
    } else {
      widen(args.table.as<T>() + id * width, width, out);
    }
  }
}

void embedding_rows(const EmbeddingArgs& args, int64_t begin, int64_t end) {
  args.table.dtype == DType::kBFloat16 ? embedding_rows_typed<Bf16>(args, begin, end)
                                       : embedding_rows_typed<float>(args, begin, end);
}

template <class Out>
void silu_mul_rows_typed(const SiluMulArgs& args, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    silu_mul_row(args.gate.as<float>() + t * args.gate.strides[0],
                 args.up.as<float>() + t * args.up.strides[0],
                 args.out.as<Out>() + t * args.out.strides[0], args.gate.shape[1]);
  }
}

void silu_mul_rows(const SiluMulArgs& args, int64_t begin, int64_t end) {
  args.out.dtype == DType::kBFloat16 ? silu_mul_rows_typed<Bf16>(args, begin, end)
                                     : silu_mul_rows_typed<float>(args, begin, end);
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {

HWY_EXPORT(embedding_rows);
HWY_EXPORT(rms_norm_rows);
HWY_EXPORT(layer_norm_rows);
HWY_EXPORT(silu_mul_rows);

const Kernel<EmbeddingArgs> kEmbedding = {
    .name = "cpu/embedding",
    .supports = supports_all<EmbeddingArgs>,
    .run =
        [](const EmbeddingArgs& args, const DeviceInfo& device, const Launch&) {
          const auto rows = HWY_DYNAMIC_DISPATCH(embedding_rows);
          parallel_ranges(device, args.ids.shape[0], grain_rows(4 * args.table.shape[1]),
                          [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
          return ok_status();
        },
};

const Kernel<RmsNormArgs> kRmsNorm = {
    .name = "cpu/rms_norm",
    .supports = supports_all<RmsNormArgs>,
    .run =
        [](const RmsNormArgs& args, const DeviceInfo& device, const Launch&) {
          const auto rows = HWY_DYNAMIC_DISPATCH(rms_norm_rows);
          parallel_ranges(device, args.x.shape[0], grain_rows(4 * args.x.shape[1]),
                          [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
          return ok_status();
        },
};

const Kernel<LayerNormArgs> kLayerNorm = {
    .name = "cpu/layer_norm",
    .supports = supports_all<LayerNormArgs>,
    .run =
        [](const LayerNormArgs& args, const DeviceInfo& device, const Launch&) {
          const auto rows = HWY_DYNAMIC_DISPATCH(layer_norm_rows);
          parallel_ranges(device, args.x.shape[0], grain_rows(4 * args.x.shape[1]),
                          [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
          return ok_status();
        },
};

const Kernel<SiluMulArgs> kSiluMul = {
    .name = "cpu/silu_mul",
    .supports = supports_all<SiluMulArgs>,
    .run =
        [](const SiluMulArgs& args, const DeviceInfo& device, const Launch&) {
          const auto rows = HWY_DYNAMIC_DISPATCH(silu_mul_rows);
          // An exponential and a division cost as much as some eight loads.
          parallel_ranges(device, args.gate.shape[0], grain_rows(32 * args.gate.shape[1]),
                          [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
          return ok_status();
        },
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
