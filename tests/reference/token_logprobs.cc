// Oracle of token_logprobs.
#include <algorithm>
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

std::vector<double> token_logprobs(const TokenLogprobsArgs& args) {
  const int64_t vocabulary = args.logits.shape[1];
  std::vector<double> out;
  for (int64_t t = 0; t < args.logits.shape[0]; ++t) {
    const int64_t id = integer(args.ids, t);
    if (id < 0 || id >= vocabulary) {
      out.push_back(-INFINITY);
      continue;
    }
    double largest = -INFINITY;
    for (int64_t i = 0; i < vocabulary; ++i) {
      largest = std::fmax(largest, element(args.logits, t, i));
    }
    double sum = 0;
    for (int64_t i = 0; i < vocabulary; ++i) {
      sum += std::exp(element(args.logits, t, i) - largest);
    }
    out.push_back(element(args.logits, t, id) - largest - std::log(sum));
  }
  return out;
}

}  // namespace lacuna::reference
