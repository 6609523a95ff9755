// The CPU kernels are compiled once for each SIMD target; a test may ask for every one of them.
#pragma once

#include <cstdint>

#include "hwy/targets.h"

namespace lacuna::testing {

// Runs `body` once for each SIMD target that this machine has, as if it had no better one.
template <class Body>
void for_each_target(Body&& body) {
  const int64_t all = hwy::SupportedTargets();
  for (int64_t left = all; left != 0; left &= left - 1) {
    hwy::SetSupportedTargetsForTest(left);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body(hwy::TargetName(left & -left));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace lacuna::testing
