// What dispatch knows of devices, and its texts.
#include "ops/dispatch.h"

#include <memory>
#include <utility>

namespace lacuna {

const DeviceInfo* find_device(const ContextState& state, Device device) {
  for (const DeviceInfo& info : state.devices) {
    if (info.device == device) {
      return &info;
    }
  }
  return nullptr;
}

Status give_tuning(Tuning tuning, const std::string& source, ContextState& state) {
  const auto shared = std::make_shared<const Tuning>(std::move(tuning));
  std::string others;
  bool given = false;
  for (DeviceInfo& device : state.devices) {
    if (device.device.kind != DeviceKind::kCuda) {
      continue;
    }
    if (device.name == shared->device && device.sm_count == shared->sm_count) {
      device.tuning = shared;
      given = true;
    } else {
      others += (others.empty() ? "" : "; ") + device_text(device.device) + " is " + device.name +
                " with " + std::to_string(device.sm_count) + " SMs";
    }
  }
  if (given) {
    return ok_status();
  }
  if (others.empty()) {
    others = "there is no GPU" + (state.cuda_status.empty() ? "" : ": " + state.cuda_status);
  }
  return invalid_argument("tuning_file: " + source + " was measured on " + shared->device +
                          " with " + std::to_string(shared->sm_count) + " SMs, but " + others +
                          "; lacuna tune measures a table for a device");
}

std::string device_text(Device device) {
  return device.kind == DeviceKind::kCpu ? std::string("cpu")
                                         : "cuda:" + std::to_string(device.index);
}

std::string unavailable_text(const Backend& backend, const DeviceInfo& device) {
  const int capability = device.compute_capability;
  return std::string(backend.name) + " does not run on " + device.name +
         (capability == 0 ? ""
                          : " (compute capability " + std::to_string(capability / 10) + "." +
                                std::to_string(capability % 10) + ")");
}

std::string refusals_text(const std::vector<KernelRefusal>& refusals) {
  std::string text;
  for (const KernelRefusal& refusal : refusals) {
    text += (text.empty() ? ": " : "; ") + refusal.kernel + ": " + refusal.reason;
  }
  return text;
}

}  // namespace lacuna
