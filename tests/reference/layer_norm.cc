// Oracle of layer_norm.
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

LayerNormalized layer_norm(const LayerNormArgs& args) {
  const int64_t width = args.x.shape[1];
  const double count = static_cast<double>(width);
  LayerNormalized result;
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    double mean = 0;
    for (int64_t i = 0; i < width; ++i) {
      mean += element(args.x, t, i) / count;
    }
    double variance = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double centred = element(args.x, t, i) - mean;
      variance += centred * centred / count;
    }
    for (int64_t i = 0; i < width; ++i) {
      const double scaled =
          (element(args.x, t, i) - mean) / std::sqrt(variance + args.eps) * element(args.weight, i);
      result.scaled.push_back(scaled);
      result.out.push_back(scaled + element(args.bias, i));
    }
  }
  return result;
}

}  // namespace lacuna::reference
