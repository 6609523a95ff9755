// How the engine calls operations: applies forced kernels, counts calls by kernel, hands out the
// one workspace, and in measuring mode only asks how much workspace a call would need. A forward
// pass is written once and run in both modes.
#pragma once

#include <algorithm>
#include <chrono>
#include <map>
#include <string>

#include "ops/dispatch.h"

namespace lacuna {

// Operation name -> kernel name.
using ForcedKernels = std::map<std::string, std::string, std::less<>>;

class OpRunner {
 public:
  explicit OpRunner(const Context& context, ForcedKernels forced = {})
      : context_(context), forced_(std::move(forced)) {}

  const Context& context() const { return context_; }

  void set_launch(const Launch& launch) { launch_ = launch; }
  void set_measuring(bool measuring) { measuring_ = measuring; }
  bool measuring() const { return measuring_; }
  int64_t workspace_bytes_max() const { return workspace_bytes_max_; }
  // Also add up the wall time of each kernel's calls (a synchronous backend's only).
  void set_timing(bool timing) { timing_ = timing; }

  struct KernelUse {
    int64_t calls = 0;
    double seconds = 0;  // when timing
  };
  // Kernel name -> its use since the start.
  const std::map<std::string, KernelUse, std::less<>>& uses() const { return uses_; }

  template <class Args>
  Status operator()(Args args) {
    const auto forced = forced_.find(Op<Args>::kName);
    if (forced != forced_.end()) {
      args.kernel = forced->second;
    }
    if (measuring_) {
      LACUNA_ASSIGN_OR_RETURN(const int64_t bytes, op_workspace_bytes(context_, args));
      workspace_bytes_max_ = std::max(workspace_bytes_max_, bytes);
      return ok_status();
    }
    const char* kernel = nullptr;
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = timing_ ? Clock::now() : Clock::time_point();
    const Status status = run_op(context_, args, launch_, &kernel);
    if (kernel != nullptr) {
      auto found = uses_.find(kernel);
      if (found == uses_.end()) {
        found = uses_.emplace(kernel, KernelUse{}).first;
      }
      ++found->second.calls;
      if (timing_) {
        found->second.seconds += std::chrono::duration<double>(Clock::now() - start).count();
      }
    }
    return status;
  }

 private:
  const Context& context_;
  ForcedKernels forced_;
  Launch launch_;
  bool measuring_ = false;
  int64_t workspace_bytes_max_ = 0;
  bool timing_ = false;
  std::map<std::string, KernelUse, std::less<>> uses_;
};

}  // namespace lacuna
