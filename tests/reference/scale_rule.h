// The power-of-two scale of the FP8 writers.
#pragma once

#include <cmath>

namespace lacuna::reference {

// 2^ceil(log2(x)), exactly: frexp gives x = mantissa * 2^exponent with mantissa in [1/2, 1).
inline float power_of_two_at_least(double x) {
  int exponent = 0;
  const double mantissa = std::frexp(x, &exponent);
  return static_cast<float>(std::ldexp(1.0, mantissa == 0.5 ? exponent - 1 : exponent));
}

}  // namespace lacuna::reference
