// Evaluation problems: one JSON object a line with id, kind, prompt and answer.
#pragma once

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

}  // namespace lacuna::cli
