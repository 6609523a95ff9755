// GSM8K in the form of vLLM's and SGLang's own tests: raw completions after five worked examples,
// an answer being its last number.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/problems.h"

namespace lacuna::cli {

inline constexpr int kGsm8kShots = 5;
inline constexpr int64_t kGsm8kMaxTokens = 512;
inline constexpr int64_t kGsm8kSeed = 42;

// What ends an answer: the model goes on with a question of its own.
std::vector<std::string> gsm8k_stops();

// The last run of digits once commas are gone, without leading zeros: "72 clips, or $1,234." gives
// 1234. Signs and fractions are not read, as in those tests; every label of GSM8K is a whole
// number.
std::optional<std::string> last_number(std::string_view text);

// The problems of `folder`/test.jsonl, each prompt with the worked examples of
// `folder`/train_first5.jsonl before it and each answer the label's number.
Result<std::vector<Problem>> load_gsm8k(const std::string& folder);

}  // namespace lacuna::cli
