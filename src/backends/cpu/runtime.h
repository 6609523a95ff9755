// The CPU's Runtime: malloc, memcpy and a queue of nothing.
#pragma once

#include "core/runtime.h"

namespace lacuna::cpu {

extern const Runtime kRuntime;

}  // namespace lacuna::cpu
