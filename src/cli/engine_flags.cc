// Flags to EngineOptions. Names are vLLM's, with the aliases that SGLang's and llama.cpp's users
// type.
#include "cli/engine_flags.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>

#include "cli/text.h"
#include "core/check.h"

namespace lacuna::cli {

void add_engine_flags(CLI::App& command, EngineFlags& flags, bool selection) {
  command
      .add_option("-m,--model,--model-path", flags.model,
                  "Model folder (config.json, safetensors, tokenizer.json); default: dsa-nano, "
                  "which ships with the project")
      ->check([](const std::string& folder) {
        // As from an unset variable: the default would be a surprise.
        return folder.empty() ? "empty, expected a model folder" : "";
      });
  command
      .add_option("--device", flags.device, "cpu, cuda, or auto: cuda where there is a usable GPU")
      ->capture_default_str();
  command.add_option("--dtype", flags.dtype, "Arithmetic: bfloat16 or float32")
      ->capture_default_str();
  command
      .add_option("--kv-cache-dtype", flags.kv_cache_dtype,
                  "Latent cache: auto, bfloat16, float32 or fp8_ds_mla")
      ->capture_default_str();
  command
      .add_option("--index-cache-dtype", flags.index_cache_dtype,
                  "Index key cache: auto, bfloat16, float32 or fp8")
      ->capture_default_str();
  command.add_option("-c,--max-model-len,--context-length", flags.max_model_len,
                     "Context in tokens; default: the model's");
  command
      .add_option("--max-num-batched-tokens,--chunked-prefill-size", flags.max_num_batched_tokens,
                  "Rows of a step; longer prompts run in chunks")
      ->capture_default_str();
  command.add_option("--block-size", flags.block_size, "Tokens of a cache block")
      ->capture_default_str();
  command.add_option("--threads", flags.threads, "CPU threads; 0: one per core")
      ->capture_default_str();
  command.add_option("--kernel", flags.kernels,
                     "Force a kernel: OPERATION=NAME (repeatable; lacuna info lists them)");
  command.add_option("--tuning-file", flags.tuning_file,
                     "On a GPU: the table that lacuna tune measured on it");
  command.add_flag("--force-mqa", flags.force_mqa, "Sparse MQA for every row, no dense lane");
  command
      .add_option("--prefill-lane", flags.prefill_lane,
                  "Lane of prompt rows beyond index_topk keys: auto, mqa or masked")
      ->capture_default_str();
  command
      .add_option("--mha-keys-max", flags.mha_keys_max,
                  "Un-absorbed keys that the MHA lanes hold at a time; 0: by the other sizes")
      ->capture_default_str();
  command.add_flag("--enforce-eager,--disable-cuda-graph", flags.enforce_eager,
                   "On a GPU: no CUDA graphs");
  command.add_flag("--async-scheduling,!--no-async-scheduling", flags.async_scheduling,
                   "On a GPU: launch a step before the tokens of the one before are read");
  command.add_flag("--check-sync", flags.check_sync,
                   "On a GPU: a step that makes the host wait for the device fails");
  if (selection) {
    command
        .add_option("--selection", flags.selection,
                    "Where key lists come from: indexer, or a deliberate mistake: random, "
                    "window (the last index_topk keys), dense (every key)")
        ->capture_default_str();
  }
}

void add_serving_flags(CLI::App& command, EngineFlags& flags) {
  command
      .add_option("--max-num-seqs,--max-running-requests", flags.max_num_seqs,
                  "Sequences that run at a time")
      ->capture_default_str();
  command.add_option(
      "--kv-cache-memory-bytes", flags.kv_cache_memory_bytes,
      "Memory of the caches; default: room for max-num-seqs contexts, at most 4 GiB");
  command.add_flag("--enable-prefix-caching,!--no-enable-prefix-caching,!--disable-radix-cache",
                   flags.enable_prefix_caching, "Keep and reuse the cache of common prefixes");
  command.add_option("--chat-template", flags.chat_template,
                     "A Jinja template or a file with one; default: the model's");
}

std::string default_model_dir() {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path binary = fs::read_symlink("/proc/self/exe", error);
  std::vector<fs::path> places;
  if (!error) {
    places.push_back(binary.parent_path().parent_path() / "share/lacuna/models/dsa-nano");
  }
  places.push_back(fs::path(LACUNA_SOURCE_MODELS) / "dsa-nano");
  for (const fs::path& place : places) {
    if (fs::exists(place / "config.json", error)) {
      return place.string();
    }
  }
  return {};
}

namespace {

Result<EngineOptions> to_options(const EngineFlags& flags) {
  EngineOptions options;
  options.model_dir = flags.model.empty() ? default_model_dir() : flags.model;
  if (options.model_dir.empty()) {
    return invalid_argument(
        "--model: the model that ships with the project was not found, name a "
        "model folder");
  }
  if (flags.dtype == "bfloat16" || flags.dtype == "bf16" || flags.dtype == "auto") {
    options.dtype = DType::kBFloat16;
  } else if (flags.dtype == "float32" || flags.dtype == "f32" || flags.dtype == "float") {
    options.dtype = DType::kFloat32;
  } else {
    return invalid_argument("--dtype: \"" + flags.dtype + "\", expected bfloat16 or float32");
  }
  options.device = flags.device;
  options.enforce_eager = flags.enforce_eager;
  options.async_scheduling = flags.async_scheduling;
  options.check_sync = flags.check_sync;
  options.kv_cache_dtype = flags.kv_cache_dtype;
  options.index_cache_dtype = flags.index_cache_dtype;
  options.max_model_len = flags.max_model_len;
  options.max_num_batched_tokens = flags.max_num_batched_tokens;
  options.block_size = flags.block_size;
  options.max_num_seqs = flags.max_num_seqs;
  options.kv_cache_memory_bytes = flags.kv_cache_memory_bytes;
  options.enable_prefix_caching = flags.enable_prefix_caching;
  options.chat_template = flags.chat_template;
  options.force_mqa = flags.force_mqa;
  options.prefill_lane = flags.prefill_lane;
  options.mha_keys_max = flags.mha_keys_max;
  options.profile = flags.profile;
  for (const std::string& kernel : flags.kernels) {
    const size_t equals = kernel.find('=');
    if (equals == std::string::npos || equals == 0 || equals + 1 == kernel.size()) {
      return invalid_argument("--kernel: \"" + kernel + "\", expected OPERATION=NAME");
    }
    options.kernels[kernel.substr(0, equals)] = kernel.substr(equals + 1);
  }
  using Kind = SelectionSource::Kind;
  if (flags.selection == "indexer") {
    options.selection.kind = Kind::kIndexer;
  } else if (flags.selection == "random") {
    options.selection.kind = Kind::kRandom;
    options.selection.seed = 1;
  } else if (flags.selection == "window") {
    options.selection.kind = Kind::kWindow;
  } else if (flags.selection == "dense") {
    options.selection.kind = Kind::kDense;
  } else {
    return invalid_argument("--selection: \"" + flags.selection +
                            "\", expected indexer, random, window or dense");
  }
  return options;
}

}  // namespace

Result<std::unique_ptr<Engine>> make_engine(const EngineFlags& flags, bool quiet,
                                            bool skip_tokenizer) {
  LACUNA_ASSIGN_OR_RETURN(EngineOptions options, to_options(flags));
  options.skip_tokenizer = skip_tokenizer;
  LACUNA_ASSIGN_OR_RETURN(const Context context,
                          Context::create({.num_threads = flags.threads,
                                           .use_cuda = flags.device != "cpu",
                                           .tuning_file = flags.tuning_file}));
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, Engine::create(context, options));
  if (!quiet) {
    print_loaded(flags, *engine);
  }
  return engine;
}

void print_loaded(const EngineFlags& flags, const Engine& engine) {
  const EngineInfo& info = engine.info();
  const std::string model = flags.model.empty() ? default_model_dir() : flags.model;
  fmt::print(stderr,
             "{}: {}, {} layers ({} with an indexer), {} heads, top-{}; weights {:.1f} MB, {} "
             "arithmetic; {} tokens of cache, {:.1f} MB ({}, {}); context {}\n",
             std::filesystem::path(model).filename().string(), info.architecture, info.num_layers,
             info.num_leader_layers, info.num_heads, info.index_topk, info.weight_bytes / 1e6,
             info.dtype, info.kv_cache_tokens, info.kv_cache_bytes / 1e6, info.kv_format,
             info.index_format, info.max_model_len);
}

int report(const Status& status) {
  fmt::print(stderr, "lacuna: {}\n", one_line(status.message()));
  return status.code() == StatusCode::kInvalidArgument ? 2 : 1;
}

}  // namespace lacuna::cli
