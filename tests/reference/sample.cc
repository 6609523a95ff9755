// Oracle of sample: the distribution by sorting.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {
namespace {

// exp((x - largest) / temperature); infinite logits share all of the mass.
double likelihood(double x, double largest, double temperature) {
  return std::isinf(largest) ? (x == largest ? 1.0 : 0.0) : std::exp((x - largest) / temperature);
}

}  // namespace

SampledRow sample_row(const SampleArgs& args, int64_t t) {
  const int64_t vocabulary = args.logits.shape[1];
  std::vector<double> logits(vocabulary);
  for (int64_t i = 0; i < vocabulary; ++i) {
    const double x = element(args.logits, t, i);
    logits[i] = std::isnan(x) ? -INFINITY : x;
  }
  SampledRow row;
  row.best = std::max_element(logits.begin(), logits.end()) - logits.begin();
  const double largest = logits[row.best];
  if (largest == -INFINITY) {
    row.best = 0;
    row.greedy = true;
    row.logprobs.assign(vocabulary, -INFINITY);
    return row;
  }
  double total = 0;
  for (double x : logits) {
    total += likelihood(x, largest, 1);
  }
  for (double x : logits) {
    const double above = std::isinf(largest) ? (x == largest ? 0.0 : -INFINITY) : x - largest;
    row.logprobs.push_back(above - std::log(total));
  }
  const double temperature = std::min(element(args.temperature, t), double{FLT_MAX});
  row.greedy = !(temperature > 0);
  if (row.greedy) {
    return row;
  }
  row.p.resize(vocabulary);
  for (int64_t i = 0; i < vocabulary; ++i) {
    row.p[i] = likelihood(logits[i], largest, temperature);
  }
  std::vector<int64_t> order(vocabulary);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  const auto kept_mass = [&] {
    double mass = 0;
    for (int64_t i : order) {
      mass += row.p[i];
    }
    return mass;
  };
  const int64_t top_k = integer(args.top_k, t);
  if (top_k > 0 && top_k < vocabulary) {
    order.resize(top_k);
  }
  const double top_p = element(args.top_p, t);
  if (top_p < 1) {
    const double target = top_p * kept_mass();
    double mass = 0;
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || mass < target)) {
      mass += row.p[order[kept++]];
    }
    order.resize(kept);
  }
  const double min_p = element(args.min_p, t);
  const double least = min_p * row.p[order[0]];
  std::erase_if(order, [&](int64_t i) { return row.p[i] < least; });
  const double mass = kept_mass();
  std::vector<double> p(vocabulary, 0.0);
  for (int64_t i : order) {
    p[i] = row.p[i] / mass;
  }
  row.p = std::move(p);
  return row;
}

}  // namespace lacuna::reference
