// A file that is whole or not there: written beside its place and moved to it at the end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "lacuna/status.h"

namespace lacuna {

class OutputFile {
 public:
  // Opens PATH.partial, so that a wrong path is known before any work. What lies at `path` stays as
  // it is until commit(). A device, a pipe or a link (/dev/stdout) is no file that could be
  // replaced: it is written to directly.
  static Result<OutputFile> create(const std::string& path);
  OutputFile(OutputFile&&) = default;
  OutputFile& operator=(OutputFile&& other) noexcept;
  // Without a commit nothing is left behind.
  ~OutputFile();

  // A failure shows at commit().
  void write(const void* data, int64_t bytes);
  Status commit();

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  OutputFile(std::string path, std::string written_path, std::FILE* file)
      : path_(std::move(path)), written_path_(std::move(written_path)), file_(file) {}

  std::string path_;
  std::string written_path_;  // path_ itself when it is written to directly
  std::unique_ptr<std::FILE, Close> file_;
  int error_ = 0;  // errno of the first write that failed
};

}  // namespace lacuna
