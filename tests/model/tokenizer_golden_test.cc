// The tokenizer against ids of Hugging Face tokenizers: DeepSeek-V3's vocabulary (when the data
// folder is there), the regular expression of GLM, and every behaviour of a pre-tokenizer.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>

#include "model/tokenizer.h"

namespace lacuna {
namespace {

using nlohmann::json;
using Ids = std::vector<int32_t>;

const json& golden() {
  static const json all = [] {
    std::ifstream in(std::string(LACUNA_SOURCE_DIR) + "/tests/model/tokenizer_golden.json");
    return json::parse(in);
  }();
  return all;
}

// The golden file lists a vocabulary in the order of its ids.
json tokenizer_file(json file) {
  json vocab;
  for (const json& entry : file["model"]["vocab"]) {
    vocab[entry.get<std::string>()] = vocab.size();
  }
  file["model"]["vocab"] = vocab;
  return file;
}

Tokenizer parse(const json& file) {
  Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return std::move(tokenizer).value();
}

void expect_cases(const Tokenizer& tokenizer, const json& cases, bool special = false) {
  for (const json& test : cases) {
    const std::string text = test[0];
    const Result<Ids> ids = tokenizer.encode(text, special);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_EQ(*ids, test[1].get<Ids>()) << test[0];
  }
}

TEST(TokenizerGolden, GlmRegex) {
  const json& glm = golden()["glm"];
  const Tokenizer tokenizer = parse(tokenizer_file(glm["file"]));
  expect_cases(tokenizer, glm["cases"]);
  expect_cases(tokenizer, glm["cases"]);  // now from the cache
  for (const json& test : glm["cases"]) {
    EXPECT_EQ(tokenizer.decode(test[1].get<Ids>(), false), test[0].get<std::string>());
  }
}

TEST(TokenizerGolden, PreTokenizersAddedTokensAndPostProcessors) {
  for (const json& variant : golden()["variants"]) {
    SCOPED_TRACE(variant["name"].get<std::string>());
    json file = tokenizer_file(golden()["loose"]);
    file.update(variant["changes"]);
    expect_cases(parse(file), variant["cases"], variant["special"]);
  }
}

std::string deepseek_dir() {
  const char* data = std::getenv("LACUNA_DATA_DIR");
  const std::string dir = std::string(data == nullptr ? "" : data) + "/tokenizers/deepseek_v3";
  return data != nullptr && std::filesystem::exists(dir + "/tokenizer.json") ? dir : "";
}

TEST(TokenizerGolden, DeepseekV3) {
  const std::string dir = deepseek_dir();
  if (dir.empty()) {
    GTEST_SKIP() << "LACUNA_DATA_DIR names no folder with tokenizers/deepseek_v3/tokenizer.json";
  }
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  const Result<Tokenizer> tokenizer = Tokenizer::load(dir);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const std::chrono::duration<double, std::milli> loading = Clock::now() - start;
  EXPECT_EQ(tokenizer->vocab_size(), 128815);
  const json& cases = golden()["deepseek_v3"];
  EXPECT_EQ(cases[0][1].get<Ids>(),
            (Ids{19923, 14, 2058, 3, 223, 6895, 1883, 223, 88768, 109288, 223, 128803, 6366}));
  expect_cases(*tokenizer, cases);
  std::string all;
  for (const json& test : cases) {
    const std::string text = test[0];
    EXPECT_EQ(tokenizer->decode(test[1].get<Ids>(), false), text);
    if (&test - &cases[0] < 40) {  // people's text; the rest is random
      all += text;
    }
  }
  std::string large;
  while (large.size() < (1 << 20)) {
    large += all;
  }
  const auto encode_start = Clock::now();
  ASSERT_TRUE(tokenizer->encode(large).ok());
  const std::chrono::duration<double> encoding = Clock::now() - encode_start;
  RecordProperty("load_ms", std::to_string(loading.count()));
  RecordProperty("encode_mb_per_s", std::to_string(large.size() / 1e6 / encoding.count()));
  std::printf("loaded in %.0f ms, %.1f MB/s\n", loading.count(),
              large.size() / 1e6 / encoding.count());
}

TEST(TokenizerGolden, ThreadsShareATokenizer) {
  const json& glm = golden()["glm"];
  const Tokenizer tokenizer = parse(tokenizer_file(glm["file"]));
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (const json& test : glm["cases"]) {
        const Result<Ids> ids = tokenizer.encode(test[0].get<std::string>());
        wrong += !ids.ok() || *ids != test[1].get<Ids>();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
}

json with_regex(const std::string& regex) {
  json file = tokenizer_file(golden()["loose"]);
  file["pre_tokenizer"] = {
      {"type", "Sequence"},
      {"pretokenizers",
       {{{"type", "Split"},
         {"pattern", {{"Regex", regex}}},
         {"behavior", "Isolated"},
         {"invert", false}},
        {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  return file;
}

TEST(TokenizerGolden, HostilePatternsEnd) {
  const Tokenizer slow = parse(with_regex("(a+)+$|(x+x+)+y"));
  const Result<Ids> ids = slow.encode(std::string(60, 'x') + " " + std::string(40, 'a') + "b");
  ASSERT_FALSE(ids.ok());
  EXPECT_NE(ids.status().message().find("the tokenizer's regular expression gave up"),
            std::string::npos)
      << ids.status().message();
  // Deep but sensible: the machine stack is small, the second one is not.
  const Tokenizer deep = parse(with_regex("(?:ab|c)+"));
  std::string text;
  for (int i = 0; i < 50000; ++i) {
    text += "abc";
  }
  EXPECT_TRUE(deep.encode(text).ok());
  // Runs of white space as long as a text may have.
  const Tokenizer glm = parse(tokenizer_file(golden()["glm"]["file"]));
  EXPECT_TRUE(glm.encode(std::string(1 << 18, ' ')).ok());
  EXPECT_TRUE(glm.encode(std::string(1 << 18, 'x')).ok());
}

TEST(TokenizerGolden, WhatPcreReadsInAnotherWayIsRefused) {
  for (const char* regex : {"[a[bc]]", "[a&&b]", "\\p{N}{1,3}+", "(*ACCEPT)", "[\\W]", "\\Ka", "(",
                            "[z-a]", "\\p{Klingon}", "\\G", "a\\X"}) {
    const Result<Tokenizer> tokenizer = Tokenizer::parse(with_regex(regex).dump());
    ASSERT_FALSE(tokenizer.ok()) << regex;
    EXPECT_EQ(tokenizer.status().code(), StatusCode::kUnsupported);
    EXPECT_EQ(tokenizer.status().message().rfind("tokenizer.json: pre_tokenizer regex \"", 0), 0u)
        << tokenizer.status().message();
  }
}

}  // namespace
}  // namespace lacuna
