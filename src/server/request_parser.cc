// Reads fields one by one; the first complaint stands and later reads do nothing.
#include "server/request_parser.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

namespace lacuna::server {
namespace {

using Json = nlohmann::json;

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

std::string excerpt(const Json& value) {
  constexpr size_t kExcerptBytes = 60;
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  if (text.size() > kExcerptBytes) {
    text.resize(kExcerptBytes);
    text += "...";
  }
  return text;
}

// Brackets outside of strings: what would make recursive code deep.
bool nested_too_deeply(std::string_view body) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < body.size(); ++i) {
    const char c = body[i];
    if (in_string) {
      i += c == '\\' ? 1 : 0;
      in_string = c != '"';
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      if (++depth > kNestingMax) {
        return true;
      }
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return false;
}

std::optional<ApiError> parse_object(std::string_view body, Json* out) {
  if (body.empty()) {
    return bad_request("The body is empty, expected a JSON object.");
  }
  if (nested_too_deeply(body)) {
    return bad_request("The JSON body is nested more than " + std::to_string(kNestingMax) +
                       " levels deep.");
  }
  *out = Json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (out->is_discarded()) {
    return bad_request("The body is not valid JSON (UTF-8).");
  }
  if (!out->is_object()) {
    return bad_request("The body is " + excerpt(*out) + ", expected a JSON object.");
  }
  return std::nullopt;
}

template <class T>
struct ValueOf {
  using type = T;
};
template <class T>
struct ValueOf<std::optional<T>> {
  using type = T;
};

class FieldReader {
 public:
  explicit FieldReader(const Json& object) : object_(object) {}

  const std::optional<ApiError>& error() const { return error_; }

  void fail(const std::string& name, const std::string& value, const std::string& expected) {
    if (!error_.has_value()) {
      error_ = bad_request(name + ": " + value + ", expected " + expected + ".", name);
    }
  }
  void fail(ApiError error) {
    if (!error_.has_value()) {
      error_ = std::move(error);
    }
  }

  // Null counts as absent, as everywhere in this API.
  const Json* find(const std::string& name) const {
    if (error_.has_value()) {
      return nullptr;
    }
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  void boolean(const std::string& name, bool* out) {
    const Json* value = find(name);
    if (value == nullptr) {
      return;
    }
    if (!value->is_boolean()) {
      return fail(name, excerpt(*value), "true or false");
    }
    *out = value->get<bool>();
  }

  void text(const std::string& name, std::string* out) {
    const Json* value = find(name);
    if (value == nullptr) {
      return;
    }
    if (!value->is_string()) {
      return fail(name, excerpt(*value), "a string");
    }
    *out = value->get<std::string>();
  }

  void number(const std::string& name, double low, double high, double* out) {
    const Json* value = find(name);
    if (value == nullptr) {
      return;
    }
    const double given = value->is_number() ? value->get<double>() : NAN;
    if (!(given >= low && given <= high)) {
      return fail(name, excerpt(*value), "a number " + range(low, high));
    }
    *out = given;
  }

  template <class Integer>
  void integer(const std::string& name, int64_t low, int64_t high, Integer* out) {
    const Json* value = find(name);
    if (value == nullptr) {
      return;
    }
    const std::optional<int64_t> given = as_integer(*value);
    if (!given.has_value() || *given < low || *given > high) {
      return fail(name, excerpt(*value),
                  "an integer " + range(static_cast<double>(low), static_cast<double>(high)));
    }
    *out = static_cast<typename ValueOf<Integer>::type>(*given);
  }

  void ids(const std::string& name, std::vector<int32_t>* out) {
    const Json* value = find(name);
    if (value == nullptr) {
      return;
    }
    if (!value->is_array()) {
      return fail(name, excerpt(*value), "a list of token ids");
    }
    read_ids(name, *value, out);
  }

  void read_ids(const std::string& name, const Json& list, std::vector<int32_t>* out) {
    out->reserve(list.size());
    for (const Json& item : list) {
      const std::optional<int64_t> id = as_integer(item);
      if (!id.has_value() || *id < 0 || *id > kInt32Max) {
        return fail(name, excerpt(item), "a token id");
      }
      out->push_back(static_cast<int32_t>(*id));
    }
  }

  // A parameter that would change the answer and is not implemented.
  void refuse(const std::string& name, bool given) {
    if (given) {
      fail(bad_request(name + ": not supported by this server.", name, "unsupported_parameter"));
    }
  }

 private:
  static std::optional<int64_t> as_integer(const Json& value) {
    if (value.is_number_unsigned()) {
      const uint64_t number = value.get<uint64_t>();
      return number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                 ? std::nullopt
                 : std::optional<int64_t>(number);
    }
    if (value.is_number_integer()) {
      return value.get<int64_t>();
    }
    // 16.0 is what some clients send for 16.
    if (value.is_number_float()) {
      const double number = value.get<double>();
      if (std::abs(number) < 1e15 && number == std::floor(number)) {
        return static_cast<int64_t>(number);
      }
    }
    return std::nullopt;
  }

  static std::string range(double low, double high) {
    auto shown = [](double bound) {
      std::string text = std::to_string(bound);
      text.erase(text.find_last_not_of('0') + 1);
      return text.back() == '.' ? text.substr(0, text.size() - 1) : text;
    };
    return high >= 1e15 || high == kInt32Max ? "of at least " + shown(low)
                                             : "from " + shown(low) + " to " + shown(high);
  }

  const Json& object_;
  std::optional<ApiError> error_;
};

bool has_content(const Json* value) { return value != nullptr && !value->empty(); }

bool is_true(const Json* value) {
  return value != nullptr && !(value->is_boolean() && !value->get<bool>());
}

void read_stop(FieldReader& fields, std::vector<std::string>* out) {
  constexpr size_t kStopsMax = 64;
  const Json* value = fields.find("stop");
  if (value == nullptr) {
    return;
  }
  const Json list = value->is_string() ? Json::array({*value}) : *value;
  if (!list.is_array() || list.size() > kStopsMax) {
    return fields.fail("stop", excerpt(*value),
                       "a string or a list of at most " + std::to_string(kStopsMax) + " strings");
  }
  for (const Json& item : list) {
    if (!item.is_string() || item.get_ref<const std::string&>().empty()) {
      return fields.fail("stop", excerpt(item), "a string of at least one character");
    }
    out->push_back(item.get<std::string>());
  }
}

void read_logit_bias(FieldReader& fields, std::map<int32_t, float>* out) {
  constexpr double kBiasMax = 100;
  const Json* value = fields.find("logit_bias");
  if (value == nullptr) {
    return;
  }
  if (!value->is_object()) {
    return fields.fail("logit_bias", excerpt(*value), "an object of token ids and biases");
  }
  for (const auto& [key, bias] : value->items()) {
    char* end = nullptr;
    const int64_t id = std::strtoll(key.c_str(), &end, 10);
    if (key.empty() || *end != '\0' || id < 0 || id > kInt32Max) {
      return fields.fail("logit_bias", "\"" + key + "\"", "a token id");
    }
    if (!bias.is_number() || !(std::abs(bias.get<double>()) <= kBiasMax)) {
      return fields.fail("logit_bias", excerpt(bias), "a bias from -100 to 100");
    }
    (*out)[static_cast<int32_t>(id)] = bias.get<float>();
  }
}

void read_unsupported(FieldReader& fields) {
  for (const char* name :
       {"tools", "functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "bad_words", "allowed_token_ids", "logits_processors", "audio"}) {
    fields.refuse(name, has_content(fields.find(name)));
  }
  const Json* format = fields.find("response_format");
  fields.refuse("response_format", format != nullptr && !(format->is_object() &&
                                                          format->value("type", Json()) == "text"));
  const Json* choice = fields.find("tool_choice");
  fields.refuse("tool_choice", choice != nullptr && *choice != "none" && *choice != "auto");
  fields.refuse("use_beam_search", is_true(fields.find("use_beam_search")));
}

void read_common(FieldReader& fields, GenerationRequest* out) {
  constexpr int64_t kTokensMax = int64_t{1} << 40;
  constexpr double kTemperatureMax = 100;
  SamplingParams& sampling = out->sampling;
  sampling.temperature = 1;
  fields.text("model", &out->model);
  fields.number("temperature", 0, kTemperatureMax, &sampling.temperature);
  fields.number("top_p", 0, 1, &sampling.top_p);
  if (sampling.top_p == 0) {
    fields.fail("top_p", "0", "a number above 0, at most 1");
  }
  fields.integer("top_k", -1, kInt32Max, &sampling.top_k);
  fields.number("min_p", 0, 1, &sampling.min_p);
  fields.number("presence_penalty", -2, 2, &sampling.presence_penalty);
  fields.number("frequency_penalty", -2, 2, &sampling.frequency_penalty);
  fields.number("repetition_penalty", 1e-6, 1e6, &sampling.repetition_penalty);
  std::optional<int64_t> seed;
  fields.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                 &seed);
  if (seed.has_value()) {
    out->seed = static_cast<uint64_t>(*seed);
  }
  fields.integer("max_tokens", out->chat ? 1 : 0, kTokensMax, &out->max_tokens);
  fields.integer("max_completion_tokens", out->chat ? 1 : 0, kTokensMax, &out->max_tokens);
  fields.integer("min_tokens", 0, kTokensMax, &sampling.min_tokens);
  if (out->max_tokens.has_value() && sampling.min_tokens > *out->max_tokens) {
    fields.fail("min_tokens", std::to_string(sampling.min_tokens),
                "at most max_tokens " + std::to_string(*out->max_tokens));
  }
  fields.integer("n", 1, kSequencesMax, &out->n);
  int64_t best_of = out->n;
  fields.integer("best_of", 1, kSequencesMax, &best_of);
  fields.refuse("best_of", best_of != out->n);
  read_stop(fields, &sampling.stop);
  fields.ids("stop_token_ids", &sampling.stop_token_ids);
  fields.boolean("include_stop_str_in_output", &sampling.include_stop_in_text);
  fields.boolean("ignore_eos", &sampling.ignore_eos);
  fields.boolean("skip_special_tokens", &sampling.skip_special_tokens);
  read_logit_bias(fields, &sampling.logit_bias);
  fields.integer("priority", -kInt32Max, kInt32Max, &out->priority);
  fields.boolean("stream", &out->stream);
  if (const Json* options = fields.find("stream_options"); options != nullptr) {
    if (!options->is_object()) {
      fields.fail("stream_options", excerpt(*options), "an object");
    } else if (!out->stream) {
      fields.fail("stream_options", "given", "stream: true with it");
    } else {
      FieldReader inner(*options);
      inner.boolean("include_usage", &out->include_usage);
      if (inner.error().has_value()) {
        fields.fail("stream_options", excerpt(*options), "include_usage: true or false");
      }
    }
  }
  fields.boolean("echo", &out->echo);
  fields.integer("prompt_logprobs", 0, 20, &out->prompt_logprobs);
  if (out->prompt_logprobs.has_value() && out->stream) {
    fields.fail("prompt_logprobs", "given with stream", "stream: false with it");
  }
  fields.boolean("record_selection", &out->record_selection);
  read_unsupported(fields);
}

// A string, token ids, or a list of either.
void read_prompts(FieldReader& fields, std::vector<PromptInput>* out) {
  const std::string expected = "a string, a list of token ids, or a list of either";
  const Json* value = fields.find("prompt");
  if (value == nullptr) {
    return fields.fail("prompt", "missing", expected);
  }
  auto add = [&](const Json& item) {
    PromptInput prompt;
    if (item.is_string()) {
      prompt.text = item.get<std::string>();
    } else if (item.is_array()) {
      prompt.is_ids = true;
      fields.read_ids("prompt", item, &prompt.ids);
    } else {
      return fields.fail("prompt", excerpt(item), expected);
    }
    out->push_back(std::move(prompt));
  };
  if (value->is_array()) {
    if (value->empty()) {
      return fields.fail("prompt", "an empty list", expected);
    }
    if (!value->front().is_number()) {
      if (value->size() > static_cast<size_t>(kSequencesMax)) {
        return fields.fail("prompt", std::to_string(value->size()) + " prompts",
                           "at most " + std::to_string(kSequencesMax));
      }
      for (const Json& item : *value) {
        add(item);
      }
      return;
    }
  }
  add(*value);
}

// Messages with text only; lists of text parts are joined, as templates expect plain strings.
void read_messages(FieldReader& fields, std::string* out) {
  const Json* value = fields.find("messages");
  if (value == nullptr || !value->is_array() || value->empty()) {
    return fields.fail("messages", value == nullptr ? "missing" : excerpt(*value),
                       "a list of at least one message");
  }
  Json messages = *value;
  for (size_t i = 0; i < messages.size(); ++i) {
    Json& message = messages[i];
    const std::string name = "messages[" + std::to_string(i) + "]";
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string()) {
      return fields.fail(
          bad_request(name + ": expected an object with role and content.", "messages"));
    }
    const auto content = message.find("content");
    if (content == message.end() || content->is_null()) {
      if (message["role"] != "assistant") {
        return fields.fail(bad_request(name + ".content: missing.", "messages"));
      }
      message["content"] = "";
    } else if (content->is_array()) {
      std::string text;
      for (const Json& part : *content) {
        if (!part.is_object() || part.value("type", Json()) != "text" || !part.contains("text") ||
            !part["text"].is_string()) {
          return fields.fail(bad_request(
              name + ".content: " + excerpt(part) + ", expected parts of type text.", "messages"));
        }
        text += (text.empty() ? "" : "\n") + part["text"].get<std::string>();
      }
      *content = text;
    } else if (!content->is_string()) {
      return fields.fail(bad_request(
          name + ".content: " + excerpt(*content) + ", expected a string or text parts.",
          "messages"));
    }
  }
  *out = messages.dump();
}

void read_chat_options(FieldReader& fields, std::string* out) {
  Json options = Json::object();
  for (const char* name : {"add_generation_prompt", "continue_final_message"}) {
    bool given = fields.find(name) != nullptr;
    bool value = false;
    fields.boolean(name, &value);
    if (given) {
      options[name] = value;
    }
  }
  if (options.value("continue_final_message", false) &&
      !options.contains("add_generation_prompt")) {
    options["add_generation_prompt"] = false;
  }
  Json kwargs = Json::object();
  if (const Json* given = fields.find("chat_template_kwargs"); given != nullptr) {
    if (!given->is_object()) {
      return fields.fail("chat_template_kwargs", excerpt(*given), "an object");
    }
    kwargs = *given;
  }
  if (const Json* effort = fields.find("reasoning_effort"); effort != nullptr) {
    kwargs.emplace("reasoning_effort", *effort);
  }
  if (!kwargs.empty()) {
    options["chat_template_kwargs"] = kwargs;
  }
  *out = options.dump();
}

}  // namespace

std::string error_body(const ApiError& error) {
  auto or_null = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  nlohmann::ordered_json inner;
  inner["message"] = error.message;
  inner["type"] = error.type;
  inner["param"] = or_null(error.param);
  inner["code"] = or_null(error.code);
  return nlohmann::ordered_json{{"error", inner}}.dump(
      -1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::optional<ApiError> parse_completion(std::string_view body, GenerationRequest* out) {
  Json json;
  if (std::optional<ApiError> error = parse_object(body, &json)) {
    return error;
  }
  FieldReader fields(json);
  out->chat = false;
  read_common(fields, out);
  read_prompts(fields, &out->prompts);
  if (static_cast<int64_t>(out->prompts.size()) * out->n > kSequencesMax) {
    fields.fail("n", std::to_string(out->n),
                "prompts times n of at most " + std::to_string(kSequencesMax));
  }
  if (const Json* suffix = fields.find("suffix"); suffix != nullptr) {
    fields.refuse("suffix", *suffix != "");
  }
  if (const Json* logprobs = fields.find("logprobs"); logprobs != nullptr) {
    out->logprobs = true;
    fields.integer("logprobs", 0, 20, &out->sampling.top_logprobs);
  }
  if (out->echo && out->logprobs && out->stream) {
    fields.fail("echo", "true with logprobs and stream", "stream: false with both");
  }
  return fields.error();
}

std::optional<ApiError> parse_chat(std::string_view body, GenerationRequest* out) {
  Json json;
  if (std::optional<ApiError> error = parse_object(body, &json)) {
    return error;
  }
  FieldReader fields(json);
  out->chat = true;
  read_common(fields, out);
  fields.refuse("echo", out->echo);
  read_messages(fields, &out->messages_json);
  read_chat_options(fields, &out->options_json);
  fields.boolean("logprobs", &out->logprobs);
  fields.integer("top_logprobs", 0, 20, &out->sampling.top_logprobs);
  if (out->sampling.top_logprobs > 0 && !out->logprobs) {
    fields.fail("top_logprobs", std::to_string(out->sampling.top_logprobs),
                "logprobs: true with it");
  }
  return fields.error();
}

std::optional<ApiError> parse_tokenize(std::string_view body, TokenizeRequest* out) {
  Json json;
  if (std::optional<ApiError> error = parse_object(body, &json)) {
    return error;
  }
  FieldReader fields(json);
  fields.text("model", &out->model);
  fields.boolean("return_token_strs", &out->return_token_strs);
  if (fields.find("messages") != nullptr) {
    read_messages(fields, &out->messages_json);
    read_chat_options(fields, &out->options_json);
  } else if (fields.find("prompt") == nullptr) {
    fields.fail("prompt", "missing", "a string, or messages");
  }
  fields.text("prompt", &out->prompt);
  return fields.error();
}

std::optional<ApiError> parse_detokenize(std::string_view body, DetokenizeRequest* out) {
  Json json;
  if (std::optional<ApiError> error = parse_object(body, &json)) {
    return error;
  }
  FieldReader fields(json);
  fields.text("model", &out->model);
  if (fields.find("tokens") == nullptr) {
    fields.fail("tokens", "missing", "a list of token ids");
  }
  fields.ids("tokens", &out->tokens);
  return fields.error();
}

}  // namespace lacuna::server
