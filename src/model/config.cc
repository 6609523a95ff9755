// From JSON to ModelConfig. Two families share all of it; what differs between them, including the
// defaults of fields that transformers leaves out when it saves, stands in kFamilies.
#include "model/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numbers>
#include <utility>

#include "core/check.h"
#include "core/file_map.h"
#include "model/json.h"
#include "model/model_dir.h"

namespace lacuna {
namespace {

// Limits of single numbers. Their point is that products of the few that make a weight, times eight
// bytes, stay far below 2^63; each is an order of magnitude above any known model.
constexpr int64_t kVocabMax = int64_t{1} << 22;
constexpr int64_t kWidthMax = int64_t{1} << 20;
constexpr int64_t kHeadsMax = 4096;
constexpr int64_t kHeadDimMax = 4096;
constexpr int64_t kLayersMax = 4096;
constexpr int64_t kExpertsMax = 65536;
constexpr int64_t kPositionsMax = int64_t{1} << 30;  // positions are int32
constexpr int64_t kConfigBytesMax = int64_t{16} << 20;

constexpr const char* kFormatsThatLoad =
    "what loads: bf16, f16 and f32 safetensors, and fp8 ones with weight_block_size [128,128]";

struct Family {
  const char* architecture;
  const char* model_type;
  bool indexer_rope_interleave;
  bool groups_required;  // otherwise n_group and topk_group default to 1
};

constexpr std::array<Family, 2> kFamilies = {{
    {"DeepseekV32ForCausalLM", "deepseek_v32", false, true},
    {"GlmMoeDsaForCausalLM", "glm_moe_dsa", true, false},
}};

constexpr const char* kSupportedModels =
    "supported: DeepseekV32ForCausalLM (model_type deepseek_v32), GlmMoeDsaForCausalLM (model_type "
    "glm_moe_dsa)";

// Relatives that people will try, and why they do not load.
struct Relative {
  const char* model_type_prefix;
  const char* reason;
};
constexpr std::array<Relative, 3> kRelatives = {{
    {"glm5_next", "it needs linear-attention layers, hyper-connections and a pooled indexer"},
    {"deepseek_v4", "its attention is not MLA with a top-k indexer"},
    {"deepseek_v3", "it has no indexer (dense MLA)"},
}};

std::string range_text(int64_t low, int64_t high) {
  return std::to_string(low) + ".." + std::to_string(high);
}

std::string range_text(double low, double high) {
  return Json(low).dump() + ".." + Json(high).dump();
}

// Reads members of one object; the first failure is kept, and readings after it mean nothing.
class Reader {
 public:
  Reader(const Json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const Json* find(const char* name) const { return find_member(object_, name); }
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

  void fail(const std::string& field, const std::string& message) {
    adopt(invalid_argument(where_ + field + ": " + message));
  }
  void refuse(const std::string& field, const std::string& message) {
    adopt(unsupported(where_ + field + ": " + message));
  }
  void adopt(Status status) {
    if (status_.ok()) {
      status_ = std::move(status);
    }
  }

  int64_t integer(const char* name, int64_t low, int64_t high) {
    const Json* value = require(name, "an integer in " + range_text(low, high));
    return value == nullptr ? low : integer_of(*value, name, low, high);
  }
  int64_t integer_or(const char* name, int64_t low, int64_t high, int64_t fallback) {
    const Json* value = find(name);
    return value == nullptr ? fallback : integer_of(*value, name, low, high);
  }
  double number(const char* name, double low, double high) {
    const Json* value = require(name, "a number in " + range_text(low, high));
    return value == nullptr ? low : number_of(*value, name, low, high);
  }
  double number_or(const char* name, double low, double high, double fallback) {
    const Json* value = find(name);
    return value == nullptr ? fallback : number_of(*value, name, low, high);
  }
  bool boolean_or(const char* name, bool fallback) {
    const Json* value = find(name);
    if (value == nullptr) {
      return fallback;
    }
    if (!value->is_boolean()) {
      fail(name, describe(*value) + ", expected true or false");
      return fallback;
    }
    return value->get<bool>();
  }
  std::string text_or(const char* name, const std::string& fallback) {
    const Json* value = find(name);
    if (value == nullptr) {
      return fallback;
    }
    if (!value->is_string()) {
      fail(name, describe(*value) + ", expected a string");
      return fallback;
    }
    return value->get<std::string>();
  }
  // A field of which this code runs one value only; absent counts as that value.
  void only(const char* name, const Json& supported) {
    const Json* value = find(name);
    if (value != nullptr && *value != supported) {
      refuse(name, describe(*value) + " is not supported; supported: " + describe(supported));
    }
  }
  // Token ids: one, a list, or none.
  std::vector<int32_t> token_ids(const char* name, int64_t vocab_size) {
    std::vector<int32_t> ids;
    const Json* value = find(name);
    if (value == nullptr) {
      return ids;
    }
    const Json one = value->is_array() ? *value : Json::array({*value});
    for (const Json& id : one) {
      ids.push_back(static_cast<int32_t>(integer_of(id, name, 0, vocab_size - 1)));
    }
    return ids;
  }
  int64_t integer_of(const Json& value, const std::string& field, int64_t low, int64_t high) {
    // 4096.0 is how some tools write an integer.
    int64_t integer = 0;
    bool good = false;
    if (value.is_number_unsigned()) {
      const uint64_t number = value.get<uint64_t>();
      good = number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
      integer = static_cast<int64_t>(number);
    } else if (value.is_number_integer()) {
      integer = value.get<int64_t>();
      good = true;
    } else if (value.is_number_float()) {
      const double number = value.get<double>();
      good = std::abs(number) <= 0x1p52 && std::floor(number) == number;
      integer = good ? static_cast<int64_t>(number) : 0;
    }
    if (!good || integer < low || integer > high) {
      fail(field, describe(value) + ", expected an integer in " + range_text(low, high));
      return low;
    }
    return integer;
  }

 private:
  const Json* require(const char* name, const std::string& expected) {
    const Json* value = find(name);
    if (value == nullptr) {
      fail(name, "missing, expected " + expected);
    }
    return value;
  }
  double number_of(const Json& value, const char* name, double low, double high) {
    const double number = value.is_number() ? value.get<double>() : std::nan("");
    if (!(number >= low && number <= high)) {
      fail(name, describe(value) + ", expected a number in " + range_text(low, high));
      return low;
    }
    return number;
  }

  const Json& object_;
  std::string where_;
  Status status_;
};

// Sets architecture and model_type; returns null after a failure.
const Family* read_family(Reader& in, ModelConfig* config) {
  std::string architecture;
  if (const Json* list = in.find("architectures")) {
    if (!list->is_array() || list->empty() || !list->front().is_string()) {
      in.fail("architectures",
              describe(*list) + ", expected a list of one class name; " + kSupportedModels);
      return nullptr;
    }
    architecture = list->front().get<std::string>();
  }
  const std::string model_type = in.text_or("model_type", "");
  if (architecture.empty() && model_type.empty()) {
    in.fail("architectures", std::string("missing, and model_type too; ") + kSupportedModels);
    return nullptr;
  }
  const std::string given =
      architecture.empty()
          ? "model_type " + quote_text(model_type)
          : quote_text(architecture) +
                (model_type.empty() ? "" : " (model_type " + quote_text(model_type) + ")");
  for (const Relative& relative : kRelatives) {
    if (model_type.starts_with(relative.model_type_prefix) && model_type != "deepseek_v32") {
      in.refuse("architectures",
                given + " is not supported: " + relative.reason + "; " + kSupportedModels);
      return nullptr;
    }
  }
  for (const Family& family : kFamilies) {
    if ((architecture.empty() || architecture == family.architecture) &&
        (model_type.empty() || model_type == family.model_type)) {
      config->architecture = family.architecture;
      config->model_type = family.model_type;
      return &family;
    }
  }
  in.refuse("architectures", given + " is not supported; " + kSupportedModels);
  return nullptr;
}

// A list with one word per layer; `yes` and `no` are the words.
std::vector<bool> read_layer_words(Reader& in, const char* name, const Json& list,
                                   int64_t num_layers, const char* yes, const char* no) {
  std::vector<bool> layers(static_cast<size_t>(num_layers), false);
  if (!list.is_array() || list.size() != layers.size()) {
    in.fail(name, describe(list) + ", expected a list of " + std::to_string(num_layers) +
                      " words (num_hidden_layers)");
    return layers;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (list[i] != yes && list[i] != no) {
      in.fail(std::string(name) + "[" + std::to_string(i) + "]",
              describe(list[i]) + ", expected \"" + yes + "\" or \"" + no + "\"");
      return layers;
    }
    layers[i] = list[i] == yes;
  }
  return layers;
}

void read_mlp_kinds(Reader& in, ModelConfig* config) {
  const int64_t num_layers = config->num_hidden_layers;
  if (const Json* list = in.find("mlp_layer_types")) {
    config->layer_is_moe =
        read_layer_words(in, "mlp_layer_types", *list, num_layers, "sparse", "dense");
    return;
  }
  const int64_t num_dense = in.integer("first_k_dense_replace", 0, kLayersMax);
  const int64_t freq = in.integer_or("moe_layer_freq", 1, kLayersMax, 1);
  for (int64_t i = 0; i < num_layers; ++i) {
    config->layer_is_moe.push_back(i >= num_dense && i % freq == 0);
  }
}

void read_indexer_kinds(Reader& in, ModelConfig* config) {
  const int64_t num_layers = config->num_hidden_layers;
  const char* source = "indexer_types";
  if (const Json* list = in.find("indexer_types")) {
    config->layer_has_indexer =
        read_layer_words(in, "indexer_types", *list, num_layers, "full", "shared");
  } else if (in.find("index_topk_pattern") != nullptr) {
    source = "index_topk_pattern";
    const std::string pattern = in.text_or("index_topk_pattern", "");
    if (static_cast<int64_t>(pattern.size()) != num_layers ||
        pattern.find_first_not_of("FS") != std::string::npos) {
      in.fail("index_topk_pattern", quote_text(pattern) + " of length " +
                                        std::to_string(pattern.size()) + ", expected " +
                                        std::to_string(num_layers) +
                                        " letters (num_hidden_layers) F (full) or S (shared)");
      return;
    }
    for (const char letter : pattern) {
      config->layer_has_indexer.push_back(letter == 'F');
    }
  } else {
    source = "index_skip_topk_offset";
    const int64_t freq = in.integer_or("index_topk_freq", 1, kLayersMax, 1);
    const int64_t offset = in.integer_or("index_skip_topk_offset", 0, kLayersMax, 2);
    for (int64_t i = 0; i < num_layers; ++i) {
      config->layer_has_indexer.push_back(std::max<int64_t>(i - offset + 1, 0) % freq == 0);
    }
  }
  if (in.ok() && !config->layer_has_indexer.front()) {
    in.fail(source,
            "layer 0 is shared, but there is no earlier layer whose list it could use; it must be "
            "full");
  }
}

RopeConfig read_rope(Reader& top, const Json& root, const std::string& where) {
  RopeConfig rope;
  const char* name = "rope_parameters";
  const Json* object = top.find(name);
  if (object == nullptr) {
    name = "rope_scaling";
    object = top.find(name);
  }
  if (object != nullptr && !object->is_object()) {
    top.fail(name, describe(*object) + ", expected an object");
    return rope;
  }
  Reader in(object == nullptr ? root : *object,
            object == nullptr ? where : where + std::string(name) + ".");
  constexpr double kThetaMin = 2;  // YaRN divides by ln(theta)
  constexpr double kThetaMax = 1e15;
  if (object != nullptr && in.find("rope_theta") != nullptr) {
    rope.theta = in.number("rope_theta", kThetaMin, kThetaMax);
  } else {
    rope.theta = top.number("rope_theta", kThetaMin, kThetaMax);
  }
  if (object == nullptr) {
    return rope;
  }
  const std::string type = in.text_or("rope_type", in.text_or("type", "default"));
  if (type == "yarn") {
    rope.type = RopeConfig::Type::kYarn;
    rope.factor = in.number("factor", 1, 1e6);
    rope.original_max_position = in.integer("original_max_position_embeddings", 1, kPositionsMax);
    rope.beta_fast = in.number_or("beta_fast", 1e-3, 1e6, rope.beta_fast);
    rope.beta_slow = in.number_or("beta_slow", 1e-3, 1e6, rope.beta_slow);
    rope.mscale = in.number_or("mscale", 0, 100, rope.mscale);
    rope.mscale_all_dim = in.number_or("mscale_all_dim", 0, 100, rope.mscale_all_dim);
    if (rope.mscale != rope.mscale_all_dim) {
      // cos and sin would be multiplied by m(mscale) / m(mscale_all_dim), which the rope kernels
      // do not do.
      in.refuse("mscale", Json(rope.mscale).dump() + " with mscale_all_dim " +
                              Json(rope.mscale_all_dim).dump() +
                              " is not supported; supported: equal values (1 and 1 in the released "
                              "checkpoints)");
    }
    in.only("truncate", true);
    if (const Json* factor = in.find("attention_factor"); factor != nullptr && *factor != 1) {
      in.refuse("attention_factor",
                describe(*factor) + " is not supported; supported: absent or 1");
    }
  } else if (type != "default") {
    in.refuse(in.find("rope_type") != nullptr ? "rope_type" : "type",
              quote_text(type) + " is not supported; supported: default, yarn");
  }
  if (!in.ok()) {
    top.adopt(in.status());
  }
  return rope;
}

void read_quantization(Reader& top, const std::string& where, ModelConfig* config) {
  if (const Json* other = top.find("compression_config")) {
    top.refuse("compression_config",
               describe(*other) + ": compressed-tensors is not supported; " + kFormatsThatLoad);
    return;
  }
  const Json* object = top.find("quantization_config");
  if (object == nullptr) {
    return;
  }
  Reader in(*object, where + "quantization_config.");
  const std::string method = in.text_or("quant_method", "");
  if (method != "fp8") {
    const std::string algorithm = in.text_or("quant_algo", "");
    in.refuse("quant_method", (method.empty() ? "missing" : quote_text(method)) +
                                  (algorithm.empty() ? "" : " (" + algorithm + ")") +
                                  " is not supported; " + kFormatsThatLoad);
  } else {
    in.only("fmt", "e4m3");
    in.only("activation_scheme", "dynamic");
    const Json* block = in.find("weight_block_size");
    if (block == nullptr || *block != Json::array({128, 128})) {
      in.refuse("weight_block_size",
                (block == nullptr                          ? "missing"
                 : block->is_array() && block->size() <= 4 ? block->dump()
                                                           : describe(*block)) +
                    " is not supported; supported: [128,128]");
    }
    config->fp8_blocks = true;
  }
  top.adopt(in.status());
}

DType read_dtype(Reader& in) {
  const char* name = in.find("dtype") != nullptr ? "dtype" : "torch_dtype";
  const std::string text = in.text_or(name, "bfloat16");
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    if (text == dtype_name(dtype)) {
      return dtype;
    }
  }
  in.refuse(name, quote_text(text) + " is not supported; supported: bfloat16, float16, float32");
  return DType::kBFloat16;
}

void check_experts(Reader& in, const ModelConfig& config) {
  const int64_t experts = config.n_routed_experts;
  const int64_t groups = config.n_group;
  if (experts % groups != 0) {
    in.fail("n_group", std::to_string(groups) + " does not divide n_routed_experts " +
                           std::to_string(experts));
  } else if (groups > 1 && experts / groups < 2) {
    in.fail("n_group", std::to_string(groups) +
                           " leaves one expert a group, but a group is "
                           "judged by its best two; n_routed_experts is " +
                           std::to_string(experts));
  }
  if (config.topk_group > groups) {
    in.fail("topk_group", std::to_string(config.topk_group) + ", expected at most n_group " +
                              std::to_string(groups));
  }
  const int64_t eligible = experts / groups * config.topk_group;
  if (config.num_experts_per_tok > eligible) {
    in.fail("num_experts_per_tok", std::to_string(config.num_experts_per_tok) +
                                       ", expected at most the " + std::to_string(eligible) +
                                       " experts of topk_group groups");
  }
}

Result<ModelConfig> parse(std::string_view text, const std::string& what) {
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(text, what));
  if (!root.is_object()) {
    return invalid_argument(what + ": " + describe(root) + ", expected an object");
  }
  const std::string where = what + ": ";
  Reader in(root, where);
  ModelConfig config;
  const Family* family = read_family(in, &config);
  if (family == nullptr) {
    return in.status();
  }
  // Quantisation first: for who has such a checkpoint it is the answer, whatever else is missing.
  read_quantization(in, where, &config);

  config.vocab_size = in.integer("vocab_size", 1, kVocabMax);
  config.hidden_size = in.integer("hidden_size", 1, kWidthMax);
  config.num_hidden_layers = in.integer("num_hidden_layers", 1, kLayersMax);
  config.num_attention_heads = in.integer("num_attention_heads", 1, kHeadsMax);
  config.q_lora_rank = in.integer("q_lora_rank", 1, kWidthMax);
  config.kv_lora_rank = in.integer("kv_lora_rank", 1, kWidthMax);
  config.qk_nope_head_dim = in.integer("qk_nope_head_dim", 1, kHeadDimMax);
  config.qk_rope_head_dim = in.integer("qk_rope_head_dim", 2, kHeadDimMax);
  config.v_head_dim = in.integer("v_head_dim", 1, kHeadDimMax);
  config.intermediate_size = in.integer("intermediate_size", 1, kWidthMax);
  config.moe_intermediate_size = in.integer("moe_intermediate_size", 1, kWidthMax);
  config.n_routed_experts = in.integer("n_routed_experts", 1, kExpertsMax);
  config.n_shared_experts = in.integer("n_shared_experts", 1, 64);
  config.num_experts_per_tok = in.integer("num_experts_per_tok", 1, kExpertsMax);
  if (family->groups_required) {
    config.n_group = in.integer("n_group", 1, kExpertsMax);
    config.topk_group = in.integer("topk_group", 1, kExpertsMax);
  } else {
    config.n_group = in.integer_or("n_group", 1, kExpertsMax, 1);
    config.topk_group = in.integer_or("topk_group", 1, kExpertsMax, 1);
  }
  config.index_n_heads = in.integer("index_n_heads", 1, kHeadsMax);
  config.index_head_dim = in.integer("index_head_dim", 2, kHeadDimMax);
  config.index_topk = in.integer("index_topk", 1, kPositionsMax);
  config.max_position_embeddings = in.integer("max_position_embeddings", 1, kPositionsMax);
  config.rms_norm_eps = in.number("rms_norm_eps", 1e-12, 1);
  config.norm_topk_prob = in.boolean_or("norm_topk_prob", true);
  config.routed_scaling_factor = in.number("routed_scaling_factor", 1e-6, 1e6);
  config.indexer_rope_interleave =
      in.boolean_or("indexer_rope_interleave", family->indexer_rope_interleave);
  config.tie_word_embeddings = in.boolean_or("tie_word_embeddings", false);
  config.dtype = read_dtype(in);

  in.only("hidden_act", "silu");
  in.only("attention_bias", false);
  in.only("mlp_bias", false);
  in.only("rope_interleave", true);
  in.only("scoring_func", "sigmoid");
  in.only("topk_method", "noaux_tc");
  if (!in.ok()) {
    return in.status();  // what follows divides by, and loops to, the numbers read so far
  }

  if (const Json* kinds = in.find("layer_types")) {
    read_layer_words(in, "layer_types", *kinds, config.num_hidden_layers,
                     "deepseek_sparse_attention", "deepseek_sparse_attention");
  }
  if (config.qk_rope_head_dim % 2 != 0) {
    in.fail("qk_rope_head_dim", std::to_string(config.qk_rope_head_dim) +
                                    ", expected an even number: rope turns pairs");
  }
  if (config.index_head_dim < config.qk_rope_head_dim) {
    in.fail("index_head_dim", std::to_string(config.index_head_dim) +
                                  ", expected at least qk_rope_head_dim " +
                                  std::to_string(config.qk_rope_head_dim));
  }
  const int64_t qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim;
  if (in.integer_or("qk_head_dim", 1, 2 * kHeadDimMax, qk_head_dim) != qk_head_dim) {
    in.fail("qk_head_dim",
            describe(*in.find("qk_head_dim")) +
                ", expected qk_nope_head_dim + qk_rope_head_dim = " + std::to_string(qk_head_dim));
  }
  check_experts(in, config);
  read_mlp_kinds(in, &config);
  read_indexer_kinds(in, &config);
  config.rope = read_rope(in, root, where);
  config.eos_token_ids = in.token_ids("eos_token_id", config.vocab_size);
  config.bos_token_id =
      static_cast<int32_t>(in.integer_or("bos_token_id", 0, config.vocab_size - 1, -1));
  if (!in.ok()) {
    return in.status();
  }
  return config;
}

Status merge_generation_config(const std::string& path, ModelConfig* config) {
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, kConfigBytesMax));
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(text, path));
  Reader in(root, path + ": ");
  for (const int32_t id : in.token_ids("eos_token_id", config->vocab_size)) {
    if (std::find(config->eos_token_ids.begin(), config->eos_token_ids.end(), id) ==
        config->eos_token_ids.end()) {
      config->eos_token_ids.push_back(id);
    }
  }
  if (config->bos_token_id < 0) {
    config->bos_token_id =
        static_cast<int32_t>(in.integer_or("bos_token_id", 0, config->vocab_size - 1, -1));
  }
  return in.status();
}

}  // namespace

Result<ModelConfig> parse_config(std::string_view json) { return parse(json, "config.json"); }

Result<ModelConfig> load_config(const std::string& model_dir) {
  LACUNA_ASSIGN_OR_RETURN(const ModelDir dir, list_model_dir(model_dir));
  if (!dir.has("config.json")) {
    return dir.missing("config.json");
  }
  LACUNA_ASSIGN_OR_RETURN(const std::string text,
                          read_file(dir.path("config.json"), kConfigBytesMax));
  LACUNA_ASSIGN_OR_RETURN(ModelConfig config, parse(text, dir.path("config.json")));
  if (dir.has("hf_quant_config.json")) {
    return unsupported(dir.path("hf_quant_config.json") +
                       ": ModelOpt quantisation (NVFP4, FP8) is not supported; " +
                       kFormatsThatLoad);
  }
  if (dir.has("generation_config.json")) {
    LACUNA_RETURN_IF_ERROR(merge_generation_config(dir.path("generation_config.json"), &config));
  }
  return config;
}

double attention_scale(const ModelConfig& config) {
  const double head_dim = static_cast<double>(config.qk_nope_head_dim + config.qk_rope_head_dim);
  const RopeConfig& rope = config.rope;
  double m = 1;
  if (rope.type == RopeConfig::Type::kYarn && rope.factor > 1) {
    m = 0.1 * rope.mscale_all_dim * std::log(rope.factor) + 1;
  }
  return m * m / std::sqrt(head_dim);
}

std::vector<double> rope_frequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const double width = static_cast<double>(config.qk_rope_head_dim);
  std::vector<double> frequencies(static_cast<size_t>(config.qk_rope_head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = std::pow(rope.theta, -2.0 * static_cast<double>(i) / width);
  }
  if (rope.type != RopeConfig::Type::kYarn) {
    return frequencies;
  }
  // The pair that makes `turns` rotations over the original context. Faster pairs than `low` stay,
  // slower ones than `high` are slowed by `factor`, those between are mixed.
  const auto pair_of = [&](double turns) {
    return width *
           std::log(static_cast<double>(rope.original_max_position) /
                    (2 * std::numbers::pi * turns)) /
           (2 * std::log(rope.theta));
  };
  const double low = std::max(std::floor(pair_of(rope.beta_fast)), 0.0);
  const double high = std::min(std::ceil(pair_of(rope.beta_slow)), width - 1);
  const double span = std::max(high - low, 1e-3);  // the usual guard against dividing by 0
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / span, 0.0, 1.0);
    frequencies[i] = frequencies[i] / rope.factor * ramp + frequencies[i] * (1 - ramp);
  }
  return frequencies;
}

}  // namespace lacuna
