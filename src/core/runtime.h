// What a device must offer besides kernels: memory, copies, streams, events, graphs. A table of
// functions that a backend fills; nothing else in the house allocates device memory.
#pragma once

#include <cstdint>

#include "lacuna/status.h"

namespace lacuna {

struct RuntimeCounters {
  int64_t allocations = 0;       // of device and of pinned memory
  int64_t synchronizations = 0;  // synchronize(), and copies that make the host wait
  int64_t graph_launches = 0;
};

struct Runtime {
  const char* name;
  // Device memory, 256-byte aligned. allocate(0) gives null.
  Result<void*> (*allocate)(int device_idx, int64_t bytes);
  void (*free)(int device_idx, void* data);
  // Host memory that the device can read and write without staging.
  Result<void*> (*allocate_pinned)(int64_t bytes);
  void (*free_pinned)(void* data);
  // Makes existing host memory pinned (chunks and alignment are the caller's).
  Status (*register_host)(void* data, int64_t bytes);
  void (*unregister_host)(void* data);
  // Ordered on the stream; between host and device in either direction, or on the device.
  Status (*copy)(void* to, const void* from, int64_t bytes, void* stream);
  Status (*fill_bytes)(void* to, int value, int64_t bytes, void* stream);
  Result<void*> (*create_stream)(int device_idx);
  void (*destroy_stream)(void* stream);
  // Waits; the status carries asynchronous errors of earlier launches.
  Status (*synchronize)(int device_idx, void* stream);
  Result<void*> (*create_event)(int device_idx);
  void (*destroy_event)(void* event);
  Status (*record_event)(void* event, void* stream);
  // The stream waits, the host does not.
  Status (*wait_event)(void* stream, void* event);
  // The host waits for the event alone; allowed where synchronize() is not (see forbid_sync).
  Status (*await_event)(void* event);
  // Milliseconds between two recorded events that have both happened.
  Result<double> (*elapsed_ms)(void* from, void* to);

  // What a stream is given between begin and end is not run but becomes a graph, which can be
  // launched again and again: the same kernels on the same addresses. A failed capture leaves the
  // stream usable. All null where there are no graphs (the CPU).
  Status (*begin_capture)(void* stream);
  Result<void*> (*end_capture)(void* stream);
  Status (*launch_graph)(void* graph, void* stream);
  void (*destroy_graph)(void* graph);

  // Sync-check mode: while it is on, allocations, synchronize() and copies from the device into
  // pageable memory are refused with an internal error that names them. One switch a process.
  void (*forbid_sync)(bool forbidden);
  // Calls since the start of the process.
  RuntimeCounters (*counters)();
};

}  // namespace lacuna
