// A mark may come in pieces: text that could begin one waits for the next piece.
#include "server/reasoning_splitter.h"

#include <algorithm>

namespace lacuna::server {
namespace {

constexpr std::string_view kOpen = "<think>";
constexpr std::string_view kClose = "</think>";

// The longest end of `text` that begins `mark`.
size_t partial_mark(std::string_view text, std::string_view mark) {
  for (size_t length = std::min(text.size(), mark.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == mark.substr(0, length)) {
      return length;
    }
  }
  return 0;
}

}  // namespace

ReasoningSplitter::ReasoningSplitter(bool enabled, bool prompt_opens)
    : state_(!enabled       ? State::kOff
             : prompt_opens ? State::kThinking
                            : State::kStart) {}

ReasoningSplitter::Piece ReasoningSplitter::feed(std::string_view text) {
  Piece piece;
  held_ += text;
  if (state_ == State::kStart) {
    if (held_.size() < kOpen.size() && kOpen.substr(0, held_.size()) == held_) {
      return piece;
    }
    const bool opens = held_.starts_with(kOpen);
    state_ = opens ? State::kThinking : State::kContent;
    held_.erase(0, opens ? kOpen.size() : 0);
  }
  if (state_ == State::kThinking) {
    const size_t close = held_.find(kClose);
    if (close == std::string::npos) {
      const size_t sure = held_.size() - partial_mark(held_, kClose);
      piece.reasoning = held_.substr(0, sure);
      held_.erase(0, sure);
      return piece;
    }
    piece.reasoning = held_.substr(0, close);
    held_.erase(0, close + kClose.size());
    state_ = State::kAfterThinking;
  }
  if (state_ == State::kAfterThinking) {
    // The line breaks between thought and answer belong to neither.
    held_.erase(0, std::min(held_.find_first_not_of('\n'), held_.size()));
    if (held_.empty()) {
      return piece;
    }
    state_ = State::kContent;
  }
  piece.content = std::move(held_);
  held_.clear();
  return piece;
}

ReasoningSplitter::Piece ReasoningSplitter::flush() {
  Piece piece;
  (state_ == State::kThinking ? piece.reasoning : piece.content) = std::move(held_);
  held_.clear();
  return piece;
}

bool opens_think_block(std::string_view prompt) {
  while (!prompt.empty() && (prompt.back() == '\n' || prompt.back() == ' ')) {
    prompt.remove_suffix(1);
  }
  return prompt.ends_with(kOpen);
}

}  // namespace lacuna::server
