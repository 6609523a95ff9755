// Which SIMD targets a file with arrays of vectors is compiled for: include it before
// hwy/foreach_target.h. Types without a size (SVE) can not be array elements, so Arm has NEON
// there.
#pragma once

#if defined(__aarch64__) && !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif
