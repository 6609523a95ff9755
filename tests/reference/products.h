// What the oracles of matrix products share: rows of a tensor as double, and FP8 weights with their
// block scales.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/model_ops.h"
#include "tests/reference/element.h"

namespace lacuna::reference {

// A matrix, contiguous.
inline std::vector<double> matrix(const ConstTensorView& tensor) {
  std::vector<double> values;
  values.reserve(tensor.num_elements());
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (int64_t j = 0; j < tensor.shape[1]; ++j) {
      values.push_back(element(tensor, i, j));
    }
  }
  return values;
}

// A weight, contiguous, each block of an FP8 one multiplied by its scale.
inline std::vector<double> weight_matrix(const ConstTensorView& weight,
                                         const ConstTensorView& scale) {
  std::vector<double> values = matrix(weight);
  if (!scale.empty()) {
    const int64_t width = weight.shape[1];
    for (int64_t n = 0; n < weight.shape[0]; ++n) {
      for (int64_t k = 0; k < width; ++k) {
        values[n * width + k] *= element(scale, n / kWeightScaleBlock, k / kWeightScaleBlock);
      }
    }
  }
  return values;
}

inline double dot_of_magnitudes(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += std::fabs(a[i] * b[i]);
  }
  return sum;
}

}  // namespace lacuna::reference
