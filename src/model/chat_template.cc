// Finds a model's chat template and renders messages through it.
#include "model/chat_template.h"

#include "core/check.h"

namespace lacuna {

struct ChatTemplateState {
  std::string source;
};

Result<ChatOptions> parse_chat_options(std::string_view) { return ChatOptions{}; }

Result<ChatTemplate> ChatTemplate::load(const std::string&, const std::string&,
                                        const std::string&) {
  return unsupported("chat_template: not available yet");
}

Result<std::string> ChatTemplate::render(std::string_view, const ChatOptions&) const {
  return unsupported("chat_template: not available yet");
}

const std::string& ChatTemplate::source() const { return state_->source; }

}  // namespace lacuna
