// Oracle of add.
#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

std::vector<double> add(const AddArgs& args) {
  std::vector<double> out;
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    for (int64_t i = 0; i < args.out.shape[1]; ++i) {
      out.push_back(static_cast<float>(element(args.out, t, i) + element(args.x, t, i)));
    }
  }
  return out;
}

}  // namespace lacuna::reference
