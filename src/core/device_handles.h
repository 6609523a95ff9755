// Owners of what a Runtime hands out: streams, events, graphs, pinned memory. On a device without
// them (the CPU) the handle is null, and that is what its Runtime takes.
#pragma once

#include <utility>

#include "core/runtime.h"

namespace lacuna {

template <auto kDestroy>
class DeviceHandle {
 public:
  DeviceHandle() = default;
  DeviceHandle(const Runtime* runtime, void* handle) : runtime_(runtime), handle_(handle) {}
  ~DeviceHandle() { reset(); }
  DeviceHandle(DeviceHandle&& other) noexcept { *this = std::move(other); }
  DeviceHandle& operator=(DeviceHandle&& other) noexcept {
    if (this != &other) {
      reset();
      runtime_ = other.runtime_;
      handle_ = std::exchange(other.handle_, nullptr);
    }
    return *this;
  }

  void* get() const { return handle_; }

 private:
  void reset() {
    if (handle_ != nullptr) {
      (runtime_->*kDestroy)(handle_);
      handle_ = nullptr;
    }
  }

  const Runtime* runtime_ = nullptr;
  void* handle_ = nullptr;
};

using StreamHandle = DeviceHandle<&Runtime::destroy_stream>;
using EventHandle = DeviceHandle<&Runtime::destroy_event>;
using GraphHandle = DeviceHandle<&Runtime::destroy_graph>;

inline Result<StreamHandle> make_stream(const Runtime* runtime, int device_idx) {
  Result<void*> stream = runtime->create_stream(device_idx);
  if (!stream.ok()) {
    return stream.status();
  }
  return StreamHandle(runtime, *stream);
}

inline Result<EventHandle> make_event(const Runtime* runtime, int device_idx) {
  Result<void*> event = runtime->create_event(device_idx);
  if (!event.ok()) {
    return event.status();
  }
  return EventHandle(runtime, *event);
}

}  // namespace lacuna
