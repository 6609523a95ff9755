// Reads evaluation problems, line by line, with the line's number in every complaint.
#include "cli/problems.h"

#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/file_map.h"

namespace lacuna::cli {

Result<std::vector<Problem>> load_problems(const std::string& path) {
  constexpr int64_t kBytesMax = int64_t{1} << 30;
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, kBytesMax));
  std::vector<Problem> problems;
  size_t begin = 0;
  for (int64_t line = 1; begin < text.size(); ++line) {
    size_t end = text.find('\n', begin);
    end = end == std::string::npos ? text.size() : end;
    const std::string_view row(text.data() + begin, end - begin);
    begin = end + 1;
    if (row.empty()) {
      continue;
    }
    const std::string where = path + " line " + std::to_string(line) + ": ";
    const nlohmann::json json = nlohmann::json::parse(row, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      return data_loss(where + "not a JSON object");
    }
    Problem problem;
    problem.id = static_cast<int64_t>(problems.size());
    if (json.contains("id") && json["id"].is_number_integer()) {
      problem.id = json["id"];
    }
    for (const auto& [name, field] :
         {std::pair{"kind", &problem.kind}, std::pair{"prompt", &problem.prompt},
          std::pair{"answer", &problem.answer}}) {
      if (!json.contains(name) || !json[name].is_string()) {
        return data_loss(where + "field \"" + name + "\" is missing or not text");
      }
      *field = json[name].get<std::string>();
    }
    problems.push_back(std::move(problem));
  }
  if (problems.empty()) {
    return data_loss(path + ": no problems");
  }
  return problems;
}

}  // namespace lacuna::cli
