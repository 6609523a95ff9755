// The gated activation of an MLP, shared by silu_mul and the experts. Included once per SIMD target
// from within foreach_target (no #pragma once: the guard toggles).
#if defined(LACUNA_BACKENDS_CPU_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LACUNA_BACKENDS_CPU_SILU_INL_H_
#undef LACUNA_BACKENDS_CPU_SILU_INL_H_
#else
#define LACUNA_BACKENDS_CPU_SILU_INL_H_
#endif

#include "backends/cpu/simd-inl.h"
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// silu(x) = x / (1 + exp(-x)). Highway's Exp is infinite from 89 on and undefined above 104; below
// x = -100 the infinity gives -0, as it should. A NaN passes through the numerator.
template <class D>
HWY_INLINE hn::Vec<D> silu(D d, hn::Vec<D> x) {
  const auto exponent = hn::Min(hn::Neg(x), hn::Set(d, 100.0f));
  return hn::Div(x, hn::Add(hn::Set(d, 1.0f), hn::Exp(d, exponent)));
}

// out = silu(gate) * up. out may be gate or up when its type is float.
template <class Out>
void silu_mul_row(const float* gate, const float* up, Out* out, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store_float(hn::Mul(silu(d, hn::LoadU(d, gate + i)), hn::LoadU(d, up + i)), d, out + i);
  }
  // The same arithmetic on a whole vector, so that an element's bits do not depend on its place.
  HWY_ALIGN float buffer[hn::MaxLanes(d)];
  for (; i < n; ++i) {
    hn::Store(silu(d, hn::Set(d, gate[i])), d, buffer);
    store_scalar(buffer[0] * up[i], out + i);
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
