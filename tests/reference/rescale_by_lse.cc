// Oracle of rescale_by_lse.
#include "tests/reference/element.h"
#include "tests/reference/lse.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

MergedState rescale_by_lse(const RescaleByLseArgs& args) {
  const int64_t num_rows = args.out.shape[0];
  const int64_t num_heads = args.out.shape[1];
  const int64_t width = args.out.shape[2];
  MergedState result;
  result.out.assign(num_rows * num_heads * width, 0.0);
  result.lse.resize(num_rows * num_heads);
  std::vector<double> lse(args.lse.shape[0]);
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (size_t n = 0; n < lse.size(); ++n) {
        lse[n] = natural_lse(element(args.lse, static_cast<int64_t>(n), t, h), args.lse_base);
      }
      const double total = log_sum_exp(lse);
      result.lse[t * num_heads + h] = total;
      if (std::isinf(lse[args.rank])) {
        continue;  // factor 0: whatever out held, 0 is written
      }
      const double factor = std::exp(lse[args.rank] - total);
      for (int64_t i = 0; i < width && static_cast<float>(factor) != 0; ++i) {
        result.out[(t * num_heads + h) * width + i] = factor * element(args.out, t, h, i);
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
