// Fills and runs the sampling operations.
#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>

#include "core/rng.h"

namespace lacuna {
namespace {

constexpr int32_t kTopLogprobsMax = 20;

bool has_penalties(const SamplingParams& params) {
  return params.presence_penalty != 0 || params.frequency_penalty != 0 ||
         params.repetition_penalty != 1;
}

template <class T>
ConstTensorView list_view(const std::vector<T>& list) {
  return view_of(list.data(), {static_cast<int64_t>(list.size())});
}

}  // namespace

void Sampler::clear() {
  for (std::vector<float>* list : {&temperature_, &top_p_, &min_p_, &uniform_, &adjust_repetition_,
                                   &adjust_add_, &adjust_saved_}) {
    list->clear();
  }
  for (std::vector<int32_t>* list : {&top_k_, &forced_, &num_top_, &adjust_rows_, &adjust_ids_}) {
    list->clear();
  }
}

void Sampler::add(const Sequence& sequence) {
  const SamplingParams& params = sequence.request.sampling;
  const int32_t row = static_cast<int32_t>(temperature_.size());
  temperature_.push_back(static_cast<float>(params.temperature));
  top_p_.push_back(static_cast<float>(params.top_p));
  min_p_.push_back(static_cast<float>(params.min_p));
  top_k_.push_back(params.top_k);
  uniform_.push_back(philox_uniform(params.seed, static_cast<uint64_t>(sequence.num_tokens())));
  num_top_.push_back(params.top_logprobs);
  const int64_t n = sequence.num_generated();
  const std::vector<int32_t>& forced = sequence.request.forced_tokens;
  forced_.push_back(n < static_cast<int64_t>(forced.size()) ? forced[n] : -1);
  if (has_penalties(params) || !params.logit_bias.empty() || n < params.min_tokens) {
    add_adjustments(sequence, row);
  }
}

void Sampler::add_adjustments(const Sequence& sequence, int32_t row) {
  const SamplingParams& params = sequence.request.sampling;
  struct Edit {
    float repetition = 1;
    float add = 0;
  };
  std::map<int32_t, Edit> edits;
  if (has_penalties(params)) {
    for (int64_t i = 0; i < sequence.num_tokens(); ++i) {
      Edit& edit = edits[sequence.tokens[i]];
      edit.repetition = static_cast<float>(params.repetition_penalty);
      if (i >= sequence.num_prompt()) {
        if (edit.add == 0) {
          edit.add -= static_cast<float>(params.presence_penalty);
        }
        edit.add -= static_cast<float>(params.frequency_penalty);
      }
    }
  }
  for (const auto& [id, bias] : params.logit_bias) {
    edits[id].add += bias;
  }
  if (sequence.num_generated() < params.min_tokens) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    for (const std::vector<int32_t>* ids : {&std::as_const(eos_), &params.stop_token_ids}) {
      for (const int32_t id : *ids) {
        edits[id].add = -kInf;
      }
    }
  }
  for (const auto& [id, edit] : edits) {
    adjust_rows_.push_back(row);
    adjust_ids_.push_back(id);
    adjust_repetition_.push_back(edit.repetition);
    adjust_add_.push_back(edit.add);
  }
}

Status most_likely(OpRunner& run, const ConstTensorView& logits, int32_t count,
                   std::vector<std::vector<TokenLogprob>>* out) {
  const int64_t rows = logits.shape[0];
  const int64_t k = std::min<int64_t>(count, logits.shape[1]);
  std::vector<int32_t> ids(rows * k);
  std::vector<float> scores(rows * k);
  LACUNA_RETURN_IF_ERROR(run(TopKArgs{.logits = logits,
                                      .k = k,
                                      .outputs = {.indices = view_of(ids.data(), {rows, k}),
                                                  .scores = view_of(scores.data(), {rows, k})}}));
  // The row's log-sum-exp follows from any token's log-probability.
  std::vector<int32_t> first(rows);
  std::vector<float> first_logprob(rows);
  for (int64_t t = 0; t < rows; ++t) {
    first[t] = std::max(0, ids[t * k]);
  }
  LACUNA_RETURN_IF_ERROR(run(TokenLogprobsArgs{
      .logits = logits, .ids = list_view(first), .out = view_of(first_logprob.data(), {rows})}));
  out->assign(rows, {});
  for (int64_t t = 0; t < rows; ++t) {
    const float log_sum = scores[t * k] - first_logprob[t];
    for (int64_t c = 0; c < k && ids[t * k + c] >= 0; ++c) {
      (*out)[t].push_back({ids[t * k + c], scores[t * k + c] - log_sum});
    }
    std::stable_sort(
        (*out)[t].begin(), (*out)[t].end(),
        [](const TokenLogprob& a, const TokenLogprob& b) { return a.logprob > b.logprob; });
  }
  return ok_status();
}

Status Sampler::draw(OpRunner& run, TensorView logits) {
  const int64_t rows = logits.shape[0];
  ids_.assign(rows, 0);
  logprobs_.assign(rows, 0.0f);
  top_.assign(rows, {});
  adjust_saved_.assign(adjust_ids_.size(), 0.0f);
  AdjustLogitsArgs adjust{
      .logits = logits,
      .rows = list_view(adjust_rows_),
      .ids = list_view(adjust_ids_),
      .repetition = list_view(adjust_repetition_),
      .add = list_view(adjust_add_),
      .saved = view_of(adjust_saved_.data(), {static_cast<int64_t>(adjust_saved_.size())})};
  if (!adjust_ids_.empty()) {
    LACUNA_RETURN_IF_ERROR(run(adjust));
  }
  LACUNA_RETURN_IF_ERROR(run(SampleArgs{.logits = logits,
                                        .temperature = list_view(temperature_),
                                        .top_k = list_view(top_k_),
                                        .top_p = list_view(top_p_),
                                        .min_p = list_view(min_p_),
                                        .uniform = list_view(uniform_),
                                        .ids = view_of(ids_.data(), {rows}),
                                        .logprobs = view_of(logprobs_.data(), {rows})}));
  bool recompute = !adjust_ids_.empty();
  if (recompute) {
    adjust.restore = true;
    LACUNA_RETURN_IF_ERROR(run(adjust));
  }
  for (int64_t t = 0; t < rows; ++t) {
    if (forced_[t] >= 0) {
      ids_[t] = forced_[t];
      recompute = true;
    }
  }
  if (recompute) {
    LACUNA_RETURN_IF_ERROR(run(TokenLogprobsArgs{
        .logits = logits, .ids = list_view(ids_), .out = view_of(logprobs_.data(), {rows})}));
  }
  const int32_t most = *std::max_element(num_top_.begin(), num_top_.end());
  if (most > 0) {
    LACUNA_RETURN_IF_ERROR(most_likely(run, logits, most, &top_));
    for (int64_t t = 0; t < rows; ++t) {
      top_[t].resize(std::min<size_t>(top_[t].size(), num_top_[t]));
    }
  }
  return ok_status();
}

Status Sampler::measure(OpRunner& run, TensorView logits) {
  const int64_t rows = logits.shape[0];
  clear();
  for (std::vector<float>* list : {&temperature_, &top_p_, &min_p_, &uniform_}) {
    list->assign(rows, 0.0f);
  }
  top_k_.assign(rows, 0);
  forced_.assign(rows, -1);
  num_top_.assign(rows, kTopLogprobsMax);
  return draw(run, logits);
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
  if (params.min_tokens < 0 || params.min_tokens > params.max_tokens) {
    return bad("min_tokens", std::to_string(params.min_tokens), "0 to max_tokens");
  }
  if (!(std::fabs(params.presence_penalty) <= 2)) {
    return bad("presence_penalty", std::to_string(params.presence_penalty), "-2 to 2");
  }
  if (!(std::fabs(params.frequency_penalty) <= 2)) {
    return bad("frequency_penalty", std::to_string(params.frequency_penalty), "-2 to 2");
  }
  if (!std::isfinite(params.repetition_penalty) || params.repetition_penalty <= 0) {
    return bad("repetition_penalty", std::to_string(params.repetition_penalty), "more than 0");
  }
  if (params.top_logprobs < 0 || params.top_logprobs > kTopLogprobsMax) {
    return bad("top_logprobs", std::to_string(params.top_logprobs), "0 to 20");
  }
  for (const auto& [id, bias] : params.logit_bias) {
    if (id < 0 || id >= vocab_size || !(std::fabs(bias) <= 100)) {
      return bad(
          "logit_bias", std::to_string(id) + ": " + std::to_string(bias),
          ("ids below " + std::to_string(vocab_size) + " and values of -100 to 100").c_str());
    }
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
