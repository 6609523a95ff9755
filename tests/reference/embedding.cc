// Oracle of embedding.
#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

std::vector<double> embedding(const EmbeddingArgs& args) {
  std::vector<double> out;
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    const int64_t id = integer(args.ids, t);
    for (int64_t i = 0; i < args.out.shape[1]; ++i) {
      out.push_back(id < 0 || id >= args.table.shape[0] ? 0.0 : element(args.table, id, i));
    }
  }
  return out;
}

}  // namespace lacuna::reference
