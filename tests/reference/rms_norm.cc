// Oracle of rms_norm.
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

Normalized rms_norm(const RmsNormArgs& args) {
  const int64_t width = args.x.shape[1];
  Normalized result;
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double more = args.add.empty() ? 0.0 : element(args.add, t, i);
      const double h = static_cast<float>(element(args.x, t, i) + more);
      result.sum.push_back(h);
      squares += h * h;
    }
    const double inverse = 1 / std::sqrt(squares / static_cast<double>(width) + args.eps);
    for (int64_t i = 0; i < width; ++i) {
      result.out.push_back(result.sum[t * width + i] * inverse * element(args.weight, i));
    }
  }
  return result;
}

}  // namespace lacuna::reference
