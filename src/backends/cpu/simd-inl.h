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

// Storage of scalars, so that tails share the code of vectors.
HWY_INLINE void store_scalar(float v, float* to) { *to = v; }
HWY_INLINE void store_scalar(float v, Bf16* to) { *to = to_bf16(v); }
HWY_INLINE void store_scalar(float v, Fp16* to) { *to = to_fp16(v); }

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
