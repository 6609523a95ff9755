// Files through POSIX calls: mmap for FileMap, read for read_file.
#include "core/file_map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/check.h"

namespace lacuna {
namespace {

Status errno_status(const std::string& path, const char* operation, int error) {
  const std::string reason = std::generic_category().message(error);
  if (error == ENOENT || error == ENOTDIR) {
    return not_found(path + ": " + reason);
  }
  return io_error(path + ": " + operation + ": " + reason);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) {
      ::close(fd_);
    }
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

struct OpenFile {
  Descriptor descriptor;
  int64_t size_bytes;
};

Result<OpenFile> open_regular(const std::string& path) {
  // Without O_NONBLOCK, opening a FIFO would wait for a writer.
  Descriptor descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (descriptor.get() < 0) {
    return errno_status(path, "open", errno);
  }
  struct stat info = {};
  if (::fstat(descriptor.get(), &info) != 0) {
    return errno_status(path, "fstat", errno);
  }
  if (!S_ISREG(info.st_mode)) {
    return io_error(path + ": not a regular file" + (S_ISDIR(info.st_mode) ? " but a folder" : ""));
  }
  return OpenFile{std::move(descriptor), static_cast<int64_t>(info.st_size)};
}

}  // namespace

Result<FileMap> FileMap::open(const std::string& path) {
  LACUNA_ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
  FileMap map;
  map.path_ = path;
  if (file.size_bytes == 0) {
    return map;  // mmap refuses an empty range
  }
  void* data = ::mmap(nullptr, static_cast<size_t>(file.size_bytes), PROT_READ, MAP_PRIVATE,
                      file.descriptor.get(), 0);
  if (data == MAP_FAILED) {
    return errno_status(path, "mmap", errno);
  }
  map.data_ = static_cast<const std::byte*>(data);
  map.size_ = static_cast<size_t>(file.size_bytes);
  return map;
}

FileMap::FileMap(FileMap&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

FileMap& FileMap::operator=(FileMap&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

FileMap::~FileMap() {
  if (data_ != nullptr) {
    ::munmap(const_cast<std::byte*>(data_), size_);
  }
}

void FileMap::will_need(std::span<const std::byte> part) const {
  if (part.empty()) {
    return;
  }
  // madvise wants a page boundary; the map itself starts at one.
  const uintptr_t page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t begin = reinterpret_cast<uintptr_t>(part.data()) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(part.data() + part.size());
  (void)::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_WILLNEED);
}

Result<std::string> read_file(const std::string& path, int64_t bytes_max) {
  LACUNA_ASSIGN_OR_RETURN(const OpenFile file, open_regular(path));
  if (file.size_bytes > bytes_max) {
    return invalid_argument(path + ": " + std::to_string(file.size_bytes) +
                            " bytes, more than the limit of " + std::to_string(bytes_max));
  }
  std::string text(static_cast<size_t>(file.size_bytes), '\0');
  size_t used = 0;
  while (used < text.size()) {
    const ssize_t n = ::read(file.descriptor.get(), text.data() + used, text.size() - used);
    if (n < 0) {
      if (errno == EINTR) {
        continue;
      }
      return errno_status(path, "read", errno);
    }
    if (n == 0) {
      break;  // the file became shorter since fstat
    }
    used += static_cast<size_t>(n);
  }
  text.resize(used);
  return text;
}

}  // namespace lacuna
