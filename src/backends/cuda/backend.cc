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
    .mha = kMha,
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
    .embedding = {&kEmbedding, 1},
    .rms_norm = {&kRmsNorm, 1},
    .layer_norm = {&kLayerNorm, 1},
    .rope = {&kRope, 1},
    .linear = kLinear,
    .head_linear = kHeadLinear,
    .silu_mul = {&kSiluMul, 1},
    .moe_route = {&kMoeRoute, 1},
    .moe_experts = kMoeExperts,
    .add = {&kAdd, 1},
    .adjust_logits = {&kAdjustLogits, 1},
    .sample = {&kSample, 1},
    .token_logprobs = {&kTokenLogprobs, 1},
    .pick_tokens = {&kPickTokens, 1},
};

}  // namespace lacuna::cuda
