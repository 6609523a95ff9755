// Finds a model's chat template and renders messages through it, with the variables that Hugging
// Face transformers gives to templates.
#include "model/chat_template.h"

#include <optional>
#include <vector>

#include "core/check.h"
#include "core/file_map.h"
#include "model/deepseek_encoder.h"
#include "model/jinja.h"
#include "model/jinja_value.h"
#include "model/json.h"
#include "model/model_dir.h"

namespace lacuna {

struct ChatTemplateState {
  std::string source;
  std::string tool_source;  // of a second template for requests with tools; empty: none
  std::optional<JinjaTemplate> jinja;
  std::optional<JinjaTemplate> tool_jinja;
  OrderedJson special_tokens = OrderedJson::object();  // bos_token, eos_token, ...
};

namespace {

constexpr int64_t kTemplateBytesMax = int64_t{1} << 20;
constexpr int64_t kTokenizerConfigBytesMax = int64_t{64} << 20;
constexpr const char* kDeepseekSource = "built-in encoder of deepseek_v32";

// A token in tokenizer_config.json is a text or an object with content.
std::optional<std::string> token_text(const Json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  const Json* content = find_member(value, "content");
  return content != nullptr && content->is_string() ? std::optional(content->get<std::string>())
                                                    : std::nullopt;
}

Status read_tokenizer_config(const ModelDir& dir, ChatTemplateState* state) {
  if (!dir.has("tokenizer_config.json")) {
    return ok_status();
  }
  const std::string path = dir.path("tokenizer_config.json");
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, kTokenizerConfigBytesMax));
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(text, path));
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    const Json* token = find_member(root, name);
    const std::optional<std::string> content = token == nullptr ? std::nullopt : token_text(*token);
    if (content.has_value()) {
      state->special_tokens[name] = *content;
    }
  }
  if (!state->source.empty()) {
    return ok_status();
  }
  const Json* given = find_member(root, "chat_template");
  if (given == nullptr) {
    return ok_status();
  }
  if (given->is_string()) {
    state->source = given->get<std::string>();
    return ok_status();
  }
  if (given->is_array()) {  // named ones
    for (const Json& named : *given) {
      const Json* name = find_member(named, "name");
      const Json* body = find_member(named, "template");
      if (name != nullptr && body != nullptr && body->is_string()) {
        if (*name == "default") {
          state->source = body->get<std::string>();
        } else if (*name == "tool_use") {
          state->tool_source = body->get<std::string>();
        }
      }
    }
  }
  if (state->source.empty()) {
    return data_loss(path + ": chat_template: " + describe(*given) +
                     ", expected a text or a list with one named default");
  }
  return ok_status();
}

bool looks_like_template(const std::string& text) {
  return text.find("{{") != std::string::npos || text.find("{%") != std::string::npos ||
         text.find('\n') != std::string::npos;
}

// A conversation as templates expect it: content a text or null, arguments of calls as objects or
// as texts.
Result<OrderedJson> normalized(const OrderedJson& messages, bool arguments_as_text) {
  OrderedJson out = messages;
  for (size_t i = 0; i < out.size(); ++i) {
    OrderedJson& message = out[i];
    const std::string where = "messages[" + std::to_string(i) + "]";
    if (!message.is_object()) {
      return invalid_argument(where + ": expected an object with role and content");
    }
    const auto role = message.find("role");
    if (role == message.end() || !role->is_string()) {
      return invalid_argument(where + ".role: missing, expected a text");
    }
    OrderedJson& content = message["content"];  // null when it was absent
    if (content.is_array()) {
      std::string text;
      for (size_t p = 0; p < content.size(); ++p) {
        const OrderedJson& part = content[p];
        const auto piece = part.is_object() ? part.find("text") : part.end();
        if (!part.is_object() || piece == part.end() || !piece->is_string()) {
          return invalid_argument(where + ".content[" + std::to_string(p) +
                                  "]: only text parts are supported: {\"type\": \"text\", "
                                  "\"text\": \"...\"}");
        }
        text += (p == 0 ? "" : "\n") + piece->get<std::string>();
      }
      content = std::move(text);
    } else if (!content.is_string() && !content.is_null()) {
      return invalid_argument(where + ".content: expected a text or a list of text parts");
    }
    const auto calls = message.find("tool_calls");
    if (calls == message.end() || !calls->is_array()) {
      continue;
    }
    for (size_t c = 0; c < calls->size(); ++c) {
      OrderedJson& call = (*calls)[c];
      const auto function = call.is_object() ? call.find("function") : call.end();
      if (!call.is_object() || function == call.end() || !function->is_object()) {
        continue;
      }
      const auto arguments = function->find("arguments");
      if (arguments == function->end()) {
        continue;
      }
      if (arguments_as_text && !arguments->is_string()) {
        *arguments = jinja_to_json(JinjaValue::from_json(*arguments), {});
      } else if (!arguments_as_text && arguments->is_string()) {
        const std::string text = arguments->get<std::string>();
        LACUNA_ASSIGN_OR_RETURN(
            *arguments, parse_ordered_json(
                            text.empty() ? "{}" : text,
                            where + ".tool_calls[" + std::to_string(c) + "].function.arguments"));
      }
    }
  }
  return out;
}

bool has_arguments(const OrderedJson& messages) {
  for (const OrderedJson& message : messages) {
    if (message.is_object() && message.contains("tool_calls")) {
      return true;
    }
  }
  return false;
}

// The text up to the end of the last message's content, as transformers cuts it.
Result<std::string> cut_after_final_message(std::string text, const OrderedJson& messages) {
  const OrderedJson& content = messages.back()["content"];
  const std::string last = content.is_string() ? content.get<std::string>() : std::string();
  const std::string stripped(strip_python_space(last, true, true));
  const size_t at = text.rfind(stripped);
  if (stripped.empty() || at == std::string::npos) {
    return invalid_argument(
        "continue_final_message: the template does not show the last message's content");
  }
  const std::string from_left(strip_python_space(last, true, false));
  const bool whole = text.compare(at, from_left.size(), from_left) == 0;
  text.resize(at + (whole ? from_left.size() : stripped.size()));
  return text;
}

}  // namespace

Result<ChatOptions> parse_chat_options(std::string_view options_json) {
  ChatOptions options;
  if (options_json.empty()) {
    return options;
  }
  LACUNA_ASSIGN_OR_RETURN(const OrderedJson root, parse_ordered_json(options_json, "options"));
  if (!root.is_object()) {
    return invalid_argument("options: expected an object");
  }
  for (const auto& [name, flag] :
       {std::pair("add_generation_prompt", &options.add_generation_prompt),
        std::pair("continue_final_message", &options.continue_final_message)}) {
    const auto at = root.find(name);
    if (at != root.end() && !at->is_null()) {
      if (!at->is_boolean()) {
        return invalid_argument(std::string(name) + ": expected true or false");
      }
      *flag = at->get<bool>();
    }
  }
  if (options.continue_final_message && !root.contains("add_generation_prompt")) {
    options.add_generation_prompt = false;
  }
  if (const auto at = root.find("tools"); at != root.end() && !at->is_null()) {
    options.tools_json = at->dump();
  }
  if (const auto at = root.find("chat_template_kwargs"); at != root.end() && !at->is_null()) {
    options.template_kwargs_json = at->dump();
  }
  return options;
}

Result<ChatTemplate> ChatTemplate::load(const std::string& model_dir, const std::string& model_type,
                                        const std::string& override_path_or_text) {
  LACUNA_ASSIGN_OR_RETURN(const ModelDir dir, list_model_dir(model_dir));
  auto state = std::make_shared<ChatTemplateState>();
  std::string what = "chat template";
  if (!override_path_or_text.empty()) {
    state->source = override_path_or_text;
    if (!looks_like_template(override_path_or_text)) {
      what = override_path_or_text;
      LACUNA_ASSIGN_OR_RETURN(state->source, read_file(what, kTemplateBytesMax));
    }
  } else if (dir.has("chat_template.jinja")) {
    what = dir.path("chat_template.jinja");
    LACUNA_ASSIGN_OR_RETURN(state->source, read_file(what, kTemplateBytesMax));
  } else {
    what = dir.path("tokenizer_config.json") + ": chat_template";
  }
  LACUNA_RETURN_IF_ERROR(read_tokenizer_config(dir, state.get()));
  if (!state->source.empty()) {
    LACUNA_ASSIGN_OR_RETURN(state->jinja, JinjaTemplate::parse(state->source, what));
    if (!state->tool_source.empty()) {
      LACUNA_ASSIGN_OR_RETURN(state->tool_jinja, JinjaTemplate::parse(state->tool_source, what));
    }
  } else if (model_type == "deepseek_v32") {
    state->source = kDeepseekSource;
  } else {
    return not_found(dir.root +
                     ": no chat template (chat_template.jinja, or chat_template in "
                     "tokenizer_config.json); give one with --chat-template");
  }
  return ChatTemplate(std::move(state));
}

Result<std::string> ChatTemplate::render(std::string_view messages_json,
                                         const ChatOptions& options) const {
  if (options.add_generation_prompt && options.continue_final_message) {
    return invalid_argument(
        "continue_final_message: excludes add_generation_prompt, set that to false");
  }
  LACUNA_ASSIGN_OR_RETURN(const OrderedJson messages,
                          parse_ordered_json(messages_json, "messages"));
  if (!messages.is_array() || messages.empty()) {
    return invalid_argument("messages: expected a list of at least one message");
  }
  OrderedJson tools = nullptr;
  if (!options.tools_json.empty()) {
    LACUNA_ASSIGN_OR_RETURN(tools, parse_ordered_json(options.tools_json, "tools"));
    if (!tools.is_array() && !tools.is_null()) {
      return invalid_argument("tools: expected a list");
    }
    if (tools.empty()) {
      tools = nullptr;
    }
  }
  OrderedJson kwargs = OrderedJson::object();
  if (!options.template_kwargs_json.empty()) {
    LACUNA_ASSIGN_OR_RETURN(
        kwargs, parse_ordered_json(options.template_kwargs_json, "chat_template_kwargs"));
    if (!kwargs.is_object()) {
      return invalid_argument("chat_template_kwargs: expected an object");
    }
  }

  const auto render_form = [&](bool arguments_as_text) -> Result<std::string> {
    LACUNA_ASSIGN_OR_RETURN(OrderedJson form, normalized(messages, arguments_as_text));
    Result<std::string> text = std::string();
    if (!state_->jinja.has_value()) {
      DeepseekChat deepseek{.add_generation_prompt = options.add_generation_prompt};
      for (const char* name : {"thinking", "enable_thinking"}) {
        deepseek.thinking = deepseek.thinking || kwargs.value(name, OrderedJson(false)) == true;
      }
      text = encode_deepseek_chat(form, tools, deepseek);
    } else {
      OrderedJson variables = state_->special_tokens;
      variables["messages"] = form;
      variables["tools"] = tools;
      variables["documents"] = nullptr;
      variables["add_generation_prompt"] = options.add_generation_prompt;
      for (const auto& [name, value] : kwargs.items()) {
        variables[name] = value;
      }
      const bool by_tool_template = !tools.is_null() && state_->tool_jinja.has_value();
      text = (by_tool_template ? state_->tool_jinja : state_->jinja)->render(variables);
    }
    if (text.ok() && options.continue_final_message) {
      return cut_after_final_message(std::move(*text), form);
    }
    return text;
  };
  // Templates disagree whether the arguments of earlier calls are objects (most iterate over them)
  // or the API's text (some add it to a string): the other form is an error in either kind.
  Result<std::string> text = render_form(/*arguments_as_text=*/false);
  if (!text.ok() && state_->jinja.has_value() && has_arguments(messages)) {
    Result<std::string> second = render_form(/*arguments_as_text=*/true);
    if (second.ok()) {
      return second;
    }
  }
  return text;
}

const std::string& ChatTemplate::source() const { return state_->source; }

}  // namespace lacuna
