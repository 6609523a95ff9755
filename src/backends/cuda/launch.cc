// Limits of dynamic shared memory. See launch.h.
#include "backends/cuda/launch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>

namespace lacuna::cuda {
namespace {

// What every kernel may use without asking.
constexpr int64_t kSmemFree = 48 * 1024;

// The limit of a kernel on a device. Entries are added and raised under the mutex, and never go:
// launches read them without it.
struct SmemLimit {
  std::atomic<const void*> kernel = nullptr;  // null: free; set last
  int device_idx = 0;
  std::atomic<int64_t> bytes = 0;
};

// A power of two, and several times what the kernels that ask for more are on eight devices. Were
// it full, launches would ask the driver each time.
constexpr size_t kNumLimits = 1024;
SmemLimit limits[kNumLimits];
std::mutex limits_mutex;

// The entry, or the free one where it belongs; null when there is neither.
struct Found {
  SmemLimit* limit;
  bool is_free;
};

Found find_limit(const void* kernel, int device_idx) {
  // Kernels lie at multiples of 16.
  const size_t first =
      reinterpret_cast<uintptr_t>(kernel) / 16 * 31 + static_cast<size_t>(device_idx);
  for (size_t i = 0; i < kNumLimits; ++i) {
    SmemLimit& limit = limits[(first + i) % kNumLimits];
    const void* owner = limit.kernel.load(std::memory_order_acquire);
    if (owner == nullptr || (owner == kernel && limit.device_idx == device_idx)) {
      return {&limit, owner == nullptr};
    }
  }
  return {nullptr, true};
}

// Asks the driver, and remembers. Never lowers: another call of the same kernel may need more.
Status raise_limit(const void* kernel, int device_idx, int64_t bytes) {
  const std::lock_guard lock(limits_mutex);
  cudaFuncAttributes attributes = {};
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaFuncGetAttributes(&attributes, kernel), "launch"));
  if (attributes.maxDynamicSharedSizeBytes < bytes) {
    LACUNA_RETURN_IF_ERROR(
        cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)),
                    "launch: shared memory"));
  }
  const auto [limit, is_free] = find_limit(kernel, device_idx);
  if (limit != nullptr) {
    limit->bytes = std::max<int64_t>(bytes, attributes.maxDynamicSharedSizeBytes);
    if (is_free) {
      limit->device_idx = device_idx;
      limit->kernel.store(kernel, std::memory_order_release);
    }
  }
  return ok_status();
}

}  // namespace

Status allow_smem(const void* kernel, int device_idx, int64_t bytes) {
  if (bytes <= kSmemFree) {
    return ok_status();
  }
  const auto [limit, is_free] = find_limit(kernel, device_idx);
  const bool known = !is_free && bytes <= limit->bytes.load(std::memory_order_relaxed);
  return known ? ok_status() : raise_limit(kernel, device_idx, bytes);
}

}  // namespace lacuna::cuda
