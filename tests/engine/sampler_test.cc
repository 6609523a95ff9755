// Sampling parameters: what is refused, and that each row is drawn with its own.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "core/rng.h"
#include "engine/nano.h"

namespace lacuna {
namespace {

using Change = std::function<void(SamplingParams&)>;

TEST(CheckSampling, NamesTheParameterTheValueAndWhatWouldWork) {
  const double nan = std::nan("");
  const double inf = std::numeric_limits<double>::infinity();
  struct Case {
    Change change;
    const char* message;
  };
  const std::vector<Case> cases = {
      {[](auto& p) { p.temperature = -0.5; },
       "temperature: -0.500000, expected 0 (greedy) or more"},
      {[=](auto& p) { p.temperature = nan; }, "temperature: nan, expected 0 (greedy) or more"},
      {[=](auto& p) { p.temperature = inf; }, "temperature: inf, expected 0 (greedy) or more"},
      {[](auto& p) { p.top_p = 0; }, "top_p: 0.000000, expected more than 0 and at most 1"},
      {[](auto& p) { p.top_p = 1.5; }, "top_p: 1.500000, expected more than 0 and at most 1"},
      {[=](auto& p) { p.top_p = nan; }, "top_p: nan, expected more than 0 and at most 1"},
      {[](auto& p) { p.top_k = -2; }, "top_k: -2, expected 0 or -1 (off) or a count"},
      {[](auto& p) { p.min_p = -0.25; }, "min_p: -0.250000, expected 0 to 1"},
      {[](auto& p) { p.min_p = 2; }, "min_p: 2.000000, expected 0 to 1"},
      {[=](auto& p) { p.min_p = nan; }, "min_p: nan, expected 0 to 1"},
      {[](auto& p) { p.max_tokens = 0; }, "max_tokens: 0, expected at least 1"},
      {[](auto& p) { p.max_tokens = -4; }, "max_tokens: -4, expected at least 1"},
      {[](auto& p) {
         p.stop = {"x", ""};
       },
       "stop: an empty string, expected text of at least one byte"},
      {[](auto& p) {
         p.stop_token_ids = {3, -1};
       },
       "stop_token_ids: -1, expected an id from 0 to 9"},
      {[](auto& p) { p.stop_token_ids = {10}; }, "stop_token_ids: 10, expected an id from 0 to 9"},
  };
  for (const Case& one : cases) {
    SamplingParams params;
    one.change(params);
    const Status status = check_sampling(params, 10);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << one.message;
    EXPECT_EQ(status.message(), one.message);
  }
}

TEST(CheckSampling, TheEndsOfTheRangesAreGood) {
  const std::vector<Change> changes = {[](auto&) {},
                                       [](auto& p) { p.temperature = 100; },
                                       [](auto& p) { p.top_p = 1e-9; },
                                       [](auto& p) { p.top_k = -1; },
                                       [](auto& p) { p.top_k = 1 << 30; },
                                       [](auto& p) { p.min_p = 1; },
                                       [](auto& p) { p.max_tokens = 1; },
                                       [](auto& p) { p.stop = {"x"}; },
                                       [](auto& p) {
                                         p.stop_token_ids = {0, 9};
                                       }};
  for (const Change& change : changes) {
    SamplingParams params;
    change(params);
    EXPECT_TRUE(check_sampling(params, 10).ok());
  }
}

// Draws over 8 equal logits unless given.
class SamplerTest : public ::testing::Test {
 protected:
  std::vector<int32_t> draw(const std::vector<std::pair<SamplingParams, int64_t>>& rows,
                            std::vector<float> logits = {}) {
    const int64_t n = static_cast<int64_t>(rows.size());
    logits.resize(n * kVocab, 0.0f);
    sampler_.clear();
    for (const auto& [params, position] : rows) {
      Request request;
      request.sampling = params;
      Sequence sequence(1, request, std::nullopt, &pool_, 16);
      // The token to draw goes to `position`; what stands before is of no concern to a row without
      // penalties.
      sequence.tokens.assign(position, 0);
      sampler_.add(sequence);
    }
    return run_draw(&logits, n);
  }
  // The next token of one sequence.
  int32_t draw_after(const Request& request, const std::vector<int32_t>& generated,
                     std::vector<float> logits) {
    Sequence sequence(1, request, std::nullopt, &pool_, 16);
    sequence.tokens.insert(sequence.tokens.end(), generated.begin(), generated.end());
    sampler_.clear();
    sampler_.add(sequence);
    return run_draw(&logits, 1)[0];
  }
  std::vector<int32_t> run_draw(std::vector<float>* logits, int64_t rows) {
    const std::vector<float> before = *logits;
    const DrawLists& lists = sampler_.lists();
    const auto list = [](const auto& values) {
      return view_of(values.data(), {static_cast<int64_t>(values.size())});
    };
    std::vector<int32_t> ids(rows, -7), top_ids(rows * kTopLogprobsMax, -7);
    std::vector<float> logprobs(rows), top_first(rows), saved(lists.num_adjustments()),
        top_scores(rows * kTopLogprobsMax);
    const DrawOutputs outputs = {.ids = view_of(ids.data(), {rows}),
                                 .logprobs = view_of(logprobs.data(), {rows}),
                                 .adjust_saved = view_of(saved.data(), {lists.num_adjustments()}),
                                 .top_ids = view_of(top_ids.data(), {rows * kTopLogprobsMax}),
                                 .top_scores = view_of(top_scores.data(), {rows * kTopLogprobsMax}),
                                 .top_first = view_of(top_first.data(), {rows})};
    const Status status = draw_tokens(run_, view_of(logits->data(), {rows, kVocab}),
                                      {.temperature = list(lists.temperature),
                                       .top_p = list(lists.top_p),
                                       .min_p = list(lists.min_p),
                                       .uniform = list(lists.uniform),
                                       .top_k = list(lists.top_k),
                                       .forced = list(lists.forced),
                                       .forced_sources = list(lists.forced_sources),
                                       .adjust_rows = list(lists.adjust_rows),
                                       .adjust_ids = list(lists.adjust_ids),
                                       .adjust_repetition = list(lists.adjust_repetition),
                                       .adjust_add = list(lists.adjust_add)},
                                      outputs, sampler_.forces(), sampler_.num_top());
    EXPECT_TRUE(status.ok()) << status.message();
    sampler_.unpack(outputs, kVocab);
    EXPECT_EQ(*logits, before) << "a draw must leave the logits as they were";
    return sampler_.ids();
  }
  BlockPool pool_{1};
  static constexpr int64_t kVocab = 8;
  const Context context_ = one_thread();
  OpRunner run_{context_};
  Sampler sampler_{{6}};  // 6 ends a sequence
  std::vector<std::byte> memory_ = std::vector<std::byte>(1 << 20);

  void SetUp() override {
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory_.data());
    run_.set_launch(
        {.workspace = memory_.data() + (64 - at % 64) % 64, .workspace_bytes = (1 << 20) - 64});
  }
};

SamplingParams hot(uint64_t seed) { return {.temperature = 1, .seed = seed}; }

TEST_F(SamplerTest, ADrawIsWhereTheSumPassesTheRandomNumber) {
  std::set<int32_t> seen;
  for (int64_t position = 0; position < 60; ++position) {
    const float u = philox_uniform(5, static_cast<uint64_t>(position));
    const int32_t token = draw({{hot(5), position}})[0];
    EXPECT_EQ(token, static_cast<int32_t>(u * 8)) << position;
    seen.insert(token);
  }
  EXPECT_EQ(seen.size(), 8u);
}

TEST_F(SamplerTest, RowsDoNotDependOnTheirNeighbours) {
  const std::vector<std::pair<SamplingParams, int64_t>> rows = {
      {hot(1), 4}, {hot(2), 4}, {hot(1), 5}, {{.temperature = 0}, 4}, {hot(9), 1000000}};
  const std::vector<int32_t> together = draw(rows);
  for (size_t i = 0; i < rows.size(); ++i) {
    EXPECT_EQ(draw({rows[i]})[0], together[i]) << i;
  }
}

TEST_F(SamplerTest, EachRowHasItsOwnParameters) {
  // Ascending logits: greedy takes 7, top_k 1 takes 7, a hot row is spread.
  std::vector<float> logits;
  for (int row = 0; row < 4; ++row) {
    for (int i = 0; i < 8; ++i) {
      logits.push_back(0.01f * static_cast<float>(i));
    }
  }
  std::set<int32_t> third;
  std::set<int32_t> fourth;
  for (int64_t position = 0; position < 40; ++position) {
    SamplingParams top_two = hot(1);
    top_two.top_k = 2;
    SamplingParams top_one = hot(1);
    top_one.top_k = 1;
    const std::vector<int32_t> ids = draw({{{.temperature = 0}, position},
                                           {top_one, position},
                                           {top_two, position},
                                           {hot(1), position}},
                                          logits);
    EXPECT_EQ(ids[0], 7);
    EXPECT_EQ(ids[1], 7);
    third.insert(ids[2]);
    fourth.insert(ids[3]);
  }
  EXPECT_EQ(third, (std::set<int32_t>{6, 7}));
  EXPECT_GT(fourth.size(), 4u);
}

TEST_F(SamplerTest, LogprobsAreOfThePlainDistribution) {
  const std::vector<float> logits = {0, 0, 0, 0, 0, 0, 0, 3,  //
                                     1, 1, 1, 1, 1, 1, 1, 5};
  SamplingParams cold = hot(1);
  cold.temperature = 0.01;
  SamplingParams biased;
  biased.logit_bias = {{2, 50.0f}};
  EXPECT_EQ(draw({{cold, 1}, {biased, 1}}, logits), (std::vector<int32_t>{7, 2}));
  const double sum0 = 7 + std::exp(3.0);
  const double sum1 = 7 * std::exp(1.0) + std::exp(5.0);
  EXPECT_NEAR(sampler_.logprobs()[0], 3 - std::log(sum0), 1e-5);
  EXPECT_NEAR(sampler_.logprobs()[1], 1 - std::log(sum1), 1e-5);  // before the bias
}

TEST_F(SamplerTest, ForcedTokensAreTakenWithTheirOwnLogprob) {
  Request request;
  request.prompt = {0};
  request.forced_tokens = {3, 4};
  const std::vector<float> logits = {1, 1, 1, 1, 1, 1, 1, 5};
  EXPECT_EQ(draw_after(request, {}, logits), 3);
  EXPECT_NEAR(sampler_.logprobs()[0], 1 - std::log(7 * std::exp(1.0) + std::exp(5.0)), 1e-5);
  EXPECT_EQ(draw_after(request, {3}, logits), 4);
  EXPECT_EQ(draw_after(request, {3, 4}, logits), 7);  // no more to force
}

TEST_F(SamplerTest, PenaltiesFollowTheAnswerAndRepetitionThePromptToo) {
  const std::vector<float> logits = {2.0f, 1.9f, 1.5f, 0, 0, 0, 0, -1};
  Request request;
  request.prompt = {0};
  request.sampling.presence_penalty = 0.2;
  EXPECT_EQ(draw_after(request, {}, logits), 0);      // the prompt does not count
  EXPECT_EQ(draw_after(request, {0}, logits), 1);     // 1.8 < 1.9
  EXPECT_EQ(draw_after(request, {0, 0}, logits), 1);  // once, however often
  EXPECT_EQ(draw_after(request, {0, 1}, logits), 0);  // 1.8 against 1.7
  request.sampling.presence_penalty = 0;
  request.sampling.frequency_penalty = 0.06;
  EXPECT_EQ(draw_after(request, {0}, logits), 0);     // 1.94
  EXPECT_EQ(draw_after(request, {0, 0}, logits), 1);  // 1.88
  request.sampling.frequency_penalty = 0;
  request.sampling.repetition_penalty = 2;
  EXPECT_EQ(draw_after(request, {}, logits), 1);      // 0 stands in the prompt: 2 / 2
  EXPECT_EQ(draw_after(request, {1, 2}, logits), 0);  // 1.0, 0.95, 0.75
}

TEST_F(SamplerTest, NothingEndsBeforeMinTokens) {
  const std::vector<float> logits = {0, 1, 0, 0, 0, 2, 9, 0};
  Request request;
  request.prompt = {0};
  request.sampling.min_tokens = 2;
  request.sampling.stop_token_ids = {5};
  EXPECT_EQ(draw_after(request, {}, logits), 1);
  EXPECT_EQ(draw_after(request, {1}, logits), 1);
  EXPECT_EQ(draw_after(request, {1, 1}, logits), 6);
}

TEST_F(SamplerTest, ReportsTheMostLikelyTokens) {
  const std::vector<float> logits = {0, 3, 1, 3, 2, 0, 0, 0};
  Request request;
  request.prompt = {0};
  request.sampling.top_logprobs = 4;
  draw_after(request, {}, logits);
  ASSERT_EQ(sampler_.top().size(), 1u);
  const std::vector<TokenLogprob>& top = sampler_.top()[0];
  ASSERT_EQ(top.size(), 4u);
  double sum = 0;
  for (const float x : logits) {
    sum += std::exp(static_cast<double>(x));
  }
  const std::vector<int32_t> ids = {1, 3, 4, 2};  // equal ones: lowest id first
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(top[i].token_id, ids[i]);
    EXPECT_NEAR(top[i].logprob, logits[ids[i]] - std::log(sum), 1e-5);
  }
  EXPECT_EQ(top[0].logprob, sampler_.logprobs()[0]);
}

TEST_F(SamplerTest, GroupsHoldWholeRowsAndAsManyEditsAsFit) {
  SamplingParams biased;
  for (int32_t id = 0; id < 3; ++id) {
    biased.logit_bias[id] = 1;
  }
  sampler_.clear();
  EXPECT_EQ(sampler_.groups(4).size(), 1u);
  Request request;
  request.sampling = biased;
  const Sequence edited(1, request, std::nullopt, &pool_, 16);
  for (const bool edits : {true, false, true, true, false}) {
    edits ? sampler_.add(edited) : sampler_.add_unused();
  }
  ASSERT_EQ(sampler_.groups(9).size(), 1u);
  EXPECT_EQ(sampler_.groups(9)[0].num_adjustments, 9);
  EXPECT_EQ(sampler_.groups(9)[0].num_rows, 5);
  for (const int64_t most : {int64_t{1}, int64_t{3}, int64_t{6}}) {
    const std::vector<DrawGroup> groups = sampler_.groups(most);
    ASSERT_EQ(groups.size(), most == 6 ? 2u : 3u) << most;
    int64_t row = 0;
    int64_t edit = 0;
    for (const DrawGroup& group : groups) {
      EXPECT_EQ(group.first_row, row);
      EXPECT_EQ(group.first_adjustment, edit);
      EXPECT_LE(group.num_adjustments, std::max<int64_t>(most, 3));
      row += group.num_rows;
      edit += group.num_adjustments;
    }
    EXPECT_EQ(row, 5);
    EXPECT_EQ(edit, 9);
  }
}

}  // namespace
}  // namespace lacuna
