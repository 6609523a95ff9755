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
  TextStream(const std::optional<Tokenizer>& tokenizer, std::vector<std::string> stop)
      : stop_(std::move(stop)) {
    if (tokenizer.has_value()) {
      decoder_.emplace(*tokenizer);
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
  std::string held_;
  bool stopped_ = false;
};

}  // namespace lacuna
