// Owning pieces of memory, through a Runtime: a device's, and the host's pinned memory.
#pragma once

#include <cstdint>
#include <utility>

#include "core/device_handles.h"
#include "core/runtime.h"

namespace lacuna {

class DeviceMemory {
 public:
  DeviceMemory() = default;
  static Result<DeviceMemory> allocate(const Runtime* runtime, int device_idx, int64_t bytes) {
    Result<void*> data = runtime->allocate(device_idx, bytes);
    if (!data.ok()) {
      return data.status();
    }
    return DeviceMemory(runtime, device_idx, *data, bytes);
  }
  ~DeviceMemory() { reset(); }
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    if (this != &other) {
      reset();
      runtime_ = other.runtime_;
      device_idx_ = other.device_idx_;
      data_ = std::exchange(other.data_, nullptr);
      bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
  }

  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  DeviceMemory(const Runtime* runtime, int device_idx, void* data, int64_t bytes)
      : runtime_(runtime), device_idx_(device_idx), data_(data), bytes_(bytes) {}
  void reset() {
    if (data_ != nullptr) {
      runtime_->free(device_idx_, data_);
      data_ = nullptr;
    }
  }

  const Runtime* runtime_ = nullptr;
  int device_idx_ = 0;
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Host memory that the device copies from and to without making the host wait.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  static Result<PinnedMemory> allocate(const Runtime* runtime, int64_t bytes) {
    Result<void*> data = runtime->allocate_pinned(bytes);
    if (!data.ok()) {
      return data.status();
    }
    return PinnedMemory(runtime, *data, bytes);
  }

  void* data() const { return data_.get(); }
  int64_t bytes() const { return bytes_; }

 private:
  PinnedMemory(const Runtime* runtime, void* data, int64_t bytes)
      : data_(runtime, data), bytes_(bytes) {}

  DeviceHandle<&Runtime::free_pinned> data_;
  int64_t bytes_ = 0;
};

}  // namespace lacuna
