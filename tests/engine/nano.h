// What the engine tests share: the small trained model, runs of one request, and text to ask about.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "lacuna/engine.h"
#include "ops/backend.h"

namespace lacuna {

inline std::string nano_dir() { return std::string(LACUNA_SOURCE_DIR) + "/models/dsa-nano"; }

// dsa-nano's index_topk, layers, and layers with an indexer (0 and 2).
inline constexpr int64_t kNanoTopk = 128;
inline constexpr int64_t kNanoLayers = 4;
inline constexpr int64_t kNanoLeaders = 2;

inline Context one_thread() {
  Result<Context> context = Context::create({.num_threads = 1});
  EXPECT_TRUE(context.ok());
  return std::move(context).value();
}

inline const Backend& cpu_backend(const Context& context) {
  for (const Backend* backend : context.state().backends) {
    if (std::string_view(backend->name) == "cpu") {
      return *backend;
    }
  }
  LACUNA_CHECK(false);
}

// float32, so that runs may be compared closely; a short context, so that creation is cheap.
inline EngineOptions nano_options() {
  EngineOptions options;
  options.model_dir = nano_dir();
  options.device = "cpu";
  options.dtype = DType::kFloat32;
  options.max_model_len = 1024;
  return options;
}

inline std::unique_ptr<Engine> make_engine(const EngineOptions& options,
                                           const Context& context = one_thread()) {
  Result<std::unique_ptr<Engine>> engine = Engine::create(context, options);
  EXPECT_TRUE(engine.ok()) << engine.status().message();
  return engine.ok() ? std::move(engine).value() : nullptr;
}

inline std::vector<int32_t> ids_of(const std::string& text) {
  return {text.begin(), text.end()};  // dsa-nano's tokens are bytes; ASCII only
}

// Letters that mean nothing to the model: context that it must look past.
inline std::string filler(int64_t length, uint32_t seed = 1) {
  std::string text;
  for (int64_t i = 0; i < length; ++i) {
    seed = seed * 1664525u + 1013904223u;
    text += i % 8 == 7 ? '\n' : static_cast<char>('a' + (seed >> 24) % 26);
  }
  return text;
}

// A prompt of the evaluation's kind: facts, then a question about one of them. `answer`, when
// given, receives what is asked for.
inline std::string prompt_about(int which, int num_facts, std::string* answer = nullptr) {
  std::string text;
  const int asked = num_facts / 3;
  for (int i = 0; i < num_facts; ++i) {
    const int n = (which * 31 + i * 7) % 676;
    const std::string value = std::to_string(10 + (which * 13 + i * 17) % 90);
    text += {static_cast<char>('a' + n / 26), static_cast<char>('a' + n % 26), 'x', '='};
    text += value + ";\n";
    if (i == asked && answer != nullptr) {
      *answer = value;
    }
  }
  const int n = (which * 31 + asked * 7) % 676;
  return text + '?' + static_cast<char>('a' + n / 26) + static_cast<char>('a' + n % 26) + "x:";
}

struct Answer {
  int64_t id = 0;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::string text;
  FinishReason finish = FinishReason::kNone;
  std::vector<TokenEvent> events;
};

inline Answer run(Engine& engine, Request request) {
  Answer answer;
  const Result<int64_t> id = engine.submit(std::move(request));
  EXPECT_TRUE(id.ok()) << id.status().message();
  if (!id.ok()) {
    return answer;
  }
  answer.id = *id;
  while (engine.has_work()) {
    const Result<std::vector<TokenEvent>> events = engine.step();
    EXPECT_TRUE(events.ok()) << events.status().message();
    if (!events.ok()) {
      break;
    }
    for (const TokenEvent& event : *events) {
      EXPECT_EQ(event.request_id, answer.id);
      EXPECT_EQ(answer.finish, FinishReason::kNone) << "an event after the last";
      if (event.token_id >= 0) {
        answer.tokens.push_back(event.token_id);
        answer.logprobs.push_back(event.logprob);
      }
      answer.text += event.text;
      answer.finish = event.finish;
      answer.events.push_back(event);
    }
  }
  return answer;
}

// What many requests were answered, by their ids.
struct Answers {
  std::map<int64_t, std::string> text;
  std::map<int64_t, std::vector<int32_t>> tokens;
  std::map<int64_t, std::vector<float>> logprobs;
  std::map<int64_t, int64_t> cached;
  std::map<int64_t, FinishReason> finish;
};

// Steps until all submitted requests are done.
inline Answers run_all(Engine& engine) {
  Answers answers;
  while (engine.has_work()) {
    const Result<std::vector<TokenEvent>> events = engine.step();
    EXPECT_TRUE(events.ok()) << events.status().message();
    if (!events.ok()) {
      break;
    }
    for (const TokenEvent& event : *events) {
      answers.text[event.request_id] += event.text;
      if (event.token_id >= 0) {
        answers.tokens[event.request_id].push_back(event.token_id);
        answers.logprobs[event.request_id].push_back(event.logprob);
      }
      answers.cached[event.request_id] += event.step.cached_tokens;
      answers.finish[event.request_id] = event.finish;
    }
  }
  return answers;
}

}  // namespace lacuna
