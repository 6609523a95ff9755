// The part of the Jinja language that chat templates use, with the settings of Hugging Face
// transformers: trim_blocks and lstrip_blocks, loop controls, an immutable sandbox. A template is
// untrusted text: nesting, steps and bytes are bounded.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "lacuna/status.h"

namespace lacuna {

// Objects keep the order of their members, as Python's dictionaries do: tojson shows it.
using OrderedJson = nlohmann::ordered_json;

// Parses JSON that a caller sent, at most 64 deep. `what` names it in messages.
Result<OrderedJson> parse_ordered_json(std::string_view text, const std::string& what);

struct JinjaLimits {
  int64_t steps = 20'000'000;                // expressions and statements
  int64_t output_bytes = int64_t{64} << 20;  // of one string, the result included
  int64_t total_bytes = int64_t{512} << 20;  // of everything built on the way
  int depth = 64;                            // macros and blocks within each other
};

struct JinjaNode;  // jinja_parser.h

// Immutable, cheap to copy, safe to share between threads.
class JinjaTemplate {
 public:
  // `what` names the template in messages, which also give the line.
  static Result<JinjaTemplate> parse(std::string_view source, const std::string& what);

  // `variables` is an object. Errors are the template's own raise_exception() too.
  Result<std::string> render(const OrderedJson& variables, const JinjaLimits& limits = {}) const;

 private:
  JinjaTemplate(std::shared_ptr<const JinjaNode> root, std::string what)
      : root_(std::move(root)), what_(std::move(what)) {}
  std::shared_ptr<const JinjaNode> root_;
  std::string what_;
};

}  // namespace lacuna
