// The weights of a model as tensors: views into the mapped checkpoint where the type fits,
// converted copies where it does not. Names are those of the released checkpoints.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/config.h"
#include "model/safetensors.h"
#include "ops/model_ops.h"

namespace lacuna {

struct MlpWeights {
  ConstTensorView gate;  // [F, D]
  ConstTensorView up;    // [F, D]
  ConstTensorView down;  // [D, F]
};

struct IndexerWeights {
  ConstTensorView wq_b;           // [Hi * dim, q_lora]
  ConstTensorView wk;             // [dim, D]
  ConstTensorView k_norm_weight;  // [dim]
  ConstTensorView k_norm_bias;    // [dim]
  // [Hi, D] f32, multiplied by (Hi * dim)^-0.5, so that it yields head weights with every scale
  // folded in.
  ConstTensorView weights_proj;
};

struct LayerWeights {
  ConstTensorView input_norm;
  ConstTensorView post_attention_norm;
  ConstTensorView q_a;        // [q_lora, D]
  ConstTensorView q_a_norm;   // [q_lora]
  ConstTensorView q_b;        // [H * (nope + rope), q_lora]
  ConstTensorView kv_a;       // [latent + rope, D]
  ConstTensorView kv_a_norm;  // [latent]
  ConstTensorView kv_b;       // [H * (nope + v), latent]: per head W_UK over W_UV
  ConstTensorView o;          // [D, H * v]
  IndexerWeights indexer;     // empty views in a layer that shares its leader's lists
  // Dense layers have `mlp`; MoE layers have the rest.
  MlpWeights mlp;
  ConstTensorView router;       // [E, D]
  ConstTensorView router_bias;  // [E] f32
  std::vector<ExpertWeights> experts;
  MlpWeights shared_experts;  // empty views without shared experts
};

class ModelWeights {
 public:
  // `dtype` is the arithmetic: bf16 keeps matrices in bf16 (f32 and f16 ones are rounded), f32
  // widens nothing that the kernels can read (bf16 stays bf16, exactly). The checkpoint must
  // outlive the weights.
  static Result<ModelWeights> load(const ModelConfig& config, const Checkpoint& checkpoint,
                                   DType dtype);

  ConstTensorView embedding;   // [V, D]
  ConstTensorView final_norm;  // [D]
  ConstTensorView lm_head;     // [V, D]
  std::vector<LayerWeights> layers;

 private:
  friend class WeightLoader;
  std::vector<std::unique_ptr<std::byte[]>> converted_;
};

}  // namespace lacuna
