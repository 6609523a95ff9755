// Spin, then sleep.
#include "core/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <chrono>

namespace lacuna {
namespace {

// A worker that finds no loop for this long goes to sleep. Waking costs some 50 us, steps are
// trains of shorter gaps.
constexpr std::chrono::microseconds kSpin{200};

inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads <= 0) {
    num_threads = usable_cores();
  }
  workers_.reserve(num_threads - 1);
  for (int worker = 1; worker < num_threads; ++worker) {
    workers_.emplace_back([this, worker] { worker_main(worker); });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_release);
  { std::lock_guard lock(sleep_mutex_); }
  wake_.notify_all();
  for (std::thread& thread : workers_) {
    thread.join();
  }
}

void ThreadPool::work(int worker) {
  for (int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed); task < num_tasks_;
       task = next_task_.fetch_add(1, std::memory_order_relaxed)) {
    fn_(context_, task, worker);
  }
}

void ThreadPool::run(int64_t num_tasks, TaskFn fn, void* context) {
  if (num_tasks <= 0) {
    return;
  }
  if (workers_.empty() || num_tasks == 1) {
    // Worker 0 belongs to whoever holds the caller's lock, as scratch may be indexed by worker.
    std::lock_guard lock(caller_mutex_);
    for (int64_t task = 0; task < num_tasks; ++task) {
      fn(context, task, 0);
    }
    return;
  }
  std::lock_guard caller_lock(caller_mutex_);
  fn_ = fn;
  context_ = context;
  num_tasks_ = num_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  running_workers_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard lock(sleep_mutex_); }
    wake_.notify_all();
  }
  work(0);
  // All tasks are taken; wait until every worker has left the loop, so that its fields may be
  // written again.
  int spins = 0;
  while (running_workers_.load(std::memory_order_acquire) > 0) {
    if (++spins < 20000) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
}

void ThreadPool::worker_main(int worker) {
  uint64_t seen = 0;
  for (;;) {
    auto deadline = std::chrono::steady_clock::now() + kSpin;
    int polls = 0;
    while (epoch_.load(std::memory_order_acquire) == seen &&
           !stop_.load(std::memory_order_acquire)) {
      cpu_relax();
      if (++polls % 64 != 0 || std::chrono::steady_clock::now() < deadline) {
        continue;
      }
      std::unique_lock lock(sleep_mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        return epoch_.load(std::memory_order_seq_cst) != seen ||
               stop_.load(std::memory_order_acquire);
      });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (stop_.load(std::memory_order_acquire)) {
      return;
    }
    seen = epoch_.load(std::memory_order_acquire);
    work(worker);
    running_workers_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace lacuna
