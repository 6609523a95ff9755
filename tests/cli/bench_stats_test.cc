// The numbers of `lacuna bench serve`: percentiles, when two runs have a ratio, what disturbs a
// round, data sets, and a server's counters.
#include "cli/bench_stats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>

#include "cli/bench_load.h"

namespace lacuna::cli {
namespace {

RequestOutcome finished(int64_t tokens, double first, double last) {
  RequestOutcome outcome;
  outcome.ok = true;
  outcome.prompt_tokens = 7;
  outcome.tokens_asked = tokens;
  outcome.tokens = tokens;
  outcome.first_token = first;
  outcome.last_token = last;
  return outcome;
}

LoadRun good_run() {
  LoadRun run;
  run.prompt_hash = "a";
  run.seconds = 2;
  run.requests = {finished(5, 1, 3), finished(1, 2, 2)};
  run.server.known = true;
  run.server.requests = 2;
  return run;
}

TEST(Percentile, InterpolatesBetweenNeighbours) {
  EXPECT_EQ(percentile({}, 50), 0);
  EXPECT_EQ(percentile({3}, 99), 3);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 50), 2.5);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 0), 1);
  EXPECT_EQ(percentile({4, 1, 3, 2}, 100), 4);
  EXPECT_NEAR(percentile({10, 20, 30, 40, 50}, 90), 46, 1e-12);
}

TEST(Times, OfFinishedRequestsOnly) {
  LoadRun run = good_run();
  RequestOutcome failed;
  failed.first_token = 100;
  run.requests.push_back(failed);
  EXPECT_EQ(run.completed(), 2);
  EXPECT_EQ(run.tokens_out(), 6);
  EXPECT_EQ(run.tokens_in(), 14);
  EXPECT_EQ(run.ttft(), (std::vector<double>{1, 2}));
  EXPECT_EQ(run.tpot(), (std::vector<double>{0.5}));  // one token has no time after the first
  EXPECT_EQ(run.e2el(), (std::vector<double>{3, 2}));
  EXPECT_EQ(mean({1, 2, 6}), 3);
  EXPECT_EQ(standard_deviation({1, 3}), 1);
}

TEST(Ratio, NeedsEveryRequestWithItsLengthAndEqualInputs) {
  const LoadRun run = good_run();
  EXPECT_EQ(why_no_ratio(run, run), "");
  LoadRun other = run;
  other.requests[1].ok = false;
  EXPECT_EQ(why_no_ratio(run, other), "second: 1 of 2 requests failed");
  EXPECT_EQ(why_no_ratio(other, run), "first: 1 of 2 requests failed");
  other = run;
  other.requests[0].tokens = 4;
  EXPECT_EQ(why_no_ratio(run, other),
            "second: 1 of 2 requests have another length than was asked for");
  other = run;
  other.prompt_hash = "b";
  EXPECT_EQ(why_no_ratio(run, other), "the prompts differ");
  other = run;
  other.requests[1].prompt_tokens = 8;
  EXPECT_EQ(why_no_ratio(run, other), "request 1: the servers counted 7 and 8 prompt tokens");
  EXPECT_EQ(why_no_ratio(LoadRun{}, run), "first: no requests");
}

TEST(Ratio, MedianAndRange) {
  const Spread spread = spread_of({1.02583, 1.15008, 1.02530});
  EXPECT_EQ(spread.median, 1.02583);
  EXPECT_EQ(spread.low, 1.02530);
  EXPECT_EQ(spread.high, 1.15008);
  EXPECT_EQ(spread.count, 3);
}

TEST(Rounds, FirstAndSecondTakeTurns) {
  EXPECT_FALSE(second_goes_first(0));
  EXPECT_TRUE(second_goes_first(1));
  EXPECT_FALSE(second_goes_first(2));
}

TEST(Disturbed, NamesTheArmAndTheReason) {
  EXPECT_TRUE(disturbances("A", good_run()).empty());
  LoadRun run = good_run();
  run.server.preemptions = 3;
  EXPECT_EQ(disturbances("A", run), (std::vector<std::string>{"A: 3 preemptions"}));
  run = good_run();
  run.server.requests = 4;
  EXPECT_EQ(disturbances("B", run),
            (std::vector<std::string>{"B: 2 requests of others ended meanwhile"}));
  run = good_run();
  run.server.late_kernels = {"cpu/mha"};
  EXPECT_EQ(disturbances("A", run).size(), 1u);
  run = good_run();
  run.server.restarted = true;
  EXPECT_EQ(disturbances("A", run), (std::vector<std::string>{"A: the server restarted"}));
  run = good_run();
  run.requests[0].late = 0.02;
  EXPECT_TRUE(disturbances("A", run).empty());  // nothing was due at a time of its own
  run.paced = true;
  EXPECT_EQ(disturbances("A", run),
            (std::vector<std::string>{"A: 1 requests were sent more than 10 ms late"}));
  run = good_run();
  run.server.prefix_hits = 64;
  EXPECT_EQ(pair_disturbances(good_run(), run),
            (std::vector<std::string>{"prefix cache hits differ: 0 and 64 tokens"}));
  EXPECT_TRUE(pair_disturbances(run, run).empty());
}

TEST(RandomPrompts, RepeatWithTheirSeedAndStayInBounds) {
  RandomDataset dataset = {.num_prompts = 50,
                           .input_len = 20,
                           .output_len = 10,
                           .prefix_len = 3,
                           .range_ratio = 0.5,
                           .vocab_size = 100,
                           .seed = 42};
  const std::vector<LoadPrompt> prompts = random_prompts(dataset);
  EXPECT_EQ(hash_of(prompts), hash_of(random_prompts(dataset)));
  ASSERT_EQ(prompts.size(), 50u);
  bool varies = false;
  for (const LoadPrompt& prompt : prompts) {
    EXPECT_GE(prompt.ids.size(), 13u);
    EXPECT_LE(prompt.ids.size(), 33u);
    EXPECT_GE(prompt.max_tokens, 5);
    EXPECT_LE(prompt.max_tokens, 15);
    EXPECT_TRUE(std::equal(prompt.ids.begin(), prompt.ids.begin() + 3, prompts[0].ids.begin()));
    for (const int32_t id : prompt.ids) {
      EXPECT_TRUE(id >= 0 && id < 100);
    }
    varies = varies || prompt.ids.size() != prompts[0].ids.size();
  }
  EXPECT_TRUE(varies);
  dataset.seed = 43;
  EXPECT_NE(hash_of(prompts), hash_of(random_prompts(dataset)));
  dataset.range_ratio = 0;
  for (const LoadPrompt& prompt : random_prompts(dataset)) {
    EXPECT_EQ(prompt.ids.size(), 23u);
    EXPECT_EQ(prompt.max_tokens, 10);
  }
}

TEST(JsonlPrompts, TextsIdsAndWhatIsWrong) {
  const std::string path = testing::TempDir() + "bench_stats_test.jsonl";
  const auto load = [&](const char* text, int64_t count) {
    std::ofstream(path) << text;
    return jsonl_prompts(path, count, 9, /*shuffle=*/false, 0);
  };
  const auto prompts = load("{\"prompt\": \"a\"}\n\n{\"prompt\": [1, 2], \"output_len\": 4}\n", 3);
  ASSERT_TRUE(prompts.ok()) << prompts.status().message();
  ASSERT_EQ(prompts->size(), 3u);
  EXPECT_EQ((*prompts)[0].text, "a");
  EXPECT_EQ((*prompts)[0].max_tokens, 9);
  EXPECT_EQ((*prompts)[1].ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ((*prompts)[1].max_tokens, 4);
  EXPECT_EQ((*prompts)[2].text, "a");  // a short file begins again
  for (const char* bad : {"", "\n", "[]", "{\"prompt\": 3}", "{\"prompt\": [1.5]}",
                          "{\"prompt\": []}", "{\"prompt\": \"a\", \"output_len\": 0}", "{"}) {
    EXPECT_FALSE(load(bad, 1).ok()) << bad;
  }
  std::remove(path.c_str());
  EXPECT_FALSE(jsonl_prompts(path, 1, 9, false, 0).ok());
}

TEST(ArrivalTimes, HaveTheRate) {
  EXPECT_TRUE(arrival_times(5, std::numeric_limits<double>::infinity(), 1, 0).empty());
  for (const double burstiness : {0.5, 1.0, 100.0}) {
    const std::vector<double> due = arrival_times(4001, 20, burstiness, 1);
    EXPECT_EQ(due.front(), 0);
    EXPECT_NEAR(due.back() / 4000, 0.05, 0.005) << burstiness;
    EXPECT_EQ(due, arrival_times(4001, 20, burstiness, 1));
  }
}

TEST(Metrics, WhateverThePrefixAndTheLabels) {
  const ServerCounters before = parse_metrics(
      "# HELP x y\nvllm:num_preemptions_total{engine=\"0\",model_name=\"a b}\"} 1.0\n"
      "vllm:num_preemptions_total{engine=\"1\"} 2.0\nplain 5\nbroken\n");
  EXPECT_TRUE(before.known);
  EXPECT_EQ(before.values.at("num_preemptions_total"), 3);
  EXPECT_EQ(before.values.at("plain"), 5);
  EXPECT_FALSE(parse_metrics("<html>").known);
  const ServerCounters after = parse_metrics(
      "lacuna:num_preemptions_total{model_name=\"m\"} 4\n"
      "lacuna:request_success_total{finished_reason=\"stop\"} 2\n"
      "lacuna:request_success_total{finished_reason=\"length\"} 3\n"
      "lacuna:kernel_calls_total{model_name=\"m\",kernel=\"cpu/mha\"} 11\n");
  const ServerSide side = server_side(before, after);
  EXPECT_TRUE(side.known);
  EXPECT_EQ(side.preemptions, 1);
  EXPECT_EQ(side.requests, 5);
  EXPECT_EQ(side.kernel_calls.at("cpu/mha"), 11);
  EXPECT_EQ(side.late_kernels, (std::vector<std::string>{"cpu/mha"}));
  EXPECT_FALSE(side.restarted);
  EXPECT_TRUE(server_side(after, before).restarted);
  EXPECT_FALSE(server_side({}, after).known);
}

}  // namespace
}  // namespace lacuna::cli
