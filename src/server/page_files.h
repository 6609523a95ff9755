// The page served at /, compiled into the program from src/server/page.
#pragma once

#include <span>
#include <string_view>

namespace lacuna::server {

struct PageFile {
  std::string_view name;  // "index.html"
  std::string_view content_type;
  std::string_view content;
};

std::span<const PageFile> page_files();

}  // namespace lacuna::server
