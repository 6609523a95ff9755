// How the CPU kernels cut a loop over rows into tasks of the thread pool, and the pieces of a
// kernel that are the same everywhere.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/thread_pool.h"
#include "ops/backend.h"

namespace lacuna::cpu {

constexpr int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return div_up(a, b) * b; }

// Calls body(begin, end, worker) over ranges that cover [0, n). `grain` items are worth a task (a
// task costs some 100 ns, so a grain is a few microseconds of work); there are at most eight tasks
// a thread, which is enough to even out unequal ones.
template <class Body>
void parallel_ranges(const DeviceInfo& device, int64_t n, int64_t grain, Body&& body) {
  if (n <= 0) {
    return;
  }
  const int64_t tasks_max = int64_t{8} * device.num_threads;
  const int64_t step = std::max({grain, div_up(n, tasks_max), int64_t{1}});
  device.thread_pool->parallel_for(div_up(n, step), [&](int64_t task, int worker) {
    body(task * step, std::min(n, (task + 1) * step), worker);
  });
}

// Rows of `bytes_per_row` that make a task worth its cost: 16 KiB take about a microsecond.
constexpr int64_t grain_rows(int64_t bytes_per_row) {
  return std::max<int64_t>(1, (int64_t{16} << 10) / std::max<int64_t>(1, bytes_per_row));
}

// `supports` of a kernel that runs everything its operation allows.
template <class Args>
Status supports_all(const Args&, const DeviceInfo&) {
  return ok_status();
}

}  // namespace lacuna::cpu
