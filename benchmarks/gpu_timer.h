// Times work on a device through its Runtime. Short kernels are timed as nodes of a graph: what a
// launch costs the host, and the events around it, are shared by many nodes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "benchmarks/bench_line.h"
#include "core/runtime.h"

namespace lacuna::bench {

// Enqueues call number i on the stream. Called many times with the same i.
using Enqueue = std::function<Status(int64_t i, void* stream)>;

class GpuTimer {
 public:
  static Result<GpuTimer> create(const Runtime* runtime, int device_idx);
  GpuTimer(GpuTimer&&) = default;
  GpuTimer& operator=(GpuTimer&&) = default;

  void* stream() const { return stream_.get(); }

  // The subjects take turns, in one order and in the other, so that a drift of the clocks falls on
  // all of them. Each turn is one graph of the calls 0 .. nodes - 1, whose time is divided by
  // nodes. `before` is enqueued ahead of each turn and not timed; it may be null.
  Result<std::vector<Timing>> time_graphs(const std::vector<Enqueue>& subjects, int64_t nodes,
                                          int64_t rounds, const Enqueue& before);
  // The same with two events around each single call.
  Result<std::vector<Timing>> time_events(const std::vector<Enqueue>& subjects, int64_t calls,
                                          const Enqueue& before);

 private:
  using Handle = std::unique_ptr<void, void (*)(void*)>;
  GpuTimer(const Runtime* runtime, int device_idx, Handle stream, Handle begin, Handle end)
      : runtime_(runtime),
        device_idx_(device_idx),
        stream_(std::move(stream)),
        begin_(std::move(begin)),
        end_(std::move(end)) {}
  Result<double> time_us(const Enqueue& before, const std::function<Status()>& work);

  const Runtime* runtime_;
  int device_idx_;
  Handle stream_;
  Handle begin_;
  Handle end_;
};

}  // namespace lacuna::bench
