// The lists of the Hopper backend: what wgmma makes faster. It stands before the portable backend,
// whose memory, streams and graphs it shares.
#include "backends/sm90/backend.h"

#include "backends/cuda/runtime.h"
#include "backends/sm90/kernels.h"

namespace lacuna::sm90 {

const Backend kBackend = {
    .name = "sm90",
    .runtime = &cuda::kRuntime,
    .device_kind = DeviceKind::kCuda,
    // wgmma is sm_90's own: later GPUs do not have it.
    .available = [](const DeviceInfo& device) { return device.compute_capability == 90; },
    .sparse_mla = {&kSparseMlaSmallHead, 1},
};

}  // namespace lacuna::sm90
