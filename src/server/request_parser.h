// Request bodies of the OpenAI API to plain structs. A complaint names the parameter.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/engine_types.h"
#include "server/api_error.h"

namespace lacuna::server {

struct PromptInput {
  bool is_ids = false;
  std::string text;
  std::vector<int32_t> ids;
};

// A body of /v1/completions or /v1/chat/completions.
struct GenerationRequest {
  bool chat = false;
  std::string model;                 // empty: the one that is served
  std::vector<PromptInput> prompts;  // completions
  std::string messages_json;         // chat, for Engine::apply_chat_template
  std::string options_json;          // chat
  SamplingParams sampling;           // without seed and max_tokens, which have no fixed default
  std::optional<uint64_t> seed;
  std::optional<int64_t> max_tokens;
  int64_t n = 1;
  int priority = 0;
  bool stream = false;
  bool include_usage = false;
  bool echo = false;
  bool logprobs = false;  // sampling.top_logprobs says how many alternatives
  std::optional<int32_t> prompt_logprobs;
  bool record_selection = false;
};

struct TokenizeRequest {
  std::string model;
  std::string prompt;
  std::string messages_json;  // not empty: tokenize a conversation
  std::string options_json;
  bool return_token_strs = false;
};

struct DetokenizeRequest {
  std::string model;
  std::vector<int32_t> tokens;
};

inline constexpr int kNestingMax = 64;         // of JSON in a body
inline constexpr int64_t kSequencesMax = 128;  // of one request: prompts times n

std::optional<ApiError> parse_completion(std::string_view body, GenerationRequest* out);
std::optional<ApiError> parse_chat(std::string_view body, GenerationRequest* out);
std::optional<ApiError> parse_tokenize(std::string_view body, TokenizeRequest* out);
std::optional<ApiError> parse_detokenize(std::string_view body, DetokenizeRequest* out);

}  // namespace lacuna::server
