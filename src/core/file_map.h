// Files as bytes: a read-only memory map for the large ones, one read for the small ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "lacuna/status.h"

namespace lacuna {

// A regular file mapped read-only. The bytes start at a page boundary and live as long as the map;
// moving the map does not move them. An empty file gives an empty span. A file that another process
// shortens while it is mapped kills the reader (SIGBUS), as with any memory map.
class FileMap {
 public:
  static Result<FileMap> open(const std::string& path);
  FileMap() = default;
  FileMap(FileMap&& other) noexcept;
  FileMap& operator=(FileMap&& other) noexcept;
  FileMap(const FileMap&) = delete;
  FileMap& operator=(const FileMap&) = delete;
  ~FileMap();

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  const std::string& path() const { return path_; }

  // Tells the system that this part of bytes() is about to be read, so that it reads ahead instead
  // of faulting page by page. Only a hint: `part` may be any part, also an empty one.
  void will_need(std::span<const std::byte> part) const;

 private:
  std::string path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The whole file as a string; an error when it holds more than `bytes_max` bytes.
Result<std::string> read_file(const std::string& path, int64_t bytes_max);

}  // namespace lacuna
