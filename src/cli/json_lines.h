// Files of one JSON object a line; complaints name the file and the line.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "lacuna/status.h"

namespace lacuna::cli {

// Calls `row` with the object of each line that is not empty, and with "PATH line N: ".
Status for_each_json_line(
    const std::string& path,
    const std::function<Status(const nlohmann::json& json, const std::string& where)>& row);

// Reads the text field `name` of a row.
Status text_field(const nlohmann::json& json, const char* name, const std::string& where,
                  std::string& out);

}  // namespace lacuna::cli
