// Messages to the text of a prompt, in the form a model was trained on: its Jinja template, or the
// encoder in code of a model family that publishes no template.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "lacuna/status.h"

namespace lacuna {

// The JSON texts are those of the OpenAI chat API; empty ones mean absent.
struct ChatOptions {
  bool add_generation_prompt = true;    // end with the beginning of an answer
  bool continue_final_message = false;  // end within the last message; excludes the above
  std::string tools_json;               // a list: [{"type": "function", "function": {...}}]
  std::string template_kwargs_json;     // an object: further variables of the template
};

// Reads an object with any of add_generation_prompt, continue_final_message, tools and
// chat_template_kwargs; other members are ignored. An empty text gives the defaults.
Result<ChatOptions> parse_chat_options(std::string_view options_json);

struct ChatTemplateState;  // chat_template.cc

// Immutable, cheap to copy, safe to share between threads.
class ChatTemplate {
 public:
  // The first that exists: `override_path_or_text` (a file, or the template itself), the folder's
  // chat_template.jinja, chat_template of its tokenizer_config.json, the encoder in code of
  // `model_type`.
  static Result<ChatTemplate> load(const std::string& model_dir, const std::string& model_type,
                                   const std::string& override_path_or_text = {});

  // `messages_json` is a list of objects with role and content. Content may be a list of text
  // parts, which are joined by newlines.
  Result<std::string> render(std::string_view messages_json, const ChatOptions& options = {}) const;

  // The template's text; of an encoder in code its name.
  const std::string& source() const;

 private:
  explicit ChatTemplate(std::shared_ptr<const ChatTemplateState> state)
      : state_(std::move(state)) {}
  std::shared_ptr<const ChatTemplateState> state_;
};

}  // namespace lacuna
