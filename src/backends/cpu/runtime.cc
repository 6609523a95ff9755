// Fills core's Runtime for the CPU: launches are synchronous, so streams and events are empty.
#include "backends/cpu/runtime.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "backends/cpu/backend.h"
#include "backends/cpu/kernels.h"

namespace lacuna::cpu {
namespace {

// A page and more than any vector; also what CUDA's allocator promises.
constexpr size_t kAlignment = 4096;

// From here on memory asks for huge pages. Attention reads rows all over the cache, and with 4 KiB
// pages it waits for a page walk a row: a list of 2048 rows of a 75 MB cache takes 1.3 times as
// long.
constexpr size_t kHugePage = size_t{2} << 20;

// Huge memory is made resident by several threads, a gigabyte each: about what one does in half a
// second.
constexpr size_t kResidentShare = size_t{1} << 30;
constexpr size_t kResidentThreadsMax = 16;

// Gives every page its memory now; false: there is not as much. Pages hold what they held.
bool touch(char* data, size_t size) {
#ifdef MADV_POPULATE_WRITE
  if (madvise(data, size, MADV_POPULATE_WRITE) == 0) {
    return true;
  }
  if (errno == ENOMEM || errno == EFAULT || errno == EHWPOISON) {
    return false;
  }
#endif
  // Linux before 5.14: a write to each page.
  for (size_t at = 0; at < size; at += kAlignment) {
    volatile char* byte = data + at;
    *byte = *byte;
  }
  return true;
}

// What was admitted must not fail or grow later, so a cache is resident before its first token.
bool make_resident(char* data, size_t size) {
  const size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const size_t num_threads = std::min({size / kResidentShare + 1, cores, kResidentThreadsMax});
  if (num_threads == 1) {
    return touch(data, size);
  }
  const size_t share = (size / num_threads + kHugePage - 1) / kHugePage * kHugePage;
  std::atomic<bool> there = true;
  std::vector<std::thread> threads;
  for (size_t begin = 0; begin < size; begin += share) {
    threads.emplace_back([&there, data, begin, count = std::min(share, size - begin)] {
      if (!touch(data + begin, count)) {
        there = false;
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return there;
}

Result<void*> allocate_bytes(int64_t bytes) {
  if (bytes < 0) {
    return invalid_argument("allocate: " + std::to_string(bytes) + " bytes");
  }
  if (bytes == 0) {
    return static_cast<void*>(nullptr);
  }
  const size_t alignment = static_cast<size_t>(bytes) < kHugePage ? kAlignment : kHugePage;
  const size_t size = (static_cast<size_t>(bytes) + alignment - 1) / alignment * alignment;
  void* data = std::aligned_alloc(alignment, size);
  if (data == nullptr) {
    return out_of_memory("allocate: the host has no " + std::to_string(bytes) + " bytes left");
  }
  if (alignment == kHugePage) {
    madvise(data, size, MADV_HUGEPAGE);  // advice: a kernel without huge pages may decline it
  }
  if (!make_resident(static_cast<char*>(data), size)) {
    std::free(data);
    return out_of_memory("allocate: the host has no " + std::to_string(bytes) +
                         " bytes of memory free");
  }
  return data;
}

std::atomic<int64_t> num_allocations{0};

Result<void*> allocate_counted(int64_t bytes) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return allocate_bytes(bytes);
}

Result<void*> nothing(int) { return static_cast<void*>(nullptr); }

}  // namespace

const Runtime kRuntime = {
    .name = "cpu",
    .allocate = [](int, int64_t bytes) { return allocate_counted(bytes); },
    .free = [](int, void* data) { std::free(data); },
    .allocate_pinned = allocate_counted,
    .free_pinned = [](void* data) { std::free(data); },
    .register_host = [](void*, int64_t) { return ok_status(); },
    .unregister_host = [](void*) {},
    .copy =
        [](void* to, const void* from, int64_t bytes, void*) {
          if (bytes > 0) {
            std::memmove(to, from, static_cast<size_t>(bytes));
          }
          return ok_status();
        },
    .fill_bytes =
        [](void* to, int value, int64_t bytes, void*) {
          if (bytes > 0) {
            std::memset(to, value, static_cast<size_t>(bytes));
          }
          return ok_status();
        },
    .create_stream = nothing,
    .destroy_stream = [](void*) {},
    .synchronize = [](int, void*) { return ok_status(); },
    .create_event = nothing,
    .destroy_event = [](void*) {},
    .record_event = [](void*, void*) { return ok_status(); },
    .wait_event = [](void*, void*) { return ok_status(); },
    .await_event = [](void*) { return ok_status(); },
    .elapsed_ms = [](void*, void*) { return Result<double>(0.0); },
    .begin_capture = nullptr,
    .end_capture = nullptr,
    .launch_graph = nullptr,
    .destroy_graph = nullptr,
    .forbid_sync = [](bool) {},
    .counters =
        [] {
          return RuntimeCounters{.allocations = num_allocations.load(std::memory_order_relaxed)};
        },
};

}  // namespace lacuna::cpu
