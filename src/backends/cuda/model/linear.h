// The kernels of linear, head_linear and moe_experts, one namespace a way to do it; linear.cc puts
// them into lists.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// x a few rows: decode.
namespace few_rows {
Status supports(const LinearArgs&, const DeviceInfo&);
bool preferred(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);

Status supports(const HeadLinearArgs&, const DeviceInfo&);
bool preferred(const HeadLinearArgs&, const DeviceInfo&);
Status run(const HeadLinearArgs&, const DeviceInfo&, const Launch&);
}  // namespace few_rows

namespace few_rows_fma {
Status supports(const LinearArgs&, const DeviceInfo&);
bool preferred(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);
}  // namespace few_rows_fma

namespace cublaslt {
Status supports(const LinearArgs&, const DeviceInfo&);
int64_t workspace(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);

Status supports(const HeadLinearArgs&, const DeviceInfo&);
int64_t workspace(const HeadLinearArgs&, const DeviceInfo&);
Status run(const HeadLinearArgs&, const DeviceInfo&, const Launch&);
}  // namespace cublaslt

// FP8 weights multiplied out to bf16, then cuBLASLt.
namespace widened {
Status supports(const LinearArgs&, const DeviceInfo&);
bool preferred(const LinearArgs&, const DeviceInfo&);
int64_t workspace(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);
}  // namespace widened

// Our own tensor core tiles (product_tile.h).
namespace tiles {
Status supports(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);

Status supports(const MoeExpertsArgs&, const DeviceInfo&);
int64_t workspace(const MoeExpertsArgs&, const DeviceInfo&);
Status run(const MoeExpertsArgs&, const DeviceInfo&, const Launch&);
}  // namespace tiles

// Whatever the contracts allow (product_simt.cuh).
namespace generic {
Status supports(const LinearArgs&, const DeviceInfo&);
Status run(const LinearArgs&, const DeviceInfo&, const Launch&);

Status supports(const HeadLinearArgs&, const DeviceInfo&);
Status run(const HeadLinearArgs&, const DeviceInfo&, const Launch&);

Status supports(const MoeExpertsArgs&, const DeviceInfo&);
int64_t workspace(const MoeExpertsArgs&, const DeviceInfo&);
Status run(const MoeExpertsArgs&, const DeviceInfo&, const Launch&);
}  // namespace generic

}  // namespace lacuna::cuda
