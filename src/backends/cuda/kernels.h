// The kernels of the portable CUDA backend, one family a file; backend.cc puts them into lists.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// attention/
extern const Kernel<SparseMlaArgs> kSparseMla[2];
extern const Kernel<SparseMlaScheduleArgs> kBuildSchedule;
extern const Kernel<MergeStatesArgs> kMergeStates;
extern const Kernel<RescaleByLseArgs> kRescaleByLse;
extern const Kernel<BuildMaskArgs> kBuildMask;
extern const Kernel<MhaArgs> kMha[2];
// cache/
extern const Kernel<AppendKvArgs> kAppendKv;
extern const Kernel<AppendIndexKeysArgs> kAppendIndexKeys;
extern const Kernel<GatherKvArgs> kGatherKv;
// indexer/
extern const Kernel<TranslateIndicesArgs> kTranslateIndices;
extern const Kernel<IndexLogitsArgs> kIndexLogits[2];
extern const Kernel<TopKArgs> kTopK;
extern const Kernel<SelectKeysArgs> kSelectKeys;

// model/
extern const Kernel<EmbeddingArgs> kEmbedding;
extern const Kernel<RmsNormArgs> kRmsNorm;
extern const Kernel<LayerNormArgs> kLayerNorm;
extern const Kernel<RopeArgs> kRope;
extern const Kernel<LinearArgs> kLinear[6];
extern const Kernel<HeadLinearArgs> kHeadLinear[3];
extern const Kernel<SiluMulArgs> kSiluMul;
extern const Kernel<MoeRouteArgs> kMoeRoute;
extern const Kernel<MoeExpertsArgs> kMoeExperts[2];
extern const Kernel<AddArgs> kAdd;
extern const Kernel<AdjustLogitsArgs> kAdjustLogits;
extern const Kernel<SampleArgs> kSample;
extern const Kernel<TokenLogprobsArgs> kTokenLogprobs;
extern const Kernel<PickTokensArgs> kPickTokens;

template <class Args>
Status supports_all(const Args&, const DeviceInfo&) {
  return ok_status();
}

}  // namespace lacuna::cuda
