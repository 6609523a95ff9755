# Writes OUTPUT, a source with the contents of FILES as bytes: string literals have a length limit.
set(arrays "")
set(table "")
set(number 0)
foreach(file IN LISTS FILES)
  get_filename_component(name ${file} NAME)
  get_filename_component(suffix ${file} LAST_EXT)
  if(suffix STREQUAL ".html")
    set(type "text/html; charset=utf-8")
  elseif(suffix STREQUAL ".js")
    set(type "text/javascript; charset=utf-8")
  elseif(suffix STREQUAL ".css")
    set(type "text/css; charset=utf-8")
  elseif(suffix STREQUAL ".svg")
    set(type "image/svg+xml")
  else()
    message(FATAL_ERROR "${name}: no content type is known for ${suffix}")
  endif()
  file(READ ${file} hex HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  string(REGEX REPLACE "((0x..,){20})" "\\1\n" bytes "${bytes}")
  string(APPEND arrays "const unsigned char kFile${number}[] = {\n${bytes}\n0};\n")
  string(APPEND table "    {\"${name}\", \"${type}\", text_of(kFile${number}, sizeof(kFile${number}))},\n")
  math(EXPR number "${number} + 1")
endforeach()
file(WRITE ${OUTPUT} "// Generated from src/server/page by embed_page.cmake.
#include \"server/page_files.h\"

namespace lacuna::server {
namespace {

std::string_view text_of(const unsigned char* bytes, unsigned long size) {
  return {reinterpret_cast<const char*>(bytes), size - 1};
}

${arrays}
}  // namespace

std::span<const PageFile> page_files() {
  static const PageFile kFiles[] = {
${table}  };
  return kFiles;
}

}  // namespace lacuna::server
")
