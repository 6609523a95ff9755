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

bool has_penalties(const SamplingParams& params) {
  return params.presence_penalty != 0 || params.frequency_penalty != 0 ||
         params.repetition_penalty != 1;
}

}  // namespace

void Sampler::clear() {
  for (std::vector<float>* list :
       {&lists_.temperature, &lists_.top_p, &lists_.min_p, &lists_.uniform,
        &lists_.adjust_repetition, &lists_.adjust_add}) {
    list->clear();
  }
  for (std::vector<int32_t>* list : {&lists_.top_k, &lists_.forced, &lists_.forced_sources,
                                     &lists_.adjust_rows, &lists_.adjust_ids, &num_top_}) {
    list->clear();
  }
  forces_ = false;
  num_top_max_ = 0;
}

void Sampler::add(const Sequence& sequence) {
  const SamplingParams& params = sequence.request.sampling;
  const int32_t row = static_cast<int32_t>(lists_.num_rows());
  lists_.temperature.push_back(static_cast<float>(params.temperature));
  lists_.top_p.push_back(static_cast<float>(params.top_p));
  lists_.min_p.push_back(static_cast<float>(params.min_p));
  lists_.top_k.push_back(params.top_k);
  lists_.uniform.push_back(
      philox_uniform(params.seed, static_cast<uint64_t>(sequence.num_tokens())));
  num_top_.push_back(params.top_logprobs);
  num_top_max_ = std::max(num_top_max_, params.top_logprobs);
  const int64_t n = sequence.num_generated();
  const std::vector<int32_t>& forced = sequence.request.forced_tokens;
  const bool is_forced = n < static_cast<int64_t>(forced.size());
  lists_.forced.push_back(is_forced ? forced[n] : -1);
  lists_.forced_sources.push_back(is_forced ? -1 : row);
  forces_ = forces_ || is_forced;
  if (has_penalties(params) || !params.logit_bias.empty() || n < params.min_tokens) {
    add_adjustments(sequence, row);
  }
}

void Sampler::add_unused() {
  const int32_t row = static_cast<int32_t>(lists_.num_rows());
  for (std::vector<float>* list : {&lists_.temperature, &lists_.min_p, &lists_.uniform}) {
    list->push_back(0);
  }
  lists_.top_p.push_back(1);
  lists_.top_k.push_back(0);
  lists_.forced.push_back(-1);
  lists_.forced_sources.push_back(row);
  num_top_.push_back(0);
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
    lists_.adjust_rows.push_back(row);
    lists_.adjust_ids.push_back(id);
    lists_.adjust_repetition.push_back(edit.repetition);
    lists_.adjust_add.push_back(edit.add);
  }
}

std::vector<DrawGroup> Sampler::groups(int64_t adjustments_max) const {
  std::vector<DrawGroup> groups(1);
  const int64_t count = lists_.num_adjustments();
  int64_t next = 0;
  for (int64_t row = 0; row < lists_.num_rows(); ++row) {
    const int64_t begin = next;
    while (next < count && lists_.adjust_rows[next] == row) {
      ++next;
    }
    if (next > begin && groups.back().num_rows > 0 &&
        groups.back().num_adjustments + next - begin > adjustments_max) {
      groups.push_back({.first_row = row, .first_adjustment = begin});
    }
    ++groups.back().num_rows;
    groups.back().num_adjustments += next - begin;
  }
  return groups;
}

void Sampler::unpack(const DrawOutputs& outputs, int64_t vocab_size) {
  const int64_t rows = lists_.num_rows();
  ids_.assign(outputs.ids.as<int32_t>(), outputs.ids.as<int32_t>() + rows);
  logprobs_.assign(outputs.logprobs.as<float>(), outputs.logprobs.as<float>() + rows);
  top_.assign(rows, {});
  for (int64_t t = 0; t < rows; ++t) {
    if (num_top_[t] > 0) {
      top_[t] = ranked_tokens(outputs, t, vocab_size, num_top_max_, num_top_[t]);
    }
  }
}

Status rank_tokens(OpRunner& run, const ConstTensorView& logits, int32_t count,
                   const DrawOutputs& outputs) {
  const int64_t rows = logits.shape[0];
  const int64_t k = std::min<int64_t>(count, logits.shape[1]);
  const auto rows_of_top = [&](const TensorView& list) {
    TensorView view = list;
    view.rank = 2;
    view.shape = {rows, k};
    view.strides = {kTopLogprobsMax, 1};
    return view;
  };
  const TensorView ids = rows_of_top(outputs.top_ids);
  LACUNA_RETURN_IF_ERROR(
      run(TopKArgs{.logits = logits,
                   .k = k,
                   .outputs = {.indices = ids, .scores = rows_of_top(outputs.top_scores)}}));
  // The row's log-sum-exp follows from any token's log-probability.
  ConstTensorView first = ids;
  first.rank = 1;
  return run(TokenLogprobsArgs{
      .logits = logits, .ids = first, .out = outputs.top_first.slice(0, 0, rows)});
}

std::vector<TokenLogprob> ranked_tokens(const DrawOutputs& outputs, int64_t row, int64_t vocab_size,
                                        int32_t count, int32_t wanted) {
  const int64_t k = std::min<int64_t>(count, vocab_size);
  const int32_t* ids = outputs.top_ids.as<int32_t>() + row * kTopLogprobsMax;
  const float* scores = outputs.top_scores.as<float>() + row * kTopLogprobsMax;
  const float log_sum = scores[0] - outputs.top_first.as<float>()[row];
  std::vector<TokenLogprob> tokens;
  for (int64_t c = 0; c < k && ids[c] >= 0; ++c) {
    tokens.push_back({ids[c], scores[c] - log_sum});
  }
  std::stable_sort(tokens.begin(), tokens.end(), [](const TokenLogprob& a, const TokenLogprob& b) {
    return a.logprob > b.logprob;
  });
  tokens.resize(std::min<size_t>(tokens.size(), wanted));
  return tokens;
}

Status draw_tokens(OpRunner& run, TensorView logits, const DrawInputs& inputs,
                   const DrawOutputs& outputs, bool forces, int32_t num_top) {
  AdjustLogitsArgs adjust{.logits = logits,
                          .rows = inputs.adjust_rows,
                          .ids = inputs.adjust_ids,
                          .repetition = inputs.adjust_repetition,
                          .add = inputs.adjust_add,
                          .saved = outputs.adjust_saved};
  const bool adjusts = inputs.adjust_rows.shape[0] > 0;
  if (adjusts) {
    LACUNA_RETURN_IF_ERROR(run(adjust));
  }
  LACUNA_RETURN_IF_ERROR(run(SampleArgs{.logits = logits,
                                        .temperature = inputs.temperature,
                                        .top_k = inputs.top_k,
                                        .top_p = inputs.top_p,
                                        .min_p = inputs.min_p,
                                        .uniform = inputs.uniform,
                                        .ids = outputs.ids,
                                        .logprobs = outputs.logprobs}));
  if (adjusts) {
    adjust.restore = true;
    LACUNA_RETURN_IF_ERROR(run(adjust));
  }
  if (forces) {
    LACUNA_RETURN_IF_ERROR(run(PickTokensArgs{.given = inputs.forced,
                                              .sources = inputs.forced_sources,
                                              .drawn = outputs.ids,
                                              .out = outputs.ids}));
  }
  if (adjusts || forces) {
    LACUNA_RETURN_IF_ERROR(
        run(TokenLogprobsArgs{.logits = logits, .ids = outputs.ids, .out = outputs.logprobs}));
  }
  return num_top > 0 ? rank_tokens(run, logits, num_top, outputs) : ok_status();
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
