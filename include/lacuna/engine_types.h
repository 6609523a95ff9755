// The engine's small vocabulary: sampling parameters, where key lists come from, the tap. See
// lacuna/engine.h.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/attention.h"
#include "lacuna/tensor.h"

namespace lacuna {

struct SamplingParams {
  double temperature = 0;  // 0: greedy
  double top_p = 1;        // (0, 1]; 1: off
  int32_t top_k = 0;       // 0 or -1: off
  double min_p = 0;        // [0, 1]; 0: off
  uint64_t seed = 0;       // samples depend on (seed, position) alone, not on batching
  int64_t max_tokens = 128;
  int64_t min_tokens = 0;               // no end-of-sequence or stop token before
  std::vector<std::string> stop;        // text that ends the answer; not part of it
  std::vector<int32_t> stop_token_ids;  // besides the model's end-of-sequence ids
  bool include_stop_in_text = false;
  bool ignore_eos = false;
  bool skip_special_tokens = true;  // in text
  // Before temperature, as the OpenAI API defines them: of tokens generated so far, presence once
  // and frequency times the count are subtracted; repetition (1: off) divides positive and
  // multiplies negative logits of tokens in prompt or answer; bias is added.
  double presence_penalty = 0;    // [-2, 2]
  double frequency_penalty = 0;   // [-2, 2]
  double repetition_penalty = 1;  // > 0
  std::map<int32_t, float> logit_bias;
  int32_t top_logprobs = 0;  // most likely tokens to report with each token, 0..20
};

struct TokenLogprob {
  int32_t token_id = -1;
  float logprob = 0;
};

// Where the lists of attended keys come from. Everything but kIndexer is a tool of tests and
// evaluations.
struct SelectionSource {
  enum class Kind {
    kIndexer = 0,  // the model as meant
    kGiven,        // `given`: lists of an oracle
    kRandom,       // index_topk random visible keys for each row and leader layer
    kWindow,       // the last index_topk keys
    kDense,        // every key
  };
  Kind kind = Kind::kIndexer;
  uint64_t seed = 0;  // kRandom
  // kGiven: leader layer -> [positions, width] row-major, by the position of the query row; -1:
  // unused. Widths are the map values' size divided by given_positions.
  std::map<int, std::vector<int32_t>> given;
  int64_t given_positions = 0;
};

// Called with intermediate tensors of a forward pass, for comparison with oracles: ("hidden",
// layer, [T, D]), in host memory, valid during the call. The pass goes on with what the tap leaves
// in them: a test may put an oracle's values in the place of "hidden".
using Tap = std::function<void(std::string_view name, int layer, const TensorView& tensor)>;

// A sparse_mla call of a step that the device has finished: its arguments on the engine's device,
// its output still in place. Valid while the tap runs.
struct SparseMlaCall {
  int64_t step = 0;  // from 0
  int layer = 0;
  const SparseMlaArgs& args;
  std::string_view kernel;
};
using SparseMlaTap = std::function<void(const SparseMlaCall& call)>;

}  // namespace lacuna
