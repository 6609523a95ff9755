// The lists of the portable CUDA backend: every operation, on any GPU from sm_80 on.
#include "backends/cuda/backend.h"

#include "backends/cuda/kernels.h"
#include "backends/cuda/runtime.h"

namespace lacuna::cuda {

const Backend kBackend = {
    .name = "cuda",
    .runtime = &kRuntime,
    .device_kind = DeviceKind::kCuda,
    .available = [](const DeviceInfo& device) { return device.compute_capability >= 80; },
    .sparse_mla = kSparseMla,
    .build_schedule = {&kBuildSchedule, 1},
    .build_mask = {&kBuildMask, 1},
    .merge_states = {&kMergeStates, 1},
    .rescale_by_lse = {&kRescaleByLse, 1},
    .translate_indices = {&kTranslateIndices, 1},
    .index_logits = kIndexLogits,
    .top_k = {&kTopK, 1},
    .select_keys = {&kSelectKeys, 1},
    .append_kv = {&kAppendKv, 1},
    .append_index_keys = {&kAppendIndexKeys, 1},
    .gather_kv = {&kGatherKv, 1},
    .pick_tokens = {&kPickTokens, 1},
};

}  // namespace lacuna::cuda
