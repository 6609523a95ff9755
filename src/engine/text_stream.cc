// Stop strings over a stream.
#include "engine/text_stream.h"

#include <algorithm>

namespace lacuna {

std::string TextStream::feed(int32_t token_id) {
  if (stopped_ || !decoder_.has_value()) {
    return {};
  }
  held_ += decoder_->feed(token_id);
  return take_safe(false);
}

std::string TextStream::flush() {
  if (stopped_ || !decoder_.has_value()) {
    return {};
  }
  held_ += decoder_->flush();
  return take_safe(true);
}

std::string TextStream::take_safe(bool at_end) {
  size_t found = std::string::npos;
  size_t end = 0;
  for (const std::string& stop : stop_) {
    const size_t at = held_.find(stop);
    if (at < found) {
      found = at;
      end = at + (include_stop_ ? stop.size() : 0);
    }
  }
  if (found != std::string::npos) {
    stopped_ = true;
    std::string text = held_.substr(0, end);
    held_.clear();
    return text;
  }
  size_t keep = 0;  // longest end of the held text that begins a stop string
  if (!at_end) {
    for (const std::string& stop : stop_) {
      for (size_t n = std::min(stop.size() - 1, held_.size()); n > keep; --n) {
        if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) {
          keep = n;
          break;
        }
      }
    }
  }
  std::string text = held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return text;
}

}  // namespace lacuna
