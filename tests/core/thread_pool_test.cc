// The thread pool under the loads that decode steps make: many tiny loops, callers that race, and
// workers that have gone to sleep. Also run under the thread sanitizer.
#include "core/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>
#include <vector>

namespace lacuna {
namespace {

// Longer than a worker spins before it sleeps.
constexpr std::chrono::milliseconds kPastSpin{3};

class ThreadPoolOfSize : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolOfSize, RunsEveryTaskOnce) {
  ThreadPool pool(GetParam());
  ASSERT_EQ(pool.num_threads(), GetParam());
  for (const int64_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) {
    std::vector<std::atomic<int>> runs(num_tasks);
    pool.parallel_for(num_tasks, [&](int64_t task, int worker) {
      ASSERT_GE(worker, 0);
      ASSERT_LT(worker, pool.num_threads());
      runs[task].fetch_add(1);
    });
    for (int64_t task = 0; task < num_tasks; ++task) {
      ASSERT_EQ(runs[task].load(), 1) << "task " << task << " of " << num_tasks;
    }
  }
}

TEST_P(ThreadPoolOfSize, PublishesPlainWritesToTheCaller) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> values(257);
  for (int64_t round = 0; round < 200; ++round) {
    pool.parallel_for(257, [&](int64_t task, int) { values[task] += task + round; });
  }
  for (int64_t task = 0; task < 257; ++task) {
    ASSERT_EQ(values[task], 200 * task + 199 * 200 / 2) << "task " << task;
  }
}

TEST_P(ThreadPoolOfSize, NeverOverlapsTwoTasksOfOneWorker) {
  ThreadPool pool(GetParam());
  // Plain scratch, indexed by worker: a race here is also the sanitizer's to find.
  std::vector<int64_t> scratch(pool.num_threads());
  std::vector<std::atomic<int>> inside(pool.num_threads());
  std::atomic<int> overlaps{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) {
        pool.parallel_for(1 + round % 9, [&](int64_t, int worker) {
          overlaps += inside[worker].fetch_add(1) != 0;
          ++scratch[worker];
          inside[worker].fetch_sub(1);
        });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  EXPECT_EQ(overlaps.load(), 0);
  int64_t expected = 0;
  for (int round = 0; round < 50; ++round) {
    expected += 3 * (1 + round % 9);
  }
  EXPECT_EQ(std::accumulate(scratch.begin(), scratch.end(), int64_t{0}), expected);
}

TEST_P(ThreadPoolOfSize, RunsManyTinyLoops) {
  ThreadPool pool(GetParam());
  std::atomic<int64_t> sum{0};
  for (int loop = 0; loop < 2000; ++loop) {
    pool.parallel_for(3, [&](int64_t task, int) { sum += task; });
  }
  EXPECT_EQ(sum.load(), 2000 * 3);
}

TEST_P(ThreadPoolOfSize, WakesSleepingWorkers) {
  ThreadPool pool(GetParam());
  std::atomic<int64_t> tasks{0};
  for (int loop = 0; loop < 20; ++loop) {
    std::this_thread::sleep_for(kPastSpin);
    pool.parallel_for(16, [&](int64_t, int) { ++tasks; });
  }
  EXPECT_EQ(tasks.load(), 20 * 16);
}

TEST_P(ThreadPoolOfSize, IsDestroyedAwakeAsleepAndUnused) {
  for (int round = 0; round < 20; ++round) {
    ThreadPool unused(GetParam());
    ThreadPool awake(GetParam());
    awake.parallel_for(4, [](int64_t, int) {});
  }
  for (int round = 0; round < 5; ++round) {
    ThreadPool asleep(GetParam());
    asleep.parallel_for(4, [](int64_t, int) {});
    std::this_thread::sleep_for(kPastSpin);
  }
}

// 16 threads on a machine of fewer cores: nothing may depend on all of them running at once.
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOfSize, testing::Values(1, 2, 3, 16));

TEST(ThreadPool, CountsTheCoresOfTheProcessByDefault) {
  ThreadPool pool(0);
  EXPECT_GE(pool.num_threads(), 1);
  EXPECT_LE(pool.num_threads(), static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(ThreadPool, LetsTheCallerWork) {
  ThreadPool pool(2);
  const std::thread::id caller = std::this_thread::get_id();
  // The tasks are long enough that the caller gets one before the other worker takes them all.
  std::atomic<bool> seen{false};
  for (int attempt = 0; attempt < 100 && !seen; ++attempt) {
    pool.parallel_for(8, [&](int64_t, int worker) {
      if (std::this_thread::get_id() == caller) {
        EXPECT_EQ(worker, 0);
        seen = true;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    });
  }
  EXPECT_TRUE(seen.load());
}

TEST(ThreadPool, GivesConcurrentCallersTheirTurns) {
  ThreadPool pool(3);
  std::vector<std::vector<int64_t>> sums(4, std::vector<int64_t>(5));
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 300; ++round) {
        pool.parallel_for(5, [&](int64_t task, int) { sums[caller][task] += caller + task; });
      }
    });
  }
  for (std::thread& caller : callers) {
    caller.join();
  }
  for (int caller = 0; caller < 4; ++caller) {
    for (int task = 0; task < 5; ++task) {
      ASSERT_EQ(sums[caller][task], 300 * (caller + task)) << caller << " " << task;
    }
  }
}

}  // namespace
}  // namespace lacuna
