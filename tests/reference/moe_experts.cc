// Oracle of moe_experts.
#include "tests/reference/model_ops.h"
#include "tests/reference/products.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {
namespace {

struct Expert {
  std::vector<double> gate;  // [F, D]
  std::vector<double> up;    // [F, D]
  std::vector<double> down;  // [D, F]
};

}  // namespace

ExpertsOutput moe_experts(const MoeExpertsArgs& args) {
  const int64_t width = args.x.shape[1];
  const int64_t hidden_width = args.experts[0].gate.shape[0];
  std::vector<Expert> experts;
  for (const ExpertWeights& expert : args.experts) {
    experts.push_back({weight_matrix(expert.gate, expert.gate_scale),
                       weight_matrix(expert.up, expert.up_scale),
                       weight_matrix(expert.down, expert.down_scale)});
  }
  const std::vector<double> x = matrix(args.x);
  ExpertsOutput result;
  result.out.assign(args.out.num_elements(), 0.0);
  result.hidden_scale.assign(args.out.num_elements(), 0.0);
  result.input_scale.assign(args.out.num_elements(), 0.0);
  for (int64_t t = 0; t < args.x.shape[0]; ++t) {
    for (int64_t k = 0; k < args.ids.shape[1]; ++k) {
      const int64_t id = integer(args.ids, t, k);
      if (id < 0) {
        continue;
      }
      const Expert& expert = experts[id];
      const double weight = element(args.weights, t, k);
      for (int64_t f = 0; f < hidden_width; ++f) {
        const double* gate_row = &expert.gate[f * width];
        const double* up_row = &expert.up[f * width];
        const double gate = dot(x.data() + t * width, gate_row, width);
        const double up = dot(x.data() + t * width, up_row, width);
        const double silu = gate / (1 + std::exp(-gate));
        // The derivative of silu is nowhere above 1.1 in magnitude.
        const double moved =
            1.1 * std::fabs(up) * dot_of_magnitudes(x.data() + t * width, gate_row, width) +
            std::fabs(silu) * dot_of_magnitudes(x.data() + t * width, up_row, width);
        for (int64_t i = 0; i < width; ++i) {
          const double factor = weight * expert.down[i * hidden_width + f];
          result.out[t * width + i] += factor * silu * up;
          result.hidden_scale[t * width + i] += std::fabs(factor * silu * up);
          result.input_scale[t * width + i] += std::fabs(factor) * moved;
        }
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
