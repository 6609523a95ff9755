// DeepSeek-V3.2 chat: every question is followed by the beginning of its answer, so the form of one
// message depends on where the last question is.
#include "model/deepseek_encoder.h"

#include "core/check.h"
#include "model/jinja_value.h"

namespace lacuna {
namespace {

constexpr const char* kBos = "<｜begin▁of▁sentence｜>";
constexpr const char* kEos = "<｜end▁of▁sentence｜>";
constexpr const char* kUser = "<｜User｜>";
constexpr const char* kAssistant = "<｜Assistant｜>";
constexpr const char* kThink = "<think>";
constexpr const char* kEndThink = "</think>";

// What the model was trained to read before its functions.
constexpr const char* kToolsBefore =
    "## Tools\n"
    "You have access to a set of tools you can use to answer the user's question.\n"
    "You can invoke functions by writing a \"<｜DSML｜function_calls>\" block like the following "
    "as "
    "part of your reply to the user:\n"
    "<｜DSML｜function_calls>\n"
    "<｜DSML｜invoke name=\"$FUNCTION_NAME\">\n"
    "<｜DSML｜parameter name=\"$PARAMETER_NAME\" "
    "string=\"true|false\">$PARAMETER_VALUE</｜DSML｜parameter>\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "<｜DSML｜invoke name=\"$FUNCTION_NAME2\">\n"
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>\n"
    "String and scalar parameters should be specified as is without any escaping or quotes, while "
    "lists and objects should use JSON format. The \"string\" attribute should be set to \"true\" "
    "for string type parameters and \"false\" for other types (numbers, booleans, arrays, "
    "objects).\n"
    "If the thinking_mode is enabled, then after function results you should strongly consider "
    "outputting a thinking block. Here is an example:\n"
    "<｜DSML｜function_calls>\n"
    "...\n"
    "</｜DSML｜function_calls>\n"
    "<function_results>\n"
    "...\n"
    "</function_results>\n"
    "<think>...thinking about results</think>\n"
    "Here are the functions available in JSONSchema format:\n"
    "<functions>\n";
constexpr const char* kToolsAfter = "\n</functions>\n";

std::string text_member(const OrderedJson& object, const char* name) {
  const auto at = object.find(name);
  return at != object.end() && at->is_string() ? at->get<std::string>() : std::string();
}

// Python's json.dumps with its spaces.
std::string python_json(const OrderedJson& json) {
  return jinja_to_json(JinjaValue::from_json(json), {});
}

Result<std::string> tools_text(const OrderedJson& tools) {
  std::string out = kToolsBefore;
  for (size_t i = 0; i < tools.size(); ++i) {
    const auto function = tools[i].is_object() ? tools[i].find("function") : tools[i].end();
    if (!tools[i].is_object() || function == tools[i].end() || !function->is_object()) {
      return invalid_argument("tools[" + std::to_string(i) +
                              "]: expected {\"type\": \"function\", \"function\": {...}}");
    }
    out += (i == 0 ? "" : "\n") + python_json(*function);
  }
  return out + kToolsAfter;
}

Result<std::string> calls_text(const OrderedJson& calls, const std::string& where) {
  std::string out = "\n\n<｜DSML｜function_calls>\n";
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string field = where + ".tool_calls[" + std::to_string(i) + "].function";
    const auto function = calls[i].is_object() ? calls[i].find("function") : calls[i].end();
    if (!calls[i].is_object() || function == calls[i].end() || !function->is_object()) {
      return invalid_argument(field + ": missing");
    }
    OrderedJson arguments = OrderedJson::object();
    if (const auto given = function->find("arguments"); given != function->end()) {
      arguments = *given;
      if (given->is_string()) {
        LACUNA_ASSIGN_OR_RETURN(arguments, parse_ordered_json(given->get_ref<const std::string&>(),
                                                              field + ".arguments"));
      }
    }
    if (!arguments.is_object()) {
      return invalid_argument(field + ".arguments: expected an object");
    }
    out += "<｜DSML｜invoke name=\"" + text_member(*function, "name") + "\">\n";
    bool first = true;
    for (const auto& [name, value] : arguments.items()) {
      out += first ? "" : "\n";
      first = false;
      out += "<｜DSML｜parameter name=\"" + name + "\" string=\"" +
             (value.is_string() ? "true\">" + value.get<std::string>()
                                : "false\">" + python_json(value)) +
             "</｜DSML｜parameter>";
    }
    out += "\n</｜DSML｜invoke>\n";
  }
  return out + "</｜DSML｜function_calls>";
}

class Encoder {
 public:
  Encoder(const OrderedJson& messages, const OrderedJson& tools, const DeepseekChat& options)
      : messages_(messages), tools_(tools), options_(options) {}

  Result<std::string> encode() {
    for (size_t i = 0; i < messages_.size(); ++i) {
      const std::string role = text_member(messages_[i], "role");
      if (role == "user" || role == "developer") {
        last_question_ = static_cast<int64_t>(i);
      }
    }
    out_ = kBos;
    const bool has_tools = tools_.is_array() && !tools_.empty();
    const bool has_system =
        !messages_.empty() && text_member(messages_.front(), "role") == "system";
    if (has_tools && !has_system) {
      LACUNA_ASSIGN_OR_RETURN(const std::string text, tools_text(tools_));
      out_ += "\n\n" + text;
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      LACUNA_RETURN_IF_ERROR(add(i));
      if (i == 0 && has_tools && has_system) {
        LACUNA_ASSIGN_OR_RETURN(const std::string text, tools_text(tools_));
        out_ += "\n\n" + text;
      }
    }
    return std::move(out_);
  }

 private:
  // After a question or a result: does the answer begin with a thought?
  const char* answer_begin(size_t i) const {
    return options_.thinking && static_cast<int64_t>(i) >= last_question_ ? kThink : kEndThink;
  }

  Status add(size_t i) {
    const OrderedJson& message = messages_[i];
    const std::string where = "messages[" + std::to_string(i) + "]";
    const std::string role = text_member(message, "role");
    const std::string content = text_member(message, "content");
    const bool last = i + 1 == messages_.size();
    if (role == "system") {
      out_ += content;
    } else if (role == "user" || role == "developer") {
      out_ += kUser + (role == "user" ? content : "\n\n# The user's message is: " + content);
      if (!last || options_.add_generation_prompt) {
        out_ += std::string(kAssistant) + answer_begin(i);
      }
    } else if (role == "assistant") {
      if (options_.thinking && static_cast<int64_t>(i) > last_question_) {
        std::string thought = text_member(message, "reasoning_content");
        if (thought.empty()) {
          thought = text_member(message, "reasoning");
        }
        out_ += thought + kEndThink;
      }
      out_ += content;
      if (const auto calls = message.find("tool_calls");
          calls != message.end() && calls->is_array() && !calls->empty()) {
        LACUNA_ASSIGN_OR_RETURN(const std::string text, calls_text(*calls, where));
        out_ += text;
      }
      out_ += kEos;
    } else if (role == "tool") {
      return add_result(i, where, content);
    } else {
      return invalid_argument(where + ".role: \"" + role +
                              "\", expected system, developer, user, assistant or tool");
    }
    return ok_status();
  }

  // The results of one turn's calls stand in one block, in the order of the calls.
  Status add_result(size_t i, const std::string& where, const std::string& content) {
    size_t order = 1;
    while (order <= i && text_member(messages_[i - order], "role") == "tool") {
      ++order;
    }
    size_t num_calls = 0;
    if (order <= i && text_member(messages_[i - order], "role") == "assistant") {
      const auto calls = messages_[i - order].find("tool_calls");
      num_calls = calls != messages_[i - order].end() && calls->is_array() ? calls->size() : 0;
    }
    if (order > num_calls) {
      return invalid_argument(where + ": a tool's result without a call before it");
    }
    out_ += (order == 1 ? "\n\n<function_results>" : "") + ("\n<result>" + content) + "</result>";
    if (order == num_calls) {
      out_ += "\n</function_results>";
      if (i + 1 < messages_.size() || options_.add_generation_prompt) {
        out_ += std::string("\n\n") + answer_begin(i);
      }
    }
    return ok_status();
  }

  const OrderedJson& messages_;
  const OrderedJson& tools_;
  const DeepseekChat& options_;
  int64_t last_question_ = -1;
  std::string out_;
};

}  // namespace

Result<std::string> encode_deepseek_chat(const OrderedJson& messages, const OrderedJson& tools,
                                         const DeepseekChat& options) {
  try {
    return Encoder(messages, tools, options).encode();
  } catch (const JinjaError& error) {  // a value too large to write
    return invalid_argument("chat: " + error.message);
  }
}

}  // namespace lacuna
