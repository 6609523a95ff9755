// Context: the only thing one must create. It owns the devices, their backends and the CPU thread
// pool; it is immutable after creation and may be shared between threads. It owns no stream and no
// workspace: those come with each call in Launch.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

struct ContextOptions {
  // Threads of the CPU backend, the calling thread included. 0: one per core that the process may
  // run on.
  int num_threads = 0;
  // Whether GPUs are looked for. Creating a context on them takes memory and start-up time.
  bool use_cuda = true;
  // A table of measured choices, written by `lacuna tune`, for the GPUs whose name and SM count are
  // those that it was measured on. Empty: none. An error when no GPU of the context is such a one.
  std::string tuning_file;
};

// What a call needs besides its arguments. `stream` is the backend's stream (null on the CPU).
// `workspace` must hold `workspace_bytes(context, args)` bytes, 64-byte aligned, on the device of
// the arguments; its contents do not matter and are not kept.
struct Launch {
  void* stream = nullptr;
  void* workspace = nullptr;
  int64_t workspace_bytes = 0;
};

struct ContextState;  // src/ops/backend.h

class Context {
 public:
  static Result<Context> create(const ContextOptions& options = {});
  // Over devices and backends chosen by the caller, for code within the library and its tests.
  static Context from_state(std::shared_ptr<const ContextState> state) {
    return Context(std::move(state));
  }

  const ContextState& state() const { return *state_; }

 private:
  explicit Context(std::shared_ptr<const ContextState> state) : state_(std::move(state)) {}
  std::shared_ptr<const ContextState> state_;
};

// Why a kernel will not run these arguments, in words for the person who reads it.
struct KernelRefusal {
  std::string kernel;
  std::string reason;
};

// What dispatch would do with given arguments. `status` is ok when some kernel runs them; then
// `kernel` names it, and `preferred` tells whether it was chosen for speed or only because nothing
// else runs. `detail` is how it would cut the work and why, in words; empty: the kernel has no
// choice there. `refusals` lists every kernel that refused. Nothing is launched.
struct Explanation {
  Status status;
  std::string kernel;
  bool preferred = false;
  std::string detail;
  std::vector<KernelRefusal> refusals;
};

}  // namespace lacuna
