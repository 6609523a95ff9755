// Two uses of the same bytes: as tokenizer.json, and as text for a fixed tokenizer with merges,
// where decoding what was encoded must give the text back.
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "core/check.h"
#include "model/tokenizer.h"
#include "model/utf8.h"

namespace {

using nlohmann::json;

// All 256 bytes, a few merges, added tokens of every kind.
lacuna::Tokenizer fixed_tokenizer(const char* regex) {
  json vocab;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string entry;
    lacuna::append_utf8(printable ? static_cast<char32_t>(byte) : next++, &entry);
    vocab[entry] = byte;
  }
  json merges = json::array();
  for (const char* merge : {"a b", "b a", "ab ab", "a a", "aa aa", "1 a", "Ġ a", "Ã ©"}) {
    merges.push_back(merge);
    std::string joined = merge;
    joined.erase(joined.find(' '), 1);
    vocab[joined] = vocab.size();
  }
  json added = json::array();
  for (const char* content : {"<s>", "<s>>", "<sp", "ab<", "é!"}) {
    added.push_back({{"id", vocab.size() + added.size()},
                     {"content", content},
                     {"special", added.size() % 2 == 0},
                     {"normalized", added.size() > 2}});
  }
  const json file = {
      {"added_tokens", added},
      {"pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", "Isolated"}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
  lacuna::Result<lacuna::Tokenizer> tokenizer = lacuna::Tokenizer::parse(file.dump());
  LACUNA_CHECK(tokenizer.ok());
  return std::move(tokenizer).value();
}

void round_trip(const lacuna::Tokenizer& tokenizer, std::string_view text) {
  const lacuna::Result<std::vector<int32_t>> ids = tokenizer.encode(text);
  if (ids.ok()) {
    LACUNA_CHECK(tokenizer.decode(*ids, /*skip_special=*/false) == text);
  }
}

// StreamDecoder's promise: whole characters, and joined the same as decode().
void stream(const lacuna::Tokenizer& tokenizer, std::string_view bytes) {
  std::vector<int32_t> ids;
  lacuna::StreamDecoder decoder(tokenizer);
  std::string joined;
  for (const char c : bytes) {
    ids.push_back(static_cast<unsigned char>(c));
    const std::string part = decoder.feed(ids.back());
    for (size_t at = 0; at < part.size();) {
      const lacuna::Utf8Step step = lacuna::utf8_step(part, at);
      LACUNA_CHECK(step.kind == lacuna::Utf8Step::Kind::kCharacter);
      at += step.length;
    }
    joined += part;
  }
  joined += decoder.flush();
  LACUNA_CHECK(joined == tokenizer.decode(ids));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const lacuna::Tokenizer fixed = fixed_tokenizer("\\p{N}");
  static const lacuna::Tokenizer words = fixed_tokenizer(
      "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| "
      "?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+");
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  round_trip(fixed, text);
  round_trip(words, text);
  stream(fixed, text);
  const lacuna::Result<lacuna::Tokenizer> tokenizer = lacuna::Tokenizer::parse(text);
  if (!tokenizer.ok()) {
    LACUNA_CHECK(tokenizer.status().message().find('\n') == std::string::npos);
    return 0;
  }
  for (int32_t id = 0; id < tokenizer->vocab_size(); ++id) {
    (void)tokenizer->token_bytes(id);
  }
  (void)tokenizer->encode("abab <s>>12 \u00e9");
  stream(*tokenizer, text);
  return 0;
}
