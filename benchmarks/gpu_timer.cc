// Graphs and events over core's Runtime.
#include "benchmarks/gpu_timer.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace lacuna::bench {

Result<GpuTimer> GpuTimer::create(const Runtime* runtime, int device_idx) {
  if (runtime->begin_capture == nullptr) {
    return unsupported("timing by graphs: the device has none");
  }
  LACUNA_ASSIGN_OR_RETURN(void* stream, runtime->create_stream(device_idx));
  Handle owned_stream(stream, runtime->destroy_stream);
  LACUNA_ASSIGN_OR_RETURN(void* begin, runtime->create_event(device_idx));
  Handle owned_begin(begin, runtime->destroy_event);
  LACUNA_ASSIGN_OR_RETURN(void* end, runtime->create_event(device_idx));
  Handle owned_end(end, runtime->destroy_event);
  return GpuTimer(runtime, device_idx, std::move(owned_stream), std::move(owned_begin),
                  std::move(owned_end));
}

Result<double> GpuTimer::time_us(const Enqueue& before, const std::function<Status()>& work) {
  if (before) {
    LACUNA_RETURN_IF_ERROR(before(0, stream_.get()));
  }
  LACUNA_RETURN_IF_ERROR(runtime_->record_event(begin_.get(), stream_.get()));
  LACUNA_RETURN_IF_ERROR(work());
  LACUNA_RETURN_IF_ERROR(runtime_->record_event(end_.get(), stream_.get()));
  LACUNA_RETURN_IF_ERROR(runtime_->await_event(end_.get()));
  LACUNA_ASSIGN_OR_RETURN(const double ms, runtime_->elapsed_ms(begin_.get(), end_.get()));
  return 1e3 * ms;
}

Result<std::vector<Timing>> GpuTimer::time_graphs(const std::vector<Enqueue>& subjects,
                                                  int64_t nodes, int64_t rounds,
                                                  const Enqueue& before) {
  std::vector<Handle> graphs;
  for (const Enqueue& subject : subjects) {
    // Once outside of a graph: a kernel's first launch may talk to the driver.
    LACUNA_RETURN_IF_ERROR(subject(0, stream_.get()));
    LACUNA_RETURN_IF_ERROR(runtime_->synchronize(device_idx_, stream_.get()));
    LACUNA_RETURN_IF_ERROR(runtime_->begin_capture(stream_.get()));
    Status status;
    for (int64_t i = 0; i < nodes && status.ok(); ++i) {
      status = subject(i, stream_.get());
    }
    Result<void*> graph = runtime_->end_capture(stream_.get());
    if (graph.ok()) {
      graphs.emplace_back(*graph, runtime_->destroy_graph);
    }
    LACUNA_RETURN_IF_ERROR(status);
    LACUNA_RETURN_IF_ERROR(graph.status());
  }
  std::vector<std::vector<double>> us(subjects.size());
  for (int64_t round = -1; round < rounds; ++round) {
    for (size_t turn = 0; turn < subjects.size(); ++turn) {
      const size_t s = round % 2 == 0 ? turn : subjects.size() - 1 - turn;
      LACUNA_ASSIGN_OR_RETURN(const double time, time_us(before, [&] {
                                return runtime_->launch_graph(graphs[s].get(), stream_.get());
                              }));
      if (round >= 0) {
        us[s].push_back(time / static_cast<double>(nodes));
      }
    }
  }
  std::vector<Timing> timings;
  for (std::vector<double>& times : us) {
    timings.push_back(timing_of(std::move(times)));
  }
  return timings;
}

Result<std::vector<Timing>> GpuTimer::time_events(const std::vector<Enqueue>& subjects,
                                                  int64_t calls, const Enqueue& before) {
  std::vector<std::vector<double>> us(subjects.size());
  for (int64_t i = -1; i < calls; ++i) {
    for (size_t turn = 0; turn < subjects.size(); ++turn) {
      const size_t s = i % 2 == 0 ? turn : subjects.size() - 1 - turn;
      LACUNA_ASSIGN_OR_RETURN(const double time, time_us(before, [&] {
                                return subjects[s](std::max<int64_t>(i, 0), stream_.get());
                              }));
      if (i >= 0) {
        us[s].push_back(time);
      }
    }
  }
  std::vector<Timing> timings;
  for (std::vector<double>& times : us) {
    timings.push_back(timing_of(std::move(times)));
  }
  return timings;
}

}  // namespace lacuna::bench
