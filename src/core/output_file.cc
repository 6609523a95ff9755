// Files through stdio and rename.
#include "core/output_file.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace lacuna {
namespace {

Status write_error(const std::string& path, int error) {
  return io_error(path + ": can not be written: " + std::generic_category().message(error));
}

}  // namespace

Result<OutputFile> OutputFile::create(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_type type = fs::symlink_status(path, error).type();
  const bool replace = type == fs::file_type::not_found || type == fs::file_type::regular;
  if (type == fs::file_type::directory || path.empty() || path.back() == '/') {
    return io_error("\"" + path + "\": a folder, expected the name of a file to write");
  }
  const std::string written_path = replace ? path + ".partial" : path;
  std::FILE* file = std::fopen(written_path.c_str(), "wb");
  if (file == nullptr) {
    return write_error(path, errno);
  }
  return OutputFile(path, written_path, file);
}

OutputFile& OutputFile::operator=(OutputFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(written_path_, other.written_path_);
  std::swap(file_, other.file_);
  std::swap(error_, other.error_);
  return *this;
}

OutputFile::~OutputFile() {
  if (file_ != nullptr && written_path_ != path_) {
    file_.reset();
    std::remove(written_path_.c_str());
  }
}

void OutputFile::write(const void* data, int64_t bytes) {
  const size_t size = static_cast<size_t>(bytes);
  if (error_ == 0 && std::fwrite(data, 1, size, file_.get()) != size) {
    error_ = errno;
  }
}

Status OutputFile::commit() {
  if (std::fclose(file_.release()) != 0 && error_ == 0) {
    error_ = errno;
  }
  const bool replace = written_path_ != path_;
  if (error_ == 0 && replace && std::rename(written_path_.c_str(), path_.c_str()) != 0) {
    error_ = errno;
  }
  if (error_ == 0) {
    return ok_status();
  }
  if (replace) {
    std::remove(written_path_.c_str());
  }
  return write_error(path_, error_);
}

}  // namespace lacuna
