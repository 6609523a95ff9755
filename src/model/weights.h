// The weights of a model as tensors. On the CPU they are views into the mapped checkpoint where the
// type fits and converted copies where it does not; on a GPU all of them are uploaded. Names are
// those of the released checkpoints.
#pragma once

#include <string>
#include <vector>

#include "core/device_memory.h"
#include "model/config.h"
#include "model/safetensors.h"
#include "ops/model_ops.h"

namespace lacuna {

// A matrix as `linear` takes it. `scale` is there when the values are FP8 (see LinearArgs).
struct WeightMatrix {
  ConstTensorView values;
  ConstTensorView scale;
};

struct MlpWeights {
  WeightMatrix gate;  // [F, D]
  WeightMatrix up;    // [F, D]
  WeightMatrix down;  // [D, F]
};

struct IndexerWeights {
  WeightMatrix wq_b;              // [Hi * dim, q_lora]
  WeightMatrix wk;                // [dim, D]
  ConstTensorView k_norm_weight;  // [dim]
  ConstTensorView k_norm_bias;    // [dim]
  // [Hi, D] f32, multiplied by (Hi * dim)^-0.5, so that it yields head weights with every scale
  // folded in.
  ConstTensorView weights_proj;
};

struct LayerWeights {
  ConstTensorView input_norm;
  ConstTensorView post_attention_norm;
  WeightMatrix q_a;           // [q_lora, D]
  ConstTensorView q_a_norm;   // [q_lora]
  WeightMatrix q_b;           // [H * (nope + rope), q_lora]
  WeightMatrix kv_a;          // [latent + rope, D]
  ConstTensorView kv_a_norm;  // [latent]
  // [H * (nope + v), latent]: per head W_UK over W_UV. Never FP8: its heads are taken apart, and
  // need not begin with a block.
  ConstTensorView kv_b;
  WeightMatrix o;          // [D, H * v]
  IndexerWeights indexer;  // empty views in a layer that shares its leader's lists
  // Dense layers have `mlp`; MoE layers have the rest.
  MlpWeights mlp;
  ConstTensorView router;       // [E, D]
  ConstTensorView router_bias;  // [E] f32
  // On a GPU they lie one behind the other, at equal distances.
  std::vector<ExpertWeights> experts;
  MlpWeights shared_experts;  // empty views without shared experts
};

class ModelWeights {
 public:
  // `dtype` is the arithmetic: bf16 keeps matrices in bf16 (f32 and f16 ones are rounded), f32
  // widens nothing that the kernels can read (bf16 stays bf16, exactly). FP8 matrices stay FP8.
  // `runtime` is that of `device`, and outlives the weights; on the CPU the checkpoint must outlive
  // them too. Returns when everything is on the device.
  static Result<ModelWeights> load(const ModelConfig& config, const Checkpoint& checkpoint,
                                   DType dtype, const Runtime* runtime, Device device);

  ConstTensorView embedding;   // [V, D]
  ConstTensorView final_norm;  // [D]
  ConstTensorView lm_head;     // [V, D]
  std::vector<LayerWeights> layers;

  // What was allocated for them, the mapped checkpoint not counted.
  int64_t allocated_bytes() const;

 private:
  friend class WeightLoader;
  std::vector<DeviceMemory> memory_;
};

}  // namespace lacuna
