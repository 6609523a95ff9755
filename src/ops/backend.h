// The seam of the house: a kernel is a value, a backend is a struct of lists of kernels, a Context
// is an ordered list of backends with their devices. Nothing registers itself and nothing is
// virtual.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/runtime.h"
#include "core/thread_pool.h"
#include "lacuna/attention.h"
#include "lacuna/context.h"
#include "lacuna/indexer.h"
#include "lacuna/kv_cache.h"
#include "ops/model_ops.h"
#include "ops/tuning.h"

namespace lacuna {

// What a kernel may know of the device when it decides. Filled once, when the context is created.
struct DeviceInfo {
  Device device;
  std::string name;
  int64_t memory_bytes = 0;
  // CPU
  ThreadPool* thread_pool = nullptr;  // owned by the context
  int num_threads = 0;
  std::string isa;  // the SIMD target that run-time dispatch chose
  // CUDA
  int sm_count = 0;
  int compute_capability = 0;  // 90 for sm_90
  int64_t smem_optin_bytes = 0;
  int64_t l2_bytes = 0;
  // How many clusters of 4 or 8 blocks, each of which fills an SM, run at once; asked of the driver
  // when a plan first wants to know. Null: no clusters of this kind.
  int64_t (*clusters_max)(int device_idx, int blocks) = nullptr;
  std::shared_ptr<const Tuning> tuning;  // null: none was given
};

// A kernel is a name and up to five functions. `Args` are validated before any of them is called.
template <class Args>
struct Kernel {
  const char* name;                                    // "cpu/sparse_mla"
  Status (*supports)(const Args&, const DeviceInfo&);  // may it run? the refusal is the message
  bool (*preferred)(const Args&, const DeviceInfo&) = nullptr;  // does it pay? null: always
  int64_t (*workspace_bytes)(const Args&, const DeviceInfo&) = nullptr;  // null: none
  Status (*run)(const Args&, const DeviceInfo&,
                const Launch&);  // no allocation, no synchronisation
  // How it would run arguments that it supports, for explain(). Null: nothing to say.
  std::string (*describe)(const Args&, const DeviceInfo&) = nullptr;
};

template <class Args>
using KernelList = std::span<const Kernel<Args>>;

struct Backend {
  const char* name;
  const Runtime* runtime;
  DeviceKind device_kind;
  bool (*available)(const DeviceInfo&);

  // Attention. An empty list: ask the next backend of the same device.
  KernelList<SparseMlaArgs> sparse_mla = {};
  KernelList<SparseMlaScheduleArgs> build_schedule = {};
  KernelList<MhaArgs> mha = {};
  KernelList<BuildMaskArgs> build_mask = {};
  KernelList<MergeStatesArgs> merge_states = {};
  KernelList<RescaleByLseArgs> rescale_by_lse = {};
  // Indexer.
  KernelList<TranslateIndicesArgs> translate_indices = {};
  KernelList<IndexLogitsArgs> index_logits = {};
  KernelList<TopKArgs> top_k = {};
  KernelList<SelectKeysArgs> select_keys = {};
  // Cache.
  KernelList<AppendKvArgs> append_kv = {};
  KernelList<AppendIndexKeysArgs> append_index_keys = {};
  KernelList<GatherKvArgs> gather_kv = {};
  // The engine's own operations.
  KernelList<EmbeddingArgs> embedding = {};
  KernelList<RmsNormArgs> rms_norm = {};
  KernelList<LayerNormArgs> layer_norm = {};
  KernelList<RopeArgs> rope = {};
  KernelList<LinearArgs> linear = {};
  KernelList<HeadLinearArgs> head_linear = {};
  KernelList<SiluMulArgs> silu_mul = {};
  KernelList<MoeRouteArgs> moe_route = {};
  KernelList<MoeExpertsArgs> moe_experts = {};
  KernelList<AddArgs> add = {};
  KernelList<AdjustLogitsArgs> adjust_logits = {};
  KernelList<SampleArgs> sample = {};
  KernelList<TokenLogprobsArgs> token_logprobs = {};
  KernelList<PickTokensArgs> pick_tokens = {};
};

struct ContextState {
  std::unique_ptr<ThreadPool> thread_pool;
  std::vector<DeviceInfo> devices;       // every usable device
  std::vector<const Backend*> backends;  // in dispatch order
  std::string cuda_status;  // why there are fewer GPUs than one may expect; may be empty
};

// Name of an operation, its list in a backend, and how its arguments are validated. One
// specialisation per operation.
template <class Args>
struct Op;

#define LACUNA_OP(ArgsType, op)                                                     \
  template <>                                                                       \
  struct Op<ArgsType> {                                                             \
    static constexpr const char* kName = #op;                                       \
    static KernelList<ArgsType> list(const Backend& backend) { return backend.op; } \
    static Status validate(const ArgsType& args);                                   \
    static Device device(const ArgsType& args);                                     \
    /* True when the call has nothing to do: it succeeds without a launch. */       \
    static bool nothing_to_do(const ArgsType& args);                                \
  }

LACUNA_OP(SparseMlaArgs, sparse_mla);
LACUNA_OP(SparseMlaScheduleArgs, build_schedule);
LACUNA_OP(MhaArgs, mha);
LACUNA_OP(BuildMaskArgs, build_mask);
LACUNA_OP(MergeStatesArgs, merge_states);
LACUNA_OP(RescaleByLseArgs, rescale_by_lse);
LACUNA_OP(TranslateIndicesArgs, translate_indices);
LACUNA_OP(IndexLogitsArgs, index_logits);
LACUNA_OP(TopKArgs, top_k);
LACUNA_OP(SelectKeysArgs, select_keys);
LACUNA_OP(AppendKvArgs, append_kv);
LACUNA_OP(AppendIndexKeysArgs, append_index_keys);
LACUNA_OP(GatherKvArgs, gather_kv);
LACUNA_OP(EmbeddingArgs, embedding);
LACUNA_OP(RmsNormArgs, rms_norm);
LACUNA_OP(LayerNormArgs, layer_norm);
LACUNA_OP(RopeArgs, rope);
LACUNA_OP(LinearArgs, linear);
LACUNA_OP(HeadLinearArgs, head_linear);
LACUNA_OP(SiluMulArgs, silu_mul);
LACUNA_OP(MoeRouteArgs, moe_route);
LACUNA_OP(MoeExpertsArgs, moe_experts);
LACUNA_OP(AddArgs, add);
LACUNA_OP(AdjustLogitsArgs, adjust_logits);
LACUNA_OP(SampleArgs, sample);
LACUNA_OP(TokenLogprobsArgs, token_logprobs);
LACUNA_OP(PickTokensArgs, pick_tokens);
#undef LACUNA_OP

template <class... Args>
struct TypeList {};

// Every operation, for code that walks them all (lacuna info, the conformance suite).
using AllOps = TypeList<SparseMlaArgs, SparseMlaScheduleArgs, MhaArgs, BuildMaskArgs,
                        MergeStatesArgs, RescaleByLseArgs, TranslateIndicesArgs, IndexLogitsArgs,
                        TopKArgs, SelectKeysArgs, AppendKvArgs, AppendIndexKeysArgs, GatherKvArgs,
                        EmbeddingArgs, RmsNormArgs, LayerNormArgs, RopeArgs, LinearArgs,
                        HeadLinearArgs, SiluMulArgs, MoeRouteArgs, MoeExpertsArgs, AddArgs,
                        AdjustLogitsArgs, SampleArgs, TokenLogprobsArgs, PickTokensArgs>;

template <class Visitor, class... Args>
void for_each_op(TypeList<Args...>, Visitor&& visit) {
  (visit(static_cast<Args*>(nullptr)), ...);
}

}  // namespace lacuna
