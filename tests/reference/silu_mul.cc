// Oracle of silu_mul.
#include <cmath>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

std::vector<double> silu_mul(const SiluMulArgs& args) {
  std::vector<double> out;
  for (int64_t t = 0; t < args.gate.shape[0]; ++t) {
    for (int64_t i = 0; i < args.gate.shape[1]; ++i) {
      const double gate = element(args.gate, t, i);
      out.push_back(gate / (1 + std::exp(-gate)) * element(args.up, t, i));
    }
  }
  return out;
}

}  // namespace lacuna::reference
