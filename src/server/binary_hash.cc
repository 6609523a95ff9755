// Reads the executable once.
#include "server/binary_hash.h"

#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

namespace lacuna::server {
namespace {

std::string hash_executable() {
  const auto close = [](std::FILE* file) { std::fclose(file); };
  const std::unique_ptr<std::FILE, decltype(close)> file(std::fopen("/proc/self/exe", "rb"), close);
  if (file == nullptr) {
    return {};
  }
  std::vector<unsigned char> buffer(1 << 20);
  uint64_t hash = 0xcbf29ce484222325u;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), file.get())) {
    for (size_t i = 0; i < count; ++i) {
      hash = (hash ^ buffer[i]) * 0x100000001b3u;
    }
  }
  return std::ferror(file.get()) != 0 ? std::string() : fmt::format("{:016x}", hash);
}

}  // namespace

const std::string& binary_hash() {
  static const std::string hash = hash_executable();
  return hash;
}

}  // namespace lacuna::server
