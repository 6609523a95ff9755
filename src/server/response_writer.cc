// Field order follows the OpenAI API, for people who read the bodies.
#include "server/response_writer.h"

#include <algorithm>

namespace lacuna::server {
namespace {

int64_t count_characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(),
                       [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

OrderedJson byte_list(std::string_view bytes) {
  OrderedJson list = OrderedJson::array();
  for (const char c : bytes) {
    list.push_back(static_cast<unsigned char>(c));
  }
  return list;
}

OrderedJson head_json(const ResponseHead& head, bool stream) {
  OrderedJson json;
  json["id"] = head.id;
  json["object"] = !head.chat ? "text_completion"
                   : stream   ? "chat.completion.chunk"
                              : "chat.completion";
  json["created"] = head.created;
  json["model"] = head.model;
  return json;
}

OrderedJson text_or_null(const std::string& text) {
  return text.empty() ? OrderedJson() : OrderedJson(text);
}

// The choice but for its text.
void finish_choice(const ChoiceBody& choice, OrderedJson* json) {
  (*json)["logprobs"] = choice.logprobs;
  (*json)["finish_reason"] = text_or_null(choice.finish);
  if (!choice.prompt_logprobs.is_null()) {
    (*json)["prompt_logprobs"] = choice.prompt_logprobs;
  }
}

}  // namespace

std::string dump(const OrderedJson& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, OrderedJson::error_handler_t::replace);
}

std::string valid_utf8(std::string_view bytes) {
  // Through the serialiser, which knows what is valid.
  return OrderedJson::parse(dump(OrderedJson(std::string(bytes)))).get<std::string>();
}

OrderedJson usage_json(const Usage& usage) {
  OrderedJson json;
  json["prompt_tokens"] = usage.prompt_tokens;
  json["completion_tokens"] = usage.completion_tokens;
  json["total_tokens"] = usage.prompt_tokens + usage.completion_tokens;
  json["prompt_tokens_details"] = {{"cached_tokens", usage.cached_tokens}};
  return json;
}

OrderedJson chat_logprobs(const std::vector<TokenDetail>& tokens) {
  OrderedJson content = OrderedJson::array();
  for (const TokenDetail& token : tokens) {
    OrderedJson entry;
    entry["token"] = token.bytes;
    entry["logprob"] = token.logprob;
    entry["bytes"] = byte_list(token.bytes);
    entry["top_logprobs"] = OrderedJson::array();
    for (const AlternativeToken& other : token.top) {
      entry["top_logprobs"].push_back(
          {{"token", other.bytes}, {"logprob", other.logprob}, {"bytes", byte_list(other.bytes)}});
    }
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

OrderedJson completion_logprobs(const std::vector<TokenDetail>& tokens, int64_t* text_offset) {
  OrderedJson texts = OrderedJson::array();
  OrderedJson logprobs = OrderedJson::array();
  OrderedJson tops = OrderedJson::array();
  OrderedJson offsets = OrderedJson::array();
  for (const TokenDetail& token : tokens) {
    texts.push_back(token.bytes);
    offsets.push_back(*text_offset);
    *text_offset += count_characters(token.bytes);
    if (!token.has_logprob) {
      logprobs.push_back(nullptr);
      tops.push_back(nullptr);
      continue;
    }
    logprobs.push_back(token.logprob);
    OrderedJson top = OrderedJson::object();
    for (const AlternativeToken& other : token.top) {
      top.emplace(valid_utf8(other.bytes), other.logprob);
    }
    // The chosen token is always among them, as in vLLM.
    top.emplace(valid_utf8(token.bytes), token.logprob);
    tops.push_back(std::move(top));
  }
  OrderedJson json;
  json["text_offset"] = std::move(offsets);
  json["token_logprobs"] = std::move(logprobs);
  json["tokens"] = std::move(texts);
  json["top_logprobs"] = std::move(tops);
  return json;
}

OrderedJson prompt_logprobs_json(const std::vector<TokenDetail>& tokens) {
  OrderedJson list = OrderedJson::array();
  for (const TokenDetail& token : tokens) {
    if (!token.has_logprob) {
      list.push_back(nullptr);
      continue;
    }
    OrderedJson entry = OrderedJson::object();
    int rank = 0;
    OrderedJson own_rank;  // null: not among the most likely ones
    for (const AlternativeToken& other : token.top) {
      ++rank;
      entry[std::to_string(other.id)] = {
          {"logprob", other.logprob}, {"rank", rank}, {"decoded_token", other.bytes}};
      if (other.id == token.id) {
        own_rank = rank;
      }
    }
    entry[std::to_string(token.id)] = {
        {"logprob", token.logprob}, {"rank", own_rank}, {"decoded_token", token.bytes}};
    list.push_back(std::move(entry));
  }
  return list;
}

std::string full_response(const ResponseHead& head, const std::vector<ChoiceBody>& choices,
                          const Usage& usage) {
  OrderedJson json = head_json(head, /*stream=*/false);
  json["choices"] = OrderedJson::array();
  for (const ChoiceBody& choice : choices) {
    OrderedJson entry;
    entry["index"] = choice.index;
    if (head.chat) {
      entry["message"]["role"] = "assistant";
      if (!choice.reasoning.empty()) {
        entry["message"]["reasoning_content"] = choice.reasoning;
      }
      entry["message"]["content"] = choice.text;
    } else {
      entry["text"] = choice.text;
    }
    finish_choice(choice, &entry);
    json["choices"].push_back(std::move(entry));
  }
  json["usage"] = usage_json(usage);
  return dump(json);
}

std::string stream_chunk(const ResponseHead& head, const ChoiceBody& choice, bool with_role,
                         bool null_usage) {
  OrderedJson json = head_json(head, /*stream=*/true);
  OrderedJson entry;
  entry["index"] = choice.index;
  if (head.chat) {
    OrderedJson delta = OrderedJson::object();
    if (with_role) {
      delta["role"] = "assistant";
    }
    if (!choice.reasoning.empty()) {
      delta["reasoning_content"] = choice.reasoning;
    }
    if (!choice.text.empty() || (with_role && choice.reasoning.empty())) {
      delta["content"] = choice.text;
    }
    entry["delta"] = std::move(delta);
  } else {
    entry["text"] = choice.text;
  }
  finish_choice(choice, &entry);
  json["choices"] = OrderedJson::array({std::move(entry)});
  if (null_usage) {
    json["usage"] = nullptr;
  }
  return stream_event(dump(json));
}

std::string usage_chunk(const ResponseHead& head, const Usage& usage) {
  OrderedJson json = head_json(head, /*stream=*/true);
  json["choices"] = OrderedJson::array();
  json["usage"] = usage_json(usage);
  return stream_event(dump(json));
}

std::string stream_event(std::string_view data) { return "data: " + std::string(data) + "\n\n"; }

}  // namespace lacuna::server
