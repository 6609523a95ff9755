// The lists of the CPU backend: every operation, on any x86-64 or Arm processor.
#include "backends/cpu/backend.h"

#include "backends/cpu/kernels.h"
#include "backends/cpu/runtime.h"

namespace lacuna::cpu {

const Backend kBackend = {
    .name = "cpu",
    .runtime = &kRuntime,
    .device_kind = DeviceKind::kCpu,
    .available = [](const DeviceInfo&) { return true; },
    .sparse_mla = {&kSparseMla, 1},
    .build_schedule = {&kBuildSchedule, 1},
    .mha = {&kMha, 1},
    .build_mask = {&kBuildMask, 1},
    .merge_states = {&kMergeStates, 1},
    .rescale_by_lse = {&kRescaleByLse, 1},
    .translate_indices = {&kTranslateIndices, 1},
    .index_logits = {&kIndexLogits, 1},
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
    .head_linear = {&kHeadLinear, 1},
    .silu_mul = {&kSiluMul, 1},
    .moe_route = {&kMoeRoute, 1},
    .moe_experts = {&kMoeExperts, 1},
    .add = {&kAdd, 1},
    .adjust_logits = {&kAdjustLogits, 1},
    .sample = {&kSample, 1},
    .token_logprobs = {&kTokenLogprobs, 1},
    .pick_tokens = {&kPickTokens, 1},
};

}  // namespace lacuna::cpu
