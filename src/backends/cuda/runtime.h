// The only owner of CUDA memory, streams, events and graphs: core's Runtime over the CUDA runtime.
#pragma once

#include "core/runtime.h"

namespace lacuna::cuda {

extern const Runtime kRuntime;

}  // namespace lacuna::cuda
