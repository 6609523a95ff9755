// Checks options and derives sizes from them.
#include "engine/setup.h"

#include <algorithm>
#include <string>

#include "core/check.h"

namespace lacuna {
namespace {

// The mask buffer holds every step's masks up to this size; larger steps take the sparse lane.
constexpr int64_t kMaskBytesMax = int64_t{128} << 20;

}  // namespace

Result<EngineOptions> resolve_options(const EngineOptions& given, const ModelConfig& config) {
  EngineOptions options = given;
  if (options.max_num_batched_tokens < 1 || options.max_num_batched_tokens > (1 << 20)) {
    return invalid_argument(
        "max_num_batched_tokens: " + std::to_string(options.max_num_batched_tokens) +
        ", expected 1 to 1048576");
  }
  if (options.block_size < 1 || options.block_size > 4096) {
    return invalid_argument("block_size: " + std::to_string(options.block_size) +
                            ", expected 1 to 4096");
  }
  if (options.max_model_len == 0) {
    options.max_model_len = config.max_position_embeddings;
  }
  if (options.max_model_len < 1 || options.max_model_len > config.max_position_embeddings) {
    return invalid_argument("max_model_len: " + std::to_string(options.max_model_len) +
                            ", expected 1 to max_position_embeddings " +
                            std::to_string(config.max_position_embeddings));
  }
  if (options.max_num_seqs < 1 || options.max_num_seqs > 65536) {
    return invalid_argument("max_num_seqs: " + std::to_string(options.max_num_seqs) +
                            ", expected 1 to 65536");
  }
  if (options.kv_cache_memory_bytes < 0 || options.kv_cache_tokens < 0) {
    return invalid_argument(
        "kv_cache_memory_bytes, kv_cache_tokens: " + std::to_string(options.kv_cache_memory_bytes) +
        ", " + std::to_string(options.kv_cache_tokens) + ", expected 0 (automatic) or a size");
  }
  if (options.check_sync && options.profile) {
    return invalid_argument(
        "check_sync: with profile, which waits for the device to read its clocks; one of them "
        "would work");
  }
  return options;
}

Result<const DeviceInfo*> choose_device(const ContextState& state, const EngineOptions& options) {
  if (options.device != "auto" && options.device != "cpu" && options.device != "cuda") {
    return invalid_argument("device: \"" + options.device + "\", expected cpu, cuda or auto");
  }
  const DeviceInfo* cpu = nullptr;
  const DeviceInfo* gpu = nullptr;
  for (const DeviceInfo& device : state.devices) {
    const DeviceInfo*& first = device.device.kind == DeviceKind::kCpu ? cpu : gpu;
    first = first == nullptr ? &device : first;
  }
  if (options.device == "cuda" && gpu == nullptr) {
    return unsupported("device: cuda, but there is no usable GPU: " + state.cuda_status +
                       "; cpu would work");
  }
  const DeviceInfo* chosen = options.device == "cpu" || gpu == nullptr ? cpu : gpu;
  if (chosen == nullptr) {
    return unsupported("device: " + options.device + ", which this context does not have");
  }
  return chosen;
}

const Runtime* runtime_of(const ContextState& state, DeviceKind kind) {
  for (const Backend* backend : state.backends) {
    if (backend->device_kind == kind) {
      return backend->runtime;
    }
  }
  return nullptr;
}

std::string describe_device(const DeviceInfo& device) {
  if (device.device.kind == DeviceKind::kCpu) {
    return device.name + ", " + device.isa + ", " + std::to_string(device.num_threads) + " threads";
  }
  return device.name + ", compute capability " + std::to_string(device.compute_capability / 10) +
         "." + std::to_string(device.compute_capability % 10) + ", " +
         std::to_string(device.sm_count) + " SMs";
}

Result<KvLayout> latent_layout(const ModelConfig& config, const EngineOptions& options) {
  std::string name = options.kv_cache_dtype;
  if (name == "auto") {
    name = options.dtype == DType::kFloat32 ? "float32" : "bfloat16";
  }
  if (name == "bfloat16" || name == "bf16") {
    return KvLayout::latent_bf16(config.kv_lora_rank, config.qk_rope_head_dim);
  }
  if (name == "float32" || name == "f32") {
    return KvLayout::latent_f32(config.kv_lora_rank, config.qk_rope_head_dim);
  }
  if (name == "fp8_ds_mla" || name == "fp8") {
    if (config.kv_lora_rank != kFp8DsMlaLatent ||
        (config.qk_rope_head_dim != kFp8DsMlaRope && config.qk_rope_head_dim != 0)) {
      return unsupported(
          "kv_cache_dtype: fp8_ds_mla holds latent 512 and rope 64 or 0, the model has " +
          std::to_string(config.kv_lora_rank) + " and " + std::to_string(config.qk_rope_head_dim) +
          "; bfloat16 and float32 would work");
    }
    return KvLayout::fp8_ds_mla(config.qk_rope_head_dim);
  }
  return invalid_argument("kv_cache_dtype: \"" + name +
                          "\", expected auto, bfloat16, float32 or fp8_ds_mla");
}

Result<KvLayout> index_layout(const ModelConfig& config, const EngineOptions& options) {
  std::string name = options.index_cache_dtype;
  if (name == "auto") {
    name = options.dtype == DType::kFloat32 ? "float32" : "bfloat16";
  }
  if (name == "bfloat16" || name == "bf16") {
    return KvLayout::index_bf16(config.index_head_dim);
  }
  if (name == "float32" || name == "f32") {
    return KvLayout::index_f32(config.index_head_dim);
  }
  if (name == "fp8") {
    return KvLayout::index_fp8(config.index_head_dim);
  }
  return invalid_argument("index_cache_dtype: \"" + name +
                          "\", expected auto, bfloat16, float32 or fp8");
}

Result<int64_t> count_blocks(const EngineOptions& options, const PagedKvCacheOptions& cache,
                             const DeviceInfo& device, int64_t weight_bytes) {
  // Without a wish: room for every sequence at full length, but not more than this. A GPU's memory
  // is for the weights and the cache, with a fifth left for buffers; the host's is not ours alone.
  constexpr int64_t kHostBytesMax = int64_t{4} << 30;
  const int64_t default_bytes_max = device.device.kind == DeviceKind::kCpu
                                        ? kHostBytesMax
                                        : device.memory_bytes / 5 * 4 - weight_bytes;
  const int64_t block_bytes = PagedKvCache::block_bytes(cache);
  const auto blocks_of = [&](int64_t tokens) {
    return (tokens + options.block_size - 1) / options.block_size;
  };
  int64_t num_blocks = 0;
  if (options.kv_cache_tokens > 0) {
    num_blocks = blocks_of(options.kv_cache_tokens);
  } else if (options.kv_cache_memory_bytes > 0) {
    num_blocks = options.kv_cache_memory_bytes / block_bytes;
    if (num_blocks < 1) {
      return invalid_argument(
          "kv_cache_memory_bytes: " + std::to_string(options.kv_cache_memory_bytes) +
          " holds no block, one takes " + std::to_string(block_bytes));
    }
  } else {
    num_blocks =
        std::min(options.max_num_seqs * blocks_of(options.max_model_len),
                 std::max(default_bytes_max / block_bytes, blocks_of(options.max_model_len)));
  }
  if (num_blocks > INT32_MAX) {
    return invalid_argument("kv_cache_tokens: " + std::to_string(num_blocks) +
                            " blocks, expected fewer than 2^31");
  }
  return num_blocks;
}

Result<RoutingLimits> routing_limits(const ModelConfig& config, const EngineOptions& options,
                                     int64_t rows_max) {
  const std::string& lane = options.prefill_lane;
  if (lane != "auto" && lane != "mqa" && lane != "masked") {
    return invalid_argument("prefill_lane: \"" + lane + "\", expected auto, mqa or masked");
  }
  if (options.force_mqa && lane == "masked") {
    return invalid_argument("prefill_lane: \"masked\" with force_mqa; one of them would work");
  }
  const bool dense = options.selection.kind == SelectionSource::Kind::kDense;
  const bool masked = lane == "masked" && !dense;
  if (options.mha_keys_max < 0 ||
      (masked && options.mha_keys_max > 0 && options.mha_keys_max < rows_max)) {
    return invalid_argument("mha_keys_max: " + std::to_string(options.mha_keys_max) +
                            ", expected 0 (automatic)" +
                            (masked ? " or at least the rows of a step, " + std::to_string(rows_max)
                                    : " or a number of keys"));
  }
  // Prompts that fit index_topk take the dense lane as long as a step's keys fit its buffers: those
  // of the rows that a step can hold and of one full list beside them.
  const int64_t dense_keys = std::min(options.max_model_len, config.index_topk);
  RoutingLimits limits = {.index_topk = config.index_topk,
                          .mha_keys_max = std::min(options.max_num_seqs * dense_keys,
                                                   options.max_num_batched_tokens + dense_keys),
                          .masked = masked ? MaskedMha::kAlways : MaskedMha::kAuto,
                          .force_mqa = options.force_mqa || lane == "mqa",
                          .force_dense = dense};
  if (dense) {
    limits.mha_keys_max = options.max_model_len * options.max_num_seqs;
  } else if (options.mha_keys_max > 0) {
    limits.mha_keys_max =
        std::min(options.mha_keys_max, options.max_model_len * options.max_num_seqs);
  }
  if (masked) {
    limits.mha_keys_max = std::max(limits.mha_keys_max, rows_max);
    limits.chunked_rows_max = rows_max;
    limits.mask_words_max =
        std::min(rows_max * mask_row_words(options.max_model_len), kMaskBytesMax / 4);
  }
  return limits;
}

Status check_forced_kernels(const ContextState& state, DeviceKind kind,
                            const ForcedKernels& kernels) {
  for (const auto& [op, kernel] : kernels) {
    bool op_known = false;
    bool kernel_known = false;
    std::string ops;
    std::string names;
    for_each_op(AllOps{}, [&]<class Args>(Args*) {
      ops += (ops.empty() ? "" : ", ") + std::string(Op<Args>::kName);
      if (op != Op<Args>::kName) {
        return;
      }
      op_known = true;
      for (const Backend* backend : state.backends) {
        if (backend->device_kind != kind) {
          continue;
        }
        for (const Kernel<Args>& candidate : Op<Args>::list(*backend)) {
          names += (names.empty() ? "" : ", ") + std::string(candidate.name);
          kernel_known = kernel_known || kernel == candidate.name;
        }
      }
    });
    if (!op_known) {
      return not_found("kernel: there is no operation \"" + op + "\"; there are " + ops);
    }
    if (!kernel_known) {
      return not_found("kernel: " + op + " has no kernel \"" + kernel + "\"; it has " + names);
    }
  }
  return ok_status();
}

}  // namespace lacuna
