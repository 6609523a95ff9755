// A tiny random model folder whose big matrices are FP8 in blocks of 128 x 128, as the released
// checkpoints have them, or the same numbers multiplied out in F32. Every such matrix has partial
// blocks at its edges.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "lacuna/dtype.h"
#include "ops/model_ops.h"
#include "tests/support/random.h"

namespace lacuna::testing {

// Writes safetensors one tensor after the other.
class CheckpointWriter {
 public:
  template <class T>
  void add(const std::string& name, const char* dtype, const std::vector<int64_t>& shape,
           const std::vector<T>& values) {
    const size_t begin = data_.size();
    data_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
    std::string extents;
    for (const int64_t extent : shape) {
      extents += (extents.empty() ? "" : ",") + std::to_string(extent);
    }
    header_ += (header_.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + dtype +
               "\",\"shape\":[" + extents + "],\"data_offsets\":[" + std::to_string(begin) + "," +
               std::to_string(data_.size()) + "]}";
  }

  void write(const std::string& path) {
    std::string header = header_ + "}";
    header.append((8 - header.size() % 8) % 8, ' ');
    const uint64_t size = header.size();
    std::ofstream file(path, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&size), sizeof(size));
    file << header << data_;
    ASSERT_TRUE(file.good()) << path;
  }

 private:
  std::string header_;
  std::string data_;
};

class TinyModelWriter {
 public:
  static constexpr int64_t kVocab = 96;
  static constexpr int64_t kWidth = 176;
  static constexpr int64_t kHeads = 3;
  static constexpr int64_t kQLora = 160;
  static constexpr int64_t kLatent = 48;
  static constexpr int64_t kNope = 40;
  static constexpr int64_t kRope = 16;
  static constexpr int64_t kValue = 48;
  static constexpr int64_t kIndexHeads = 4;
  static constexpr int64_t kIndexDim = 48;
  static constexpr int64_t kDense = 208;   // intermediate_size
  static constexpr int64_t kExpert = 144;  // moe_intermediate_size
  static constexpr int64_t kExperts = 6;

  // The two kinds of a seed hold the same numbers.
  static void write(const std::string& dir, bool fp8, uint64_t seed = 1) {
    TinyModelWriter writer(fp8, seed);
    std::filesystem::create_directories(dir);
    writer.add_tensors();
    writer.out_.write(dir + "/model.safetensors");
    std::ofstream(dir + "/config.json") << config(fp8);
  }

  static std::string config(bool fp8) {
    const auto number = [](const char* name, int64_t value) {
      return "\"" + std::string(name) + "\":" + std::to_string(value) + ",";
    };
    return "{\"architectures\":[\"DeepseekV32ForCausalLM\"],\"model_type\":\"deepseek_v32\"," +
           number("vocab_size", kVocab) + number("hidden_size", kWidth) +
           number("num_hidden_layers", 2) + number("num_attention_heads", kHeads) +
           number("q_lora_rank", kQLora) + number("kv_lora_rank", kLatent) +
           number("qk_nope_head_dim", kNope) + number("qk_rope_head_dim", kRope) +
           number("v_head_dim", kValue) + number("intermediate_size", kDense) +
           number("moe_intermediate_size", kExpert) + number("n_routed_experts", kExperts) +
           number("n_shared_experts", 1) + number("num_experts_per_tok", 2) + number("n_group", 1) +
           number("topk_group", 1) + number("first_k_dense_replace", 1) +
           number("moe_layer_freq", 1) + number("index_n_heads", kIndexHeads) +
           number("index_head_dim", kIndexDim) + number("index_topk", 64) +
           number("max_position_embeddings", 256) + number("bos_token_id", 0) +
           number("eos_token_id", 1) +
           (fp8 ? "\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
                  "\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128]},"
                : "") +
           "\"rms_norm_eps\":1e-6,\"routed_scaling_factor\":2.5,\"norm_topk_prob\":true,"
           "\"hidden_act\":\"silu\",\"scoring_func\":\"sigmoid\",\"topk_method\":\"noaux_tc\","
           "\"rope_theta\":10000.0,\"tie_word_embeddings\":false,\"torch_dtype\":\"bfloat16\"}";
  }

 private:
  TinyModelWriter(bool fp8, uint64_t seed) : fp8_(fp8), random_(seed) {}

  std::vector<float> values(int64_t count, float mean, float spread) {
    std::vector<float> result(static_cast<size_t>(count));
    for (float& value : result) {
      value = mean + spread * random_.bell();
    }
    return result;
  }

  void plain(const std::string& name, const std::vector<int64_t>& shape, float mean, float spread) {
    int64_t count = 1;
    for (const int64_t extent : shape) {
      count *= extent;
    }
    out_.add(name, "F32", shape, values(count, mean, spread));
  }

  // [n, k] whose elements are about k^-1/2.
  void matrix(const std::string& name, int64_t n, int64_t k) {
    const int64_t row_blocks = (k + kWeightScaleBlock - 1) / kWeightScaleBlock;
    const int64_t column_blocks = (n + kWeightScaleBlock - 1) / kWeightScaleBlock;
    std::vector<float> scales(static_cast<size_t>(row_blocks * column_blocks));
    for (float& scale : scales) {
      scale = (0.5f + random_.uniform()) / (60 * std::sqrt(static_cast<float>(k)));
    }
    std::vector<Fp8E4M3> packed(static_cast<size_t>(n * k));
    std::vector<float> whole(packed.size());
    for (int64_t i = 0; i < n * k; ++i) {
      packed[i] = to_fp8_e4m3(60 * random_.bell());
      whole[i] = to_float(packed[i]) *
                 scales[i / k / kWeightScaleBlock * row_blocks + i % k / kWeightScaleBlock];
    }
    if (fp8_) {
      out_.add(name, "F8_E4M3", {n, k}, packed);
      out_.add(name + "_scale_inv", "F32", {column_blocks, row_blocks}, scales);
    } else {
      out_.add(name, "F32", {n, k}, whole);
    }
  }

  void mlp(const std::string& prefix, int64_t hidden) {
    matrix(prefix + "gate_proj.weight", hidden, kWidth);
    matrix(prefix + "up_proj.weight", hidden, kWidth);
    matrix(prefix + "down_proj.weight", kWidth, hidden);
  }

  void add_tensors() {
    plain("model.embed_tokens.weight", {kVocab, kWidth}, 0, 1);
    plain("model.norm.weight", {kWidth}, 1, 0.1f);
    plain("lm_head.weight", {kVocab, kWidth}, 0, 0.1f);
    for (int layer = 0; layer < 2; ++layer) {
      const std::string prefix = "model.layers." + std::to_string(layer) + ".";
      const std::string attention = prefix + "self_attn.";
      plain(prefix + "input_layernorm.weight", {kWidth}, 1, 0.1f);
      plain(prefix + "post_attention_layernorm.weight", {kWidth}, 1, 0.1f);
      matrix(attention + "q_a_proj.weight", kQLora, kWidth);
      plain(attention + "q_a_layernorm.weight", {kQLora}, 1, 0.1f);
      matrix(attention + "q_b_proj.weight", kHeads * (kNope + kRope), kQLora);
      matrix(attention + "kv_a_proj_with_mqa.weight", kLatent + kRope, kWidth);
      plain(attention + "kv_a_layernorm.weight", {kLatent}, 1, 0.1f);
      matrix(attention + "kv_b_proj.weight", kHeads * (kNope + kValue), kLatent);
      matrix(attention + "o_proj.weight", kWidth, kHeads * kValue);
      matrix(attention + "indexer.wq_b.weight", kIndexHeads * kIndexDim, kQLora);
      matrix(attention + "indexer.wk.weight", kIndexDim, kWidth);
      plain(attention + "indexer.k_norm.weight", {kIndexDim}, 1, 0.1f);
      plain(attention + "indexer.k_norm.bias", {kIndexDim}, 0, 0.1f);
      plain(attention + "indexer.weights_proj.weight", {kIndexHeads, kWidth}, 0, 0.1f);
      if (layer == 0) {
        mlp(prefix + "mlp.", kDense);
        continue;
      }
      plain(prefix + "mlp.gate.weight", {kExperts, kWidth}, 0, 0.1f);
      plain(prefix + "mlp.gate.e_score_correction_bias", {kExperts}, 0, 0.1f);
      for (int64_t e = 0; e < kExperts; ++e) {
        mlp(prefix + "mlp.experts." + std::to_string(e) + ".", kExpert);
      }
      mlp(prefix + "mlp.shared_experts.", kExpert);
    }
  }

  bool fp8_;
  Random random_;
  CheckpointWriter out_;
};

}  // namespace lacuna::testing
