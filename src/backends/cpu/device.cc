// What `lacuna info` and the kernels learn of this machine's processor.
#include <unistd.h>

#include <fstream>
#include <string>

#include "backends/cpu/backend.h"
#include "backends/cpu/kernels.h"

namespace lacuna::cpu {
namespace {

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) {
      const size_t colon = line.find(':');
      if (colon != std::string::npos && colon + 2 <= line.size()) {
        return line.substr(colon + 2);
      }
    }
  }
  return "cpu";
}

}  // namespace

DeviceInfo device_info(ThreadPool* pool) {
  DeviceInfo info;
  info.device = {DeviceKind::kCpu, 0};
  info.name = processor_name();
  info.memory_bytes = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  info.thread_pool = pool;
  info.num_threads = pool->num_threads();
  info.isa = simd_target_name();
  return info;
}

}  // namespace lacuna::cpu
