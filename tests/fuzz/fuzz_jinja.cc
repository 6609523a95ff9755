// Two uses of the same bytes: as a Jinja template over a fixed conversation, and as JSON of a
// request, rendered by a fixed template and by DeepSeek-V3.2's encoder.
#include <cstdint>
#include <string>
#include <string_view>

#include "core/check.h"
#include "model/deepseek_encoder.h"
#include "model/jinja.h"
#include "model/utf8.h"

namespace {

using lacuna::OrderedJson;

constexpr lacuna::JinjaLimits kLimits = {
    .steps = 20'000, .output_bytes = 1 << 18, .total_bytes = 4 << 20};

OrderedJson conversation() {
  return OrderedJson::parse(R"({
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hé 日"},
                 {"role": "assistant", "content": null, "tool_calls": [
                   {"function": {"name": "f", "arguments": {"a": 1, "b": [true, null, 2.5]}}}]}],
    "tools": [{"type": "function", "function": {"name": "f"}}], "add_generation_prompt": true,
    "n": -7, "s": "text\n  more", "l": [3, 1, 2], "o": {"k": "v", "items": 0}})");
}

const lacuna::JinjaTemplate& fixed_template() {
  static const lacuna::JinjaTemplate parsed = [] {
    auto made = lacuna::JinjaTemplate::parse(
        "{% for k, v in request.items() %}{{ k }}{{ v | tojson(indent=2) }}{{ v }}{{ v | length "
        "if v is iterable }}{{ v | string | upper | trim }}{% endfor %}{{ request | dictsort }}",
        "fixed");
    LACUNA_CHECK(made.ok());
    return std::move(made).value();
  }();
  return parsed;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const OrderedJson variables = conversation();
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const lacuna::Result<lacuna::JinjaTemplate> parsed = lacuna::JinjaTemplate::parse(text, "input");
  if (parsed.ok()) {
    const lacuna::Result<std::string> out = parsed->render(variables, kLimits);
    if (out.ok()) {
      LACUNA_CHECK(out->size() <= static_cast<size_t>(kLimits.output_bytes));
      for (size_t at = 0; at < out->size();) {
        const lacuna::Utf8Step step = lacuna::utf8_step(*out, at);
        LACUNA_CHECK(step.kind == lacuna::Utf8Step::Kind::kCharacter);
        at += step.length;
      }
    }
  }
  const lacuna::Result<OrderedJson> json = lacuna::parse_ordered_json(text, "input");
  if (json.ok()) {
    (void)fixed_template().render(OrderedJson{{"request", *json}}, kLimits);
    if (json->is_array()) {
      (void)lacuna::encode_deepseek_chat(*json, *json, {.thinking = true});
    }
  }
  return 0;
}
