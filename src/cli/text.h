// Small texts that commands share.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/engine.h"

namespace lacuna::cli {

// \n, \t, \r and \\ as typed in a shell.
std::string unescape(std::string_view text);
// One line: control characters as escapes.
std::string one_line(std::string_view text);
// "rows: 3 sparse MQA, 128 dense MHA; keys read a layer: 12,345 of 67,890 visible (18.2 %)"
std::string lanes_text(const std::array<int64_t, kNumRowLanes>& rows_by_lane, int64_t keys_read,
                       int64_t keys_visible);
// "1,2,3" as ids.
Result<std::vector<int32_t>> parse_tokens(const std::string& text);
std::string with_commas(int64_t value);
// The time in UTC, as strftime writes `format`.
std::string now_text(const char* format = "%Y-%m-%dT%H:%M:%SZ");

// A line on stderr that says how far a long job is: rewritten in place on a terminal, else printed
// every 10 s.
class Progress {
 public:
  Progress();
  void update(int64_t done, int64_t total, std::string_view note);
  void finish();

 private:
  bool terminal_;
  double start_seconds_;
  double last_seconds_ = 0;
  bool shown_ = false;
};

}  // namespace lacuna::cli
