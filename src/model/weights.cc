// Finds, checks and converts tensors.
#include "model/weights.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "core/check.h"

namespace lacuna {
namespace {

std::string shape_text(std::span<const int64_t> shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

float element(const SafetensorsEntry& entry, int64_t i) {
  switch (entry.dtype) {
    case DType::kFloat32: {
      float value;
      std::memcpy(&value, entry.data.data() + 4 * i, 4);
      return value;
    }
    case DType::kBFloat16:
      return to_float(reinterpret_cast<const Bf16*>(entry.data.data())[i]);
    default:
      return to_float(reinterpret_cast<const Fp16*>(entry.data.data())[i]);
  }
}

}  // namespace

class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, DType dtype, ModelWeights* weights)
      : checkpoint_(checkpoint), dtype_(dtype), weights_(weights) {}

  // A matrix of the arithmetic's type.
  Status matrix(const std::string& name, std::initializer_list<int64_t> shape,
                ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, shape));
    const bool keep = entry->dtype == DType::kBFloat16 ||
                      (entry->dtype == DType::kFloat32 && dtype_ == DType::kFloat32);
    return take(*entry, keep ? entry->dtype : dtype_, 1.0, out);
  }

  // A vector that stays as precise as it is stored.
  Status vector(const std::string& name, int64_t width, ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, {width}));
    return take(*entry, entry->dtype == DType::kFloat16 ? DType::kFloat32 : entry->dtype, 1.0, out);
  }

  Status as_float32(const std::string& name, std::initializer_list<int64_t> shape, double scale,
                    ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, shape));
    return take(*entry, DType::kFloat32, scale, out);
  }

  Status mlp(const std::string& prefix, int64_t hidden, int64_t width, MlpWeights* out) {
    LACUNA_RETURN_IF_ERROR(matrix(prefix + "gate_proj.weight", {hidden, width}, &out->gate));
    LACUNA_RETURN_IF_ERROR(matrix(prefix + "up_proj.weight", {hidden, width}, &out->up));
    return matrix(prefix + "down_proj.weight", {width, hidden}, &out->down);
  }

 private:
  Result<const SafetensorsEntry*> find(const std::string& name,
                                       std::initializer_list<int64_t> shape) {
    const std::span<const int64_t> wanted(shape.begin(), shape.size());
    const SafetensorsEntry* entry = checkpoint_.find(name);
    if (entry == nullptr) {
      return not_found("weights: tensor " + name + " is missing, expected shape " +
                       shape_text(wanted));
    }
    LACUNA_RETURN_IF_ERROR(entry->check_dtype());
    if (entry->dtype == DType::kFloat8E4M3) {
      return unsupported("weights: tensor " + name +
                         " is FP8 (F8_E4M3), which is not loaded yet; BF16, F16 and F32 load");
    }
    if (entry->dtype != DType::kFloat32 && entry->dtype != DType::kBFloat16 &&
        entry->dtype != DType::kFloat16) {
      return unsupported("weights: tensor " + name + " has dtype " + entry->dtype_text +
                         ", expected BF16, F16 or F32");
    }
    if (!std::equal(entry->shape.begin(), entry->shape.end(), wanted.begin(), wanted.end())) {
      return invalid_argument("weights: tensor " + name + " has shape " + shape_text(entry->shape) +
                              ", config.json asks for " + shape_text(wanted));
    }
    return entry;
  }

  Status take(const SafetensorsEntry& entry, DType dtype, double scale, ConstTensorView* out) {
    ConstTensorView view;
    view.dtype = dtype;
    view.rank = static_cast<int>(entry.shape.size());
    int64_t count = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      view.shape[d] = entry.shape[d];
      view.strides[d] = count;
      count *= entry.shape[d];
    }
    if (dtype == entry.dtype && scale == 1.0) {
      view.data = entry.data.data();
      *out = view;
      return ok_status();
    }
    auto copy = std::make_unique<std::byte[]>(count * size_bytes(dtype));
    for (int64_t i = 0; i < count; ++i) {
      const float value = static_cast<float>(element(entry, i) * scale);
      if (dtype == DType::kFloat32) {
        reinterpret_cast<float*>(copy.get())[i] = value;
      } else {
        reinterpret_cast<Bf16*>(copy.get())[i] = to_bf16(value);
      }
    }
    view.data = copy.get();
    weights_->converted_.push_back(std::move(copy));
    *out = view;
    return ok_status();
  }

  const Checkpoint& checkpoint_;
  DType dtype_;
  ModelWeights* weights_;
};

Result<ModelWeights> ModelWeights::load(const ModelConfig& config, const Checkpoint& checkpoint,
                                        DType dtype) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    return invalid_argument("dtype: " + std::string(dtype_name(dtype)) +
                            ", expected float32 or bfloat16");
  }
  if (config.fp8_blocks) {
    return unsupported(
        "config.json: quantization_config names FP8 weights in 128x128 blocks, which are not "
        "loaded yet; BF16, F16 and F32 checkpoints load");
  }
  ModelWeights weights;
  WeightLoader load(checkpoint, dtype, &weights);
  const int64_t width = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  const int64_t d_qk = config.qk_nope_head_dim + config.qk_rope_head_dim;
  LACUNA_RETURN_IF_ERROR(
      load.matrix("model.embed_tokens.weight", {config.vocab_size, width}, &weights.embedding));
  LACUNA_RETURN_IF_ERROR(load.vector("model.norm.weight", width, &weights.final_norm));
  if (config.tie_word_embeddings) {
    weights.lm_head = weights.embedding;
  } else {
    LACUNA_RETURN_IF_ERROR(
        load.matrix("lm_head.weight", {config.vocab_size, width}, &weights.lm_head));
  }
  weights.layers.resize(config.num_hidden_layers);
  for (int64_t i = 0; i < config.num_hidden_layers; ++i) {
    LayerWeights& layer = weights.layers[i];
    const std::string prefix = "model.layers." + std::to_string(i) + ".";
    const std::string attention = prefix + "self_attn.";
    LACUNA_RETURN_IF_ERROR(
        load.vector(prefix + "input_layernorm.weight", width, &layer.input_norm));
    LACUNA_RETURN_IF_ERROR(
        load.vector(prefix + "post_attention_layernorm.weight", width, &layer.post_attention_norm));
    LACUNA_RETURN_IF_ERROR(
        load.matrix(attention + "q_a_proj.weight", {config.q_lora_rank, width}, &layer.q_a));
    LACUNA_RETURN_IF_ERROR(
        load.vector(attention + "q_a_layernorm.weight", config.q_lora_rank, &layer.q_a_norm));
    LACUNA_RETURN_IF_ERROR(
        load.matrix(attention + "q_b_proj.weight", {heads * d_qk, config.q_lora_rank}, &layer.q_b));
    LACUNA_RETURN_IF_ERROR(load.matrix(attention + "kv_a_proj_with_mqa.weight",
                                       {config.kv_lora_rank + config.qk_rope_head_dim, width},
                                       &layer.kv_a));
    LACUNA_RETURN_IF_ERROR(
        load.vector(attention + "kv_a_layernorm.weight", config.kv_lora_rank, &layer.kv_a_norm));
    LACUNA_RETURN_IF_ERROR(load.matrix(
        attention + "kv_b_proj.weight",
        {heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank}, &layer.kv_b));
    LACUNA_RETURN_IF_ERROR(
        load.matrix(attention + "o_proj.weight", {width, heads * config.v_head_dim}, &layer.o));
    if (config.layer_has_indexer[i]) {
      IndexerWeights& indexer = layer.indexer;
      const std::string name = attention + "indexer.";
      const int64_t dim = config.index_head_dim;
      LACUNA_RETURN_IF_ERROR(load.matrix(
          name + "wq_b.weight", {config.index_n_heads * dim, config.q_lora_rank}, &indexer.wq_b));
      LACUNA_RETURN_IF_ERROR(load.matrix(name + "wk.weight", {dim, width}, &indexer.wk));
      LACUNA_RETURN_IF_ERROR(
          load.as_float32(name + "k_norm.weight", {dim}, 1.0, &indexer.k_norm_weight));
      LACUNA_RETURN_IF_ERROR(
          load.as_float32(name + "k_norm.bias", {dim}, 1.0, &indexer.k_norm_bias));
      const double scale = 1.0 / std::sqrt(static_cast<double>(config.index_n_heads * dim));
      LACUNA_RETURN_IF_ERROR(load.as_float32(name + "weights_proj.weight",
                                             {config.index_n_heads, width}, scale,
                                             &indexer.weights_proj));
    }
    if (!config.layer_is_moe[i]) {
      LACUNA_RETURN_IF_ERROR(
          load.mlp(prefix + "mlp.", config.intermediate_size, width, &layer.mlp));
      continue;
    }
    const std::string mlp = prefix + "mlp.";
    LACUNA_RETURN_IF_ERROR(
        load.matrix(mlp + "gate.weight", {config.n_routed_experts, width}, &layer.router));
    LACUNA_RETURN_IF_ERROR(load.as_float32(mlp + "gate.e_score_correction_bias",
                                           {config.n_routed_experts}, 1.0, &layer.router_bias));
    layer.experts.resize(config.n_routed_experts);
    for (int64_t e = 0; e < config.n_routed_experts; ++e) {
      MlpWeights expert;
      LACUNA_RETURN_IF_ERROR(load.mlp(mlp + "experts." + std::to_string(e) + ".",
                                      config.moe_intermediate_size, width, &expert));
      layer.experts[e] = {expert.gate, expert.up, expert.down};
    }
    if (config.n_shared_experts > 0) {
      LACUNA_RETURN_IF_ERROR(load.mlp(mlp + "shared_experts.",
                                      config.n_shared_experts * config.moe_intermediate_size, width,
                                      &layer.shared_experts));
    }
  }
  return weights;
}

}  // namespace lacuna
