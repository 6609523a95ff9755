// Weights on every device of this machine: what is kept, what is converted, and what is refused.
#include "model/weights.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "core/check.h"
#include "ops/backend.h"
#include "tests/support/fp8_checkpoint.h"

namespace lacuna {
namespace {

using Writer = testing::TinyModelWriter;

std::string fresh_dir(const std::string& name) {
  const std::string dir = ::testing::TempDir() + "lacuna_weights_test_" + name;
  std::filesystem::remove_all(dir);
  return dir;
}

struct Loaded {
  Checkpoint checkpoint;
  ModelWeights weights;
};

Result<Loaded> load(const std::string& dir, DType dtype, const Runtime* runtime, Device device) {
  LACUNA_ASSIGN_OR_RETURN(const ModelConfig config, load_config(dir));
  LACUNA_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(dir));
  LACUNA_ASSIGN_OR_RETURN(ModelWeights weights,
                          ModelWeights::load(config, checkpoint, dtype, runtime, device));
  return Loaded{std::move(checkpoint), std::move(weights)};
}

const Context& context() {
  static const Context made = [] {
    Result<Context> result = Context::create({.num_threads = 1});
    LACUNA_CHECK(result.ok());
    return std::move(result).value();
  }();
  return made;
}

const Runtime* runtime_of(DeviceKind kind) {
  for (const Backend* backend : context().state().backends) {
    if (backend->device_kind == kind) {
      return backend->runtime;
    }
  }
  return nullptr;
}

// The bytes of a contiguous tensor, wherever it lies.
std::vector<uint8_t> bytes_of(const ConstTensorView& tensor) {
  EXPECT_TRUE(tensor.is_contiguous());
  std::vector<uint8_t> bytes(static_cast<size_t>(tensor.num_elements() * size_bytes(tensor.dtype)));
  const Runtime* runtime = runtime_of(tensor.device.kind);
  EXPECT_TRUE(
      runtime->copy(bytes.data(), tensor.data, static_cast<int64_t>(bytes.size()), nullptr).ok());
  EXPECT_TRUE(runtime->synchronize(tensor.device.index, nullptr).ok());
  return bytes;
}

// What the file holds under a name.
std::vector<uint8_t> stored_bytes(const Checkpoint& checkpoint, const std::string& name) {
  const SafetensorsEntry* entry = checkpoint.find(name);
  EXPECT_NE(entry, nullptr) << name;
  std::vector<uint8_t> bytes(entry == nullptr ? 0 : entry->data.size());
  std::memcpy(bytes.data(), entry->data.data(), bytes.size());
  return bytes;
}

std::string error_of(const std::string& dir) {
  const Result<Loaded> loaded =
      load(dir, DType::kFloat32, runtime_of(DeviceKind::kCpu), {DeviceKind::kCpu, 0});
  return loaded.ok() ? "loaded" : loaded.status().message();
}

TEST(Weights, KeepsFp8MatricesAndTheirScales) {
  const std::string dir = fresh_dir("fp8");
  Writer::write(dir, true);
  for (const DeviceInfo& device : context().state().devices) {
    const Result<Loaded> result =
        load(dir, DType::kBFloat16, runtime_of(device.device.kind), device.device);
    ASSERT_TRUE(result.ok()) << result.status().message();
    const std::string prefix = "model.layers.1.";
    const LayerWeights& layer = result->weights.layers[1];
    EXPECT_EQ(layer.q_a.values.dtype, DType::kFloat8E4M3);
    EXPECT_EQ(layer.q_a.scale.shape[0], 2);
    EXPECT_EQ(layer.q_a.scale.shape[1], 2);
    const std::pair<ConstTensorView, std::string> tensors[] = {
        {layer.q_a.values, "self_attn.q_a_proj.weight"},
        {layer.q_a.scale, "self_attn.q_a_proj.weight_scale_inv"},
        {layer.indexer.wk.values, "self_attn.indexer.wk.weight"},
        {layer.indexer.wk.scale, "self_attn.indexer.wk.weight_scale_inv"},
        {layer.experts[4].down, "mlp.experts.4.down_proj.weight"},
        {layer.experts[4].down_scale, "mlp.experts.4.down_proj.weight_scale_inv"},
        {layer.router, "mlp.gate.weight"}};
    for (const auto& [tensor, name] : tensors) {
      EXPECT_EQ(tensor.device, device.device);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data) % size_bytes(tensor.dtype), 0u) << name;
      if (name != "mlp.gate.weight") {  // rounded to bf16
        EXPECT_EQ(bytes_of(tensor), stored_bytes(result->checkpoint, prefix + name)) << name;
      }
    }
  }
}

TEST(Weights, MultipliesTheScalesIntoWhatMayNotBeFp8) {
  const std::string fp8_dir = fresh_dir("split_fp8");
  const std::string f32_dir = fresh_dir("split_f32");
  Writer::write(fp8_dir, true);
  Writer::write(f32_dir, false);
  for (const DeviceInfo& device : context().state().devices) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      const Runtime* runtime = runtime_of(device.device.kind);
      const Result<Loaded> fp8 = load(fp8_dir, dtype, runtime, device.device);
      const Result<Loaded> f32 = load(f32_dir, dtype, runtime, device.device);
      ASSERT_TRUE(fp8.ok()) << fp8.status().message();
      ASSERT_TRUE(f32.ok()) << f32.status().message();
      for (size_t i = 0; i < 2; ++i) {
        const ConstTensorView& kv_b = fp8->weights.layers[i].kv_b;
        EXPECT_EQ(kv_b.dtype, dtype);
        EXPECT_EQ(bytes_of(kv_b), bytes_of(f32->weights.layers[i].kv_b));
      }
    }
  }
}

// On a GPU kernels find an expert by its number.
TEST(Weights, ExpertsLieAtEqualDistancesOnGpus) {
  const std::string dir = fresh_dir("distances");
  Writer::write(dir, true);
  int gpus = 0;
  for (const DeviceInfo& device : context().state().devices) {
    if (device.device.kind == DeviceKind::kCpu) {
      continue;
    }
    ++gpus;
    const Result<Loaded> result =
        load(dir, DType::kBFloat16, runtime_of(device.device.kind), device.device);
    ASSERT_TRUE(result.ok()) << result.status().message();
    const std::vector<ExpertWeights>& experts = result->weights.layers[1].experts;
    for (const auto member : {&ExpertWeights::gate, &ExpertWeights::up, &ExpertWeights::down,
                              &ExpertWeights::gate_scale, &ExpertWeights::down_scale}) {
      const auto at = [&](size_t e) { return (experts[e].*member).as<char>(); };
      for (size_t e = 1; e < experts.size(); ++e) {
        EXPECT_EQ(at(e) - at(e - 1), at(1) - at(0));
      }
    }
  }
  if (gpus == 0) {
    GTEST_SKIP() << "no GPU here: " << context().state().cuda_status;
  }
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

// The same file with a name in its header replaced by one of the same length.
void rename_tensor(const std::string& dir, const std::string& from, const std::string& to) {
  ASSERT_EQ(from.size(), to.size());
  std::string text = read_text(dir + "/model.safetensors");
  const size_t at = text.find("\"" + from + "\"");
  ASSERT_NE(at, std::string::npos);
  text.replace(at + 1, from.size(), to);
  std::ofstream(dir + "/model.safetensors", std::ios::binary) << text;
}

TEST(Weights, RefusesFp8WithoutScalesByName) {
  const std::string dir = fresh_dir("no_scale");
  Writer::write(dir, true);
  const std::string name = "model.layers.0.self_attn.o_proj.weight_scale_inv";
  std::string other = name;
  other.back() = 'x';
  rename_tensor(dir, name, other);
  EXPECT_EQ(error_of(dir), "weights: tensor " + name + " is missing, expected shape [2, 2]");
}

TEST(Weights, RefusesScalesOfOtherBlocks) {
  const std::string dir = fresh_dir("other_blocks");
  Writer::write(dir, true);
  std::string text = read_text(dir + "/model.safetensors");
  const std::string entry =
      "\"model.layers.0.self_attn.q_a_proj.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[2,2]";
  const size_t at = text.find(entry);
  ASSERT_NE(at, std::string::npos);
  text.replace(at + entry.size() - 5, 5, "[4,1]");
  std::ofstream(dir + "/model.safetensors", std::ios::binary) << text;
  EXPECT_EQ(error_of(dir),
            "weights: tensor model.layers.0.self_attn.q_a_proj.weight_scale_inv has shape [4, 1], "
            "config.json asks for [2, 2]");
}

TEST(Weights, RefusesFp8ThatTheConfigDoesNotAnnounce) {
  const std::string dir = fresh_dir("not_announced");
  Writer::write(dir, true);
  std::ofstream(dir + "/config.json") << Writer::config(false);
  EXPECT_NE(error_of(dir).find("model.layers.0.self_attn.q_a_proj.weight is FP8"),
            std::string::npos)
      << error_of(dir);
}

}  // namespace
}  // namespace lacuna
