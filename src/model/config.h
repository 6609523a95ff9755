// config.json (and generation_config.json) as numbers that the engine can trust: every spelling in
// use is read, every value is checked here, and what this code can not run is refused by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/dtype.h"
#include "lacuna/status.h"

namespace lacuna {

struct RopeConfig {
  enum class Type { kDefault, kYarn };
  Type type = Type::kDefault;
  double theta = 10000;
  // The rest is YaRN's (arXiv 2309.00071).
  double factor = 1;
  int64_t original_max_position = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  double mscale = 1;
  double mscale_all_dim = 0;
};

// The names are those of the DeepSeek configs. Every size is at least 1 and so bounded that the
// elements of any weight fit an int64_t with room to spare.
struct ModelConfig {
  std::string architecture;  // "DeepseekV32ForCausalLM" or "GlmMoeDsaForCausalLM"
  std::string model_type;    // "deepseek_v32" or "glm_moe_dsa"
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_hidden_layers = 0;
  int64_t num_attention_heads = 0;
  int64_t q_lora_rank = 0;
  int64_t kv_lora_rank = 0;
  int64_t qk_nope_head_dim = 0;
  int64_t qk_rope_head_dim = 0;  // even
  int64_t v_head_dim = 0;
  int64_t intermediate_size = 0;      // of dense layers
  int64_t moe_intermediate_size = 0;  // of one expert
  int64_t n_routed_experts = 0;       // a multiple of n_group
  int64_t n_shared_experts = 0;
  int64_t num_experts_per_tok = 0;
  int64_t n_group = 1;
  int64_t topk_group = 1;
  int64_t index_n_heads = 0;
  int64_t index_head_dim = 0;  // at least qk_rope_head_dim
  int64_t index_topk = 0;
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 0;
  bool norm_topk_prob = true;
  double routed_scaling_factor = 1;
  bool indexer_rope_interleave = false;  // pairs (2i, 2i+1); otherwise (i, i + rope/2)
  bool tie_word_embeddings = false;
  std::vector<bool> layer_is_moe;       // [num_hidden_layers]
  std::vector<bool> layer_has_indexer;  // [num_hidden_layers]; the first is true. A layer without
                                        // one uses the list of the nearest earlier layer that has
  RopeConfig rope;
  std::vector<int32_t> eos_token_ids;  // below vocab_size; may be empty
  int32_t bos_token_id = -1;           // -1: none
  DType dtype = DType::kBFloat16;      // bf16 when the config is silent; tensors say their own
  bool fp8_blocks = false;             // e4m3 weights with one f32 scale per 128 x 128 block
};

// `json` is the text of a config.json; messages call it so.
Result<ModelConfig> parse_config(std::string_view json);

// Reads model_dir/config.json and, where there is one, adds the eos ids (and a missing bos) of
// generation_config.json.
Result<ModelConfig> load_config(const std::string& model_dir);

// What the logits are multiplied by: (nope + rope)^-0.5, and with YaRN also m^2, where
// m = 0.1 mscale_all_dim ln(factor) + 1.
double attention_scale(const ModelConfig& config);

// Angle per position of each of the qk_rope_head_dim / 2 pairs; the indexer's rope uses the same.
std::vector<double> rope_frequencies(const ModelConfig& config);

}  // namespace lacuna
