// Tensors as a kernel receives them: a typed pointer and int64 strides in elements. An absent
// tensor has a null pointer.
#pragma once

#include <cstdint>

#include "lacuna/tensor.h"

namespace lacuna::cuda {

template <class T>
struct Strided1 {
  T* data = nullptr;
  int64_t stride = 0;

  LACUNA_HOST_DEVICE T& operator()(int64_t i) const { return data[i * stride]; }
  LACUNA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

template <class T>
struct Strided2 {
  T* data = nullptr;
  int64_t strides[2] = {};

  LACUNA_HOST_DEVICE T* row(int64_t i) const { return data + i * strides[0]; }
  LACUNA_HOST_DEVICE T& operator()(int64_t i, int64_t j) const {
    return data[i * strides[0] + j * strides[1]];
  }
  LACUNA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

template <class T>
struct Strided3 {
  T* data = nullptr;
  int64_t strides[3] = {};

  LACUNA_HOST_DEVICE T* row(int64_t i, int64_t j) const {
    return data + i * strides[0] + j * strides[1];
  }
  LACUNA_HOST_DEVICE explicit operator bool() const { return data != nullptr; }
};

// From a view whose type was checked; an absent view gives a null pointer.
template <class T, class Void>
Strided1<T> strided1(const BasicTensorView<Void>& view) {
  return {static_cast<T*>(view.data), view.strides[0]};
}
template <class T, class Void>
Strided2<T> strided2(const BasicTensorView<Void>& view) {
  return {static_cast<T*>(view.data), {view.strides[0], view.strides[1]}};
}
template <class T, class Void>
Strided3<T> strided3(const BasicTensorView<Void>& view) {
  return {static_cast<T*>(view.data), {view.strides[0], view.strides[1], view.strides[2]}};
}

}  // namespace lacuna::cuda
