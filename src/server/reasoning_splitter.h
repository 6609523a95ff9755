// Splits an answer that thinks first at its "</think>", piece by piece.
#pragma once

#include <string>
#include <string_view>

namespace lacuna::server {

class ReasoningSplitter {
 public:
  struct Piece {
    std::string reasoning;
    std::string content;
  };

  ReasoningSplitter() = default;
  // `prompt_opens`: the prompt ends within a think block.
  ReasoningSplitter(bool enabled, bool prompt_opens);

  Piece feed(std::string_view text);
  // What was held back because it might have begun a mark.
  Piece flush();

 private:
  enum class State { kOff, kStart, kThinking, kAfterThinking, kContent };
  State state_ = State::kOff;
  std::string held_;
};

// Whether a rendered prompt ends within a think block.
bool opens_think_block(std::string_view prompt);

}  // namespace lacuna::server
