// Rotary position embedding, interleaved or in halves, from tables of cosines and sines.
#include <algorithm>
#include <cstdint>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/rope.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/pairs-inl.h"
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// Pairs (2i, 2i + 1). Every pair is read before it is written, so out may be x.
template <class Out>
void rotate_interleaved(const float* x, const float* cosine, const float* sine, int64_t pairs,
                        Out* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    hn::Vec<decltype(d)> a, b;
    hn::LoadInterleaved2(d, x + 2 * i, a, b);
    const auto c = hn::LoadU(d, cosine + i);
    const auto s = hn::LoadU(d, sine + i);
    const auto low = hn::Sub(hn::Mul(a, c), hn::Mul(b, s));
    const auto high = hn::Add(hn::Mul(a, s), hn::Mul(b, c));
    store_pair<true>(low, high, out + 2 * i);
  }
  for (; i < pairs; ++i) {
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    store_scalar(a * cosine[i] - b * sine[i], out + 2 * i);
    store_scalar(a * sine[i] + b * cosine[i], out + 2 * i + 1);
  }
}

// Pairs (i, i + pairs).
template <class Out>
void rotate_halves(const float* x, const float* cosine, const float* sine, int64_t pairs,
                   Out* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= pairs; i += lanes) {
    const auto a = hn::LoadU(d, x + i);
    const auto b = hn::LoadU(d, x + pairs + i);
    const auto c = hn::LoadU(d, cosine + i);
    const auto s = hn::LoadU(d, sine + i);
    store_float(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, out + i);
    store_float(hn::Add(hn::Mul(a, s), hn::Mul(b, c)), d, out + pairs + i);
  }
  for (; i < pairs; ++i) {
    const float a = x[i];
    const float b = x[pairs + i];
    store_scalar(a * cosine[i] - b * sine[i], out + i);
    store_scalar(a * sine[i] + b * cosine[i], out + pairs + i);
  }
}

template <class Out>
void rope_rows_typed(const RopeArgs& args, int64_t begin, int64_t end) {
  const int64_t heads = args.x.shape[1];
  const int64_t width = args.x.shape[2];
  const int64_t pairs = args.cos_table.shape[1];
  const int64_t begin_idx = args.offset;
  const int64_t end_idx = args.offset + 2 * pairs;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t position = args.positions.as<int32_t>()[t * args.positions.strides[0]];
    const float* cosine = args.cos_table.as<float>() + position * pairs;
    const float* sine = args.sin_table.as<float>() + position * pairs;
    for (int64_t h = 0; h < heads; ++h) {
      const float* x = args.x.as<float>() + t * args.x.strides[0] + h * args.x.strides[1];
      Out* out = args.out.as<Out>() + t * args.out.strides[0] + h * args.out.strides[1];
      if (args.interleaved) {
        rotate_interleaved(x + begin_idx, cosine, sine, pairs, out + begin_idx);
      } else {
        rotate_halves(x + begin_idx, cosine, sine, pairs, out + begin_idx);
      }
      if (static_cast<const void*>(x) != static_cast<const void*>(out)) {
        narrow(x, begin_idx, out);
        narrow(x + end_idx, width - end_idx, out + end_idx);
      }
    }
  }
}

void rope_rows(const RopeArgs& args, int64_t begin, int64_t end) {
  args.out.dtype == DType::kBFloat16 ? rope_rows_typed<Bf16>(args, begin, end)
                                     : rope_rows_typed<float>(args, begin, end);
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {

HWY_EXPORT(rope_rows);

const Kernel<RopeArgs> kRope = {
    .name = "cpu/rope",
    .supports = supports_all<RopeArgs>,
    .run =
        [](const RopeArgs& args, const DeviceInfo& device, const Launch&) {
          const auto rows = HWY_DYNAMIC_DISPATCH(rope_rows);
          const int64_t row_bytes = 4 * args.x.shape[1] * args.x.shape[2];
          parallel_ranges(device, args.x.shape[0], grain_rows(row_bytes),
                          [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
          return ok_status();
        },
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
