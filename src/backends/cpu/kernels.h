// The kernels of the CPU backend, one family a file; backend.cc puts them into lists.
#pragma once

#include "ops/backend.h"

namespace lacuna::cpu {

// attention.cc, mha.cc, states.cc
extern const Kernel<SparseMlaArgs> kSparseMla;
extern const Kernel<SparseMlaScheduleArgs> kBuildSchedule;
extern const Kernel<MhaArgs> kMha;
extern const Kernel<BuildMaskArgs> kBuildMask;
extern const Kernel<MergeStatesArgs> kMergeStates;
extern const Kernel<RescaleByLseArgs> kRescaleByLse;
// indexer.cc
extern const Kernel<TranslateIndicesArgs> kTranslateIndices;
extern const Kernel<IndexLogitsArgs> kIndexLogits;
extern const Kernel<TopKArgs> kTopK;
extern const Kernel<SelectKeysArgs> kSelectKeys;
// cache.cc
extern const Kernel<AppendKvArgs> kAppendKv;
extern const Kernel<AppendIndexKeysArgs> kAppendIndexKeys;
extern const Kernel<GatherKvArgs> kGatherKv;
// linear.cc, norm.cc, rope.cc, moe.cc, sampling.cc
extern const Kernel<EmbeddingArgs> kEmbedding;
extern const Kernel<RmsNormArgs> kRmsNorm;
extern const Kernel<LayerNormArgs> kLayerNorm;
extern const Kernel<RopeArgs> kRope;
extern const Kernel<LinearArgs>
    kLinear[3];  // few rows: SIMD, weights widened in registers; many rows: oneDNN
extern const Kernel<HeadLinearArgs> kHeadLinear;
extern const Kernel<SiluMulArgs> kSiluMul;
extern const Kernel<MoeRouteArgs> kMoeRoute;
extern const Kernel<MoeExpertsArgs> kMoeExperts;
extern const Kernel<SampleArgs> kSample;
// elementwise.cc
extern const Kernel<AddArgs> kAdd;
extern const Kernel<AdjustLogitsArgs> kAdjustLogits;
extern const Kernel<TokenLogprobsArgs> kTokenLogprobs;
extern const Kernel<PickTokensArgs> kPickTokens;

// Name of the SIMD target that run-time dispatch picks on this machine.
const char* simd_target_name();

}  // namespace lacuna::cpu
