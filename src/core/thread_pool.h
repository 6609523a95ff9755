// The CPU backend's threads. parallel_for hands out task numbers dynamically; the caller works too.
// Workers spin for a short while after a loop before they sleep, because a decode step is a train
// of loops of microseconds. Nothing is allocated per call, and results may not depend on which
// worker runs a task.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace lacuna {

class ThreadPool {
 public:
  // `num_threads` counts the caller of parallel_for; 1 makes no thread. 0: one per core of the
  // process's affinity mask.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, worker) once for each task in [0, num_tasks); worker is in [0, num_threads())
  // and no two calls with the same worker overlap. Returns when all are done. Called while another
  // thread's loop runs, it waits for its turn; called from within a body, it would deadlock: bodies
  // must not.
  template <class Body>
  void parallel_for(int64_t num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run(
        num_tasks,
        [](void* context, int64_t task, int worker) {
          (*static_cast<Plain*>(context))(task, worker);
        },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using TaskFn = void (*)(void* context, int64_t task, int worker);
  void run(int64_t num_tasks, TaskFn fn, void* context);
  void worker_main(int worker);
  void work(int worker);
  bool enter(uint32_t* seen);

  std::vector<std::thread> workers_;
  std::mutex caller_mutex_;  // one loop at a time

  // The loop in progress: written by the caller while the loop is closed and no worker is inside
  // it.
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t num_tasks_ = 0;
  std::atomic<int64_t> next_task_{0};
  // Loop number (high 32 bits), whether workers may enter (kOpen), and how many are inside (low
  // bits). A worker that the system does not run never enters, and nobody waits for it: the others
  // take its tasks.
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  std::atomic<uint64_t> loop_{0};

  std::mutex sleep_mutex_;
  std::condition_variable wake_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace lacuna
