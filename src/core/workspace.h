// A bump allocator over memory that the caller owns. Constructed without memory it only counts, so
// that the code which carves a workspace is also the code which sizes it: the two can not disagree.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "core/check.h"

namespace lacuna {

class Workspace {
 public:
  static constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector
  static constexpr int64_t kBytesMax =
      std::numeric_limits<int64_t>::max() / kAlignment * kAlignment;

  Workspace() = default;  // counting mode
  Workspace(void* data, int64_t size_bytes) : data_(static_cast<char*>(data)), size_(size_bytes) {}

  bool counting() const { return data_ == nullptr; }

  // `count` elements of T, aligned; null in counting mode. Taking more than there is breaks an
  // invariant: dispatch compares sizes before a kernel runs. Counting stops at kBytesMax, so that
  // absurd extents give a size that nobody has instead of one that wrapped around.
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kSize = sizeof(T);
    const int64_t bytes = count > (kBytesMax - kAlignment) / kSize
                              ? kBytesMax
                              : (count * kSize + kAlignment - 1) / kAlignment * kAlignment;
    char* at = data_ == nullptr ? nullptr : data_ + used_;
    used_ = used_ > kBytesMax - bytes ? kBytesMax : used_ + bytes;
    LACUNA_CHECK(data_ == nullptr || used_ <= size_);
    return reinterpret_cast<T*>(at);
  }

  int64_t used_bytes() const { return used_; }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace lacuna
