// What a device must offer besides kernels: memory, copies, streams, events. A table of functions
// that a backend fills; nothing else in the house allocates device memory.
#pragma once

#include <cstdint>

#include "lacuna/status.h"

namespace lacuna {

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
  Status (*wait_event)(void* stream, void* event);
};

}  // namespace lacuna
