// Oracle of linear.
#include "tests/reference/model_ops.h"
#include "tests/reference/products.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

Product linear(const LinearArgs& args) {
  const int64_t depth = args.x.shape[1];
  const std::vector<double> x = matrix(args.x);
  const std::vector<double> weight = weight_matrix(args.weight, args.weight_scale);
  Product result;
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    for (int64_t n = 0; n < args.out.shape[1]; ++n) {
      result.out.push_back(dot(x.data() + t * depth, weight.data() + n * depth, depth));
      result.scale.push_back(
          dot_of_magnitudes(x.data() + t * depth, weight.data() + n * depth, depth));
    }
  }
  return result;
}

}  // namespace lacuna::reference
