// Residual additions and the log-probabilities of given tokens. Memory-bound loops that the
// compiler vectorises.
#include <cmath>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"

namespace lacuna::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

Status run_add(const AddArgs& args, const DeviceInfo& device, const Launch&) {
  const int64_t width = args.out.shape[1];
  parallel_ranges(device, args.out.shape[0], grain_rows(4 * width),
                  [&](int64_t begin, int64_t end, int) {
                    for (int64_t t = begin; t < end; ++t) {
                      const float* x = args.x.as<float>() + t * args.x.strides[0];
                      float* out = args.out.as<float>() + t * args.out.strides[0];
                      for (int64_t i = 0; i < width; ++i) {
                        out[i] += x[i];
                      }
                    }
                  });
  return ok_status();
}

Status run_token_logprobs(const TokenLogprobsArgs& args, const DeviceInfo& device, const Launch&) {
  const int64_t vocab = args.logits.shape[1];
  device.thread_pool->parallel_for(args.out.shape[0], [&](int64_t t, int) {
    const float* logits = args.logits.as<float>() + t * args.logits.strides[0];
    const int32_t id = args.ids.as<int32_t>()[t * args.ids.strides[0]];
    float* out = args.out.as<float>() + t * args.out.strides[0];
    if (id < 0 || id >= vocab) {
      *out = -kInf;
      return;
    }
    float largest = -kInf;
    for (int64_t i = 0; i < vocab; ++i) {
      largest = std::fmax(largest, logits[i]);
    }
    // In double: a vocabulary of 150,000 small terms would lose digits in float.
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) {
      sum += std::exp(static_cast<double>(logits[i]) - largest);
    }
    *out = static_cast<float>(static_cast<double>(logits[id]) - largest - std::log(sum));
  });
  return ok_status();
}

Status run_adjust_logits(const AdjustLogitsArgs& args, const DeviceInfo&, const Launch&) {
  for (int64_t i = 0; i < args.rows.shape[0]; ++i) {
    const int32_t row = args.rows.as<int32_t>()[i * args.rows.strides[0]];
    const int32_t id = args.ids.as<int32_t>()[i * args.ids.strides[0]];
    if (row < 0 || row >= args.logits.shape[0] || id < 0 || id >= args.logits.shape[1]) {
      continue;
    }
    float& x = args.logits.as<float>()[row * args.logits.strides[0] + id];
    float& saved = args.saved.as<float>()[i * args.saved.strides[0]];
    if (args.restore) {
      x = saved;
      continue;
    }
    saved = x;
    const float repetition = args.repetition.as<float>()[i * args.repetition.strides[0]];
    x = (x > 0 ? x / repetition : x * repetition) + args.add.as<float>()[i * args.add.strides[0]];
  }
  return ok_status();
}

template <class Args>
Status always(const Args&, const DeviceInfo&) {
  return ok_status();
}

}  // namespace

const Kernel<AddArgs> kAdd = {.name = "cpu/add", .supports = always<AddArgs>, .run = run_add};
const Kernel<AdjustLogitsArgs> kAdjustLogits = {
    .name = "cpu/adjust_logits", .supports = always<AdjustLogitsArgs>, .run = run_adjust_logits};
const Kernel<TokenLogprobsArgs> kTokenLogprobs = {
    .name = "cpu/token_logprobs", .supports = always<TokenLogprobsArgs>, .run = run_token_logprobs};

}  // namespace lacuna::cpu
