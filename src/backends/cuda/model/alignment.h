// Whether a kernel may read rows of a tensor 16 bytes at a time.
#pragma once

#include <cstdint>
#include <string>

#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna::cuda {

// The address and the strides of the first `num_strides` dimensions are multiples of 16 bytes.
template <class Void>
Status check_aligned(const BasicTensorView<Void>& view, const char* name, int num_strides) {
  bool aligned = reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  for (int d = 0; d < num_strides; ++d) {
    aligned = aligned && (view.shape[d] <= 1 || view.strides[d] * size_bytes(view.dtype) % 16 == 0);
  }
  return aligned
             ? ok_status()
             : unsupported(std::string(name) + ": this kernel needs its rows aligned to 16 bytes");
}

}  // namespace lacuna::cuda
