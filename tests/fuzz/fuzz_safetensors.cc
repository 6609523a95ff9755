// Any bytes as a safetensors file: an error, or entries that all lie within the file. The eight
// bytes of the header's length are also written for the fuzzer, which rarely guesses them.
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/check.h"
#include "model/safetensors.h"

namespace {

void read(std::span<const std::byte> bytes) {
  const lacuna::Result<lacuna::SafetensorsFile> file =
      lacuna::SafetensorsFile::parse(bytes, "input");
  if (!file.ok()) {
    LACUNA_CHECK(file.status().message().find('\n') == std::string::npos);
    return;
  }
  for (const lacuna::SafetensorsEntry& entry : file->entries()) {
    LACUNA_CHECK(file->find(entry.name) == &entry);
    LACUNA_CHECK(entry.data.empty() ||
                 (entry.data.data() >= bytes.data() &&
                  entry.data.data() + entry.data.size() <= bytes.data() + bytes.size()));
    if (entry.dtype_known) {
      int64_t expected = lacuna::size_bytes(entry.dtype);
      for (const int64_t extent : entry.shape) {
        expected *= extent;
      }
      LACUNA_CHECK(expected == static_cast<int64_t>(entry.data.size()));
    }
    int sum = 0;
    for (const std::byte byte : entry.data) {
      sum += static_cast<int>(byte);
    }
    LACUNA_CHECK(sum >= 0);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  read({reinterpret_cast<const std::byte*>(data), size});
  // Input as header text and, after the last '}', the data.
  const std::string text(reinterpret_cast<const char*>(data), size);
  const uint64_t header_bytes = text.rfind('}') + 1;  // 0 without one
  std::vector<std::byte> framed(sizeof(header_bytes) + size);
  std::memcpy(framed.data(), &header_bytes, sizeof(header_bytes));
  std::memcpy(framed.data() + sizeof(header_bytes), text.data(), size);
  read(framed);
  return 0;
}
