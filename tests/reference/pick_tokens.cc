// Oracle of pick_tokens.
#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"

namespace lacuna::reference {

std::vector<int32_t> pick_tokens(const PickTokensArgs& args) {
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < args.out.shape[0]; ++t) {
    const int64_t source = integer(args.sources, t);
    const bool is_drawn = source >= 0 && source < args.drawn.shape[0];
    tokens.push_back(
        static_cast<int32_t>(is_drawn ? integer(args.drawn, source) : integer(args.given, t)));
  }
  return tokens;
}

}  // namespace lacuna::reference
