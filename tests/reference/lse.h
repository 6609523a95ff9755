// The LSE algebra that merge_states and rescale_by_lse share.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>

#include "lacuna/attention.h"

namespace lacuna::reference {

// An input LSE as natural logarithm; NaN and +inf read as -inf.
inline double natural_lse(double lse, LseBase base) {
  if (std::isnan(lse) || lse == std::numeric_limits<double>::infinity()) {
    return -std::numeric_limits<double>::infinity();
  }
  return base == LseBase::kTwo ? lse * std::numbers::ln2 : lse;
}

inline double log_sum_exp(std::span<const double> values) {
  const double max = *std::max_element(values.begin(), values.end());
  if (std::isinf(max)) {
    return max;
  }
  double sum = 0;
  for (double value : values) {
    sum += std::exp(value - max);
  }
  return max + std::log(sum);
}

}  // namespace lacuna::reference
