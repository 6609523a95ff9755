// Sampling parameters of a step's rows as tensors, and the draw. Random numbers are Philox(seed,
// position): they do not depend on batching.
#pragma once

#include <vector>

#include "engine/sequence.h"
#include "ops/op_runner.h"

namespace lacuna {

class Sampler {
 public:
  void clear();
  void add(const SamplingParams& params, int64_t position);
  // logits [n, V] of the rows added, in order.
  Status draw(OpRunner& run, const ConstTensorView& logits);
  // After a draw: row `row` takes `token` instead (teacher forcing), with its own log-probability.
  Status force(OpRunner& run, const ConstTensorView& logits, int64_t row, int32_t token);
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<float>& logprobs() const { return logprobs_; }

 private:
  std::vector<float> temperature_, top_p_, min_p_, uniform_, logprobs_;
  std::vector<int32_t> top_k_, ids_;
};

// Names the parameter that makes no sense.
Status check_sampling(const SamplingParams& params, int64_t vocab_size);

}  // namespace lacuna
