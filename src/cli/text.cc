// Texts and the progress line.
#include "cli/text.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <ctime>

namespace lacuna::cli {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

std::string unescape(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\' || i + 1 == text.size()) {
      out += text[i];
      continue;
    }
    switch (text[++i]) {
      case 'n':
        out += '\n';
        break;
      case 't':
        out += '\t';
        break;
      case 'r':
        out += '\r';
        break;
      case '\\':
        out += '\\';
        break;
      default:
        out += '\\';
        out += text[i];
    }
  }
  return out;
}

std::string one_line(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    } else {
      out += c;
    }
  }
  return out;
}

Result<std::vector<int32_t>> parse_tokens(const std::string& text) {
  std::vector<int32_t> tokens;
  const char* at = text.data();
  const char* end = at + text.size();
  while (at < end) {
    int32_t token = 0;
    const auto [next, error] = std::from_chars(at, end, token);
    if (error != std::errc() || (next != end && *next != ',')) {
      return invalid_argument("--tokens: \"" + text + "\", expected ids like 1,2,3");
    }
    tokens.push_back(token);
    at = next == end ? end : next + 1;
  }
  return tokens;
}

std::string with_commas(int64_t value) {
  std::string digits = std::to_string(value);
  for (int at = static_cast<int>(digits.size()) - 3; at > (value < 0 ? 1 : 0); at -= 3) {
    digits.insert(at, ",");
  }
  return digits;
}

std::string lanes_text(const std::array<int64_t, kNumRowLanes>& rows_by_lane, int64_t keys_read,
                       int64_t keys_visible) {
  std::string text = "rows: ";
  bool first = true;
  for (int lane = 0; lane < kNumRowLanes; ++lane) {
    if (rows_by_lane[lane] > 0) {
      text += fmt::format("{}{} {}", first ? "" : ", ", with_commas(rows_by_lane[lane]),
                          row_lane_name(lane));
      first = false;
    }
  }
  return text + fmt::format("; keys read a layer: {} of {} visible ({:.1f} %)",
                            with_commas(keys_read), with_commas(keys_visible),
                            keys_visible == 0 ? 0.0 : 100.0 * keys_read / keys_visible);
}

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0), start_seconds_(now_seconds()) {}

void Progress::update(int64_t done, int64_t total, std::string_view note) {
  const double now = now_seconds();
  const double interval = terminal_ ? 0.1 : 10;
  if (now - last_seconds_ < interval || (!terminal_ && now - start_seconds_ < 2)) {
    return;
  }
  last_seconds_ = now;
  const double elapsed = now - start_seconds_;
  const double left = done > 0 ? elapsed / done * (total - done) : 0;
  if (terminal_) {
    constexpr int kWidth = 30;
    const int filled = total > 0 ? static_cast<int>(kWidth * done / total) : 0;
    fmt::print(stderr, "\r[{}{}] {}/{}  {}  {:.0f} s left\x1b[K", std::string(filled, '='),
               std::string(kWidth - filled, ' '), done, total, note, left);
  } else {
    fmt::print(stderr, "{}/{}  {}  {:.0f} s left\n", done, total, note, left);
  }
  std::fflush(stderr);
  shown_ = true;
}

void Progress::finish() {
  if (terminal_ && shown_) {
    fmt::print(stderr, "\r\x1b[K");
    std::fflush(stderr);
  }
}

std::string now_text(const char* format) {
  const std::time_t now = std::time(nullptr);
  std::tm utc = {};
  gmtime_r(&now, &utc);
  std::array<char, 64> text = {};
  std::strftime(text.data(), text.size(), format, &utc);
  return text.data();
}

}  // namespace lacuna::cli
