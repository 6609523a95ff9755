// Tokens from where they were drawn; a few integers a step.
#include "backends/cpu/kernels.h"

namespace lacuna::cpu {

const Kernel<PickTokensArgs> kPickTokens = {
    .name = "cpu/pick_tokens",
    .supports = [](const PickTokensArgs&, const DeviceInfo&) { return ok_status(); },
    .run =
        [](const PickTokensArgs& args, const DeviceInfo&, const Launch&) {
          for (int64_t t = 0; t < args.out.shape[0]; ++t) {
            const int32_t source = args.sources.as<int32_t>()[t * args.sources.strides[0]];
            const bool is_drawn = source >= 0 && source < args.drawn.shape[0];
            args.out.as<int32_t>()[t * args.out.strides[0]] =
                is_drawn ? args.drawn.as<int32_t>()[source * args.drawn.strides[0]]
                         : args.given.as<int32_t>()[t * args.given.strides[0]];
          }
          return ok_status();
        }};

}  // namespace lacuna::cpu
