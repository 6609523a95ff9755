// Reads JSON lines, one row at a time.
#include "cli/json_lines.h"

#include "core/check.h"
#include "core/file_map.h"

namespace lacuna::cli {

Status for_each_json_line(
    const std::string& path,
    const std::function<Status(const nlohmann::json& json, const std::string& where)>& row) {
  constexpr int64_t kBytesMax = int64_t{1} << 30;
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, kBytesMax));
  size_t begin = 0;
  for (int64_t line = 1; begin < text.size(); ++line) {
    size_t end = text.find('\n', begin);
    end = end == std::string::npos ? text.size() : end;
    const std::string_view bytes(text.data() + begin, end - begin);
    begin = end + 1;
    if (bytes.empty()) {
      continue;
    }
    const std::string where = path + " line " + std::to_string(line) + ": ";
    const nlohmann::json json = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      return data_loss(where + "not a JSON object");
    }
    LACUNA_RETURN_IF_ERROR(row(json, where));
  }
  return ok_status();
}

Status text_field(const nlohmann::json& json, const char* name, const std::string& where,
                  std::string& out) {
  if (!json.contains(name) || !json[name].is_string()) {
    return data_loss(where + "field \"" + name + "\" is missing or not text");
  }
  out = json[name].get<std::string>();
  return ok_status();
}

}  // namespace lacuna::cli
