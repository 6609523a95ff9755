// Oracle of adjust_logits.
#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

AdjustedLogits adjust_logits(const AdjustLogitsArgs& args) {
  const int64_t vocabulary = args.logits.shape[1];
  AdjustedLogits result;
  for (int64_t t = 0; t < args.logits.shape[0]; ++t) {
    for (int64_t i = 0; i < vocabulary; ++i) {
      result.logits.push_back(element(args.logits, t, i));
    }
  }
  for (int64_t n = 0; n < args.rows.shape[0]; ++n) {
    double& saved = result.saved.emplace_back(element(args.saved, n));
    const int64_t row = integer(args.rows, n);
    const int64_t id = integer(args.ids, n);
    if (row < 0 || row >= args.logits.shape[0] || id < 0 || id >= vocabulary) {
      continue;
    }
    double& x = result.logits[row * vocabulary + id];
    if (args.restore) {
      x = saved;
      continue;
    }
    saved = x;
    const double repetition = element(args.repetition, n);
    const float scaled = static_cast<float>(x > 0 ? x / repetition : x * repetition);
    x = static_cast<float>(scaled + element(args.add, n));
  }
  return result;
}

}  // namespace lacuna::reference
