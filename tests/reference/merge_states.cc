// Oracle of merge_states.
#include "tests/reference/element.h"
#include "tests/reference/lse.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

MergedState merge_states(const MergeStatesArgs& args) {
  const int64_t num_rows = args.out.shape[0];
  const int64_t num_heads = args.out.shape[1];
  const int64_t width = args.out.shape[2];
  MergedState result;
  result.out.assign(num_rows * num_heads * width, 0.0);
  result.lse.resize(num_rows * num_heads);
  std::vector<double> lse(args.states.size());
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (size_t n = 0; n < args.states.size(); ++n) {
        lse[n] = natural_lse(element(args.states[n].lse, t, h), args.lse_base);
      }
      const double total = log_sum_exp(lse);
      result.lse[t * num_heads + h] = total;
      for (size_t n = 0; n < args.states.size(); ++n) {
        if (std::isinf(lse[n])) {
          continue;  // its output may be NaN
        }
        for (int64_t i = 0; i < width; ++i) {
          result.out[(t * num_heads + h) * width + i] +=
              std::exp(lse[n] - total) * element(args.states[n].out, t, h, i);
        }
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
