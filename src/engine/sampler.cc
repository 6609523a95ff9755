// Fills and runs the sampling operation.
#include "engine/sampler.h"

#include <cmath>
#include <string>

#include "core/rng.h"

namespace lacuna {

void Sampler::clear() {
  temperature_.clear();
  top_p_.clear();
  min_p_.clear();
  uniform_.clear();
  top_k_.clear();
}

void Sampler::add(const SamplingParams& params, int64_t position) {
  temperature_.push_back(static_cast<float>(params.temperature));
  top_p_.push_back(static_cast<float>(params.top_p));
  min_p_.push_back(static_cast<float>(params.min_p));
  top_k_.push_back(params.top_k);
  uniform_.push_back(philox_uniform(params.seed, static_cast<uint64_t>(position)));
}

Status Sampler::draw(OpRunner& run, const ConstTensorView& logits) {
  const int64_t rows = logits.shape[0];
  ids_.assign(rows, 0);
  logprobs_.assign(rows, 0.0f);
  auto floats = [&](const std::vector<float>& list) { return view_of(list.data(), {rows}); };
  return run(SampleArgs{.logits = logits,
                        .temperature = floats(temperature_),
                        .top_k = view_of(static_cast<const int32_t*>(top_k_.data()), {rows}),
                        .top_p = floats(top_p_),
                        .min_p = floats(min_p_),
                        .uniform = floats(uniform_),
                        .ids = view_of(ids_.data(), {rows}),
                        .logprobs = view_of(logprobs_.data(), {rows})});
}

Status Sampler::force(OpRunner& run, const ConstTensorView& logits, int64_t row, int32_t token) {
  ids_[row] = token;
  return run(TokenLogprobsArgs{.logits = logits.slice(0, row, 1),
                               .ids = view_of(static_cast<const int32_t*>(&ids_[row]), {1}),
                               .out = view_of(&logprobs_[row], {1})});
}

Status check_sampling(const SamplingParams& params, int64_t vocab_size) {
  auto bad = [](const char* name, const std::string& value, const char* expected) {
    return invalid_argument(std::string(name) + ": " + value + ", expected " + expected);
  };
  if (!std::isfinite(params.temperature) || params.temperature < 0) {
    return bad("temperature", std::to_string(params.temperature), "0 (greedy) or more");
  }
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return bad("top_p", std::to_string(params.top_p), "more than 0 and at most 1");
  }
  if (params.top_k < -1) {
    return bad("top_k", std::to_string(params.top_k), "0 or -1 (off) or a count");
  }
  if (!(params.min_p >= 0 && params.min_p <= 1)) {
    return bad("min_p", std::to_string(params.min_p), "0 to 1");
  }
  if (params.max_tokens < 1) {
    return bad("max_tokens", std::to_string(params.max_tokens), "at least 1");
  }
  for (const std::string& stop : params.stop) {
    if (stop.empty()) {
      return bad("stop", "an empty string", "text of at least one byte");
    }
  }
  for (const int32_t id : params.stop_token_ids) {
    if (id < 0 || id >= vocab_size) {
      return bad("stop_token_ids", std::to_string(id),
                 ("an id from 0 to " + std::to_string(vocab_size - 1)).c_str());
    }
  }
  return ok_status();
}

}  // namespace lacuna
