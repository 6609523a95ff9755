// Memory of the device under test, through its backend's Runtime, with a canary on either side. On
// the CPU the copies are memcpy; the suite does not know.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/runtime.h"
#include "lacuna/tensor.h"

namespace lacuna::testing {

struct TestDevice {
  const Runtime* runtime = nullptr;
  Device device;
};

class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  // Aborts when the device has no memory left: a test cannot go on.
  DeviceBuffer(const TestDevice& where, int64_t size_bytes);
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;
  ~DeviceBuffer();

  // The payload on the device: 4096-byte aligned where the runtime aligns to 4096, never less
  // than to 256.
  char* data() const { return base_ == nullptr ? nullptr : base_ + canary_bytes(); }
  int64_t size_bytes() const { return size_bytes_; }

  // Payload := image, canaries := whole again.
  void write(const std::vector<uint8_t>& image);
  void fill(uint8_t value);
  // Waits for the device, then reads the payload.
  std::vector<uint8_t> read() const;
  // Empty when both canaries are whole; otherwise where the first changed byte lies.
  std::string canary_error() const;

 private:
  static int64_t canary_bytes();
  void write_canaries();

  TestDevice where_;
  char* base_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace lacuna::testing
