// Text that may be shown: nothing that could begin a stop string, no part of a character, nothing
// kept back without need.
#include "engine/text_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace lacuna {
namespace {

// dsa-nano's tokens are the 256 bytes; some words are added, so that a stop string may lie within a
// token.
constexpr int32_t kFirstWord = 263;
const std::vector<std::string> kWords = {"hello", "STOP", "xSTOP2STOP1", "aab", "bab", "ab"};

const std::optional<Tokenizer>& tokenizer() {
  static const std::optional<Tokenizer> made = [] {
    std::ifstream file(std::string(LACUNA_SOURCE_DIR) + "/models/dsa-nano/tokenizer.json");
    nlohmann::json json = nlohmann::json::parse(file);
    for (size_t i = 0; i < kWords.size(); ++i) {
      json["model"]["vocab"][kWords[i]] = kFirstWord + i;
    }
    Result<Tokenizer> parsed = Tokenizer::parse(json.dump());
    EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    return std::move(parsed).value();
  }();
  return made;
}

// A token: a word of kWords, or one byte.
int32_t id_of(const std::string& token) {
  const auto word = std::find(kWords.begin(), kWords.end(), token);
  if (word != kWords.end()) {
    return kFirstWord + static_cast<int32_t>(word - kWords.begin());
  }
  EXPECT_EQ(token.size(), 1u) << token;
  return static_cast<unsigned char>(token[0]);
}

using Texts = std::vector<std::string>;

Texts bytes_of(const std::string& text) {
  Texts bytes;
  for (const char c : text) {
    bytes.emplace_back(1, c);
  }
  return bytes;
}

struct Shown {
  Texts fed;            // what each token released
  std::string flushed;  // what the end released
  bool stopped = false;
  std::string all() const {
    std::string text;
    for (const std::string& part : fed) {
      text += part;
    }
    return text + flushed;
  }
};

Shown show(const Texts& stops, const Texts& tokens) {
  TextStream stream(tokenizer(), stops);
  Shown shown;
  for (const std::string& token : tokens) {
    shown.fed.push_back(stream.feed(id_of(token)));
  }
  shown.stopped = stream.stopped();
  shown.flushed = stream.flush();
  return shown;
}

TEST(TextStream, WithoutStopsTextPassesAtOnce) {
  const Shown shown = show({}, {"a", "hello", "\n"});
  EXPECT_EQ(shown.fed, (Texts{"a", "hello", "\n"}));
  EXPECT_EQ(shown.flushed, "");
  EXPECT_FALSE(shown.stopped);
}

TEST(TextStream, AStopStringAcrossTokensIsNeverShown) {
  const Shown shown = show({"END"}, bytes_of("abENDcd"));
  EXPECT_EQ(shown.fed, (Texts{"a", "b", "", "", "", "", ""}));
  EXPECT_TRUE(shown.stopped);
  EXPECT_EQ(shown.flushed, "");
}

TEST(TextStream, ABeginningThatComesToNothingIsReleased) {
  const Shown shown = show({"END"}, bytes_of("aENxE"));
  EXPECT_EQ(shown.fed, (Texts{"a", "", "", "ENx", ""}));
  EXPECT_EQ(shown.flushed, "E");
  EXPECT_FALSE(shown.stopped);
}

TEST(TextStream, OnlyTheEndThatMayBeginAStopIsHeld) {
  // After "aa" the first a can no longer begin "ab...", the second can.
  EXPECT_EQ(show({"abc"}, bytes_of("aaabx")).fed, (Texts{"", "a", "a", "", "abx"}));
  EXPECT_EQ(show({"aab"}, bytes_of("aaab")).fed, (Texts{"", "", "a", ""}));
  EXPECT_TRUE(show({"aab"}, bytes_of("aaab")).stopped);
  EXPECT_EQ(show({"abab"}, bytes_of("abaab")).fed, (Texts{"", "", "", "aba", ""}));
}

TEST(TextStream, AStopWithinATokenCutsIt) {
  const Shown shown = show({"ll"}, {"x", "hello", "y"});
  EXPECT_EQ(shown.fed, (Texts{"x", "he", ""}));
  EXPECT_TRUE(shown.stopped);
}

TEST(TextStream, TheEarliestStopOfATokenCuts) {
  EXPECT_EQ(show({"STOP1", "STOP2"}, {"xSTOP2STOP1"}).all(), "x");
  EXPECT_EQ(show({"STOP1"}, {"xSTOP2STOP1"}).all(), "xSTOP2");
  EXPECT_EQ(show({"hello", "l"}, {"hello"}).all(), "");
}

TEST(TextStream, SeveralStopsWithACommonBeginning) {
  EXPECT_EQ(show({"abcd", "abx"}, bytes_of("abcabx")).fed, (Texts{"", "", "", "abc", "", ""}));
  EXPECT_TRUE(show({"abcd", "abx"}, bytes_of("abcabx")).stopped);
  // The shorter one is complete first.
  const Shown shown = show({"abcd", "ab"}, bytes_of("xab"));
  EXPECT_EQ(shown.fed, (Texts{"x", "", ""}));
  EXPECT_TRUE(shown.stopped);
  // One lies within the beginning of another.
  EXPECT_EQ(show({"abcd", "bx"}, bytes_of("abx")).fed, (Texts{"", "", "a"}));
  EXPECT_EQ(show({"abcd", "bc"}, bytes_of("abc")).all(), "a");
}

TEST(TextStream, AOneByteStop) {
  const Shown shown = show({"\n"}, bytes_of("046\n7"));
  EXPECT_EQ(shown.fed, (Texts{"0", "4", "6", "", ""}));
  EXPECT_TRUE(shown.stopped);
}

TEST(TextStream, CharactersAreShownWhole) {
  const Shown shown = show({}, bytes_of("\xC3\xA9z\xF0\x9F\x98\x80"));
  EXPECT_EQ(shown.fed, (Texts{"", "\xC3\xA9", "z", "", "", "", "\xF0\x9F\x98\x80"}));
  EXPECT_EQ(shown.flushed, "");
}

TEST(TextStream, AnUnfinishedCharacterIsReplacedAtTheEnd) {
  const Shown shown = show({}, bytes_of("a\xF0\x9F"));
  EXPECT_EQ(shown.fed, (Texts{"a", "", ""}));
  EXPECT_EQ(shown.flushed, "\xEF\xBF\xBD");
}

TEST(TextStream, AStopOfManyBytesAndTextHeldWithACharacter) {
  EXPECT_EQ(show({"\xC3\xA9"}, bytes_of("a\xC3\xA9")).all(), "a");
  EXPECT_TRUE(show({"\xC3\xA9"}, bytes_of("a\xC3\xA9")).stopped);
  // Another character with the same first byte.
  EXPECT_EQ(show({"\xC3\xA9"}, bytes_of("a\xC3\xA8")).fed, (Texts{"a", "", "\xC3\xA8"}));
  EXPECT_EQ(show({"E\xC3\xA9"}, bytes_of("E\xC3")).flushed, "E\xEF\xBF\xBD");
}

TEST(TextStream, WithoutATokenizerThereIsNoText) {
  const std::optional<Tokenizer> none;
  TextStream stream(none, {"a"});
  EXPECT_EQ(stream.feed('a'), "");
  EXPECT_EQ(stream.feed('b'), "");
  EXPECT_FALSE(stream.stopped());
  EXPECT_EQ(stream.flush(), "");
}

// Random tokens and stops over two letters, against what the whole text says.
TEST(TextStream, RandomStreamsAgreeWithTheWholeText) {
  std::mt19937 random(7);
  const Texts alphabet = {"a", "b", "aab", "bab", "ab"};
  int stopped = 0;
  int64_t held = 0;
  for (int round = 0; round < 4000; ++round) {
    Texts stops;
    for (uint32_t i = 0; i < 1 + random() % 3; ++i) {
      std::string stop;
      for (uint32_t j = 0; j < 1 + random() % 6; ++j) {
        stop += static_cast<char>('a' + random() % 2);
      }
      stops.push_back(stop);
    }
    TextStream stream(tokenizer(), stops);
    std::string whole;
    std::string shown;
    for (int i = 0; i < 12 && !stream.stopped(); ++i) {
      const std::string& token = alphabet[random() % alphabet.size()];
      whole += token;
      shown += stream.feed(id_of(token));
      size_t cut = std::string::npos;
      for (const std::string& stop : stops) {
        cut = std::min(cut, whole.find(stop));
      }
      ASSERT_EQ(stream.stopped(), cut != std::string::npos) << whole;
      if (stream.stopped()) {
        ASSERT_EQ(shown, whole.substr(0, cut));
        break;
      }
      // What is held is the longest end that begins a stop, and no more.
      size_t keep = 0;
      for (const std::string& stop : stops) {
        for (size_t n = 1; n < stop.size() && n <= whole.size(); ++n) {
          if (whole.ends_with(stop.substr(0, n))) {
            keep = std::max(keep, n);
          }
        }
      }
      held += static_cast<int64_t>(keep);
      ASSERT_EQ(shown, whole.substr(0, whole.size() - keep)) << whole;
    }
    const std::string rest = stream.flush();
    stopped += stream.stopped();
    ASSERT_EQ(rest.empty() || !stream.stopped(), true);
    if (!stream.stopped()) {
      ASSERT_EQ(shown + rest, whole);
    }
  }
  EXPECT_GT(stopped, 1000);
  EXPECT_LT(stopped, 4000);
  EXPECT_GT(held, 1000);
}

}  // namespace
}  // namespace lacuna
