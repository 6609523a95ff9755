// Oracle of moe_route.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {
namespace {

// The places of the `count` largest values, ties to the lowest.
std::vector<int64_t> best_places(const std::vector<double>& values, int64_t count) {
  std::vector<int64_t> places(values.size());
  std::iota(places.begin(), places.end(), 0);
  std::stable_sort(places.begin(), places.end(),
                   [&](int64_t a, int64_t b) { return values[a] > values[b]; });
  places.resize(count);
  return places;
}

}  // namespace

Routed moe_route(const MoeRouteArgs& args) {
  const int64_t num_experts = args.logits.shape[1];
  const int64_t group_size = num_experts / args.num_groups;
  Routed result;
  for (int64_t t = 0; t < args.logits.shape[0]; ++t) {
    std::vector<double> scores;
    std::vector<double> choices;
    for (int64_t e = 0; e < num_experts; ++e) {
      scores.push_back(1 / (1 + std::exp(-element(args.logits, t, e))));
      choices.push_back(scores[e] + element(args.bias, e));
    }
    std::vector<double> group_scores;
    for (int64_t g = 0; g < args.num_groups && args.num_groups > 1; ++g) {
      const auto begin = choices.begin() + g * group_size;
      std::vector<double> group(begin, begin + group_size);
      std::sort(group.rbegin(), group.rend());
      group_scores.push_back(group[0] + group[1]);
    }
    if (args.num_groups > 1) {
      const std::vector<int64_t> kept = best_places(group_scores, args.groups_kept);
      for (int64_t e = 0; e < num_experts; ++e) {
        if (std::find(kept.begin(), kept.end(), e / group_size) == kept.end()) {
          choices[e] = -INFINITY;
        }
      }
    }
    std::vector<int64_t> chosen = best_places(choices, args.ids.shape[1]);
    std::sort(chosen.begin(), chosen.end());
    double sum = 1e-20;
    for (int64_t e : chosen) {
      sum += scores[e];
    }
    for (int64_t e : chosen) {
      result.ids.push_back(static_cast<int32_t>(e));
      result.weights.push_back(scores[e] * args.scale / (args.normalize ? sum : 1.0));
    }
  }
  return result;
}

}  // namespace lacuna::reference
