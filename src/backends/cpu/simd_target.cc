// The name of the SIMD target that Highway's run-time dispatch picks on this machine.
#include "backends/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/simd_target.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {

HWY_EXPORT(target_name);

const char* simd_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
