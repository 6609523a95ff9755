// The tables of `lacuna tune` as text.
#include "ops/tuning.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "core/check.h"
#include "core/file_map.h"

namespace lacuna {
namespace {

constexpr int64_t kFileBytesMax = int64_t{4} << 20;
constexpr std::string_view kColumns = "heads,rows,keys,splits";
constexpr std::string_view kDevice = "# device: ";
constexpr std::string_view kSmCount = "# sm_count: ";

// A number from 0 that is all of `text`; -1: it is none.
int64_t number(std::string_view text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const std::from_chars_result result = std::from_chars(text.data(), end, value);
  return result.ec == std::errc() && result.ptr == end && value >= 0 ? value : -1;
}

// False: the line is no choice.
bool parse_choice(std::string_view line, SplitChoice* choice) {
  const std::array<int64_t*, 4> fields = {&choice->heads, &choice->rows, &choice->keys,
                                          &choice->splits};
  for (size_t i = 0; i < fields.size(); ++i) {
    const size_t comma = std::min(line.find(','), line.size());
    const bool last = i + 1 == fields.size();
    *fields[i] = number(line.substr(0, comma));
    // Only splits may be 0.
    if (*fields[i] < (last ? 0 : 1) || last != (comma == line.size())) {
      return false;
    }
    line.remove_prefix(last ? comma : comma + 1);
  }
  return true;
}

bool of_same_shape(const SplitChoice& a, const SplitChoice& b) {
  return a.heads == b.heads && a.rows == b.rows && a.keys == b.keys;
}

}  // namespace

Result<Tuning> parse_tuning(std::string_view text, const std::string& source) {
  Tuning tuning;
  bool columns_seen = false;
  int64_t line_number = 0;
  while (!text.empty()) {
    ++line_number;
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    const auto wrong = [&](const std::string& expected) {
      return invalid_argument(source + ": line " + std::to_string(line_number) + ": \"" +
                              std::string(line.substr(0, 80)) + "\", expected " + expected);
    };
    if (line.starts_with(kDevice)) {
      tuning.device = line.substr(kDevice.size());
    } else if (line.starts_with(kSmCount)) {
      tuning.sm_count = number(line.substr(kSmCount.size()));
      if (tuning.sm_count < 1) {
        return wrong("a number of SMs");
      }
    } else if (line.empty() || line.starts_with('#')) {
      continue;
    } else if (!columns_seen) {
      if (line != kColumns) {
        return wrong("the columns \"" + std::string(kColumns) + "\"");
      }
      columns_seen = true;
    } else {
      SplitChoice choice;
      if (!parse_choice(line, &choice)) {
        return wrong("numbers from 1, splits from 0: " + std::string(kColumns));
      }
      for (const SplitChoice& earlier : tuning.sparse_mla_splits) {
        if (of_same_shape(earlier, choice)) {
          return wrong("each heads,rows,keys once");
        }
      }
      tuning.sparse_mla_splits.push_back(choice);
    }
  }
  if (tuning.device.empty() || tuning.sm_count == 0) {
    return invalid_argument(source + ": does not say what it was measured on, expected lines \"" +
                            std::string(kDevice) + "NAME\" and \"" + std::string(kSmCount) + "N\"");
  }
  if (!columns_seen) {
    return invalid_argument(source + ": has no choices, expected the columns \"" +
                            std::string(kColumns) + "\" and lines below them");
  }
  return tuning;
}

Result<Tuning> read_tuning(const std::string& path) {
  const std::string source = "tuning_file: " + path;
  const Result<std::string> text = read_file(path, kFileBytesMax);
  if (!text.ok()) {
    return Status(text.status().code(), "tuning_file: " + text.status().message());
  }
  return parse_tuning(*text, source);
}

std::string tuning_text(const Tuning& tuning, const std::vector<std::string>& notes) {
  std::string text = std::string(kDevice) + tuning.device + "\n" + std::string(kSmCount) +
                     std::to_string(tuning.sm_count) + "\n";
  for (const std::string& note : notes) {
    text += "# " + note + "\n";
  }
  text += std::string(kColumns) + "\n";
  for (const SplitChoice& choice : tuning.sparse_mla_splits) {
    text += std::to_string(choice.heads) + "," + std::to_string(choice.rows) + "," +
            std::to_string(choice.keys) + "," + std::to_string(choice.splits) + "\n";
  }
  return text;
}

}  // namespace lacuna
