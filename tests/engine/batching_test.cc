// Many sequences at a time: answers do not depend on who else runs, on what the prefix cache held,
// or on preemption.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "engine/nano.h"
#include "lacuna/engine.h"

namespace lacuna {
namespace {

int64_t submit(Engine& engine, const std::string& prompt, int64_t max_tokens = 12) {
  Request request;
  const auto tokens = engine.encode(prompt);
  EXPECT_TRUE(tokens.ok());
  request.prompt = *tokens;
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  const auto id = engine.submit(request);
  EXPECT_TRUE(id.ok()) << id.status().message();
  return id.ok() ? *id : -1;
}

EngineOptions batching_options(int64_t sequences) {
  EngineOptions options = nano_options();
  options.max_num_seqs = sequences;
  options.max_model_len = 2048;
  options.max_num_batched_tokens = 256;
  return options;
}

TEST(Batching, CopiesOfAPromptGiveOneAnswer) {
  const auto engine = make_engine(batching_options(64));
  ASSERT_NE(engine, nullptr);
  std::vector<int64_t> ids;
  for (int copy = 0; copy < 64; ++copy) {
    ids.push_back(submit(*engine, prompt_about(copy % 8, 10 + 9 * (copy % 8))));
  }
  const Answers together = run_all(*engine);
  const auto alone = make_engine(batching_options(1));
  for (int which = 0; which < 8; ++which) {
    const int64_t id = submit(*alone, prompt_about(which, 10 + 9 * which));
    const Answers answer = run_all(*alone);
    for (int copy = which; copy < 64; copy += 8) {
      EXPECT_EQ(together.tokens.at(ids[copy]), answer.tokens.at(id))
          << "prompt " << which << " copy " << copy;
    }
  }
  EXPECT_EQ(engine->counters().blocks_used, 0);
}

TEST(Batching, TheRightFactIsRecalledInACrowd) {
  const auto engine = make_engine(batching_options(16));
  std::map<int64_t, std::string> expected;
  for (int which = 0; which < 16; ++which) {
    const int facts = 20 + 5 * which;
    const int i = facts / 3;
    expected[submit(*engine, prompt_about(which, facts), 3)] =
        std::to_string(10 + (which * 13 + i * 17) % 90) + "\n";
  }
  const Answers answers = run_all(*engine);
  for (const auto& [id, text] : expected) {
    EXPECT_EQ(answers.text.at(id), text) << "request " << id;
  }
}

TEST(Batching, ASharedBeginningIsReadFromTheCacheAndChangesNothing) {
  EngineOptions options = batching_options(4);
  const std::string prompt = prompt_about(3, 60);
  const auto engine = make_engine(options);
  const int64_t first = submit(*engine, prompt);
  const Answers before = run_all(*engine);
  EXPECT_EQ(before.cached.at(first), 0);
  const int64_t second = submit(*engine, prompt);
  const int64_t longer = submit(*engine, prompt + "11\n?");
  const Answers after = run_all(*engine);
  EXPECT_EQ(after.tokens.at(second), before.tokens.at(first));
  const int64_t length = static_cast<int64_t>(engine->encode(prompt)->size());
  EXPECT_EQ(after.cached.at(second), (length - 1) / options.block_size * options.block_size);
  EXPECT_GE(after.cached.at(longer), (length - 1) / options.block_size * options.block_size);
  EXPECT_GT(engine->counters().prefix_hits, 0);

  options.enable_prefix_caching = false;
  const auto without = make_engine(options);
  const int64_t a = submit(*without, prompt + "11\n?");
  const Answers uncached = run_all(*without);
  EXPECT_EQ(uncached.tokens.at(a), after.tokens.at(longer));
  EXPECT_EQ(without->counters().prefix_queries, 0);

  options.enable_prefix_caching = true;
  options.prefix_salt = 5;
  const auto salted = make_engine(options);
  EXPECT_NE(salted, nullptr);
}

TEST(Batching, PreemptedSequencesGiveTheSameAnswer) {
  EngineOptions options = batching_options(8);
  options.block_size = 16;
  const auto roomy = make_engine(options);
  options.kv_cache_tokens = 1024;  // far less than eight sequences want
  options.enable_prefix_caching = false;
  const auto tight = make_engine(options);
  std::vector<int64_t> roomy_ids;
  std::vector<int64_t> tight_ids;
  for (int which = 0; which < 8; ++which) {
    roomy_ids.push_back(submit(*roomy, prompt_about(which, 24), 120));
    tight_ids.push_back(submit(*tight, prompt_about(which, 24), 120));
  }
  const Answers expected = run_all(*roomy);
  const Answers answers = run_all(*tight);
  EXPECT_EQ(roomy->counters().num_preemptions, 0);
  EXPECT_GT(tight->counters().num_preemptions, 0);
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(answers.tokens.at(tight_ids[i]), expected.tokens.at(roomy_ids[i])) << i;
    EXPECT_EQ(answers.finish.at(tight_ids[i]), FinishReason::kLength);
  }
  EXPECT_EQ(tight->counters().blocks_used, 0);
}

TEST(Batching, ASequenceThatFillsTheCacheEndsAndOthersGoOn) {
  EngineOptions options = batching_options(2);
  options.block_size = 16;
  options.kv_cache_tokens = 256;
  const auto engine = make_engine(options);
  const int64_t greedy = submit(*engine, prompt_about(1, 26), 1000);
  const int64_t modest = submit(*engine, prompt_about(2, 4), 5);
  const Answers answers = run_all(*engine);
  EXPECT_EQ(answers.finish.at(greedy), FinishReason::kLength);
  EXPECT_LE(answers.tokens.at(greedy).size(), 256u);
  EXPECT_EQ(answers.tokens.at(modest).size(), 5u);
  EXPECT_EQ(engine->counters().blocks_used, 0);
}

TEST(Batching, MixedStepsUseBothLanesAndCountThem) {
  EngineOptions options = batching_options(4);
  const auto engine = make_engine(options);
  submit(*engine, prompt_about(1, 40), 30);  // decodes beyond index_topk
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(engine->step().ok());
  }
  submit(*engine, prompt_about(2, 8),
         4);  // a prompt that fits index_topk: dense lane beside decodes
  run_all(*engine);
  const EngineCounters counters = engine->counters();
  EXPECT_GT(counters.rows_by_lane[0], 0);
  EXPECT_GT(counters.rows_by_lane[1], 0);
  EXPECT_LT(counters.keys_read, counters.keys_visible);
}

TEST(Batching, CancelledAtAnyPointLeavesNothingBehind) {
  const auto engine = make_engine(batching_options(4));
  std::vector<int64_t> ids;
  for (int which = 0; which < 12; ++which) {
    ids.push_back(submit(*engine, prompt_about(which, 12 + 3 * which), 30));
  }
  for (size_t step = 0; engine->has_work(); ++step) {
    ASSERT_TRUE(engine->step().ok());
    if (step % 3 == 2 && step / 3 < ids.size()) {
      engine->cancel(ids[(step / 3 * 5) % ids.size()]);
    }
  }
  EXPECT_EQ(engine->counters().blocks_used, 0);
  EXPECT_EQ(engine->counters().num_running, 0);
  EXPECT_EQ(engine->counters().num_waiting, 0);
}

TEST(Batching, SeededSamplesDoNotDependOnTheCrowd) {
  const auto crowd = make_engine(batching_options(8));
  const auto alone = make_engine(batching_options(1));
  const auto request_of = [&](Engine& engine, int which) {
    Request request;
    request.prompt = *engine.encode(prompt_about(which, 15));
    request.sampling.temperature = 1.0;
    request.sampling.seed = 100 + static_cast<uint64_t>(which);
    request.sampling.max_tokens = 20;
    request.sampling.ignore_eos = true;
    return *engine.submit(request);
  };
  std::vector<int64_t> ids;
  for (int which = 0; which < 8; ++which) {
    ids.push_back(request_of(*crowd, which));
  }
  const Answers together = run_all(*crowd);
  for (int which = 0; which < 8; ++which) {
    const int64_t id = request_of(*alone, which);
    EXPECT_EQ(run_all(*alone).tokens.at(id), together.tokens.at(ids[which])) << which;
  }
}

}  // namespace
}  // namespace lacuna
