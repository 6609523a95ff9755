// Device memory with canaries.
#include "tests/support/device_buffer.h"

#include <utility>

#include "core/check.h"
#include "tests/support/poison.h"

namespace lacuna::testing {
namespace {

void must(const Status& status) {
  // A copy or allocation of the test itself failed: nothing sensible can follow.
  LACUNA_CHECK(status.ok());
}

}  // namespace

int64_t DeviceBuffer::canary_bytes() { return kCanaryBytes; }

DeviceBuffer::DeviceBuffer(const TestDevice& where, int64_t size_bytes)
    : where_(where), size_bytes_(size_bytes) {
  Result<void*> memory = where.runtime->allocate(where.device.index, size_bytes + 2 * kCanaryBytes);
  must(memory.status());
  base_ = static_cast<char*>(*memory);
  write_canaries();
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept { *this = std::move(other); }

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(where_, other.where_);
  std::swap(base_, other.base_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

DeviceBuffer::~DeviceBuffer() {
  if (base_ != nullptr) {
    where_.runtime->free(where_.device.index, base_);
  }
}

void DeviceBuffer::write_canaries() {
  must(where_.runtime->fill_bytes(base_, kCanaryByte, kCanaryBytes, nullptr));
  must(where_.runtime->fill_bytes(data() + size_bytes_, kCanaryByte, kCanaryBytes, nullptr));
}

void DeviceBuffer::write(const std::vector<uint8_t>& image) {
  LACUNA_CHECK(static_cast<int64_t>(image.size()) == size_bytes_);
  must(where_.runtime->copy(data(), image.data(), size_bytes_, nullptr));
  write_canaries();
}

void DeviceBuffer::fill(uint8_t value) {
  must(where_.runtime->fill_bytes(data(), value, size_bytes_, nullptr));
  write_canaries();
}

std::vector<uint8_t> DeviceBuffer::read() const {
  std::vector<uint8_t> bytes(size_bytes_);
  must(where_.runtime->copy(bytes.data(), data(), size_bytes_, nullptr));
  must(where_.runtime->synchronize(where_.device.index, nullptr));
  return bytes;
}

std::string DeviceBuffer::canary_error() const {
  std::vector<uint8_t> bytes(kCanaryBytes);
  for (const bool before : {true, false}) {
    must(where_.runtime->copy(bytes.data(), before ? base_ : data() + size_bytes_, kCanaryBytes,
                              nullptr));
    must(where_.runtime->synchronize(where_.device.index, nullptr));
    for (int64_t i = 0; i < kCanaryBytes; ++i) {
      if (bytes[i] != kCanaryByte) {
        return before ? "wrote " + std::to_string(kCanaryBytes - i) + " bytes before its start"
                      : "wrote " + std::to_string(i) + " bytes past its end";
      }
    }
  }
  return {};
}

}  // namespace lacuna::testing
