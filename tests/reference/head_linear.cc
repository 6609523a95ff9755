// Oracle of head_linear.
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

Product head_linear(const HeadLinearArgs& args) {
  Product result;
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    for (int64_t h = 0; h < args.out.shape[1]; ++h) {
      for (int64_t n = 0; n < args.out.shape[2]; ++n) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < args.x.shape[2]; ++k) {
          const double product = element(args.x, t, h, k) * element(args.weight, h, n, k);
          sum += product;
          magnitude += std::fabs(product);
        }
        result.out.push_back(sum);
        result.scale.push_back(magnitude);
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
