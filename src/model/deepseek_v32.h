// The forward pass of DeepSeek-V3.2 and of GLM-5.x (glm_moe_dsa is the same network under other
// numbers: ModelConfig carries all differences). Activations are f32 or bf16 as asked; residual,
// norms, router, softmax and logits are f32.
#pragma once

#include <memory>

#include "attention/lanes.h"
#include "core/device_memory.h"
#include "core/workspace.h"
#include "kvcache/paged_kv_cache.h"
#include "lacuna/engine_types.h"
#include "model/config.h"
#include "model/weights.h"

namespace lacuna {

struct ModelOptions {
  Device device = {};
  DType dtype = DType::kBFloat16;  // of weights, GEMM inputs and activations between operations
  int64_t rows_max = 0;            // rows of a step
  int64_t requests_max = 1;        // requests of a step
  int64_t model_len_max = 0;       // positions
  int64_t logits_rows_max = 1;     // rows of one logits() call
  // Of the MHA lanes' buffers: see RoutingLimits.
  int64_t mha_keys_max = 0;
  int64_t chunked_rows_max = 0;
  int64_t mask_words_max = 0;
  void* stream = nullptr;   // of the operations
  bool host_lists = false;  // key lists are made on the host: see SelectionSource
};

class DeepseekV32 {
 public:
  static Result<std::unique_ptr<DeepseekV32>> create(const Context& context, const Runtime* runtime,
                                                     const ModelConfig& config,
                                                     ModelWeights weights,
                                                     const ModelOptions& options);

  const ModelConfig& config() const { return config_; }
  int64_t buffer_bytes() const { return buffer_memory_.bytes() + table_memory_.bytes(); }

  // The layers' index groups over these caches; refused when they cannot share rows.
  Status form_groups(const PagedKvCache& cache);
  const std::vector<IndexGroup>& index_groups() const { return groups_; }

  // Runs the rows of a batch through all layers: appends to the caches and leaves the last hidden
  // states inside.
  Status forward(OpRunner& run, const Batch& batch, const BatchTensors& tensors,
                 const AttentionPlan& plan, const PagedKvCache& cache,
                 const SelectionSource& selection, const Tap& tap = {});

  // Logits of rows of the last forward: out is [n, vocab] f32, n <= logits_rows_max.
  Status logits(OpRunner& run, const ConstTensorView& row_ids, TensorView out);

 private:
  DeepseekV32(const ModelConfig& config, ModelWeights weights, const ModelOptions& options);
  void carve(Workspace& arena);
  Status attention(OpRunner& run, int layer, const Batch& batch, const BatchTensors& tensors,
                   const AttentionPlan& plan, const PagedKvCache& cache,
                   const SelectionSource& selection, const Tap& tap);
  Status index_keys(OpRunner& run, int layer, const Batch& batch, const BatchTensors& tensors,
                    const AttentionPlan& plan, const PagedKvCache& cache,
                    const SelectionSource& selection, const Tap& tap);
  Status mlp(OpRunner& run, const MlpWeights& weights, int64_t rows, TensorView out);
  Status moe(OpRunner& run, int layer, int64_t rows, const Tap& tap);

  ModelConfig config_;
  ModelWeights weights_;
  ModelOptions options_;
  double softmax_scale_ = 0;
  DeviceMemory table_memory_;
  DeviceMemory buffer_memory_;
  ConstTensorView cos_table_;  // [model_len_max, rope / 2]
  ConstTensorView sin_table_;

  // Activations of one step, carved once for rows_max rows. `act` is the options' dtype.
  struct Buffers {
    TensorView hidden;          // [T, D] f32: the residual stream
    TensorView delta;           // [T, D] f32: what the last sublayer adds to it
    TensorView x;               // [T, D] act: normalised input of a sublayer
    TensorView q_a;             // [T, q_lora] f32
    TensorView q_latent;        // [T, q_lora] act
    TensorView q;               // [T, H, nope + rope] f32
    TensorView q_act;           // [T, H, nope + rope] act, roped
    TensorView kv_a;            // [T, latent + rope] f32
    TensorView latent;          // [T, latent] act
    TensorView k_rope;          // [T, 1, rope] act
    TensorView index_k;         // [T, dim] f32
    TensorView index_k_norm;    // [T, 1, dim] f32
    TensorView index_k_act;     // [T, 1, dim] act
    TensorView index_q;         // [T, Hi, dim] f32
    TensorView index_q_act;     // [T, Hi, dim] act
    TensorView head_weights;    // [T, Hi] f32
    TensorView positions;       // [T, topk] int32
    TensorView rows;            // [T, topk] int32
    TensorView counts;          // [T] int32
    TensorView q_absorbed;      // [T, H, latent] act
    TensorView attended;        // [T, H, latent] act
    TensorView heads_out;       // [T, H, v] act
    TensorView mha_keys;        // [mha_keys_max, latent + rope] act
    TensorView mha_keys_up;     // [mha_keys_max, H * (nope + v)] act
    TensorView merged_out;      // [chunked_rows_max, H, v] f32
    TensorView merged_lse;      // [chunked_rows_max, H] f32
    TensorView piece_out;       // [chunked_rows_max, H, v] f32
    TensorView piece_lse;       // [chunked_rows_max, H] f32
    TensorView mask;            // [mask_words_max] int32
    TensorView gate;            // [T, F] f32
    TensorView up;              // [T, F] f32
    TensorView mlp_hidden;      // [T, F] act
    TensorView router_logits;   // [T, E] f32
    TensorView expert_ids;      // [T, chosen] int32
    TensorView expert_weights;  // [T, chosen] f32
    TensorView shared_out;      // [T, D] f32
    TensorView logits_hidden;   // [logits_rows_max, D] f32
    TensorView logits_x;        // [logits_rows_max, D] act
  };
  Buffers buffers_;
  std::vector<IndexGroup> groups_;
  IndexLists lists_;
  std::unique_ptr<ListWriter> list_writer_;
};

}  // namespace lacuna
