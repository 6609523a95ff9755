// The draw of a step's tokens: penalties and biases, the random numbers, the most likely
// alternatives. Random numbers are Philox(seed, position): they do not depend on batching.
#pragma once

#include <span>
#include <vector>

#include "engine/sequence.h"
#include "ops/op_runner.h"

namespace lacuna {

class Sampler {
 public:
  // `eos` ends a sequence; it is kept from being drawn before min_tokens.
  explicit Sampler(std::vector<int32_t> eos) : eos_(std::move(eos)) {}

  void clear();
  // The next row of the logits belongs to this sequence.
  void add(const Sequence& sequence);
  // `logits` [n, V] of the rows added, in order; they are as before afterwards. Log-probabilities
  // are of the model's own distribution, before penalties, temperature and filters.
  Status draw(OpRunner& run, TensorView logits);
  // Asks for the workspace that a draw of this many rows could need.
  Status measure(OpRunner& run, TensorView logits);

  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<float>& logprobs() const { return logprobs_; }
  const std::vector<std::vector<TokenLogprob>>& top() const { return top_; }

 private:
  void add_adjustments(const Sequence& sequence, int32_t row);

  std::vector<int32_t> eos_;
  std::vector<float> temperature_, top_p_, min_p_, uniform_, logprobs_;
  std::vector<int32_t> top_k_, ids_;
  std::vector<int32_t> forced_;   // token that the row must take, or -1
  std::vector<int32_t> num_top_;  // alternatives wanted
  // Adjusted logits: parallel lists.
  std::vector<int32_t> adjust_rows_, adjust_ids_;
  std::vector<float> adjust_repetition_, adjust_add_, adjust_saved_;
  std::vector<std::vector<TokenLogprob>> top_;
};

// The `count` most likely tokens of each row with their log-probabilities, most likely first (ties:
// lowest id).
Status most_likely(OpRunner& run, const ConstTensorView& logits, int32_t count,
                   std::vector<std::vector<TokenLogprob>>* out);

// Names the parameter that makes no sense.
Status check_sampling(const SamplingParams& params, int64_t vocab_size);

}  // namespace lacuna
