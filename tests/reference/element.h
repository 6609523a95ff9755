// Reads one element of a host tensor as double or int64, whatever its dtype and strides. The oracle
// reads everything through here and through read_cached_row.
#pragma once

#include <cstdint>
#include <cstring>

#include "lacuna/tensor.h"

namespace lacuna::reference {

inline const char* element_address(const ConstTensorView& tensor, int64_t i, int64_t j = 0,
                                   int64_t k = 0) {
  const int64_t offset = i * tensor.strides[0] + (tensor.rank > 1 ? j * tensor.strides[1] : 0) +
                         (tensor.rank > 2 ? k * tensor.strides[2] : 0);
  return static_cast<const char*>(tensor.data) + offset * size_bytes(tensor.dtype);
}

// memcpy, because cached records and hostile tensors need not be aligned.
template <class T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

inline double decode(DType dtype, const char* at) {
  switch (dtype) {
    case DType::kFloat32:
      return load<float>(at);
    case DType::kFloat16:
      return to_float(load<Fp16>(at));
    case DType::kBFloat16:
      return to_float(load<Bf16>(at));
    case DType::kFloat8E4M3:
      return to_float(load<Fp8E4M3>(at));
    case DType::kInt32:
      return load<int32_t>(at);
    case DType::kInt64:
      return static_cast<double>(load<int64_t>(at));
    case DType::kUInt8:
      return load<uint8_t>(at);
  }
  return 0;
}

inline double element(const ConstTensorView& tensor, int64_t i, int64_t j = 0, int64_t k = 0) {
  return decode(tensor.dtype, element_address(tensor, i, j, k));
}

inline int64_t integer(const ConstTensorView& tensor, int64_t i, int64_t j = 0, int64_t k = 0) {
  const char* at = element_address(tensor, i, j, k);
  return tensor.dtype == DType::kInt64 ? load<int64_t>(at) : load<int32_t>(at);
}

// An optional per-row integer: `absent` when the tensor is.
inline int64_t integer_or(const ConstTensorView& tensor, int64_t i, int64_t absent) {
  return tensor.empty() ? absent : integer(tensor, i);
}

}  // namespace lacuna::reference
