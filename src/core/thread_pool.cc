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
  const uint32_t number = static_cast<uint32_t>(loop_.load(std::memory_order_relaxed) >> 32) + 1;
  loop_.store(uint64_t{number} << 32 | kOpen, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard lock(sleep_mutex_); }
    wake_.notify_all();
  }
  work(0);
  // All tasks are taken. No worker may enter any more; those inside finish theirs.
  loop_.fetch_and(~kOpen, std::memory_order_acq_rel);
  int spins = 0;
  while ((loop_.load(std::memory_order_acquire) & (kOpen - 1)) != 0) {
    if (++spins < 20000) {
      cpu_relax();
    } else {
      std::this_thread::yield();
    }
  }
}

// Enters the loop in progress if it is open and not the one that was `seen`.
bool ThreadPool::enter(uint32_t* seen) {
  uint64_t loop = loop_.load(std::memory_order_seq_cst);
  while ((loop & kOpen) != 0 && static_cast<uint32_t>(loop >> 32) != *seen) {
    if (loop_.compare_exchange_weak(loop, loop + 1, std::memory_order_seq_cst)) {
      *seen = static_cast<uint32_t>(loop >> 32);
      return true;
    }
  }
  return false;
}

void ThreadPool::worker_main(int worker) {
  uint32_t seen = 0;
  for (;;) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    int polls = 0;
    bool entered = enter(&seen);
    while (!entered && !stop_.load(std::memory_order_acquire)) {
      cpu_relax();
      entered = enter(&seen);
      if (entered || ++polls % 64 != 0 || std::chrono::steady_clock::now() < deadline) {
        continue;
      }
      std::unique_lock lock(sleep_mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        entered = enter(&seen);
        return entered || stop_.load(std::memory_order_acquire);
      });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
    if (!entered) {
      return;  // stopped
    }
    work(worker);
    loop_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace lacuna
