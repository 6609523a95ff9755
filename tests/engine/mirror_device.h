// A device that is not there: it says that it is a GPU, has memory of its own as far as the engine
// can tell, and computes with the CPU's kernels. What the engine does only on a GPU - staging,
// padding, launching a step before the last one's tokens are read - runs on every machine with it.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>

#include "engine/nano.h"
#include "ops/backend.h"

namespace lacuna {

// What the device was asked for since the start of the program.
struct MirrorCounts {
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> synchronizations{0};
  std::atomic<int64_t> copies{0};
  std::atomic<bool> forbidden{false};
};
inline MirrorCounts mirror_counts;
inline const Runtime* mirrored_runtime = nullptr;

struct MirrorState : ContextState {
  MirrorState() : base(one_thread()) {
    const Backend& cpu = cpu_backend(base);
    mirrored_runtime = cpu.runtime;
    runtime = *cpu.runtime;
    runtime.name = "mirror";
    runtime.allocate = [](int device_idx, int64_t bytes) {
      ++mirror_counts.allocations;
      return mirror_counts.forbidden ? internal_error("allocate: refused")
                                     : mirrored_runtime->allocate(device_idx, bytes);
    };
    runtime.allocate_pinned = [](int64_t bytes) {
      ++mirror_counts.allocations;
      return mirror_counts.forbidden ? internal_error("allocate_pinned: refused")
                                     : mirrored_runtime->allocate_pinned(bytes);
    };
    runtime.copy = [](void* to, const void* from, int64_t bytes, void* stream) {
      ++mirror_counts.copies;
      return mirrored_runtime->copy(to, from, bytes, stream);
    };
    runtime.synchronize = [](int, void*) {
      ++mirror_counts.synchronizations;
      return mirror_counts.forbidden ? internal_error("synchronize: refused") : ok_status();
    };
    runtime.forbid_sync = [](bool forbidden) { mirror_counts.forbidden = forbidden; };
    backend = cpu;
    backend.name = "mirror";
    backend.device_kind = DeviceKind::kCuda;
    backend.runtime = &runtime;
    backends = {&backend};
    DeviceInfo device = base.state().devices.front();
    device.device = {DeviceKind::kCuda, 0};
    device.name = "mirror";
    device.compute_capability = 80;
    devices = {device};
  }
  Context base;
  Runtime runtime;
  Backend backend;
};

inline Context mirror_context() { return Context::from_state(std::make_shared<MirrorState>()); }

}  // namespace lacuna
