// Declaration of the Hopper backend: what the registry needs. Includes no CUDA header.
#pragma once

#include "ops/backend.h"

namespace lacuna::sm90 {

extern const Backend kBackend;

}  // namespace lacuna::sm90
