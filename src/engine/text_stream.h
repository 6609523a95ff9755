// From tokens to the text that may be shown: whole characters only, and nothing that might turn out
// to begin a stop string.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "model/tokenizer.h"

namespace lacuna {

class TextStream {
 public:
  // Without a tokenizer there is no text.
  TextStream(const std::optional<Tokenizer>& tokenizer, std::vector<std::string> stop,
             bool include_stop = false, bool skip_special = true)
      : stop_(std::move(stop)), include_stop_(include_stop) {
    if (tokenizer.has_value()) {
      decoder_.emplace(*tokenizer, skip_special);
    }
  }

  // Text that became safe to show. Sets stopped() when a stop string is complete; text before it is
  // returned, the rest is dropped.
  std::string feed(int32_t token_id);
  // The end of the answer: everything that was held back.
  std::string flush();
  bool stopped() const { return stopped_; }

 private:
  std::string take_safe(bool at_end);

  std::optional<StreamDecoder> decoder_;
  std::vector<std::string> stop_;
  bool include_stop_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace lacuna
