// JSON from files that somebody else wrote: bounded depth, no duplicate keys, one-line errors. The
// readers of config, safetensors and tokenizer files share it; it is not for the server's JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "lacuna/status.h"

namespace lacuna {

using Json = nlohmann::json;

// Checkpoint files nest five deep; 32 leaves room and keeps every recursive walk shallow.
inline constexpr int kJsonDepthMax = 32;

// Parses all of `text`. `what` names the source in messages.
Result<Json> parse_json(std::string_view text, const std::string& what);

// `text` in double quotes for a one-line message: control characters escaped, long text cut.
std::string quote_text(std::string_view text);

// A value in few words, for messages: `"abc"`, `12`, `null`, `a list of 3`, `an object`.
std::string describe(const Json& value);

// The member, or null when it is absent, JSON null, or `object` is not an object.
const Json* find_member(const Json& object, std::string_view name);

}  // namespace lacuna
