// The only place that chooses a kernel: the first in list order, over the device's backends, that
// supports the arguments and is preferred; if none is preferred, the first that supports; otherwise
// an error with every refusal. A kernel forced by name skips `preferred`, never `supports`.
#pragma once

#include <string>

#include "core/check.h"
#include "ops/backend.h"

namespace lacuna {

// The device with this kind and index, or null.
const DeviceInfo* find_device(const ContextState& state, Device device);

// Gives a table to the devices that it was measured on; an error when there is none, since somebody
// who names a table wants it used. `source` is what the error calls the table.
Status give_tuning(Tuning tuning, const std::string& source, ContextState& state);

std::string device_text(Device device);
// Why no kernel of a backend runs on a device of its kind.
std::string unavailable_text(const Backend& backend, const DeviceInfo& device);
std::string refusals_text(const std::vector<KernelRefusal>& refusals);

template <class Args>
struct Pick {
  const Kernel<Args>* kernel = nullptr;
  const DeviceInfo* device = nullptr;
  bool preferred = false;
  Status status;  // not ok: nothing can run
  std::vector<KernelRefusal> refusals;
};

// `collect` also fills `refusals` when a kernel was found (explain); the hot path leaves it empty.
template <class Args>
Pick<Args> pick(const Context& context, const Args& args, bool collect = false) {
  const ContextState& state = context.state();
  Pick<Args> result;
  const Device where = Op<Args>::device(args);
  result.device = find_device(state, where);
  if (result.device == nullptr) {
    result.status = unsupported(std::string(Op<Args>::kName) + ": this context has no device " +
                                device_text(where));
    return result;
  }
  const Kernel<Args>* fallback = nullptr;
  bool name_seen = args.kernel.empty();
  for (int pass = 0; pass < 2; ++pass) {
    // The second pass runs only on failure, to collect the refusal texts that the first did not
    // keep.
    const bool keep = collect || pass == 1;
    for (const Backend* backend : state.backends) {
      if (backend->device_kind != where.kind) {
        continue;
      }
      if (!backend->available(*result.device)) {
        for (const Kernel<Args>& kernel : Op<Args>::list(*backend)) {
          if (keep) {
            result.refusals.push_back({kernel.name, unavailable_text(*backend, *result.device)});
          }
        }
        continue;
      }
      for (const Kernel<Args>& kernel : Op<Args>::list(*backend)) {
        if (!args.kernel.empty() && args.kernel != kernel.name) {
          if (keep) {
            result.refusals.push_back({kernel.name, "not the kernel that was asked for"});
          }
          continue;
        }
        name_seen = true;
        Status supports = kernel.supports(args, *result.device);
        if (!supports.ok()) {
          if (keep) {
            result.refusals.push_back({kernel.name, supports.message()});
          }
          continue;
        }
        if (!args.kernel.empty() || kernel.preferred == nullptr ||
            kernel.preferred(args, *result.device)) {
          if (result.kernel == nullptr) {
            result.kernel = &kernel;
            result.preferred = true;
          }
        } else {
          if (fallback == nullptr) {
            fallback = &kernel;
          }
          if (keep) {
            result.refusals.push_back({kernel.name, "can run, but does not pay here"});
          }
        }
        if (result.kernel != nullptr && !collect) {
          return result;
        }
      }
    }
    if (result.kernel == nullptr && fallback != nullptr) {
      result.kernel = fallback;
    }
    if (result.kernel != nullptr || collect) {
      break;
    }
  }
  if (result.kernel == nullptr) {
    std::string text = std::string(Op<Args>::kName) + ": ";
    if (!name_seen) {
      text += "there is no kernel \"" + std::string(args.kernel) + "\" for " + device_text(where);
      result.status = not_found(text + refusals_text(result.refusals));
    } else {
      text += args.kernel.empty() ? "no kernel on " + device_text(where) + " runs these arguments"
                                  : "the kernel asked for cannot run these arguments";
      result.status = unsupported(text + refusals_text(result.refusals));
    }
  }
  return result;
}

// `kernel_run`, when given, receives the name of the kernel that was launched.
template <class Args>
Status run_op(const Context& context, const Args& args, const Launch& launch,
              const char** kernel_run = nullptr) {
  LACUNA_RETURN_IF_ERROR(Op<Args>::validate(args));
  if (Op<Args>::nothing_to_do(args)) {
    return ok_status();
  }
  const Pick<Args> choice = pick(context, args);
  LACUNA_RETURN_IF_ERROR(choice.status);
  if (choice.kernel->workspace_bytes != nullptr) {
    const int64_t needed = choice.kernel->workspace_bytes(args, *choice.device);
    if (launch.workspace_bytes < needed || (needed > 0 && launch.workspace == nullptr)) {
      return out_of_memory(
          std::string(choice.kernel->name) + ": needs a workspace of " + std::to_string(needed) +
          " bytes, given " +
          std::to_string(launch.workspace == nullptr ? 0 : launch.workspace_bytes));
    }
    if (needed > 0 && reinterpret_cast<uintptr_t>(launch.workspace) % 64 != 0) {
      return invalid_argument(std::string(choice.kernel->name) +
                              ": the workspace must be aligned to 64 bytes");
    }
  }
  if (kernel_run != nullptr) {
    *kernel_run = choice.kernel->name;
  }
  return choice.kernel->run(args, *choice.device, launch);
}

template <class Args>
Result<int64_t> op_workspace_bytes(const Context& context, const Args& args) {
  LACUNA_RETURN_IF_ERROR(Op<Args>::validate(args));
  if (Op<Args>::nothing_to_do(args)) {
    return int64_t{0};
  }
  const Pick<Args> choice = pick(context, args);
  LACUNA_RETURN_IF_ERROR(choice.status);
  return choice.kernel->workspace_bytes == nullptr
             ? int64_t{0}
             : choice.kernel->workspace_bytes(args, *choice.device);
}

template <class Args>
Explanation explain_op(const Context& context, const Args& args) {
  Explanation explanation;
  explanation.status = Op<Args>::validate(args);
  if (!explanation.status.ok()) {
    return explanation;
  }
  Pick<Args> choice = pick(context, args, /*collect=*/true);
  explanation.status = std::move(choice.status);
  explanation.refusals = std::move(choice.refusals);
  if (choice.kernel != nullptr) {
    explanation.kernel = choice.kernel->name;
    explanation.preferred = choice.preferred;
    if (choice.kernel->describe != nullptr) {
      explanation.detail = choice.kernel->describe(args, *choice.device);
    }
  }
  return explanation;
}

}  // namespace lacuna

// Defines the public functions of an operation: run, workspace_bytes and explain.
#define LACUNA_PUBLIC_OP(ArgsType, op)                                            \
  Status op(const Context& context, const ArgsType& args, const Launch& launch) { \
    return run_op(context, args, launch);                                         \
  }                                                                               \
  Result<int64_t> workspace_bytes(const Context& context, const ArgsType& args) { \
    return op_workspace_bytes(context, args);                                     \
  }                                                                               \
  Explanation explain(const Context& context, const ArgsType& args) {             \
    return explain_op(context, args);                                             \
  }
