// Element types and their conversions, constexpr on host and device. Rounding is to nearest, ties
// to even. Storage types (Bf16, Fp16, Fp8E4M3) hold bits and do no arithmetic: convert to float,
// compute, convert back.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#if defined(__CUDACC__)
#define LACUNA_HOST_DEVICE __host__ __device__
#else
#define LACUNA_HOST_DEVICE
#endif

namespace lacuna {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat16,
  kBFloat16,
  kFloat8E4M3,  // "fn" form: no infinity, S.1111.111 is NaN, largest finite 448
  kInt32,
  kInt64,
  kUInt8,
};

constexpr int64_t size_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat8E4M3:
    case DType::kUInt8:
      return 1;
    case DType::kInt64:
      return 8;
  }
  return 0;
}

constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat8E4M3:
      return "float8_e4m3";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
  }
  return "unknown";
}

constexpr bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16 ||
         dtype == DType::kFloat8E4M3;
}

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};
struct Fp8E4M3 {
  uint8_t bits;
};

LACUNA_HOST_DEVICE constexpr float to_float(float x) { return x; }

LACUNA_HOST_DEVICE constexpr float to_float(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

LACUNA_HOST_DEVICE constexpr Bf16 to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x0040u)};  // keep a NaN a (quiet) NaN
  }
  const uint32_t round = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + round) >> 16)};
}

LACUNA_HOST_DEVICE constexpr float to_float(Fp16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = (x.bits >> 10) & 0x1fu;
  uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 0x1fu) {
    return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  }
  // Subnormal: mantissa * 2^-24, exact in float.
  const float magnitude = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
  return sign != 0 ? -magnitude : magnitude;
}

LACUNA_HOST_DEVICE constexpr Fp16 to_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint16_t>(sign | 0x7e00u)};
  }
  if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more: infinity
    return {static_cast<uint16_t>(sign | 0x7c00u)};
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: subnormal, in units of 2^-24
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) {  // below 2^-25: zero (exactly 2^-25 ties to even, zero)
      return {static_cast<uint16_t>(sign)};
    }
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 126 - exponent;  // 14..24
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    uint32_t value = mantissa >> shift;
    if (rest > half || (rest == half && (value & 1u))) {
      ++value;
    }
    return {static_cast<uint16_t>(sign | value)};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
}

LACUNA_HOST_DEVICE constexpr float to_float(Fp8E4M3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t exponent = (x.bits >> 3) & 0xfu;
  const uint32_t mantissa = x.bits & 0x7u;
  if (exponent == 0xfu && mantissa == 0x7u) {
    return std::bit_cast<float>(sign | 0x7fc00000u);
  }
  if (exponent != 0) {
    return std::bit_cast<float>(sign | ((exponent + 120u) << 23) | (mantissa << 20));
  }
  const float magnitude = static_cast<float>(mantissa) * 0.001953125f;  // 2^-9
  return sign != 0 ? -magnitude : magnitude;
}

// Saturating, as cvt.satfinite: |x| above 448 gives +-448; NaN stays NaN.
LACUNA_HOST_DEVICE constexpr Fp8E4M3 to_fp8_e4m3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return {static_cast<uint8_t>(sign | 0x7fu)};
  }
  if (magnitude >= 0x43e00000u) {  // 448 and above
    return {static_cast<uint8_t>(sign | 0x7eu)};
  }
  if (magnitude < 0x3c800000u) {  // below 2^-6: subnormal, in units of 2^-9
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 117) {  // below 2^-10: zero
      return {static_cast<uint8_t>(sign)};
    }
    const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t shift = 141 - exponent;  // 21..24
    const uint32_t half = 1u << (shift - 1);
    const uint32_t rest = mantissa & ((1u << shift) - 1);
    uint32_t value = mantissa >> shift;
    if (rest > half || (rest == half && (value & 1u))) {
      ++value;
    }
    return {static_cast<uint8_t>(sign | value)};
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t value = (rounded - 0x3c000000u) >> 20;
  return {static_cast<uint8_t>(sign | (value > 0x7eu ? 0x7eu : value))};
}

static_assert(to_fp8_e4m3(448.0f).bits == 0x7e && to_fp8_e4m3(1.0f).bits == 0x38);
static_assert(to_bf16(1.0f).bits == 0x3f80 && to_fp16(65504.0f).bits == 0x7bff);

// Maps a storage type to its DType.
template <class T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<Bf16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct DTypeOf<Fp16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<Fp8E4M3> {
  static constexpr DType value = DType::kFloat8E4M3;
};
template <>
struct DTypeOf<int32_t> {
  static constexpr DType value = DType::kInt32;
};
template <>
struct DTypeOf<int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct DTypeOf<uint8_t> {
  static constexpr DType value = DType::kUInt8;
};
template <class T>
inline constexpr DType kDTypeOf = DTypeOf<T>::value;

}  // namespace lacuna
