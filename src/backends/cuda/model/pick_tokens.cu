// Tokens from where they were drawn, one thread a row.
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 128;

struct Params {
  int64_t num_rows;
  int64_t num_drawn;
  Strided1<const int32_t> given;
  Strided1<const int32_t> sources;
  Strided1<const int32_t> drawn;
  Strided1<int32_t> out;
};

__global__ __launch_bounds__(kThreads) void pick_tokens_kernel(const Params p) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= p.num_rows) {
    return;
  }
  const int32_t source = p.sources(t);
  p.out(t) = source >= 0 && source < p.num_drawn ? p.drawn(source) : p.given(t);
}

Status run_pick_tokens(const PickTokensArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.num_rows = args.out.shape[0],
                         .num_drawn = args.drawn.shape[0],
                         .given = strided1<const int32_t>(args.given),
                         .sources = strided1<const int32_t>(args.sources),
                         .drawn = strided1<const int32_t>(args.drawn),
                         .out = strided1<int32_t>(args.out)};
  return launch("cuda/pick_tokens", pick_tokens_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(ceil_div(params.num_rows, kThreads))),
                 .block = dim3(kThreads)},
                params);
}

}  // namespace

const Kernel<PickTokensArgs> kPickTokens = {
    .name = "cuda/pick_tokens", .supports = supports_all<PickTokensArgs>, .run = run_pick_tokens};

}  // namespace lacuna::cuda
