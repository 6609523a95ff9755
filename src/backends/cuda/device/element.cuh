// Elements of tensors on the device: the storage types of dtype.h to and from float by the
// hardware's conversions, and vectors of 16 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "lacuna/dtype.h"

namespace lacuna::cuda {

__device__ inline float load_float(float x) { return x; }
__device__ inline float load_float(Bf16 x) { return to_float(x); }  // a shift
__device__ inline float load_float(Fp16 x) { return __half2float(__ushort_as_half(x.bits)); }
__device__ inline float load_float(Fp8E4M3 x) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(x.bits, __NV_E4M3)));
}

// Rounds to nearest even; FP8 saturates.
template <class T>
__device__ inline T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline Bf16 from_float<Bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ inline Fp16 from_float<Fp16>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}
template <>
__device__ inline Fp8E4M3 from_float<Fp8E4M3>(float x) {
  return {__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3)};
}

// An element of a tensor whose type is known at run time only: one of those above.
__device__ inline float load_any(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kBFloat16:
      return load_float(static_cast<const Bf16*>(data)[i]);
    case DType::kFloat16:
      return load_float(static_cast<const Fp16*>(data)[i]);
    case DType::kFloat8E4M3:
      return load_float(static_cast<const Fp8E4M3*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

// The same for results, which are f32, bf16 or fp16.
__device__ inline void store_any(void* data, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::kBFloat16:
      static_cast<Bf16*>(data)[i] = from_float<Bf16>(value);
      break;
    case DType::kFloat16:
      static_cast<Fp16*>(data)[i] = from_float<Fp16>(value);
      break;
    default:
      static_cast<float*>(data)[i] = value;
  }
}

// Two floats as packed bf16, `low` in the low half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ inline float2 unpack_bf16(uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

// Four e4m3 values (packed, lowest first) as floats.
__device__ inline float4 unpack_fp8(uint32_t four) {
  const __half2_raw low =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four & 0xffffu), __NV_E4M3);
  const __half2_raw high =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(four >> 16), __NV_E4M3);
  const float2 a = __half22float2(__half2(low));
  const float2 b = __half22float2(__half2(high));
  return {a.x, a.y, b.x, b.y};
}

__device__ inline bool is_aligned(const void* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace lacuna::cuda
