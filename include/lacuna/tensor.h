// TensorView: borrowed memory with a type, a shape and strides. An absent tensor is a view with no
// dtype-sized memory: `TensorView{}`, whose rank is 0 (`empty()` is true). Strides count elements,
// may be any int64 (0 broadcasts an input), and nothing is assumed contiguous unless an operation
// says so.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "lacuna/dtype.h"

namespace lacuna {

enum class DeviceKind : uint8_t { kCpu = 0, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend constexpr bool operator==(const Device&, const Device&) = default;
};

inline constexpr int kMaxRank = 5;

template <class Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device = {};
  int rank = 0;
  std::array<int64_t, kMaxRank> shape = {};
  std::array<int64_t, kMaxRank> strides = {};  // elements

  // True for an absent tensor. A tensor with a zero extent is present: its rank is above 0.
  constexpr bool empty() const { return rank == 0; }

  constexpr int64_t num_elements() const {
    if (rank == 0) {
      return 0;
    }
    int64_t n = 1;
    for (int i = 0; i < rank; ++i) {
      n *= shape[i];
    }
    return n;
  }

  constexpr bool is_contiguous() const {
    int64_t expected = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (shape[i] != 1 && strides[i] != expected) {
        return false;
      }
      expected *= shape[i];
    }
    return true;
  }

  // A mutable view converts to a const one.
  template <class Other>
  requires(std::is_same_v<Other, const void> && !std::is_const_v<Void>) constexpr
  operator BasicTensorView<Other>() const {
    return {data, dtype, device, rank, shape, strides};
  }

  template <class T>
  auto* as() const {
    using Pointer = std::conditional_t<std::is_const_v<Void>, const T*, T*>;
    return static_cast<Pointer>(data);
  }

  // Elements [begin, begin + count) of dimension `dim`.
  constexpr BasicTensorView slice(int dim, int64_t begin, int64_t count) const {
    BasicTensorView view = *this;
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    if (data != nullptr) {
      view.data = static_cast<Byte*>(data) + begin * strides[dim] * size_bytes(dtype);
    }
    view.shape[dim] = count;
    return view;
  }
};

using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// A row-major contiguous view over `data`.
template <class Void>
constexpr BasicTensorView<Void> make_view(Void* data, DType dtype,
                                          std::initializer_list<int64_t> shape,
                                          Device device = {}) {
  BasicTensorView<Void> view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  view.rank = static_cast<int>(shape.size());
  int i = 0;
  for (int64_t extent : shape) {
    view.shape[i++] = extent;
  }
  int64_t stride = 1;
  for (int d = view.rank - 1; d >= 0; --d) {
    view.strides[d] = stride;
    if (d > 0) {
      stride *= view.shape[d];  // the outermost extent is in no stride, and may be absurd
    }
  }
  return view;
}

// A typed pointer becomes a view: `view_of(ptr, {rows, width})`.
template <class T>
requires(!std::is_const_v<T>) constexpr TensorView
    view_of(T* data, std::initializer_list<int64_t> shape, Device device = {}) {
  return make_view<void>(data, kDTypeOf<T>, shape, device);
}
template <class T>
constexpr ConstTensorView view_of(const T* data, std::initializer_list<int64_t> shape,
                                  Device device = {}) {
  return make_view<const void>(data, kDTypeOf<T>, shape, device);
}

}  // namespace lacuna
