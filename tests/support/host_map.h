// Address space without memory: pages that may not be touched until a test allows them. For guard
// pages, and for tensors whose offsets pass 2^31 elements although only a few rows exist.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#include "core/check.h"
#include "tests/support/poison.h"

namespace lacuna::testing {

class HostMap {
 public:
  // `size_bytes` of address space, a guard page before and after it. Any access faults.
  explicit HostMap(int64_t size_bytes) : page_(sysconf(_SC_PAGE_SIZE)) {
    size_ = (size_bytes + page_ - 1) / page_ * page_;
    void* base = mmap(nullptr, static_cast<size_t>(size_ + 2 * page_), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    LACUNA_CHECK(base != MAP_FAILED);
    base_ = static_cast<char*>(base);
  }
  ~HostMap() { munmap(base_, static_cast<size_t>(size_ + 2 * page_)); }
  HostMap(const HostMap&) = delete;
  HostMap& operator=(const HostMap&) = delete;

  // Right behind the guard page.
  char* data() const { return base_ + page_; }
  // Where a buffer of `size_bytes` ends right before the other guard page.
  char* end_minus(int64_t size_bytes) const { return data() + size_ - size_bytes; }

  // Makes the pages of [offset, offset + bytes) usable; fresh ones hold NaN.
  void allow(int64_t offset, int64_t bytes) {
    const int64_t first = offset / page_;
    const int64_t last = (offset + bytes - 1) / page_;
    for (int64_t page = first; page <= last; ++page) {
      char* at = data() + page * page_;
      LACUNA_CHECK(mprotect(at, static_cast<size_t>(page_), PROT_READ | PROT_WRITE) == 0);
      // A page that was never allowed reads as zero.
      bool fresh = true;
      for (int64_t i = 0; i < page_ && fresh; ++i) {
        fresh = at[i] == 0;
      }
      if (fresh) {
        std::memset(at, kNanByte, static_cast<size_t>(page_));
      }
    }
  }
  void allow_all() { allow(0, size_); }

 private:
  int64_t page_;
  int64_t size_ = 0;
  char* base_ = nullptr;
};

}  // namespace lacuna::testing
