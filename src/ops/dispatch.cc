// Texts of the dispatcher.
#include "ops/dispatch.h"

namespace lacuna {

const DeviceInfo* find_device(const ContextState& state, Device device) {
  for (const DeviceInfo& info : state.devices) {
    if (info.device == device) {
      return &info;
    }
  }
  return nullptr;
}

std::string device_text(Device device) {
  return device.kind == DeviceKind::kCpu ? std::string("cpu")
                                         : "cuda:" + std::to_string(device.index);
}

std::string refusals_text(const std::vector<KernelRefusal>& refusals) {
  std::string text;
  for (const KernelRefusal& refusal : refusals) {
    text += (text.empty() ? ": " : "; ") + refusal.kernel + ": " + refusal.reason;
  }
  return text;
}

}  // namespace lacuna
