// The tokenizer against ids from Hugging Face tokenizers 0.23.3, its refusals, and the stream
// decoder against decode().
#include "model/tokenizer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace lacuna {
namespace {

using nlohmann::json;
using namespace std::string_literals;

std::string alphabet(int byte) {
  // Written out again, not taken from the tokenizer: printable Latin-1, the rest from U+0100 on.
  const auto printable = [](int b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
  };
  int code_point = byte;
  if (!printable(byte)) {
    code_point = 0x100;
    for (int b = 0; b < byte; ++b) {
      code_point += !printable(b);
    }
  }
  if (code_point < 0x80) {
    return std::string(1, static_cast<char>(code_point));
  }
  return {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 63))};
}

// A byte-level BPE by hand: ids 0..255 are bytes, then one id per merge, then a word that no merge
// makes, then added tokens that overlap each other and the merges.
json bpe() {
  const std::vector<std::string> merges = {"h e", "l l",  "o w", "he ll", "hell o", "Ġ w",   "Ġw o",
                                           "r l", "rl d", "a a", "aa aa", "a b",    "ab ab", "b a",
                                           "1 2", "Ã ©",  "ð Ł", "ðŁ ĺ",  "Ġ Ġ",    "ĠĠ ĠĠ"};
  json vocab;
  for (int byte = 0; byte < 256; ++byte) {
    vocab[alphabet(byte)] = byte;
  }
  for (std::string merge : merges) {
    merge.erase(merge.find(' '), 1);
    vocab[merge] = vocab.size();
  }
  vocab["hello!"] = vocab.size();
  json added = json::array();
  const auto add = [&](const char* content, bool special, bool normalized) {
    added.push_back({{"id", vocab.size() + added.size()},
                     {"content", content},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", normalized},
                     {"special", special}});
  };
  add("<s>", true, false);
  add("<s>>", false, false);
  add("<spx", true, false);
  add("lo|", false, true);
  add("<é>", true, false);
  return {{"version", "1.0"},
          {"added_tokens", added},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "Sequence"},
            {"pretokenizers",
             {{{"type", "Split"},
               {"pattern", {{"Regex", "\\p{N}"}}},
               {"behavior", "Isolated"},
               {"invert", false}},
              {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"byte_fallback", false},
            {"ignore_merges", false},
            {"vocab", vocab},
            {"merges", merges}}}};
}

Tokenizer make(const json& file) {
  Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return std::move(tokenizer).value();
}

Tokenizer nano() {
  Result<Tokenizer> tokenizer =
      Tokenizer::load(std::string(LACUNA_SOURCE_DIR) + "/models/dsa-nano");
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  return std::move(tokenizer).value();
}

std::string error_of(const json& file) {
  const Result<Tokenizer> tokenizer = Tokenizer::parse(file.dump());
  return tokenizer.ok() ? "parsed" : tokenizer.status().message();
}

using Ids = std::vector<int32_t>;

struct Vector {
  std::string text;
  Ids ids;
};

void expect_ids(const Tokenizer& tokenizer, const std::vector<Vector>& vectors) {
  for (const Vector& vector : vectors) {
    const Result<Ids> ids = tokenizer.encode(vector.text);
    ASSERT_TRUE(ids.ok()) << ids.status().message();
    EXPECT_EQ(*ids, vector.ids) << vector.text;
    EXPECT_EQ(tokenizer.decode(*ids, false), vector.text);
  }
}

// Ids of `Tokenizer.from_file("models/dsa-nano/tokenizer.json").encode(text,
// add_special_tokens=False).ids`.
TEST(Tokenizer, DsaNanoGivesTheReferenceIds) {
  expect_ids(
      nano(),
      {{"Hello, world! 12345",
        {72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100, 33, 32, 49, 50, 51, 52, 53}},
       {"qzk=47;\n?qzk:", {113, 122, 107, 61, 52, 55, 59, 10, 63, 113, 122, 107, 58}},
       {"[gMASK]<sop><|user|>?qzk:<|assistant|>47<|user|>",
        {256, 257, 259, 63, 113, 122, 107, 58, 260, 52, 55, 259}},
       {"café Жук 日本語", {99,  97, 102, 195, 169, 32,  208, 150, 209, 131, 208,
                            186, 32, 230, 151, 165, 230, 156, 172, 232, 170, 158}},
       {"العربية", {216, 167, 217, 132, 216, 185, 216, 177, 216, 168, 217, 138, 216, 169}},
       {"हिन्दी",
        {224, 164, 185, 224, 164, 191, 224, 164, 168, 224, 165, 141, 224, 164, 166, 224, 165, 128}},
       {"\U0001F600\U0001F468\u200D\U0001F469 ok",
        {240, 159, 152, 128, 240, 159, 145, 168, 226, 128, 141, 240, 159, 145, 169, 32, 111, 107}},
       {"٤٢ Ⅷ ½ ① 𝟘", {217, 164, 217, 162, 32,  226, 133, 167, 32,  194,
                       189, 32,  226, 145, 160, 32,  240, 157, 159, 152}},
       {"[gMASK[gMASK]] <|user|",
        {91, 103, 77, 65, 83, 75, 256, 93, 32, 60, 124, 117, 115, 101, 114, 124}},
       {"\t\n  \0\x7F"s, {9, 10, 32, 32, 0, 127}},
       {"<|endoftext|><|endoftext|>", {262, 262}},
       {"", {}}});
}

// The file of bpe(), loaded by the reference.
const std::vector<Vector> kBpeVectors = {
    {"hello world", {260, 262, 264}},
    {"hellhello wow", {259, 260, 261, 258}},
    {"aaaaaaa", {266, 265, 97}},
    {"abababab", {268, 268}},
    {"babab aab", {98, 268, 32, 265, 98}},
    {"café 12 \U0001F600\U0001F601", {99, 97, 102, 271, 32, 49, 50, 32, 273, 128, 273, 129}},
    {"     x", {275, 32, 120}},
    {"<s>>><s> <spx <sp", {278, 62, 277, 32, 279, 32, 60, 115, 112}},
    {"hello|hell|lo|", {256, 108, 280, 259, 124, 280}},
    {"hello!", {260, 33}},
    {"<é> 1hello!2", {281, 32, 49, 260, 33, 50}},
    {"heheh", {256, 256, 104}}};

TEST(Tokenizer, MergesGiveTheReferenceIds) { expect_ids(make(bpe()), kBpeVectors); }

TEST(Tokenizer, MergesMayBePairs) {
  json file = bpe();
  for (json& merge : file["model"]["merges"]) {
    const std::string text = merge;
    merge = {text.substr(0, text.find(' ')), text.substr(text.find(' ') + 1)};
  }
  expect_ids(make(file), kBpeVectors);
}

TEST(Tokenizer, WholeWordsMaySkipMerges) {
  json file = bpe();
  file["model"]["ignore_merges"] = true;
  expect_ids(make(file), {{"hello!", {276}}, {"<é> 1hello!2", {281, 32, 49, 276, 50}}});
}

TEST(Tokenizer, KnowsItsTokens) {
  const Tokenizer tokenizer = make(bpe());
  EXPECT_EQ(tokenizer.vocab_size(), 282);
  EXPECT_EQ(tokenizer.token_id("<s>"), 277);
  EXPECT_EQ(tokenizer.token_id("Ġwo"), 262);
  EXPECT_EQ(tokenizer.token_id("absent"), std::nullopt);
  EXPECT_EQ(tokenizer.token_bytes(262), " wo");
  EXPECT_EQ(tokenizer.token_bytes(0xE9), "\xE9");
  EXPECT_EQ(tokenizer.token_bytes(-1), "");
  EXPECT_EQ(tokenizer.token_bytes(282), "");
  EXPECT_TRUE(tokenizer.is_special(277));
  EXPECT_FALSE(tokenizer.is_special(278));
  EXPECT_FALSE(tokenizer.is_special(-1));
  // The reference reads the é of an added token as the byte E9; here the content is literal.
  EXPECT_EQ(tokenizer.token_bytes(281), "<é>");
  EXPECT_EQ(tokenizer.decode(Ids{277, 104, 278, 281}), "h<s>>");
  EXPECT_EQ(tokenizer.decode(Ids{104, -5, 9999, 105}), "hi");
}

TEST(Tokenizer, BrokenBytesDecodeAsInTheReference) {
  const Tokenizer tokenizer = nano();
  EXPECT_EQ(tokenizer.decode(Ids{0xE2, 0x82}), "\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xFF, 0x41}), "\uFFFDA");
  EXPECT_EQ(tokenizer.decode(Ids{0xF0, 0x9F, 0x41}), "\uFFFDA");
  EXPECT_EQ(tokenizer.decode(Ids{0xE0, 0x80, 0x80}), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xED, 0xA0, 0x80}), "\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xF4, 0x90, 0x80, 0x80}), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(tokenizer.decode(Ids{0xC3, 0xC3, 0xA9}), "\uFFFDé");
  EXPECT_EQ(tokenizer.decode(Ids{0xF0, 0x9F, 0x98, 0x80, 0xF0, 0x9F}), "\U0001F600\uFFFD");
}

TEST(Tokenizer, TextMustBeUtf8) {
  const Tokenizer tokenizer = nano();
  EXPECT_EQ(tokenizer.encode("ab\xFF").status().message(), "text: not valid UTF-8 at byte 2");
  EXPECT_FALSE(tokenizer.encode("\xED\xA0\x80").ok());  // a surrogate
  EXPECT_FALSE(tokenizer.encode("\xC0\x80").ok());      // overlong
  EXPECT_FALSE(tokenizer.encode("\xE2\x82").ok());      // unfinished
}

TEST(Tokenizer, LongWordsAreNotQuadratic) {
  const Tokenizer tokenizer = make(bpe());
  const std::string text(1 << 20, 'a');
  const Result<Ids> ids = tokenizer.encode(text);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids->size(), text.size() / 4);
}

TEST(StreamDecoder, GivesCompleteCharactersOnly) {
  StreamDecoder decoder(nano());
  EXPECT_EQ(decoder.feed(0xE6), "");
  EXPECT_EQ(decoder.feed(0x97), "");
  EXPECT_EQ(decoder.feed(0xA5), "日");
  EXPECT_EQ(decoder.feed(256), "");  // special
  EXPECT_EQ(decoder.feed(0xF0), "");
  EXPECT_EQ(decoder.feed('x'), "\uFFFDx");
  EXPECT_EQ(decoder.feed(0xC3), "");
  EXPECT_EQ(decoder.flush(), "\uFFFD");
  EXPECT_EQ(decoder.flush(), "");
}

TEST(StreamDecoder, JoinedEqualsDecode) {
  const Tokenizer tokenizer = make(bpe());
  uint32_t random = 1;
  for (int round = 0; round < 2000; ++round) {
    Ids ids;
    for (int i = 0; i < 12; ++i) {
      random = random * 1664525 + 1013904223;
      // Mostly bytes of multi-byte characters.
      ids.push_back((random >> 20) % 3 == 0 ? static_cast<int32_t>((random >> 8) % 282)
                                            : 0x80 + static_cast<int32_t>((random >> 8) % 0x80));
    }
    StreamDecoder decoder(tokenizer);
    std::string joined;
    for (const int32_t id : ids) {
      joined += decoder.feed(id);
    }
    joined += decoder.flush();
    ASSERT_EQ(joined, tokenizer.decode(ids));
  }
}

TEST(Tokenizer, WhatIsNotSupportedIsRefusedByName) {
  const auto expect = [](const char* pointer, const json& value, const std::string& part) {
    json file = bpe();
    file[json::json_pointer(pointer)] = value;
    const std::string error = error_of(file);
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_EQ(error.rfind("tokenizer.json: ", 0), 0u) << error;
  };
  const std::string first = "/pre_tokenizer/pretokenizers/0";
  expect((first + "/pattern/Regex").c_str(), "[a&&b]",
         "pre_tokenizer regex \"[a&&b]\": && within brackets is not supported");
  expect((first + "/pattern/Regex").c_str(), "a(",
         "pre_tokenizer regex \"a(\": PCRE2 says: missing closing parenthesis (at byte 2)");
  expect((first + "/pattern").c_str(), {{"String", ""}}, "pre_tokenizer Split pattern an object");
  expect((first + "/behavior").c_str(), "Sideways", "pre_tokenizer Split behavior \"Sideways\"");
  expect((first + "/type").c_str(), "Whitespace", "pre_tokenizer \"Whitespace\" before the end");
  expect("/pre_tokenizer", nullptr, "pre_tokenizer null is not supported yet");
  expect("/pre_tokenizer", {{"type", "Metaspace"}}, "pre_tokenizer \"Metaspace\"");
  expect("/normalizer", {{"type", "NFC"}}, "normalizer \"NFC\" is not supported yet");
  expect("/decoder", nullptr, "decoder null");
  expect("/decoder", {{"type", "WordPiece"}}, "decoder \"WordPiece\"");
  expect("/post_processor", {{"type", "BertProcessing"}}, "post_processor \"BertProcessing\"");
  expect("/post_processor", {{"type", "TemplateProcessing"}}, "post_processor.single: missing");
  expect("/post_processor",
         {{"type", "TemplateProcessing"}, {"single", {{{"SpecialToken", {{"id", "<q>"}}}}}}},
         "post_processor.single: a SpecialToken that special_tokens does not list");
  expect("/model/type", "Unigram", "model type \"Unigram\" is not supported yet; supported: BPE");
  expect("/model/byte_fallback", true, "model byte_fallback true");
  expect("/model/dropout", 0.1, "model dropout 0.1");
  expect("/model/end_of_word_suffix", "</w>", "model end_of_word_suffix \"</w>\"");
  expect("/added_tokens/0/id", 5, "added_tokens[0] \"<s>\": id 5 belongs to another token");
  expect("/added_tokens/0/id", -5, "added_tokens[0].id: -5, expected an id in 0..");
  expect("/added_tokens/0/id", 1e9, "expected an id in 0..");
  expect("/added_tokens/0/content", "", "content is empty");
  expect("/added_tokens/0/content", "he", "\"he\" has id 277 here and id 256 elsewhere");
  expect("/model/vocab/he", 3, "belongs to another token already");
  expect("/model/vocab", json::object(), "model.vocab: an object, expected");
  expect("/model/merges/0", "he", "model.merges[0]: \"he\", expected two tokens");
  expect("/model/merges/0", "q w", "model.merges[0]: token \"qw\" is not in model.vocab");
  expect("/model/merges", nullptr, "model.merges: missing");
  json file = bpe();
  file["normalizer"] = {{"type", "Sequence"}, {"normalizers", json::array()}};
  file["post_processor"] = {{"type", "ByteLevel"}, {"trim_offsets", false}};
  file["truncation"] = {{"max_length", 8}};  // the caller's business
  EXPECT_EQ(error_of(file), "parsed");
}

TEST(Tokenizer, AByteWithoutATokenIsNamedWhenItIsMet) {
  json file = bpe();
  file["model"]["vocab"].erase("z");
  const Tokenizer tokenizer = make(file);
  EXPECT_TRUE(tokenizer.encode("hello").ok());
  EXPECT_EQ(tokenizer.encode("jazz").status().message(),
            "text: byte 122 has no token in tokenizer.json");
  file["model"]["unk_token"] = "<unk>";
  EXPECT_NE(error_of(file).find("model unk_token \"<unk>\""), std::string::npos);
}

TEST(Tokenizer, LoadNamesTheFile) {
  const std::string dir = testing::TempDir() + "lacuna_tokenizer_test";
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  EXPECT_EQ(Tokenizer::load(dir).status().code(), StatusCode::kNotFound);
  std::ofstream(dir + "/tokenizer.model") << "x";
  EXPECT_NE(Tokenizer::load(dir).status().message().find("SentencePiece"), std::string::npos);
  std::ofstream(dir + "/tokenizer.json") << "{}";
  EXPECT_EQ(Tokenizer::load(dir).status().message(), dir + "/tokenizer.json: model: missing");
}

}  // namespace
}  // namespace lacuna
