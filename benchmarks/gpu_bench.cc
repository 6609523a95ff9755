// Contents are made on the host once and repeated on the device: the work does not depend on them.
#include "benchmarks/gpu_bench.h"

#include <algorithm>
#include <cmath>

#include "benchmarks/random_values.h"
#include "core/check.h"

namespace lacuna::bench {
namespace {

constexpr int64_t kScrubBytes = int64_t{256} << 20;
constexpr int64_t kRandomElementsMax = int64_t{1} << 20;
// A graph of 2 ms hides its start; more nodes than sixty hide nothing more.
constexpr double kGraphUs = 2000;
constexpr int64_t kNodesMin = 2;
constexpr int64_t kNodesMax = 60;
constexpr int64_t kFastestRounds = 3;

}  // namespace

std::string method_text(const GpuMethod& method, const std::string& nodes,
                        const std::string& fresh) {
  const std::string rounds = std::to_string(method.rounds);
  return (method.graphs
              ? "time a node of a graph of " + nodes + ", median, p10 and p90 of " + rounds +
                    " launches"
              : "two events around one call, median, p10 and p90 of " + rounds + " calls") +
         "; cold: " + fresh +
         ", and 256 MB are rewritten before; warm: the same ones again and again";
}

Result<const Runtime*> runtime_of(const Context& context, const DeviceInfo& device) {
  for (const Backend* backend : context.state().backends) {
    if (backend->device_kind == device.device.kind) {
      return backend->runtime;
    }
  }
  return unsupported("no backend serves " + device.name);
}

Result<GpuBench> GpuBench::create(const Context& context, const DeviceInfo& device,
                                  const GpuMethod& method) {
  LACUNA_ASSIGN_OR_RETURN(const Runtime* runtime, runtime_of(context, device));
  LACUNA_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::create(runtime, device.device.index));
  GpuBench bench(context, device, method, runtime, std::move(timer));
  LACUNA_ASSIGN_OR_RETURN(bench.scrub_, bench.allocate(kScrubBytes));
  return bench;
}

Result<DeviceMemory> GpuBench::upload(const void* from, int64_t bytes) {
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory memory, allocate(bytes));
  LACUNA_RETURN_IF_ERROR(runtime_->copy(memory.data(), from, bytes, stream()));
  LACUNA_RETURN_IF_ERROR(synchronize());
  return memory;
}

template <class T, class Convert>
Result<DeviceMemory> GpuBench::random(int64_t count, uint64_t seed, Convert&& convert) {
  std::vector<T> values(std::min(count, kRandomElementsMax));
  for_random(std::ssize(values), seed, [&](int64_t i, float x) { values[i] = convert(x); });
  constexpr int64_t kSize = sizeof(T);
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory memory, allocate(kSize * count));
  const int64_t filled = kSize * std::ssize(values);
  LACUNA_RETURN_IF_ERROR(runtime_->copy(memory.data(), values.data(), filled, stream()));
  LACUNA_RETURN_IF_ERROR(repeat(memory.data(), filled, kSize * count));
  LACUNA_RETURN_IF_ERROR(synchronize());
  return memory;
}

Result<DeviceMemory> GpuBench::random_bf16(int64_t count, uint64_t seed) {
  return random<Bf16>(count, seed, to_bf16);
}

Result<DeviceMemory> GpuBench::random_fp8(int64_t count, uint64_t seed) {
  return random<Fp8E4M3>(count, seed, to_fp8_e4m3);
}

Result<DeviceMemory> GpuBench::random_f32(int64_t count, uint64_t seed) {
  return random<float>(count, seed, [](float x) { return x; });
}

Status GpuBench::repeat(void* data, int64_t filled, int64_t bytes) {
  auto* to = static_cast<char*>(data);
  while (filled < bytes) {
    const int64_t part = std::min(filled, bytes - filled);
    LACUNA_RETURN_IF_ERROR(runtime_->copy(to + filled, to, part, stream()));
    filled += part;
  }
  return ok_status();
}

Result<int64_t> GpuBench::nodes_for(const Subject& subject) {
  // time_events() makes one call ahead of the measured one.
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> once,
                          timer_.time_events({subject.enqueue}, 1, {}));
  return std::clamp(static_cast<int64_t>(std::ceil(kGraphUs / std::max(once[0].us_median, 1.0))),
                    kNodesMin, kNodesMax);
}

Result<std::vector<Timing>> GpuBench::time(const std::vector<Enqueue>& calls, int64_t nodes,
                                           bool cold, int64_t rounds) {
  std::vector<Enqueue> turns;
  for (const Enqueue& call : calls) {
    turns.push_back([&call, nodes, cold](int64_t i, void* stream) {
      return call(cold ? i % nodes : 0, stream);
    });
  }
  Enqueue before;
  if (cold) {
    before = [&](int64_t, void* stream) {
      return runtime_->fill_bytes(scrub_.data(), 1, scrub_.bytes(), stream);
    };
  }
  return method_.graphs ? timer_.time_graphs(turns, nodes, rounds, before)
                        : timer_.time_events(turns, rounds, before);
}

Status GpuBench::measure(const std::vector<Subject>& subjects, const std::vector<Enqueue>& floors,
                         int64_t nodes, const BenchLine& line, const TellLine& tell) {
  for (const bool cold : {true, false}) {
    std::vector<Enqueue> calls;
    for (const Subject& subject : subjects) {
      calls.push_back(subject.enqueue);
    }
    double best_us = 0;
    size_t best = floors.size();
    for (size_t i = 0; i < floors.size(); ++i) {
      LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                              time({floors[i]}, nodes, cold, kFastestRounds));
      if (best == floors.size() || timings[0].us_median < best_us) {
        best = i;
        best_us = timings[0].us_median;
      }
    }
    if (best < floors.size()) {
      calls.push_back(floors[best]);
    }
    LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                            time(calls, nodes, cold, method_.rounds));
    for (size_t i = 0; i < subjects.size(); ++i) {
      BenchLine told = line;
      told.kernel = subjects[i].kernel;
      told.peer = subjects[i].peer;
      told.cache = cold ? "cold" : "warm";
      told.timing = timings[i];
      told.floor_us = best < floors.size() ? timings.back().us_median : 0;
      tell(told);
    }
  }
  return ok_status();
}

}  // namespace lacuna::bench
