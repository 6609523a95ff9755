// The flags that every command with an engine shares, and how it reports trouble.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lacuna/engine.h"

namespace CLI {
class App;
}

namespace lacuna::cli {

struct EngineFlags {
  std::string model;
  std::string device = "auto";
  std::string dtype = "bfloat16";
  std::string kv_cache_dtype = "auto";
  std::string index_cache_dtype = "auto";
  int64_t max_model_len = 0;
  int64_t max_num_batched_tokens = 1024;
  int64_t block_size = 64;
  int64_t max_num_seqs = 1;
  int64_t kv_cache_memory_bytes = 0;
  bool enable_prefix_caching = true;
  std::string chat_template;
  int threads = 0;
  std::vector<std::string> kernels;
  std::string tuning_file;
  std::string selection = "indexer";
  bool force_mqa = false;
  std::string prefill_lane = "auto";
  int64_t mha_keys_max = 0;
  bool enforce_eager = false;
  bool async_scheduling = true;
  bool check_sync = false;
  bool profile = false;  // not a flag: set by commands that report time by kernel
};

// `selection`: offer --selection, the deliberate mistakes (evaluation only).
void add_engine_flags(CLI::App& command, EngineFlags& flags, bool selection = false);

// Flags of an engine that serves several requests; besides add_engine_flags.
void add_serving_flags(CLI::App& command, EngineFlags& flags);

// The folder of the model that ships with the project; empty when it is not found.
std::string default_model_dir();

// Creates context and engine, telling the terminal what is loaded.
Result<std::unique_ptr<Engine>> make_engine(const EngineFlags& flags, bool quiet,
                                            bool skip_tokenizer = false);
// The line about what is loaded, for a command that tells it later: when the prompt is good too.
void print_loaded(const EngineFlags& flags, const Engine& engine);

// Prints "lacuna: <message>" on stderr as one line; the exit code of that kind of error (1, or 2
// for a bad argument).
int report(const Status& status);

}  // namespace lacuna::cli
