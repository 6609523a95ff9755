// The kernels of the Hopper backend; backend.cc puts them into lists.
#pragma once

#include "ops/backend.h"

namespace lacuna::sm90 {

extern const Kernel<SparseMlaArgs> kSparseMlaSmallHead;

}  // namespace lacuna::sm90
