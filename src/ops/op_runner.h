// How the engine calls operations: applies forced kernels, counts calls by kernel, hands out the
// one workspace, and in measuring mode only asks how much workspace a call would need. A forward
// pass is written once and run in both modes.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/device_handles.h"
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
  // Steps are run to have everything prepared: what comes in many sizes is run in all of them.
  void set_warming_up(bool warming_up) { warming_up_ = warming_up; }
  bool warming_up() const { return warming_up_; }
  int64_t workspace_bytes_max() const { return workspace_bytes_max_; }
  // Shown each sparse_mla call after its launch, with the layer that set_layer() named.
  using SparseMlaWatch =
      std::function<void(int layer, const SparseMlaArgs& args, const char* kernel)>;
  void set_sparse_mla_watch(SparseMlaWatch watch) { sparse_mla_watch_ = std::move(watch); }
  void set_layer(int layer) { layer_ = layer; }
  // Also add up the time of each kernel's calls: the wall's, or, given the runtime of a device that
  // runs behind the host, the device's between two events around the call. The latter are added by
  // collect_timing().
  void set_timing(bool timing, const Runtime* events = nullptr, int device_idx = 0) {
    timing_ = timing;
    events_ = events;
    device_idx_ = device_idx;
  }
  // After the device has run everything that was timed.
  Status collect_timing() {
    for (const auto& [use, timer] : timed_) {
      LACUNA_ASSIGN_OR_RETURN(const double ms, events_->elapsed_ms(timers_[timer].first.get(),
                                                                   timers_[timer].second.get()));
      use->seconds += 1e-3 * ms;
    }
    timed_.clear();
    return ok_status();
  }

  struct KernelUse {
    const char* op = nullptr;
    int64_t calls = 0;
    double seconds = 0;  // when timing
  };
  using Uses = std::map<std::string, KernelUse, std::less<>>;
  // Kernel name -> its use since the start.
  const Uses& uses() const { return uses_; }

  // The calls that a captured graph makes each time it is launched.
  using Tally = std::vector<std::pair<KernelUse*, int64_t>>;
  // Takes the calls since `before` back: they were captured, not run.
  Tally take_calls_since(const Uses& before) {
    Tally tally;
    for (auto& [name, use] : uses_) {
      const auto found = before.find(name);
      const int64_t calls = use.calls - (found == before.end() ? 0 : found->second.calls);
      if (calls > 0) {
        tally.emplace_back(&use, calls);
        use.calls -= calls;
      }
    }
    return tally;
  }
  static void count(const Tally& tally) {
    for (const auto& [use, calls] : tally) {
      use->calls += calls;
    }
  }

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
    const Status status = timing_ && events_ != nullptr ? run_between_events(args, &kernel)
                                                        : run_on_the_clock(args, &kernel);
    if constexpr (std::is_same_v<Args, SparseMlaArgs>) {
      if (status.ok() && kernel != nullptr && sparse_mla_watch_) {
        sparse_mla_watch_(layer_, args, kernel);
      }
    }
    return status;
  }

 private:
  KernelUse& use_of(const char* kernel, const char* op) {
    auto found = uses_.find(kernel);
    if (found == uses_.end()) {
      found = uses_.emplace(kernel, KernelUse{.op = op}).first;
    }
    return found->second;
  }

  template <class Args>
  Status run_on_the_clock(const Args& args, const char** kernel) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point start = timing_ ? Clock::now() : Clock::time_point();
    const Status status = run_op(context_, args, launch_, kernel);
    if (*kernel != nullptr) {
      KernelUse& use = use_of(*kernel, Op<Args>::kName);
      ++use.calls;
      if (timing_) {
        use.seconds += std::chrono::duration<double>(Clock::now() - start).count();
      }
    }
    return status;
  }

  template <class Args>
  Status run_between_events(const Args& args, const char** kernel) {
    if (timed_.size() == timers_.size()) {
      LACUNA_ASSIGN_OR_RETURN(EventHandle begin, make_event(events_, device_idx_));
      LACUNA_ASSIGN_OR_RETURN(EventHandle end, make_event(events_, device_idx_));
      timers_.emplace_back(std::move(begin), std::move(end));
    }
    const auto& [begin, end] = timers_[timed_.size()];
    LACUNA_RETURN_IF_ERROR(events_->record_event(begin.get(), launch_.stream));
    LACUNA_RETURN_IF_ERROR(run_op(context_, args, launch_, kernel));
    if (*kernel == nullptr) {
      return ok_status();
    }
    LACUNA_RETURN_IF_ERROR(events_->record_event(end.get(), launch_.stream));
    KernelUse& use = use_of(*kernel, Op<Args>::kName);
    ++use.calls;
    timed_.emplace_back(&use, timed_.size());
    return ok_status();
  }

  const Context& context_;
  ForcedKernels forced_;
  Launch launch_;
  bool measuring_ = false;
  bool warming_up_ = false;
  int64_t workspace_bytes_max_ = 0;
  SparseMlaWatch sparse_mla_watch_;
  int layer_ = 0;
  bool timing_ = false;
  const Runtime* events_ = nullptr;
  int device_idx_ = 0;
  Uses uses_;
  std::vector<std::pair<EventHandle, EventHandle>> timers_;
  std::vector<std::pair<KernelUse*, size_t>> timed_;  // since the last collection: use, timer
};

}  // namespace lacuna
