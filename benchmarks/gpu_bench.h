// What the benchmarks of a GPU's operations share: the device with its memory and timer, random
// contents, and the method: cold and warm calls, nodes of graphs or events.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/bench_line.h"
#include "benchmarks/gpu_timer.h"
#include "core/device_memory.h"
#include "ops/dispatch.h"

namespace lacuna::bench {

struct GpuMethod {
  int64_t rounds = 11;
  bool graphs = true;  // false: events around single calls
};

// What is timed. Call i of the nodes of a graph has inputs of its own.
struct Subject {
  std::string kernel;
  std::string peer;  // empty: the library itself
  Enqueue enqueue;
};

using TellLine = std::function<void(const BenchLine&)>;

// How a median is made, and what cold and warm mean, in words. `nodes`: "10 to 60 calls".
std::string method_text(const GpuMethod& method, const std::string& nodes,
                        const std::string& fresh);

// The runtime that serves a device of the context.
Result<const Runtime*> runtime_of(const Context& context, const DeviceInfo& device);

class GpuBench {
 public:
  static Result<GpuBench> create(const Context& context, const DeviceInfo& device,
                                 const GpuMethod& method);

  const Context& context() const { return *context_; }
  const DeviceInfo& device() const { return *device_; }
  Device where() const { return device_->device; }
  void* stream() const { return timer_.stream(); }

  Result<DeviceMemory> allocate(int64_t bytes) {
    return DeviceMemory::allocate(runtime_, where().index, bytes);
  }
  // An array of these values.
  template <class T>
  Result<DeviceMemory> upload(const std::vector<T>& values) {
    return upload(values.data(), static_cast<int64_t>(values.size() * sizeof(T)));
  }
  // `count` random elements. The host makes at most 2^20 of them, which then repeat.
  Result<DeviceMemory> random_bf16(int64_t count, uint64_t seed);
  Result<DeviceMemory> random_fp8(int64_t count, uint64_t seed);
  Result<DeviceMemory> random_f32(int64_t count, uint64_t seed);
  // Repeats the first `filled` bytes of `bytes`.
  Status repeat(void* data, int64_t filled, int64_t bytes);
  Status synchronize() { return runtime_->synchronize(where().index, stream()); }

  // The operation whose arguments for call i are `args(i)`, with the workspace that those of call 0
  // need, by the kernel that dispatch chooses for them.
  template <class MakeArgs>
  Result<Subject> subject(MakeArgs args) {
    return subject(*context_, args);
  }
  // By what another context, of the same device, chooses.
  template <class MakeArgs>
  Result<Subject> subject(const Context& context, MakeArgs args);

  // Calls of a graph that make it last for milliseconds, so that its start does not count.
  Result<int64_t> nodes_for(const Subject& subject);
  // Times the subjects in turns, beside the fastest of `floors` (none: the floor is 0), cold and
  // warm, and tells a line of each. `line` says what they all are.
  Status measure(const std::vector<Subject>& subjects, const std::vector<Enqueue>& floors,
                 int64_t nodes, const BenchLine& line, const TellLine& tell);
  // Times these calls in turns, cold.
  Result<std::vector<Timing>> time_cold(const std::vector<Enqueue>& calls, int64_t nodes) {
    return time(calls, nodes, /*cold=*/true, method_.rounds);
  }

 private:
  GpuBench(const Context& context, const DeviceInfo& device, const GpuMethod& method,
           const Runtime* runtime, GpuTimer timer)
      : context_(&context),
        device_(&device),
        method_(method),
        runtime_(runtime),
        timer_(std::move(timer)) {}
  Result<DeviceMemory> upload(const void* from, int64_t bytes);
  template <class T, class Convert>
  Result<DeviceMemory> random(int64_t count, uint64_t seed, Convert&& convert);
  // Before a cold turn 256 MB are rewritten, which no cache of a GPU holds.
  Result<std::vector<Timing>> time(const std::vector<Enqueue>& calls, int64_t nodes, bool cold,
                                   int64_t rounds);

  const Context* context_;
  const DeviceInfo* device_;
  GpuMethod method_;
  const Runtime* runtime_;
  GpuTimer timer_;
  DeviceMemory scrub_;
};

template <class MakeArgs>
Result<Subject> GpuBench::subject(const Context& context, MakeArgs args) {
  const auto first = args(0);
  const Explanation explanation = explain_op(context, first);
  if (!explanation.status.ok()) {
    return explanation.status;
  }
  const Result<int64_t> bytes = op_workspace_bytes(context, first);
  if (!bytes.ok()) {
    return bytes.status();
  }
  Result<DeviceMemory> memory = allocate(*bytes);
  if (!memory.ok()) {
    return memory.status();
  }
  const auto workspace = std::make_shared<DeviceMemory>(std::move(*memory));
  return Subject{.kernel = explanation.kernel,
                 .enqueue = [context, args, workspace](int64_t i, void* stream) {
                   return run_op(context, args(i),
                                 {.stream = stream,
                                  .workspace = workspace->data(),
                                  .workspace_bytes = workspace->bytes()});
                 }};
}

}  // namespace lacuna::bench
