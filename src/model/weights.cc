// Finds and checks tensors, then places them: as views, as converted copies, or on a GPU through
// pinned buffers.
#include "model/weights.h"

#include <algorithm>
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

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A tensor on its way to where the kernels read it.
struct Placement {
  const SafetensorsEntry* entry;
  const SafetensorsEntry* block_scale;  // of FP8 values that lose their blocks; may be null
  DType dtype;                          // that it will have
  double factor;
  ConstTensorView* out;

  // Its bytes can be used as they are.
  bool verbatim() const { return dtype == entry->dtype && factor == 1.0 && block_scale == nullptr; }
  int64_t num_elements() const {
    int64_t count = 1;
    for (const int64_t extent : entry->shape) {
      count *= extent;
    }
    return count;
  }
  int64_t bytes() const { return num_elements() * size_bytes(dtype); }
};

inline void store_element(float value, float* to) { *to = value; }
inline void store_element(float value, Bf16* to) { *to = to_bf16(value); }

template <class From, class To>
void convert_from(const Placement& from, int64_t begin, int64_t count, To* to) {
  const From* data = reinterpret_cast<const From*>(from.entry->data.data());
  if (from.block_scale == nullptr) {
    for (int64_t i = 0; i < count; ++i) {
      store_element(static_cast<float>(double{to_float(data[begin + i])} * from.factor), to + i);
    }
    return;
  }
  const float* scales = reinterpret_cast<const float*>(from.block_scale->data.data());
  const int64_t width = from.entry->shape[1];
  const int64_t row_blocks = ceil_div(width, kWeightScaleBlock);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = (begin + i) / width;
    const int64_t k = (begin + i) % width;
    const double scale = scales[n / kWeightScaleBlock * row_blocks + k / kWeightScaleBlock];
    const double value = to_float(data[begin + i]);
    store_element(static_cast<float>(value * scale * from.factor), to + i);
  }
}

template <class To>
void convert_elements(const Placement& from, int64_t begin, int64_t count, To* to) {
  switch (from.entry->dtype) {
    case DType::kFloat32:
      return convert_from<float>(from, begin, count, to);
    case DType::kBFloat16:
      return convert_from<Bf16>(from, begin, count, to);
    case DType::kFloat16:
      return convert_from<Fp16>(from, begin, count, to);
    default:
      return convert_from<Fp8E4M3>(from, begin, count, to);
  }
}

// Elements [begin, begin + count) as they will be stored.
void write_elements(const Placement& from, int64_t begin, int64_t count, std::byte* to) {
  if (from.verbatim()) {
    const int64_t size = size_bytes(from.dtype);
    std::memcpy(to, from.entry->data.data() + begin * size, static_cast<size_t>(count * size));
  } else if (from.dtype == DType::kFloat32) {
    convert_elements(from, begin, count, reinterpret_cast<float*>(to));
  } else {
    convert_elements(from, begin, count, reinterpret_cast<Bf16*>(to));
  }
}

// Fills device memory from front to back through two pinned buffers: one is filled while the other
// is on its way.
class StagedUpload {
 public:
  StagedUpload(const Runtime* runtime, Device device) : runtime_(runtime), device_(device) {}
  StagedUpload(const StagedUpload&) = delete;
  StagedUpload& operator=(const StagedUpload&) = delete;
  ~StagedUpload() {
    if (stream_ != nullptr) {
      // The buffers may still be read. An error was told, or will be by the next call.
      static_cast<void>(runtime_->synchronize(device_.index, stream_));
      runtime_->destroy_stream(stream_);
    }
    for (Buffer& buffer : buffers_) {
      if (buffer.event != nullptr) {
        runtime_->destroy_event(buffer.event);
      }
      if (buffer.data != nullptr) {
        runtime_->free_pinned(buffer.data);
      }
    }
  }

  Status open() {
    LACUNA_ASSIGN_OR_RETURN(stream_, runtime_->create_stream(device_.index));
    for (Buffer& buffer : buffers_) {
      LACUNA_ASSIGN_OR_RETURN(void* data, runtime_->allocate_pinned(kBufferBytes));
      buffer.data = static_cast<std::byte*>(data);
      LACUNA_ASSIGN_OR_RETURN(buffer.event, runtime_->create_event(device_.index));
    }
    return ok_status();
  }

  // What is written from here on goes to `to` and onwards.
  Status begin(void* to) {
    LACUNA_RETURN_IF_ERROR(flush());
    to_ = static_cast<std::byte*>(to);
    return ok_status();
  }

  Status write(const Placement& placement) {
    const int64_t size = size_bytes(placement.dtype);
    const int64_t count = placement.num_elements();
    for (int64_t done = 0; done < count;) {
      if (kBufferBytes - used_ < size) {
        LACUNA_RETURN_IF_ERROR(flush());
      }
      const int64_t piece = std::min(count - done, (kBufferBytes - used_) / size);
      write_elements(placement, done, piece, buffers_[current_].data + used_);
      used_ += piece * size;
      done += piece;
    }
    return ok_status();
  }

  // Fewer zeros than a buffer holds.
  Status pad(int64_t bytes) {
    if (kBufferBytes - used_ < bytes) {
      LACUNA_RETURN_IF_ERROR(flush());
    }
    std::memset(buffers_[current_].data + used_, 0, static_cast<size_t>(bytes));
    used_ += bytes;
    return ok_status();
  }

  Status finish() {
    LACUNA_RETURN_IF_ERROR(flush());
    return runtime_->synchronize(device_.index, stream_);
  }

 private:
  // Large enough that a copy outlasts its start by far, small enough to be had anywhere.
  static constexpr int64_t kBufferBytes = int64_t{32} << 20;

  struct Buffer {
    std::byte* data = nullptr;
    void* event = nullptr;
    bool in_flight = false;
  };

  Status flush() {
    if (used_ == 0) {
      return ok_status();
    }
    Buffer& full = buffers_[current_];
    LACUNA_RETURN_IF_ERROR(runtime_->copy(to_, full.data, used_, stream_));
    LACUNA_RETURN_IF_ERROR(runtime_->record_event(full.event, stream_));
    full.in_flight = true;
    to_ += used_;
    used_ = 0;
    current_ = 1 - current_;
    Buffer& next = buffers_[current_];
    if (next.in_flight) {
      LACUNA_RETURN_IF_ERROR(runtime_->await_event(next.event));
      next.in_flight = false;
    }
    return ok_status();
  }

  const Runtime* runtime_;
  Device device_;
  void* stream_ = nullptr;
  Buffer buffers_[2];
  int current_ = 0;
  int64_t used_ = 0;
  std::byte* to_ = nullptr;
};

}  // namespace

class WeightLoader {
 public:
  WeightLoader(const Checkpoint& checkpoint, DType dtype, bool fp8_blocks, const Runtime* runtime,
               Device device, ModelWeights* weights)
      : checkpoint_(checkpoint),
        dtype_(dtype),
        fp8_blocks_(fp8_blocks),
        runtime_(runtime),
        device_(device),
        weights_(weights),
        upload_(runtime, device) {}

  Status open() { return device_.kind == DeviceKind::kCpu ? ok_status() : upload_.open(); }

  // A matrix of the arithmetic's type, or FP8 with its scales.
  Status matrix(const std::string& name, std::initializer_list<int64_t> shape, WeightMatrix* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, shape));
    if (entry->dtype != DType::kFloat8E4M3) {
      return plain_matrix(name, shape, &out->values);
    }
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* scale, find_scale(*entry));
    add({entry, nullptr, entry->dtype, 1.0, &out->values});
    add({scale, nullptr, DType::kFloat32, 1.0, &out->scale});
    return ok_status();
  }

  // A matrix of the arithmetic's type; FP8 values are multiplied by their scales.
  Status plain_matrix(const std::string& name, std::initializer_list<int64_t> shape,
                      ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, shape));
    const bool keep = entry->dtype == DType::kBFloat16 ||
                      (entry->dtype == DType::kFloat32 && dtype_ == DType::kFloat32);
    return convert(*entry, keep ? entry->dtype : dtype_, 1.0, out);
  }

  // A vector that stays as precise as it is stored.
  Status vector(const std::string& name, int64_t width, ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, {width}));
    const bool keep = entry->dtype == DType::kFloat32 || entry->dtype == DType::kBFloat16;
    return convert(*entry, keep ? entry->dtype : DType::kFloat32, 1.0, out);
  }

  Status as_float32(const std::string& name, std::initializer_list<int64_t> shape, double factor,
                    ConstTensorView* out) {
    LACUNA_ASSIGN_OR_RETURN(const SafetensorsEntry* entry, find(name, shape));
    return convert(*entry, DType::kFloat32, factor, out);
  }

  Status mlp(const std::string& prefix, int64_t hidden, int64_t width, MlpWeights* out) {
    LACUNA_RETURN_IF_ERROR(matrix(prefix + "gate_proj.weight", {hidden, width}, &out->gate));
    LACUNA_RETURN_IF_ERROR(matrix(prefix + "up_proj.weight", {hidden, width}, &out->up));
    return matrix(prefix + "down_proj.weight", {width, hidden}, &out->down);
  }

  // Places what was asked for since the last call. On a GPU it becomes one allocation, in the order
  // of the calls: experts, which have one shape, lie at equal distances.
  Status place() {
    LACUNA_RETURN_IF_ERROR(device_.kind == DeviceKind::kCpu ? place_on_cpu() : upload());
    pending_.clear();
    return ok_status();
  }

  Status finish() { return device_.kind == DeviceKind::kCpu ? ok_status() : upload_.finish(); }

 private:
  // Tensors of a group begin at multiples of this: enough for any load, and cuBLAS's ideal.
  static constexpr int64_t kAlignment = 256;

  Result<const SafetensorsEntry*> find(const std::string& name,
                                       std::initializer_list<int64_t> shape) {
    const std::span<const int64_t> wanted(shape.begin(), shape.size());
    const SafetensorsEntry* entry = checkpoint_.find(name);
    if (entry == nullptr) {
      return not_found("weights: tensor " + name + " is missing, expected shape " +
                       shape_text(wanted));
    }
    LACUNA_RETURN_IF_ERROR(entry->check_dtype());
    const bool is_fp8 = entry->dtype == DType::kFloat8E4M3;
    if (is_fp8 && !fp8_blocks_) {
      return unsupported("weights: tensor " + name +
                         " is FP8 (F8_E4M3), but config.json's quantization_config does not say in "
                         "which blocks; quant_method fp8 with weight_block_size [128, 128] loads");
    }
    if (!is_fp8 && entry->dtype != DType::kFloat32 && entry->dtype != DType::kBFloat16 &&
        entry->dtype != DType::kFloat16) {
      return unsupported("weights: tensor " + name + " has dtype " + entry->dtype_text +
                         ", expected BF16, F16, F32 or F8_E4M3");
    }
    if (!std::equal(entry->shape.begin(), entry->shape.end(), wanted.begin(), wanted.end())) {
      return invalid_argument("weights: tensor " + name + " has shape " + shape_text(entry->shape) +
                              ", config.json asks for " + shape_text(wanted));
    }
    return entry;
  }

  // The scales of an FP8 matrix.
  Result<const SafetensorsEntry*> find_scale(const SafetensorsEntry& entry) {
    if (entry.shape.size() != 2) {
      return unsupported("weights: tensor " + entry.name +
                         " is FP8 (F8_E4M3) and no matrix; BF16, F16 and F32 load");
    }
    LACUNA_ASSIGN_OR_RETURN(
        const SafetensorsEntry* scale,
        find(entry.name + "_scale_inv", {ceil_div(entry.shape[0], kWeightScaleBlock),
                                         ceil_div(entry.shape[1], kWeightScaleBlock)}));
    if (scale->dtype != DType::kFloat32) {
      return unsupported("weights: tensor " + scale->name + " has dtype " + scale->dtype_text +
                         ", expected F32");
    }
    return scale;
  }

  Status convert(const SafetensorsEntry& entry, DType dtype, double factor, ConstTensorView* out) {
    const SafetensorsEntry* block_scale = nullptr;
    if (entry.dtype == DType::kFloat8E4M3) {
      LACUNA_ASSIGN_OR_RETURN(block_scale, find_scale(entry));
    }
    add({&entry, block_scale, dtype, factor, out});
    return ok_status();
  }

  // Everything but the data is known at once.
  void add(const Placement& placement) {
    ConstTensorView view;
    view.dtype = placement.dtype;
    view.device = device_;
    view.rank = static_cast<int>(placement.entry->shape.size());
    int64_t count = 1;
    for (int d = view.rank - 1; d >= 0; --d) {
      view.shape[d] = placement.entry->shape[d];
      view.strides[d] = count;
      count *= view.shape[d];
    }
    *placement.out = view;
    pending_.push_back(placement);
  }

  Status place_on_cpu() {
    for (const Placement& placement : pending_) {
      if (placement.verbatim()) {
        placement.out->data = placement.entry->data.data();
        continue;
      }
      LACUNA_ASSIGN_OR_RETURN(DeviceMemory copy,
                              DeviceMemory::allocate(runtime_, device_.index, placement.bytes()));
      write_elements(placement, 0, placement.num_elements(), static_cast<std::byte*>(copy.data()));
      placement.out->data = copy.data();
      weights_->memory_.push_back(std::move(copy));
    }
    return ok_status();
  }

  Status upload() {
    int64_t bytes = 0;
    for (const Placement& placement : pending_) {
      bytes += ceil_div(placement.bytes(), kAlignment) * kAlignment;
    }
    LACUNA_ASSIGN_OR_RETURN(DeviceMemory memory,
                            DeviceMemory::allocate(runtime_, device_.index, bytes));
    std::byte* at = static_cast<std::byte*>(memory.data());
    LACUNA_RETURN_IF_ERROR(upload_.begin(at));
    for (const Placement& placement : pending_) {
      const int64_t padded = ceil_div(placement.bytes(), kAlignment) * kAlignment;
      LACUNA_RETURN_IF_ERROR(upload_.write(placement));
      LACUNA_RETURN_IF_ERROR(upload_.pad(padded - placement.bytes()));
      placement.out->data = at;
      at += padded;
    }
    weights_->memory_.push_back(std::move(memory));
    return ok_status();
  }

  const Checkpoint& checkpoint_;
  DType dtype_;
  bool fp8_blocks_;
  const Runtime* runtime_;
  Device device_;
  ModelWeights* weights_;
  StagedUpload upload_;
  std::vector<Placement> pending_;
};

int64_t ModelWeights::allocated_bytes() const {
  int64_t bytes = 0;
  for (const DeviceMemory& memory : memory_) {
    bytes += memory.bytes();
  }
  return bytes;
}

Result<ModelWeights> ModelWeights::load(const ModelConfig& config, const Checkpoint& checkpoint,
                                        DType dtype, const Runtime* runtime, Device device) {
  if (dtype != DType::kFloat32 && dtype != DType::kBFloat16) {
    return invalid_argument("dtype: " + std::string(dtype_name(dtype)) +
                            ", expected float32 or bfloat16");
  }
  ModelWeights weights;
  WeightLoader load(checkpoint, dtype, config.fp8_blocks, runtime, device, &weights);
  LACUNA_RETURN_IF_ERROR(load.open());
  const int64_t width = config.hidden_size;
  const int64_t heads = config.num_attention_heads;
  const int64_t d_qk = config.qk_nope_head_dim + config.qk_rope_head_dim;
  LACUNA_RETURN_IF_ERROR(load.plain_matrix("model.embed_tokens.weight", {config.vocab_size, width},
                                           &weights.embedding));
  LACUNA_RETURN_IF_ERROR(load.vector("model.norm.weight", width, &weights.final_norm));
  if (!config.tie_word_embeddings) {
    LACUNA_RETURN_IF_ERROR(
        load.plain_matrix("lm_head.weight", {config.vocab_size, width}, &weights.lm_head));
  }
  LACUNA_RETURN_IF_ERROR(load.place());
  if (config.tie_word_embeddings) {
    weights.lm_head = weights.embedding;
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
    LACUNA_RETURN_IF_ERROR(load.plain_matrix(
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
      LACUNA_RETURN_IF_ERROR(load.place());
      continue;
    }
    const std::string mlp = prefix + "mlp.";
    LACUNA_RETURN_IF_ERROR(
        load.plain_matrix(mlp + "gate.weight", {config.n_routed_experts, width}, &layer.router));
    LACUNA_RETURN_IF_ERROR(load.as_float32(mlp + "gate.e_score_correction_bias",
                                           {config.n_routed_experts}, 1.0, &layer.router_bias));
    std::vector<MlpWeights> experts(config.n_routed_experts);
    for (int64_t e = 0; e < config.n_routed_experts; ++e) {
      LACUNA_RETURN_IF_ERROR(load.mlp(mlp + "experts." + std::to_string(e) + ".",
                                      config.moe_intermediate_size, width, &experts[e]));
    }
    if (config.n_shared_experts > 0) {
      LACUNA_RETURN_IF_ERROR(load.mlp(mlp + "shared_experts.",
                                      config.n_shared_experts * config.moe_intermediate_size, width,
                                      &layer.shared_experts));
    }
    LACUNA_RETURN_IF_ERROR(load.place());
    for (const MlpWeights& expert : experts) {
      layer.experts.push_back({.gate = expert.gate.values,
                               .up = expert.up.values,
                               .down = expert.down.values,
                               .gate_scale = expert.gate.scale,
                               .up_scale = expert.up.scale,
                               .down_scale = expert.down.scale});
    }
  }
  LACUNA_RETURN_IF_ERROR(load.finish());
  return weights;
}

}  // namespace lacuna
