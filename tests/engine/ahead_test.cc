// Steps that are launched before the tokens of the one before them are known: the answers are those
// of an engine that waits, and nothing is lost, kept or waited for on the way. On a device that
// mirrors the CPU, so that this is tested where there is no GPU.
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "engine/mirror_device.h"
#include "engine/nano.h"
#include "engine/step_graphs.h"
#include "lacuna/engine.h"

namespace lacuna {
namespace {

EngineOptions ahead_options(int64_t sequences) {
  EngineOptions options = nano_options();
  options.device = "cuda";
  options.max_num_seqs = sequences;
  options.max_num_batched_tokens = 64;
  options.block_size = 16;
  return options;
}

// Requests of every kind that treats the last token differently.
Request request_of(int which) {
  Request request;
  request.prompt = ids_of(prompt_about(which, 1 + which * 5 % 23));
  SamplingParams& sampling = request.sampling;
  sampling.max_tokens = 1 + which * 7 % 19;
  sampling.ignore_eos = which % 4 != 0;
  sampling.seed = static_cast<uint64_t>(which);
  switch (which % 8) {
    case 1:
      sampling.temperature = 1;
      break;
    case 2:
      sampling.stop = {"\n"};
      break;
    case 3:
      sampling.repetition_penalty = 1.3;
      sampling.presence_penalty = 0.5;
      break;
    case 4:
      request.forced_tokens = ids_of("forced to say this");
      break;
    case 5:
      sampling.top_logprobs = 3;
      sampling.temperature = 0.7;
      sampling.top_p = 0.9;
      break;
    case 6:
      sampling.logit_bias = {{'7', 2.0f}, {'\n', -100.0f}};
      sampling.min_tokens = std::min<int64_t>(3, sampling.max_tokens);
      break;
    case 7:
      request.prompt_logprobs = true;
      request.prompt_top_logprobs = 2;
      break;
    default:
      break;
  }
  return request;
}

struct Log {
  std::map<int64_t, std::vector<int32_t>> tokens;
  std::map<int64_t, std::vector<float>> logprobs;
  std::map<int64_t, std::string> text;
  std::map<int64_t, FinishReason> finish;
  std::map<int64_t, std::vector<float>> prompt_logprobs;
  std::map<int64_t, size_t> top;
};

void take_events(Engine& engine, Log* log) {
  const auto events = engine.step();
  ASSERT_TRUE(events.ok()) << events.status().message();
  for (const TokenEvent& event : *events) {
    const int64_t id = event.request_id;
    ASSERT_EQ(log->finish.count(id), 0u) << "an event of " << id << " after its last";
    if (event.token_id >= 0) {
      log->tokens[id].push_back(event.token_id);
      log->logprobs[id].push_back(event.logprob);
      log->top[id] += event.top_logprobs.size();
    }
    log->text[id] += event.text;
    if (event.finish != FinishReason::kNone) {
      log->finish[id] = event.finish;
      log->prompt_logprobs[id] = engine.take_record(id).prompt_logprobs;
    }
  }
}

// Submits `count` requests as the steps go, and cancels some if asked.
Log drive(Engine& engine, int count, int arrivals_a_step, const std::set<int>& cancelled = {}) {
  Log log;
  int next = 0;
  for (int step = 0; next < count || engine.has_work(); ++step) {
    for (int i = 0; i < arrivals_a_step && next < count; ++i) {
      const auto id = engine.submit(request_of(next++));
      EXPECT_TRUE(id.ok()) << id.status().message();
    }
    if (cancelled.count(step) > 0) {
      engine.cancel(1 + step % count);
    }
    take_events(engine, &log);
    if (::testing::Test::HasFatalFailure() || step > 5000) {
      ADD_FAILURE() << "stopped at step " << step;
      break;
    }
  }
  EXPECT_EQ(engine.counters().blocks_used, 0);
  EXPECT_EQ(engine.counters().num_running, 0);
  return log;
}

void expect_same(const Log& got, const Log& want) {
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.logprobs, want.logprobs);
  EXPECT_EQ(got.text, want.text);
  EXPECT_EQ(got.finish, want.finish);
  EXPECT_EQ(got.prompt_logprobs, want.prompt_logprobs);
  EXPECT_EQ(got.top, want.top);
}

// Who runs with whom differs when tokens are known later, so the bits may differ with the shapes of
// the steps; tokens may not.
void expect_same_answers(const Log& got, const Log& want) {
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.text, want.text);
  EXPECT_EQ(got.finish, want.finish);
  for (const auto& [id, logprobs] : want.logprobs) {
    const std::vector<float>& other = got.logprobs.at(id);
    ASSERT_EQ(other.size(), logprobs.size()) << id;
    for (size_t i = 0; i < logprobs.size(); ++i) {
      EXPECT_NEAR(other[i], logprobs[i], 2e-4) << "request " << id << " token " << i;
    }
  }
}

TEST(Ahead, AnswersAreThoseOfAnEngineThatWaits) {
  const auto ahead = make_engine(ahead_options(6), mirror_context());
  EngineOptions waits = ahead_options(6);
  waits.async_scheduling = false;
  const auto waiting = make_engine(waits, mirror_context());
  EngineOptions host = ahead_options(6);
  host.device = "cpu";
  const auto cpu = make_engine(host);
  ASSERT_TRUE(ahead != nullptr && waiting != nullptr && cpu != nullptr);
  const Log want = drive(*cpu, 40, 2);
  expect_same_answers(drive(*waiting, 40, 2), want);
  expect_same_answers(drive(*ahead, 40, 2), want);
  EXPECT_EQ(waiting->counters().ahead_steps, 0);
  EXPECT_GT(ahead->counters().ahead_steps, 10);
  EXPECT_GT(ahead->counters().padded_rows, 0);
  EXPECT_EQ(cpu->counters().ahead_steps, 0);
  EXPECT_EQ(cpu->counters().padded_rows, 0);
  EXPECT_TRUE(cpu->counters().eager_steps.empty());
  EXPECT_EQ(ahead->counters().generated_tokens, cpu->counters().generated_tokens);
}

// One sequence at a time has the same steps either way.
TEST(Ahead, AloneTheBitsAreTheSame) {
  const auto ahead = make_engine(ahead_options(1), mirror_context());
  EngineOptions waits = ahead_options(1);
  waits.async_scheduling = false;
  const auto waiting = make_engine(waits, mirror_context());
  expect_same(drive(*ahead, 24, 1), drive(*waiting, 24, 1));
}

TEST(Ahead, TokensComeOneStepLater) {
  const auto engine = make_engine(ahead_options(1), mirror_context());
  Request request;
  request.prompt = ids_of("#12+34=");
  request.sampling.max_tokens = 3;
  request.sampling.ignore_eos = true;
  ASSERT_TRUE(engine->submit(request).ok());
  std::vector<size_t> events;
  while (engine->has_work()) {
    const auto step = engine->step();
    ASSERT_TRUE(step.ok());
    events.push_back(step->size());
  }
  // Three steps are launched; the last token is read when there is nothing left to launch.
  EXPECT_EQ(events, (std::vector<size_t>{0, 1, 1, 1}));
  EXPECT_EQ(engine->counters().steps, 3);
}

TEST(Ahead, ASequenceThatStopsHasOneSurplusRow) {
  const auto engine = make_engine(ahead_options(1), mirror_context());
  Request request;
  request.prompt = ids_of("#12+34=");
  request.sampling.max_tokens = 100;
  request.sampling.stop = {"\n"};
  const Answer answer = run(*engine, request);
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  EXPECT_EQ(answer.text, "046");  // dsa-nano answers in three digits
  EXPECT_EQ(engine->counters().steps, static_cast<int64_t>(answer.tokens.size()) + 1);
  EXPECT_EQ(engine->counters().generated_tokens, static_cast<int64_t>(answer.tokens.size()));
  EXPECT_EQ(engine->counters().blocks_used, 0);
}

TEST(Ahead, PreemptionLosesNoToken) {
  EngineOptions roomy = ahead_options(6);
  roomy.enable_prefix_caching = false;
  EngineOptions tight = roomy;
  tight.kv_cache_tokens = 320;
  const auto want_engine = make_engine(roomy, mirror_context());
  const auto engine = make_engine(tight, mirror_context());
  const Log want = drive(*want_engine, 32, 6);
  const Log got = drive(*engine, 32, 6);
  EXPECT_EQ(want_engine->counters().num_preemptions, 0);
  EXPECT_GT(engine->counters().num_preemptions, 0);
  expect_same_answers(got, want);
}

TEST(Ahead, CancelledAtAnyPointLeavesNothingBehind) {
  for (int offset = 0; offset < 4; ++offset) {
    const auto engine = make_engine(ahead_options(4), mirror_context());
    std::set<int> steps;
    for (int step = offset; step < 60; step += 4) {
      steps.insert(step);
    }
    const Log log = drive(*engine, 24, 3, steps);
    EXPECT_EQ(log.finish.size(), 24u);
    int cancelled = 0;
    for (const auto& [id, finish] : log.finish) {
      cancelled += finish == FinishReason::kCancelled ? 1 : 0;
    }
    EXPECT_GT(cancelled, 0);
  }
}

TEST(Ahead, APrefixIsSharedOnceItIsKnown) {
  EngineOptions options = ahead_options(2);
  const auto engine = make_engine(options, mirror_context());
  const std::vector<int32_t> prompt = ids_of(prompt_about(3, 12));
  Request request;
  request.prompt = prompt;
  request.sampling.max_tokens = 40;
  request.sampling.ignore_eos = true;
  const Answer first = run(*engine, request);
  // A conversation that goes on: prompt and answer are the next prompt's beginning.
  request.prompt.insert(request.prompt.end(), first.tokens.begin(), first.tokens.end());
  request.sampling.max_tokens = 4;
  const Answer second = run(*engine, request);
  const int64_t computed = static_cast<int64_t>(request.prompt.size()) - 1;
  int64_t cached = 0;
  for (const TokenEvent& event : second.events) {
    cached += event.step.cached_tokens;
  }
  EXPECT_EQ(cached, computed / options.block_size * options.block_size);
  const auto fresh = make_engine(options, mirror_context());
  EXPECT_EQ(run(*fresh, request).tokens, second.tokens);
}

TEST(CheckSync, StepsOfEveryKindRunWithoutAWait) {
  EngineOptions options = ahead_options(6);
  options.check_sync = true;
  const auto engine = make_engine(options, mirror_context());
  ASSERT_NE(engine, nullptr);
  const int64_t allocations = mirror_counts.allocations;
  const int64_t synchronizations = mirror_counts.synchronizations;
  int next = 0;
  Log log;
  for (int step = 0; next < 40 || engine->has_work(); ++step) {
    for (int i = 0; i < 2 && next < 40; ++i, ++next) {
      if (next % 8 != 7) {
        ASSERT_TRUE(engine->submit(request_of(next)).ok());
      }
    }
    take_events(*engine, &log);
    ASSERT_FALSE(HasFatalFailure());
  }
  EXPECT_GT(engine->counters().eager_steps["ragged"], 0);
  EXPECT_EQ(mirror_counts.allocations, allocations);
  EXPECT_EQ(mirror_counts.synchronizations, synchronizations);
  EXPECT_EQ(engine->counters().device_waits, 0);
}

TEST(CheckSync, WhatOnlyTheHostCanRecordIsRefused) {
  EngineOptions options = ahead_options(2);
  options.check_sync = true;
  const auto engine = make_engine(options, mirror_context());
  Request request;
  request.prompt = ids_of("abc");
  request.prompt_logprobs = true;
  EXPECT_EQ(engine->submit(request).status().code(), StatusCode::kInvalidArgument);
  request.prompt_logprobs = false;
  request.record_selection = true;
  const Status status = engine->submit(request).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("record_selection"), std::string::npos) << status.message();
  // A tap waits inside the step: the step fails, its sequence is gone, and the engine goes on.
  request.record_selection = false;
  engine->set_tap([](std::string_view, int, const ConstTensorView&) {});
  ASSERT_TRUE(engine->submit(request).ok());
  const auto failed = engine->step();
  ASSERT_FALSE(failed.ok());
  EXPECT_NE(failed.status().message().find("synchronize"), std::string::npos);
  EXPECT_FALSE(engine->has_work());
  EXPECT_EQ(engine->counters().blocks_used, 0);
  engine->set_tap({});
  EXPECT_EQ(run(*engine, request).finish, FinishReason::kLength);
  options.profile = true;
  EXPECT_FALSE(Engine::create(mirror_context(), options).ok());
}

TEST(Recorded, TapsAndRecordsSeeTheSameOnADevice) {
  const auto lists_of = [](const EngineOptions& options, const Context& context) {
    const auto engine = make_engine(options, context);
    Request request;
    request.prompt = ids_of(prompt_about(5, 40));
    request.record_selection = true;
    request.sampling.max_tokens = 6;
    request.sampling.ignore_eos = true;
    const Answer answer = run(*engine, request);
    return std::make_pair(answer.tokens, engine->take_record(answer.id).selected_keys);
  };
  EngineOptions host = ahead_options(1);
  host.device = "cpu";
  const auto want = lists_of(host, one_thread());
  const auto got = lists_of(ahead_options(1), mirror_context());
  EXPECT_EQ(got.first, want.first);
  EXPECT_EQ(got.second, want.second);
  ASSERT_FALSE(got.second.empty());
}

TEST(Selection, ListsThatTheHostMakesReachTheDevice) {
  for (const auto kind : {SelectionSource::Kind::kWindow, SelectionSource::Kind::kRandom,
                          SelectionSource::Kind::kDense}) {
    EngineOptions options = ahead_options(2);
    options.selection.kind = kind;
    options.selection.seed = 3;
    const auto engine = make_engine(options, mirror_context());
    ASSERT_NE(engine, nullptr);
    options.device = "cpu";
    const auto cpu = make_engine(options);
    Request request;
    request.prompt = ids_of(prompt_about(2, 40));
    request.sampling.max_tokens = 8;
    request.sampling.ignore_eos = true;
    EXPECT_EQ(run(*engine, request).tokens, run(*cpu, request).tokens);
    EXPECT_GT(engine->counters().eager_steps["selection"], 0);
  }
}

TEST(Groups, EditsThatDoNotFitTogetherAreDrawnInGroups) {
  // Edits of all 256 tokens in each row: a quarter of those of six rows fit together.
  std::vector<std::vector<int32_t>> want;
  for (const int64_t sequences : {int64_t{1}, int64_t{6}}) {
    const auto engine = make_engine(ahead_options(sequences), mirror_context());
    std::map<int64_t, std::vector<int32_t>> tokens;
    for (int which = 0; which < 6; ++which) {
      Request request;
      request.prompt = ids_of(prompt_about(which, 6));
      request.sampling.repetition_penalty = 1.2;
      request.sampling.max_tokens = 6;
      request.sampling.ignore_eos = true;
      for (int32_t id = 0; id < 256; ++id) {
        request.sampling.logit_bias[id] = static_cast<float>(id % 5) * 0.1f;
      }
      ASSERT_TRUE(engine->submit(request).ok());
    }
    while (engine->has_work()) {
      const auto events = engine->step();
      ASSERT_TRUE(events.ok()) << events.status().message();
      for (const TokenEvent& event : *events) {
        if (event.token_id >= 0) {
          tokens[event.request_id].push_back(event.token_id);
        }
      }
    }
    std::vector<std::vector<int32_t>> got;
    for (auto& [id, list] : tokens) {
      got.push_back(std::move(list));
    }
    if (want.empty()) {
      want = got;
    }
    EXPECT_EQ(got, want);
  }
}

TEST(PaddedRequests, AscendToTheLargestStep) {
  for (const int64_t query_len : {1, 2, 3, 4}) {
    for (const int64_t requests : {1, 2, 7, 64, 100, 256, 513, 4096}) {
      for (const int64_t rows : {1, 3, 8, 64, 1024, 8192}) {
        const std::vector<int64_t> sizes = padded_requests(query_len, requests, rows);
        const int64_t largest = std::min({requests, rows / query_len, int64_t{512}});
        ASSERT_EQ(sizes.empty(), largest == 0);
        if (sizes.empty()) {
          continue;
        }
        EXPECT_EQ(sizes.back(), largest);
        EXPECT_EQ(std::set<int64_t>(sizes.begin(), sizes.end()).size(), sizes.size());
        EXPECT_TRUE(std::is_sorted(sizes.begin(), sizes.end()));
        EXPECT_GT(sizes.front(), 0);
      }
    }
  }
}

TEST(Device, WhatIsNotThereIsNamed) {
  const auto status_of = [](const std::string& device, const Context& context) {
    EngineOptions options = nano_options();
    options.device = device;
    const auto engine = Engine::create(context, options);
    return engine.ok() ? ok_status() : engine.status();
  };
  EXPECT_NE(status_of("tpu", one_thread()).message().find("expected cpu, cuda or auto"),
            std::string::npos);
  const Result<Context> cpu_only = Context::create({.num_threads = 1, .use_cuda = false});
  ASSERT_TRUE(cpu_only.ok());
  const Status missing = status_of("cuda", *cpu_only);
  EXPECT_EQ(missing.code(), StatusCode::kUnsupported);
  EXPECT_NE(missing.message().find("no usable GPU"), std::string::npos) << missing.message();
  EXPECT_TRUE(status_of("auto", *cpu_only).ok());
  EXPECT_TRUE(status_of("auto", mirror_context()).ok());
  EXPECT_EQ(status_of("cpu", mirror_context()).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace lacuna
