// Highway vocabulary of the CPU kernels: float vectors from and to any storage type. Included once
// per SIMD target from within foreach_target (no #pragma once: the guard toggles).
#if defined(LACUNA_BACKENDS_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LACUNA_BACKENDS_CPU_SIMD_INL_H_
#undef LACUNA_BACKENDS_CPU_SIMD_INL_H_
#else
#define LACUNA_BACKENDS_CPU_SIMD_INL_H_
#endif

#include "hwy/highway.h"
#include "lacuna/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes(d) consecutive elements at any address, widened to float.
template <class D>
HWY_INLINE hn::Vec<D> load_float(D d, const float* from) {
  return hn::LoadU(d, from);
}

template <class D>
HWY_INLINE hn::Vec<D> load_float(D d, const Bf16* from) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::LoadU(du16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(du32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> load_float(D d, const Fp16* from) {
  const hn::Rebind<hwy::float16_t, D> df16;
  return hn::PromoteTo(d, hn::LoadU(df16, reinterpret_cast<const hwy::float16_t*>(from)));
}

template <class D>
HWY_INLINE hn::Vec<D> load_float(D d, const Fp8E4M3* from) {
  const hn::Rebind<uint8_t, D> du8;
  const hn::Rebind<uint32_t, D> du32;
  const hn::Rebind<int32_t, D> di32;
  const auto bits = hn::PromoteTo(du32, hn::LoadU(du8, reinterpret_cast<const uint8_t*>(from)));
  const auto magnitude = hn::And(bits, hn::Set(du32, 0x7fu));
  // Exponents move from bias 7 to 127; subnormals are multiples of 2^-9.
  const auto normal =
      hn::BitCast(d, hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du32, 120u << 23)));
  const auto subnormal =
      hn::Mul(hn::ConvertTo(d, hn::BitCast(di32, magnitude)), hn::Set(d, 0x1p-9f));
  const auto is_subnormal = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(du32, 8u)));
  const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(du32, 0x7fu)));
  const auto quiet_nan = hn::BitCast(d, hn::Set(du32, 0x7fc00000u));
  const auto value =
      hn::IfThenElse(is_nan, quiet_nan, hn::IfThenElse(is_subnormal, subnormal, normal));
  return hn::Or(value, hn::BitCast(d, hn::ShiftLeft<24>(hn::AndNot(hn::Set(du32, 0x7fu), bits))));
}

// Rounds to nearest even, as to_bf16 does, NaN included.
template <class D>
HWY_INLINE void store_float(hn::Vec<D> v, D d, float* to) {
  hn::StoreU(v, d, to);
}

template <class D>
HWY_INLINE void store_float(hn::Vec<D> v, D /*d*/, Bf16* to) {
  const hn::Rebind<uint16_t, D> du16;
  const hn::Rebind<uint32_t, D> du32;
  const auto bits = hn::BitCast(du32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du32, 0x7fffu)), odd));
  const auto quiet = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du32, 0x40u));
  const auto is_nan = hn::RebindMask(du32, hn::IsNaN(v));
  const auto half = hn::IfThenElse(is_nan, quiet, rounded);
  hn::StoreU(hn::TruncateTo(du16, half), du16, reinterpret_cast<uint16_t*>(to));
}

// Saturates, as to_fp8_e4m3 does; NaN stays NaN.
template <class D>
HWY_INLINE void store_float(hn::Vec<D> v, D d, Fp8E4M3* to) {
  const hn::Rebind<uint8_t, D> du8;
  const hn::Rebind<int32_t, D> di32;
  const auto absolute = hn::Abs(v);
  const auto magnitude = hn::BitCast(di32, absolute);
  const auto odd = hn::And(hn::ShiftRight<20>(magnitude), hn::Set(di32, 1));
  // Exponents move from bias 127 to 7.
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(di32, 0x7ffff - 0x3c000000)), odd);
  const auto normal = hn::Min(hn::ShiftRight<20>(rounded), hn::Set(di32, 0x7e));
  // Below 2^-6: multiples of 2^-9. Eight of them are the smallest normal number, and its code.
  const auto is_subnormal = hn::RebindMask(di32, hn::Lt(absolute, hn::Set(d, 0x1p-6f)));
  const auto small = hn::IfThenElseZero(hn::Lt(absolute, hn::Set(d, 0x1p-6f)), absolute);
  const auto subnormal = hn::NearestInt(hn::Mul(small, hn::Set(d, 0x1p9f)));
  const auto is_nan = hn::RebindMask(di32, hn::IsNaN(v));
  const auto code =
      hn::IfThenElse(is_nan, hn::Set(di32, 0x7f), hn::IfThenElse(is_subnormal, subnormal, normal));
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(di32, v)), hn::Set(di32, 0x80));
  hn::StoreU(hn::DemoteTo(du8, hn::Or(code, sign)), du8, reinterpret_cast<uint8_t*>(to));
}

// Storage of scalars, so that tails share the code of vectors.
HWY_INLINE void store_scalar(float v, float* to) { *to = v; }
HWY_INLINE void store_scalar(float v, Bf16* to) { *to = to_bf16(v); }
HWY_INLINE void store_scalar(float v, Fp16* to) { *to = to_fp16(v); }
HWY_INLINE void store_scalar(float v, Fp8E4M3* to) { *to = to_fp8_e4m3(v); }

// to[i] = widened from[i] for any n.
template <class T>
HWY_INLINE void widen(const T* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(load_float(d, from + i), d, to + i);
  }
  for (; i < n; ++i) {
    to[i] = to_float(from[i]);
  }
}

// to[i] = rounded from[i] for any n.
template <class T>
HWY_INLINE void narrow(const float* HWY_RESTRICT from, int64_t n, T* HWY_RESTRICT to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  if constexpr (!std::is_same_v<T, Fp16>) {
    for (; i + lanes <= n; i += lanes) {
      store_float(hn::LoadU(d, from + i), d, to + i);
    }
  }
  for (; i < n; ++i) {
    store_scalar(from[i], to + i);
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
