// Vectors of floats in pairs, the cheapest way to widen bf16, and sums over their lanes. Included
// once per SIMD target from within foreach_target (no #pragma once: the guard toggles).
#if defined(LACUNA_BACKENDS_CPU_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LACUNA_BACKENDS_CPU_PAIRS_INL_H_
#undef LACUNA_BACKENDS_CPU_PAIRS_INL_H_
#else
#define LACUNA_BACKENDS_CPU_PAIRS_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "backends/cpu/simd-inl.h"
#include "hwy/highway.h"
#include "lacuna/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

using FloatTag = hn::ScalableTag<float>;
using FloatVec = hn::Vec<FloatTag>;

constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));
// Elements that one load_pair covers.
constexpr int kPair = 2 * kLanes;

// Two vectors that together hold kPair consecutive elements. Floats come in order. Of bf16 the
// first vector holds the even elements and the second the odd ones: widening is then one shift and
// one mask without any shuffle. Whoever meets pairs keeps that order (to_pair_order,
// from_pair_order).
HWY_INLINE void load_pair(const float* from, FloatVec& first, FloatVec& second) {
  const FloatTag d;
  first = hn::LoadU(d, from);
  second = hn::LoadU(d, from + kLanes);
}

HWY_INLINE void load_pair(const Bf16* from, FloatVec& first, FloatVec& second) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const auto bits = hn::LoadU(du, reinterpret_cast<const uint32_t*>(from));
  first = hn::BitCast(d, hn::ShiftLeft<16>(bits));
  second = hn::BitCast(d, hn::And(bits, hn::Set(du, 0xffff0000u)));
}

// v rounded to bf16 as to_bf16 does, in the upper half of each lane; the lower half is anything.
HWY_INLINE auto round_to_upper_half(FloatVec v) {
  const hn::RebindToUnsigned<FloatTag> du;
  const auto bits = hn::BitCast(du, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const auto quiet = hn::Or(bits, hn::Set(du, 0x400000u));
  return hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(v)), quiet, rounded);
}

// Writes kPair consecutive elements. kEvenOdd: the vectors hold the even and the odd ones, as
// load_pair of bf16 gives them; else the first and the second half.
template <bool kEvenOdd>
HWY_INLINE void store_pair(FloatVec first, FloatVec second, float* to) {
  const FloatTag d;
  if constexpr (kEvenOdd) {
    hn::StoreInterleaved2(first, second, d, to);
  } else {
    hn::StoreU(first, d, to);
    hn::StoreU(second, d, to + kLanes);
  }
}

template <bool kEvenOdd>
HWY_INLINE void store_pair(FloatVec first, FloatVec second, Bf16* to) {
  const FloatTag d;
  if constexpr (kEvenOdd) {
    const hn::RebindToUnsigned<FloatTag> du;
    const auto even = hn::ShiftRight<16>(round_to_upper_half(first));
    const auto odd = hn::And(round_to_upper_half(second), hn::Set(du, 0xffff0000u));
    hn::StoreU(hn::Or(even, odd), du, reinterpret_cast<uint32_t*>(to));
  } else {
    store_float(first, d, to);
    store_float(second, d, to + kLanes);
  }
}

// Copies n floats, a multiple of kPair, into the order in which load_pair(const T*) yields them.
template <class T>
HWY_INLINE void to_pair_order(const float* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  const FloatTag d;
  for (int64_t i = 0; i < n; i += kPair) {
    FloatVec first, second;
    if constexpr (std::is_same_v<T, Bf16>) {
      hn::LoadInterleaved2(d, from + i, first, second);
    } else {
      load_pair(from + i, first, second);
    }
    hn::StoreU(first, d, to + i);
    hn::StoreU(second, d, to + i + kLanes);
  }
}

// to[i] = scale * from[i], back in memory order.
template <class T>
HWY_INLINE void from_pair_order(const float* HWY_RESTRICT from, int64_t n, float scale,
                                float* HWY_RESTRICT to) {
  const FloatTag d;
  const FloatVec factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; i += kPair) {
    const FloatVec first = hn::Mul(hn::LoadU(d, from + i), factor);
    const FloatVec second = hn::Mul(hn::LoadU(d, from + i + kLanes), factor);
    store_pair<std::is_same_v<T, Bf16>>(first, second, to + i);
  }
}

#if HWY_TARGET != HWY_SCALAR
// Adds the 128-bit blocks of a vector.
template <class D>
HWY_INLINE auto sum_blocks(D d, hn::Vec<D> v) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return v;
  } else {
    const hn::Half<D> half;
    return sum_blocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}
#endif

// to[i] = scale * sum of the lanes of v_i, for four vectors at once. All four are summed in one
// order, so a sum does not depend on its place.
HWY_INLINE void store_sums(FloatVec v0, FloatVec v1, FloatVec v2, FloatVec v3, float scale,
                           float* HWY_RESTRICT to) {
#if HWY_TARGET == HWY_SCALAR
  to[0] = scale * hn::GetLane(v0);
  to[1] = scale * hn::GetLane(v1);
  to[2] = scale * hn::GetLane(v2);
  to[3] = scale * hn::GetLane(v3);
#else
  const FloatTag d;
  const hn::RepartitionToWide<FloatTag> dw;
  const FloatVec v01 = hn::Add(hn::InterleaveLower(d, v0, v1), hn::InterleaveUpper(d, v0, v1));
  const FloatVec v23 = hn::Add(hn::InterleaveLower(d, v2, v3), hn::InterleaveUpper(d, v2, v3));
  const auto w01 = hn::BitCast(dw, v01);
  const auto w23 = hn::BitCast(dw, v23);
  // Each 128-bit block now holds a part of the four sums, in order.
  const FloatVec parts = hn::Add(hn::BitCast(d, hn::InterleaveLower(dw, w01, w23)),
                                 hn::BitCast(d, hn::InterleaveUpper(dw, w01, w23)));
  const hn::FixedTag<float, 4> d4;
  hn::StoreU(hn::Mul(sum_blocks(d, parts), hn::Set(d4, scale)), d4, to);
#endif
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
