// Evaluation problems: one JSON object a line with id, kind, prompt and answer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "lacuna/status.h"

namespace lacuna::cli {

struct Problem {
  int64_t id = 0;
  std::string kind;
  std::string prompt;
  std::string answer;
};

Result<std::vector<Problem>> load_problems(const std::string& path);

// 16 hexadecimal digits that tell sets of problems apart.
std::string problems_hash(std::span<const Problem* const> problems);

}  // namespace lacuna::cli
