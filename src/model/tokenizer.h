// Text to token ids and back: byte-level BPE as tokenizer.json describes it, with its regular
// expressions. What such a file may ask for beyond that (normalizers, other models) is refused by
// name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

struct TokenizerState;  // tokenizer.cc

// Immutable, cheap to copy, safe to share between threads.
class Tokenizer {
 public:
  // Reads model_dir/tokenizer.json.
  static Result<Tokenizer> load(const std::string& model_dir);
  static Result<Tokenizer> parse(std::string_view tokenizer_json);

  // Added tokens (special or not) are recognised anywhere in the text, leftmost first and of those
  // the longest. Nothing is added, because the chat template writes the beginning of a sequence,
  // unless `add_special_tokens` asks for what the file's post-processor adds. Text that is not
  // UTF-8 is an error.
  Result<std::vector<int32_t>> encode(std::string_view text, bool add_special_tokens = false) const;

  // The bytes of all ids as text; bytes that are not UTF-8 become U+FFFD. Ids that name no token
  // are skipped, and special ones too if asked.
  std::string decode(std::span<const int32_t> ids, bool skip_special = true) const;

  // The bytes that one token stands for, perhaps a part of a character; empty if there is no such
  // token. The view lives as long as any copy of the tokenizer.
  std::string_view token_bytes(int32_t id) const;
  bool is_special(int32_t id) const;
  // One more than the largest id.
  int32_t vocab_size() const;
  // The id of a token as tokenizer.json spells it: added tokens literally, others in the byte-level
  // alphabet (a leading space is "Ġ").
  std::optional<int32_t> token_id(std::string_view content) const;

 private:
  explicit Tokenizer(std::shared_ptr<const TokenizerState> state) : state_(std::move(state)) {}
  std::shared_ptr<const TokenizerState> state_;
};

// Decodes a stream of ids without ever giving out a part of a character: bytes wait until the next
// ids complete them. What feed and flush return, joined, equals decode of all ids.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer, bool skip_special = true)
      : tokenizer_(std::move(tokenizer)), skip_special_(skip_special) {}

  std::string feed(int32_t id) { return feed(std::span(&id, 1)); }
  std::string feed(std::span<const int32_t> ids);
  // The end of the stream: an unfinished character becomes U+FFFD.
  std::string flush();

 private:
  Tokenizer tokenizer_;
  bool skip_special_;
  std::string pending_;  // the beginning of a character, at most 3 bytes
};

}  // namespace lacuna
