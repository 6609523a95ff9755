// The kernels of linear, head_linear and moe_experts, one namespace a way to do it; linear.cc and
// moe_experts.cc put them into lists.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

#define LACUNA_KERNEL_FUNCTIONS(Args)                \
  Status supports(const Args&, const DeviceInfo&);   \
  bool preferred(const Args&, const DeviceInfo&);    \
  int64_t workspace(const Args&, const DeviceInfo&); \
  Status run(const Args&, const DeviceInfo&, const Launch&)

namespace few_rows {
LACUNA_KERNEL_FUNCTIONS(LinearArgs);
LACUNA_KERNEL_FUNCTIONS(HeadLinearArgs);
}  // namespace few_rows

namespace few_rows_fma {
LACUNA_KERNEL_FUNCTIONS(LinearArgs);
}  // namespace few_rows_fma

namespace cublaslt {
LACUNA_KERNEL_FUNCTIONS(LinearArgs);
LACUNA_KERNEL_FUNCTIONS(HeadLinearArgs);
}  // namespace cublaslt

namespace tiles {
LACUNA_KERNEL_FUNCTIONS(LinearArgs);
LACUNA_KERNEL_FUNCTIONS(MoeExpertsArgs);
}  // namespace tiles

namespace generic {
LACUNA_KERNEL_FUNCTIONS(LinearArgs);
LACUNA_KERNEL_FUNCTIONS(HeadLinearArgs);
LACUNA_KERNEL_FUNCTIONS(MoeExpertsArgs);
}  // namespace generic

#undef LACUNA_KERNEL_FUNCTIONS

}  // namespace lacuna::cuda
