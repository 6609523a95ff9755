// The draw of a step's tokens: penalties and biases, the random numbers, the most likely
// alternatives. Random numbers are Philox(seed, position): they do not depend on batching. The
// lists are made on the host, the draw is a few operations over their image on the device.
#pragma once

#include <span>
#include <vector>

#include "engine/sequence.h"
#include "ops/op_runner.h"

namespace lacuna {

inline constexpr int32_t kTopLogprobsMax = 20;

// Parameters of a draw, one entry a row, and the logits to edit.
struct DrawLists {
  std::vector<float> temperature, top_p, min_p, uniform;
  std::vector<int32_t> top_k;
  // PickTokensArgs: the token that the row must take, or the row itself.
  std::vector<int32_t> forced, forced_sources;
  // Parallel lists, in order of rows.
  std::vector<int32_t> adjust_rows, adjust_ids;
  std::vector<float> adjust_repetition, adjust_add;

  int64_t num_rows() const { return static_cast<int64_t>(temperature.size()); }
  int64_t num_adjustments() const { return static_cast<int64_t>(adjust_rows.size()); }
};

// Their image on the device.
struct DrawInputs {
  ConstTensorView temperature, top_p, min_p, uniform;
  ConstTensorView top_k;
  ConstTensorView forced, forced_sources;
  ConstTensorView adjust_rows, adjust_ids, adjust_repetition, adjust_add;  // [N]
};

// What a draw writes, on the device.
struct DrawOutputs {
  TensorView ids;           // [n] int32
  TensorView logprobs;      // [n] f32: of the model's own distribution
  TensorView adjust_saved;  // [N] f32, scratch
  // The most likely tokens in ascending order of id, for n rows of up to kTopLogprobsMax.
  TensorView top_ids;     // [n * kTopLogprobsMax] int32
  TensorView top_scores;  // [n * kTopLogprobsMax] f32: logits
  TensorView top_first;   // [n] f32: log-probability of the first
};

// Rows of a draw whose edits fit a buffer together.
struct DrawGroup {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t first_adjustment = 0;
  int64_t num_adjustments = 0;
};

class Sampler {
 public:
  // `eos` ends a sequence; it is kept from being drawn before min_tokens.
  explicit Sampler(std::vector<int32_t> eos) : eos_(std::move(eos)) {}

  void clear();
  // The next row of the logits belongs to this sequence.
  void add(const Sequence& sequence);
  // The next row belongs to nobody; it is drawn greedily and not looked at.
  void add_unused();

  const DrawLists& lists() const { return lists_; }
  bool forces() const { return forces_; }
  // Alternatives wanted of the row that wants most.
  int32_t num_top() const { return num_top_max_; }
  // The rows in groups of at most `adjustments_max` edits, or of one row. There is at least one.
  std::vector<DrawGroup> groups(int64_t adjustments_max) const;

  // Takes a draw's results, in host memory.
  void unpack(const DrawOutputs& outputs, int64_t vocab_size);
  const std::vector<int32_t>& ids() const { return ids_; }
  const std::vector<float>& logprobs() const { return logprobs_; }
  const std::vector<std::vector<TokenLogprob>>& top() const { return top_; }

 private:
  void add_adjustments(const Sequence& sequence, int32_t row);

  std::vector<int32_t> eos_;
  DrawLists lists_;
  bool forces_ = false;
  std::vector<int32_t> num_top_;  // alternatives wanted
  int32_t num_top_max_ = 0;
  std::vector<int32_t> ids_;
  std::vector<float> logprobs_;
  std::vector<std::vector<TokenLogprob>> top_;
};

// Draws a token for each row of `logits` [n, V], which are as before afterwards. Log-probabilities
// are of the model's own distribution, before penalties, temperature and filters. `forces`: some
// row's token is forced. `num_top`: alternatives wanted.
Status draw_tokens(OpRunner& run, TensorView logits, const DrawInputs& inputs,
                   const DrawOutputs& outputs, bool forces, int32_t num_top);

// The `count` most likely tokens of each row into top_ids, top_scores and top_first.
Status rank_tokens(OpRunner& run, const ConstTensorView& logits, int32_t count,
                   const DrawOutputs& outputs);
// What rank_tokens found for one row, in host memory: most likely first (ties: lowest id).
std::vector<TokenLogprob> ranked_tokens(const DrawOutputs& outputs, int64_t row, int64_t vocab_size,
                                        int32_t count, int32_t wanted);

// Names the parameter that makes no sense.
Status check_sampling(const SamplingParams& params, int64_t vocab_size);

}  // namespace lacuna
