// config.json: the spellings in use, the numbers that follow from them, and every refusal.
#include "model/config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace lacuna {
namespace {

using nlohmann::json;

// DeepSeek-V3.2's file as published (old spellings), unquantised.
json v32() {
  return json::parse(R"({
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
    "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "hidden_act": "silu", "num_attention_heads": 128,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "attention_bias": false, "rms_norm_eps": 1e-6, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "norm_topk_prob": true, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840, "tie_word_embeddings": false,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"})");
}

// GLM-5.3's shape (new spellings), indexers by frequency and offset.
json glm() {
  return json::parse(R"({
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa",
    "vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "first_k_dense_replace": 3, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "qk_head_dim": 256,
    "v_head_dim": 256, "head_dim": 192, "rms_norm_eps": 1e-5, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "index_topk_freq": 4,
    "index_skip_topk_offset": 3, "index_topk_pattern": null, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8000000},
    "max_position_embeddings": 1048576, "eos_token_id": [154820, 154827, 154829],
    "bos_token_id": null, "dtype": "bfloat16"})");
}

json with(json config, const std::string& key, json value) {
  config[key] = std::move(value);
  return config;
}
json without(json config, const std::string& key) {
  config.erase(key);
  return config;
}

ModelConfig parsed(const json& config) {
  const Result<ModelConfig> result = parse_config(config.dump());
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.ok() ? result.value() : ModelConfig{};
}

std::string error_of(const json& config) {
  const Result<ModelConfig> result = parse_config(config.dump());
  return result.ok() ? "parsed" : result.status().message();
}

std::vector<int> places(const std::vector<bool>& flags) {
  std::vector<int> at;
  for (size_t i = 0; i < flags.size(); ++i) {
    if (flags[i]) {
      at.push_back(static_cast<int>(i));
    }
  }
  return at;
}

// A fresh folder of its own.
std::string make_dir(const std::string& name) {
  const std::string dir = testing::TempDir() + "lacuna_config_test_" + name;
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  return dir;
}
void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

TEST(Config, ReadsDeepseekV32WithTheOldSpellings) {
  const ModelConfig config = parsed(v32());
  EXPECT_EQ(config.architecture, "DeepseekV32ForCausalLM");
  EXPECT_EQ(config.model_type, "deepseek_v32");
  EXPECT_EQ(config.hidden_size, 7168);
  EXPECT_EQ(config.index_topk, 2048);
  EXPECT_FALSE(config.indexer_rope_interleave);
  EXPECT_EQ(places(config.layer_is_moe).size(), 58u);
  EXPECT_EQ(places(config.layer_is_moe).front(), 3);
  EXPECT_EQ(places(config.layer_has_indexer).size(), 61u);
  EXPECT_EQ(config.rope.type, RopeConfig::Type::kYarn);
  EXPECT_EQ(config.rope.theta, 10000);
  EXPECT_EQ(config.rope.factor, 40);
  EXPECT_EQ(config.rope.original_max_position, 4096);
  EXPECT_EQ(config.eos_token_ids, std::vector<int32_t>{1});
  EXPECT_EQ(config.bos_token_id, 0);
  EXPECT_EQ(config.dtype, DType::kBFloat16);
  EXPECT_FALSE(config.fp8_blocks);
}

TEST(Config, ReadsGlmWithTheNewSpellings) {
  const ModelConfig config = parsed(glm());
  EXPECT_EQ(config.model_type, "glm_moe_dsa");
  EXPECT_TRUE(config.indexer_rope_interleave);
  EXPECT_EQ(config.n_group, 1);
  EXPECT_EQ(config.topk_group, 1);
  EXPECT_EQ(config.rope.type, RopeConfig::Type::kDefault);
  EXPECT_EQ(config.rope.theta, 8e6);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int32_t>{154820, 154827, 154829}));
  EXPECT_EQ(config.bos_token_id, -1);
}

TEST(Config, BothSpellingsGiveTheSameNumbers) {
  json modern = v32();
  json rope = modern["rope_scaling"];
  rope["rope_type"] = rope["type"];
  rope["rope_theta"] = modern["rope_theta"];
  rope["original_max_position_embeddings"] = 4096.0;
  rope.erase("type");
  modern["rope_parameters"] = rope;
  modern["dtype"] = "bfloat16";
  for (const char* key :
       {"rope_theta", "rope_scaling", "torch_dtype", "scoring_func", "topk_method"}) {
    modern.erase(key);
  }
  const ModelConfig a = parsed(v32());
  const ModelConfig b = parsed(modern);
  EXPECT_EQ(rope_frequencies(a), rope_frequencies(b));
  EXPECT_EQ(attention_scale(a), attention_scale(b));
  EXPECT_EQ(parsed(with(v32(), "torch_dtype", "float32")).dtype, DType::kFloat32);
  EXPECT_EQ(parsed(with(modern, "dtype", "float16")).dtype, DType::kFloat16);
}

TEST(Config, AttentionScaleIsThatOfTheReleasedModels) {
  EXPECT_NEAR(attention_scale(parsed(v32())), 0.1352338, 1e-7);
  EXPECT_EQ(attention_scale(parsed(glm())), 0.0625);
}

TEST(Config, YarnKeepsFastPairsAndSlowsSlowOnes) {
  const std::vector<double> frequencies = rope_frequencies(parsed(v32()));
  ASSERT_EQ(frequencies.size(), 32u);
  for (int i = 0; i < 32; ++i) {
    const double plain = std::pow(10000.0, -2.0 * i / 64);
    // The ramp goes from pair 10 to pair 23.
    const double ramp = std::min(std::max((i - 10) / 13.0, 0.0), 1.0);
    EXPECT_NEAR(frequencies[i], plain * (1 - ramp) + plain / 40 * ramp, plain * 1e-14) << i;
  }
}

// Printed by rope_frequencies of tests/golden/check_golden.py for v32-micro.
TEST(Config, GoldenConfigsGiveTheFrequenciesOfTheOracle) {
  const Result<ModelConfig> config =
      load_config(std::string(LACUNA_SOURCE_DIR) + "/tests/golden/v32-micro");
  ASSERT_TRUE(config.ok()) << config.status().message();
  const std::vector<double> want = {1.0, 0.1, 0.005125, 2.5e-05};
  const std::vector<double> got = rope_frequencies(*config);
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], want[i] * 1e-12) << i;
  }
  EXPECT_NEAR(attention_scale(*config), 0.38249888831204115, 1e-12);
}

TEST(Config, LoadsTheModelsOfTheTree) {
  const std::string root = LACUNA_SOURCE_DIR;
  const Result<ModelConfig> nano = load_config(root + "/models/dsa-nano/");
  ASSERT_TRUE(nano.ok()) << nano.status().message();
  EXPECT_EQ(places(nano->layer_has_indexer), (std::vector<int>{0, 2}));
  EXPECT_EQ(places(nano->layer_is_moe), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(nano->eos_token_ids, (std::vector<int32_t>{262, 259, 261}));
  const Result<ModelConfig> micro = load_config(root + "/tests/golden/glm-dsa-micro");
  ASSERT_TRUE(micro.ok()) << micro.status().message();
  EXPECT_EQ(places(micro->layer_has_indexer), (std::vector<int>{0, 1}));
  EXPECT_TRUE(micro->indexer_rope_interleave);
}

TEST(Config, IndexersByFrequencyPatternOrList) {
  const std::vector<int> full = places(parsed(glm()).layer_has_indexer);
  ASSERT_EQ(full.size(), 21u);
  for (int i = 0; i < 21; ++i) {
    EXPECT_EQ(full[i], i < 3 ? i : 4 * i - 6);
  }
  EXPECT_EQ(places(parsed(without(without(glm(), "index_topk_freq"), "index_skip_topk_offset"))
                       .layer_has_indexer)
                .size(),
            78u);
  json small = with(with(glm(), "num_hidden_layers", 4), "index_topk_pattern", "FSFS");
  EXPECT_EQ(places(parsed(small).layer_has_indexer), (std::vector<int>{0, 2}));
  small["indexer_types"] = {"full", "full", "shared", "full"};  // the list wins
  EXPECT_EQ(places(parsed(small).layer_has_indexer), (std::vector<int>{0, 1, 3}));
}

TEST(Config, MlpKindsByNumbersOrList) {
  json config = with(v32(), "num_hidden_layers", 6);
  config["moe_layer_freq"] = 2;
  EXPECT_EQ(places(parsed(config).layer_is_moe), (std::vector<int>{4}));
  config["mlp_layer_types"] = {"sparse", "dense", "dense", "dense", "dense", "sparse"};
  EXPECT_EQ(places(parsed(config).layer_is_moe), (std::vector<int>{0, 5}));
}

TEST(Config, EosMayBeANumberAListOrAbsent) {
  EXPECT_EQ(parsed(with(v32(), "eos_token_id", {5, 6})).eos_token_ids,
            (std::vector<int32_t>{5, 6}));
  EXPECT_TRUE(parsed(with(v32(), "eos_token_id", nullptr)).eos_token_ids.empty());
  EXPECT_TRUE(parsed(without(v32(), "eos_token_id")).eos_token_ids.empty());
}

TEST(Config, GenerationConfigAddsItsEos) {
  const std::string dir = make_dir("generation");
  write(dir + "/config.json", v32().dump());
  write(dir + "/generation_config.json", R"({"eos_token_id": [7, 1], "temperature": 0.6})");
  const Result<ModelConfig> config = load_config(dir);
  ASSERT_TRUE(config.ok()) << config.status().message();
  EXPECT_EQ(config->eos_token_ids, (std::vector<int32_t>{1, 7}));
  write(dir + "/generation_config.json", R"({"eos_token_id": 999999})");
  EXPECT_EQ(load_config(dir).status().message(),
            dir +
                "/generation_config.json: eos_token_id: 999999, expected an integer in "
                "0..129279");
}

TEST(Config, Fp8BlocksAreRecognised) {
  const json fp8 = {{"quant_method", "fp8"},
                    {"fmt", "e4m3"},
                    {"activation_scheme", "dynamic"},
                    {"weight_block_size", {128, 128}},
                    {"scale_fmt", "ue8m0"}};
  EXPECT_TRUE(parsed(with(v32(), "quantization_config", fp8)).fp8_blocks);
  EXPECT_EQ(error_of(with(v32(), "quantization_config", with(fp8, "weight_block_size", {64, 64}))),
            "config.json: quantization_config.weight_block_size: [64,64] is not supported; "
            "supported: [128,128]");
  EXPECT_EQ(error_of(with(v32(), "quantization_config", with(fp8, "fmt", "e5m2"))),
            "config.json: quantization_config.fmt: \"e5m2\" is not supported; supported: "
            "\"e4m3\"");
}

TEST(Config, OtherQuantisationsAreRefusedByName) {
  for (const char* method : {"gptq", "awq", "compressed-tensors", "modelopt", "bitsandbytes"}) {
    EXPECT_EQ(error_of(with(v32(), "quantization_config", {{"quant_method", method}})),
              "config.json: quantization_config.quant_method: \"" + std::string(method) +
                  "\" is not supported; what loads: bf16, f16 and f32 safetensors, and "
                  "fp8 ones with weight_block_size [128,128]");
  }
  EXPECT_NE(error_of(with(v32(), "quantization_config",
                          {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}))
                .find("\"modelopt\" (NVFP4) is not supported"),
            std::string::npos);
  const std::string dir = make_dir("modelopt");
  write(dir + "/config.json", v32().dump());
  write(dir + "/hf_quant_config.json", "{}");
  EXPECT_NE(load_config(dir).status().message().find("NVFP4"), std::string::npos);
}

TEST(Config, OtherModelsAreRefusedByName) {
  constexpr const char* kSupported =
      "; supported: DeepseekV32ForCausalLM (model_type deepseek_v32), GlmMoeDsaForCausalLM "
      "(model_type glm_moe_dsa)";
  const auto other = [](const char* architecture, const char* model_type) {
    return error_of({{"architectures", {architecture}}, {"model_type", model_type}});
  };
  EXPECT_EQ(other("LlamaForCausalLM", "llama"),
            std::string("config.json: architectures: \"LlamaForCausalLM\" (model_type \"llama\") "
                        "is not supported") +
                kSupported);
  EXPECT_NE(other("Glm5NextForConditionalGeneration", "glm5_next").find("hyper-connections"),
            std::string::npos);
  EXPECT_NE(other("DeepseekV4ForCausalLM", "deepseek_v4").find("not MLA"), std::string::npos);
  EXPECT_NE(other("DeepseekV3ForCausalLM", "deepseek_v3").find("no indexer"), std::string::npos);
  EXPECT_NE(other("GlmMoeDsaForCausalLM", "deepseek_v32").find("is not supported"),
            std::string::npos);
  EXPECT_EQ(error_of(json::object()),
            std::string("config.json: architectures: missing, and model_type too") + kSupported);
  EXPECT_EQ(parsed(without(v32(), "model_type")).model_type, "deepseek_v32");
  EXPECT_EQ(parsed(without(v32(), "architectures")).architecture, "DeepseekV32ForCausalLM");
}

TEST(Config, WhatTheMathsDoesNotCoverIsRefusedByName) {
  const auto refusal = [](const std::string& field, const std::string& given,
                          const std::string& supported) {
    return "config.json: " + field + ": " + given + " is not supported; supported: " + supported;
  };
  EXPECT_EQ(error_of(with(v32(), "scoring_func", "softmax")),
            refusal("scoring_func", "\"softmax\"", "\"sigmoid\""));
  EXPECT_EQ(error_of(with(v32(), "topk_method", "greedy")),
            refusal("topk_method", "\"greedy\"", "\"noaux_tc\""));
  EXPECT_EQ(error_of(with(v32(), "hidden_act", "gelu")),
            refusal("hidden_act", "\"gelu\"", "\"silu\""));
  EXPECT_EQ(error_of(with(v32(), "attention_bias", true)),
            refusal("attention_bias", "true", "false"));
  EXPECT_EQ(error_of(with(glm(), "rope_interleave", false)),
            refusal("rope_interleave", "false", "true"));
  EXPECT_EQ(error_of(with(v32(), "torch_dtype", "float64")),
            refusal("torch_dtype", "\"float64\"", "bfloat16, float16, float32"));
  EXPECT_EQ(error_of(with(v32(), "rope_scaling", {{"type", "linear"}, {"factor", 2}})),
            refusal("rope_scaling.type", "\"linear\"", "default, yarn"));
  EXPECT_NE(error_of(with(v32(), "rope_scaling", with(v32()["rope_scaling"], "mscale", 0.5)))
                .find("rope_scaling.mscale: 0.5 with mscale_all_dim 1.0 is not supported"),
            std::string::npos);
  EXPECT_NE(error_of(with(with(glm(), "num_hidden_layers", 1), "layer_types",
                          json::array({"sliding_attention"})))
                .find("layer_types[0]: \"sliding_attention\""),
            std::string::npos);
}

TEST(Config, AFirstSharedLayerIsRefused) {
  json small = with(with(glm(), "num_hidden_layers", 2), "indexer_types", {"shared", "full"});
  EXPECT_EQ(error_of(small),
            "config.json: indexer_types: layer 0 is shared, but there is no earlier layer whose "
            "list it could use; it must be full");
  small.erase("indexer_types");
  small["index_topk_pattern"] = "SF";
  EXPECT_NE(error_of(small).find("index_topk_pattern: layer 0 is shared"), std::string::npos);
}

TEST(Config, WrongNumbersAreNamed) {
  const auto expect = [](const json& config, const std::string& message) {
    EXPECT_EQ(error_of(config), "config.json: " + message);
  };
  expect(without(v32(), "kv_lora_rank"),
         "kv_lora_rank: missing, expected an integer in 1..1048576");
  expect(with(v32(), "num_attention_heads", 0),
         "num_attention_heads: 0, expected an integer in 1..4096");
  expect(with(v32(), "hidden_size", -7168),
         "hidden_size: -7168, expected an integer in 1..1048576");
  expect(with(v32(), "hidden_size", 1e300),
         "hidden_size: 1e+300, expected an integer in 1..1048576");
  expect(with(v32(), "hidden_size", 18446744073709551615u),
         "hidden_size: 18446744073709551615, expected an integer in 1..1048576");
  expect(with(v32(), "hidden_size", "big"),
         "hidden_size: \"big\", expected an integer in 1..1048576");
  expect(with(v32(), "index_topk", 0), "index_topk: 0, expected an integer in 1..1073741824");
  expect(with(v32(), "rms_norm_eps", -1), "rms_norm_eps: -1, expected a number in 1e-12..1.0");
  expect(with(v32(), "norm_topk_prob", 1), "norm_topk_prob: 1, expected true or false");
  expect(with(v32(), "qk_rope_head_dim", 63),
         "qk_rope_head_dim: 63, expected an even number: rope turns pairs");
  expect(with(v32(), "index_head_dim", 32),
         "index_head_dim: 32, expected at least qk_rope_head_dim 64");
  expect(with(glm(), "qk_head_dim", 100),
         "qk_head_dim: 100, expected qk_nope_head_dim + qk_rope_head_dim = 256");
  expect(with(v32(), "n_group", 7), "n_group: 7 does not divide n_routed_experts 256");
  expect(without(v32(), "n_group"), "n_group: missing, expected an integer in 1..65536");
  expect(with(v32(), "topk_group", 9), "topk_group: 9, expected at most n_group 8");
  expect(with(v32(), "num_experts_per_tok", 200),
         "num_experts_per_tok: 200, expected at most the 128 experts of topk_group groups");
  expect(with(v32(), "mlp_layer_types", {"dense"}),
         "mlp_layer_types: a list of 1, expected a list of 61 words (num_hidden_layers)");
  expect(with(with(v32(), "num_hidden_layers", 1), "mlp_layer_types", json::array({"moe"})),
         "mlp_layer_types[0]: \"moe\", expected \"sparse\" or \"dense\"");
  expect(with(glm(), "index_topk_pattern", "FX"),
         "index_topk_pattern: \"FX\" of length 2, expected 78 letters (num_hidden_layers) F (full) "
         "or S (shared)");
  expect(with(v32(), "eos_token_id", 129280),
         "eos_token_id: 129280, expected an integer in 0..129279");
  expect(without(v32(), "rope_theta"), "rope_theta: missing, expected a number in 2.0..1e+15");
  expect(with(v32(), "rope_scaling", {{"type", "yarn"}, {"factor", 40}}),
         "rope_scaling.original_max_position_embeddings: missing, expected an integer in "
         "1..1073741824");
}

TEST(Config, BrokenJsonIsAnError) {
  EXPECT_EQ(parse_config("").status().code(), StatusCode::kDataLoss);
  EXPECT_EQ(parse_config("[1]").status().message(), "config.json: a list of 1, expected an object");
  EXPECT_EQ(parse_config(R"({"a": 1, "a": 2})").status().message(),
            "config.json: duplicate key \"a\"");
  EXPECT_EQ(parse_config(std::string(1000000, '[')).status().message(),
            "config.json: nested more than 32 deep");
  EXPECT_EQ(parse_config("{\"a\": \xff}").status().message().find('\n'), std::string::npos);
  const std::string text = v32().dump();
  for (size_t n = 0; n < text.size(); ++n) {
    EXPECT_FALSE(parse_config(std::string_view(text).substr(0, n)).ok()) << n;
  }
}

TEST(Config, FoldersThatHoldNoConfigSayWhatTheyHold) {
  const std::string what =
      "; what loads: a folder with config.json, tokenizer.json and *.safetensors as published on "
      "Hugging Face";
  const std::string dir = make_dir("folders");
  EXPECT_EQ(load_config(dir).status().message(), dir + ": no config.json" + what);
  write(dir + "/model-q4.gguf", "GGUF");
  EXPECT_EQ(load_config(dir).status().message(),
            dir + ": no config.json, only GGUF files, which are not supported" + what);
  EXPECT_EQ(load_config(dir + "/model-q4.gguf").status().message(),
            dir + "/model-q4.gguf: GGUF files are not supported" + what);
  EXPECT_EQ(load_config(dir + "/absent").status().message(),
            dir + "/absent: no such folder" + what);
  std::filesystem::remove(dir + "/model-q4.gguf");
  write(dir + "/pytorch_model.bin", "PK");
  EXPECT_NE(load_config(dir).status().message().find("only PyTorch files"), std::string::npos);
}

}  // namespace
}  // namespace lacuna
