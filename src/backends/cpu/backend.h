// The CPU backend's one declaration.
#pragma once

#include "ops/backend.h"

namespace lacuna::cpu {

extern const Backend kBackend;

// Describes this machine's processor; the pool is the context's.
DeviceInfo device_info(ThreadPool* pool);

}  // namespace lacuna::cpu
