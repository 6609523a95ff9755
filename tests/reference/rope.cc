// Oracle of rope.
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

Product rope(const RopeArgs& args) {
  const int64_t width = args.x.shape[2];
  const int64_t pairs = args.cos_table.shape[1];
  Product result;
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    const int64_t position = integer(args.positions, t);
    for (int64_t h = 0; h < args.x.shape[1]; ++h) {
      std::vector<double> out(width);
      std::vector<double> scale(width, 0.0);
      for (int64_t i = 0; i < width; ++i) {
        out[i] = element(args.x, t, h, i);
      }
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t low = args.offset + (args.interleaved ? 2 * i : i);
        const int64_t high = args.interleaved ? low + 1 : low + pairs;
        const double a = element(args.x, t, h, low);
        const double b = element(args.x, t, h, high);
        const double cosine = element(args.cos_table, position, i);
        const double sine = element(args.sin_table, position, i);
        out[low] = a * cosine - b * sine;
        out[high] = a * sine + b * cosine;
        scale[low] = std::fabs(a * cosine) + std::fabs(b * sine);
        scale[high] = std::fabs(a * sine) + std::fabs(b * cosine);
      }
      result.out.insert(result.out.end(), out.begin(), out.end());
      result.scale.insert(result.scale.end(), scale.begin(), scale.end());
    }
  }
  return result;
}

}  // namespace lacuna::reference
