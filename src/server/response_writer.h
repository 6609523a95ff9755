// Plain structs to response bodies and stream chunks of the OpenAI API.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/engine_types.h"

namespace lacuna::server {

using OrderedJson = nlohmann::ordered_json;

struct AlternativeToken {
  int32_t id = -1;
  std::string bytes;
  float logprob = 0;
};

struct TokenDetail {
  int32_t id = -1;
  std::string bytes;  // perhaps a part of a character
  bool has_logprob = true;
  float logprob = 0;
  std::vector<AlternativeToken> top;  // most likely first
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
};

// What all bodies of one response have in common.
struct ResponseHead {
  bool chat = false;
  std::string id;
  int64_t created = 0;
  std::string model;
};

struct ChoiceBody {
  int64_t index = 0;
  std::string text;
  std::string reasoning;        // chat with a reasoning parser
  std::string finish;           // empty: null
  OrderedJson logprobs;         // null: none
  OrderedJson prompt_logprobs;  // null: none
};

std::string dump(const OrderedJson& json);
// Valid UTF-8, bad bytes as U+FFFD.
std::string valid_utf8(std::string_view bytes);

OrderedJson usage_json(const Usage& usage);
OrderedJson chat_logprobs(const std::vector<TokenDetail>& tokens);
// `text_offset`: characters of the text so far, advanced by the tokens.
OrderedJson completion_logprobs(const std::vector<TokenDetail>& tokens, int64_t* text_offset);
// vLLM's form: null for the first token, then {"<id>": {"logprob", "rank", "decoded_token"}}.
OrderedJson prompt_logprobs_json(const std::vector<TokenDetail>& tokens);

std::string full_response(const ResponseHead& head, const std::vector<ChoiceBody>& choices,
                          const Usage& usage);
// One chunk of a stream, ready to send ("data: ...\n\n"). `with_role`: the first of a chat choice.
std::string stream_chunk(const ResponseHead& head, const ChoiceBody& choice, bool with_role,
                         bool null_usage);
std::string usage_chunk(const ResponseHead& head, const Usage& usage);
std::string stream_event(std::string_view data);
inline constexpr std::string_view kStreamEnd = "data: [DONE]\n\n";
inline constexpr std::string_view kStreamKeepAlive = ": keep-alive\n\n";

}  // namespace lacuna::server
