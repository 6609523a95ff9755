// Reads evaluation problems, line by line.
#include "cli/problems.h"

#include <set>

#include "cli/json_lines.h"
#include "core/check.h"

namespace lacuna::cli {

Result<std::vector<Problem>> load_problems(const std::string& path) {
  std::vector<Problem> problems;
  std::set<int64_t> ids;
  LACUNA_RETURN_IF_ERROR(
      for_each_json_line(path, [&](const nlohmann::json& json, const std::string& where) -> Status {
        Problem problem;
        problem.id = static_cast<int64_t>(problems.size());
        if (json.contains("id") && json["id"].is_number_integer()) {
          problem.id = json["id"];
        }
        LACUNA_RETURN_IF_ERROR(text_field(json, "kind", where, problem.kind));
        LACUNA_RETURN_IF_ERROR(text_field(json, "prompt", where, problem.prompt));
        LACUNA_RETURN_IF_ERROR(text_field(json, "answer", where, problem.answer));
        if (!ids.insert(problem.id).second) {
          return data_loss(where + "the id " + std::to_string(problem.id) +
                           " is another problem's, expected each once");
        }
        problems.push_back(std::move(problem));
        return ok_status();
      }));
  if (problems.empty()) {
    return data_loss(path + ": no problems");
  }
  return problems;
}

std::string problems_hash(std::span<const Problem* const> problems) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, 64 bits
  const auto add = [&](std::string_view text) {
    for (const char c : text) {
      hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
    }
    hash = (hash ^ 0xff) * 0x100000001b3;  // a byte that ends no UTF-8 text
  };
  for (const Problem* problem : problems) {
    add(std::to_string(problem->id));
    add(problem->prompt);
    add(problem->answer);
  }
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace lacuna::cli
