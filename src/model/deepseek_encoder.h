// The chat form of DeepSeek-V3.2, whose repository publishes an encoder in Python and no template.
// Written from that format's description; see docs/models.md for what was decided here.
#pragma once

#include <string>

#include "lacuna/status.h"
#include "model/jinja.h"

namespace lacuna {

struct DeepseekChat {
  bool thinking = false;  // <think> after the last question instead of </think>
  bool add_generation_prompt = true;
};

// `messages` is a list of objects whose content is a text or null; `tools` a list or null.
Result<std::string> encode_deepseek_chat(const OrderedJson& messages, const OrderedJson& tools,
                                         const DeepseekChat& options);

}  // namespace lacuna
