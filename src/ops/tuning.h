// Measured choices of one device, from a table that `lacuna tune` wrote; without one, kernels
// choose by the models and thresholds in their tuning.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

// Of a choice: rows that fill the SMs stay whole, and the remaining ones are cut evenly over all
// SMs.
inline constexpr int64_t kLastWaveSplits = 0;

// Into how many splits sparse_mla cuts lists of `keys` for `rows` rows of `heads` heads.
struct SplitChoice {
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t splits = 1;  // or kLastWaveSplits
};

struct Tuning {
  // What it was measured on. The name belongs to a measurement, though not to a rule: GPUs with as
  // many SMs differ in clocks and memory.
  std::string device;
  int64_t sm_count = 0;
  std::vector<SplitChoice> sparse_mla_splits;
};

// A table is CSV: comments, of which "# device: NAME" and "# sm_count: N" are required, then the
// line "heads,rows,keys,splits", then a line a choice. `source` is what errors call the text.
Result<Tuning> parse_tuning(std::string_view text, const std::string& source);
// Of ContextOptions::tuning_file, which errors name.
Result<Tuning> read_tuning(const std::string& path);

// The text that parse_tuning() reads; each of `notes` ("date: ...") becomes a comment.
std::string tuning_text(const Tuning& tuning, const std::vector<std::string>& notes);

}  // namespace lacuna
