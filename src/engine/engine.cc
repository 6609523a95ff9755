// The step loop: schedule, plan, run, sample, postprocess. Everything is sized in create().
#include "lacuna/engine.h"

#include <algorithm>
#include <chrono>
#include <optional>

#include "attention/plan.h"
#include "core/check.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "model/chat_template.h"
#include "model/deepseek_v32.h"

namespace lacuna {
namespace {

static_assert(kNumRowLanes == kNumLanes);

// Logits of one call stay within this, so that prompt log-probabilities of a large vocabulary are
// computed in chunks.
constexpr int64_t kLogitsBytesMax = int64_t{64} << 20;

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

// The mask buffer holds every step's masks up to this size; larger steps take the sparse lane.
constexpr int64_t kMaskBytesMax = int64_t{128} << 20;

// What routes a step, and with it the sizes of the MHA lanes' buffers. `rows_max`: of a step.
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

Result<int64_t> count_blocks(const EngineOptions& options, const PagedKvCacheOptions& cache) {
  // Without a wish: room for every sequence at full length, but not more than this.
  constexpr int64_t kDefaultBytesMax = int64_t{4} << 30;
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
                 std::max(kDefaultBytesMax / block_bytes, blocks_of(options.max_model_len)));
  }
  if (num_blocks > INT32_MAX) {
    return invalid_argument("kv_cache_tokens: " + std::to_string(num_blocks) +
                            " blocks, expected fewer than 2^31");
  }
  return num_blocks;
}

// A forced kernel must exist, and under the name of its operation.
Status check_forced_kernels(const Context& context, const ForcedKernels& kernels) {
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
      for (const Backend* backend : context.state().backends) {
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

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::string_view row_lane_name(int lane) { return lane_name(static_cast<Lane>(lane)); }

struct Engine::State {
  State(const Context& context_in, const EngineOptions& options_in, Checkpoint checkpoint_in,
        std::optional<Tokenizer> tokenizer_in, int32_t num_blocks)
      : context(context_in),
        options(options_in),
        checkpoint(std::move(checkpoint_in)),
        tokenizer(std::move(tokenizer_in)),
        run(context, options.kernels),
        pool(num_blocks),
        scheduler({.rows_max = options.max_num_batched_tokens,
                   .sequences_max = options.max_num_seqs,
                   .prefix_caching = options.enable_prefix_caching,
                   .prefix_salt = options.prefix_salt}) {}

  int64_t rows_max() const;  // of a step
  // The largest steps that can come, run in measuring mode.
  Status measure();
  void measure_batch(int64_t rows, int64_t requests, int64_t num_keys);
  Status forward_step(const std::vector<ScheduledRows>& rows, std::vector<StepInfo>* infos);
  Status prompt_logprobs(const ScheduledRows& rows, int64_t first_row);
  Status sample();
  TokenEvent accept_token(Sequence& sequence, size_t row);
  void finish(int64_t id);

  Context context;
  EngineOptions options;
  Checkpoint checkpoint;
  std::optional<Tokenizer> tokenizer;
  // A model without a template runs; the reason is told to who asks for one.
  Result<ChatTemplate> chat_template = internal_error("chat_template: not loaded");
  OpRunner run;
  BlockPool pool;
  Scheduler scheduler;
  EngineInfo info;
  EngineCounters counters;
  RoutingLimits limits;
  std::unique_ptr<DeepseekV32> model;
  PagedKvCache cache;
  DeviceMemory workspace;
  DeviceMemory logits_memory;
  int64_t logits_rows_max = 0;
  int64_t next_id = 1;
  Tap tap;
  std::map<int64_t, RequestRecord> records;  // of finished requests

  // Of the step in progress; kept for their memory.
  std::vector<ScheduledRows> scheduled;
  std::vector<StepInfo> infos;
  Batch batch;
  AttentionPlan plan;
  Sampler sampler{{}};
  std::vector<int32_t> row_list;
};

Engine::Engine(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::create(const Context& context, const EngineOptions& given) {
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
  LACUNA_RETURN_IF_ERROR(check_forced_kernels(context, options.kernels));
  LACUNA_ASSIGN_OR_RETURN(const ModelConfig config, load_config(options.model_dir));
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
  std::optional<Tokenizer> tokenizer;
  if (!options.skip_tokenizer) {
    LACUNA_ASSIGN_OR_RETURN(tokenizer, Tokenizer::load(options.model_dir));
  }
  if (tokenizer.has_value() && tokenizer->vocab_size() > config.vocab_size) {
    return invalid_argument("tokenizer.json: has ids up to " +
                            std::to_string(tokenizer->vocab_size() - 1) +
                            ", config.json's vocab_size is " + std::to_string(config.vocab_size));
  }
  LACUNA_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(options.model_dir));
  const Device device = {DeviceKind::kCpu, 0};
  PagedKvCacheOptions cache_options{.device = device,
                                    .layer_has_indexer = config.layer_has_indexer,
                                    .block_size = options.block_size};
  LACUNA_ASSIGN_OR_RETURN(cache_options.latent_layout, latent_layout(config, options));
  LACUNA_ASSIGN_OR_RETURN(cache_options.index_layout, index_layout(config, options));
  LACUNA_ASSIGN_OR_RETURN(const int64_t num_blocks, count_blocks(options, cache_options));
  cache_options.num_blocks = num_blocks;
  auto state = std::make_unique<State>(context, options, std::move(checkpoint),
                                       std::move(tokenizer), static_cast<int32_t>(num_blocks));
  state->chat_template =
      ChatTemplate::load(options.model_dir, config.model_type, options.chat_template);
  if (!state->chat_template.ok() && !options.chat_template.empty()) {
    return state->chat_template.status();
  }
  const Runtime* runtime = nullptr;
  for (const Backend* backend : context.state().backends) {
    if (backend->device_kind == device.kind) {
      runtime = backend->runtime;
      break;
    }
  }
  LACUNA_CHECK(runtime != nullptr);
  LACUNA_ASSIGN_OR_RETURN(
      ModelWeights weights,
      ModelWeights::load(config, state->checkpoint, options.dtype, runtime, device));

  LACUNA_ASSIGN_OR_RETURN(state->cache, PagedKvCache::create(runtime, cache_options));

  const int64_t rows_max = state->rows_max();
  LACUNA_ASSIGN_OR_RETURN(state->limits, routing_limits(config, options, rows_max));
  state->sampler = Sampler(config.eos_token_ids);
  state->logits_rows_max = std::clamp<int64_t>(kLogitsBytesMax / (4 * config.vocab_size),
                                               std::min(rows_max, options.max_num_seqs), rows_max);
  LACUNA_ASSIGN_OR_RETURN(state->model,
                          DeepseekV32::create(context, runtime, config, std::move(weights),
                                              {.device = device,
                                               .dtype = options.dtype,
                                               .rows_max = rows_max,
                                               .requests_max = options.max_num_seqs,
                                               .model_len_max = options.max_model_len,
                                               .logits_rows_max = state->logits_rows_max,
                                               .mha_keys_max = state->limits.mha_keys_max,
                                               .chunked_rows_max = state->limits.chunked_rows_max,
                                               .mask_words_max = state->limits.mask_words_max}));
  LACUNA_RETURN_IF_ERROR(state->model->form_groups(state->cache));
  LACUNA_ASSIGN_OR_RETURN(state->logits_memory,
                          DeviceMemory::allocate(runtime, device.index,
                                                 4 * state->logits_rows_max * config.vocab_size));
  LACUNA_RETURN_IF_ERROR(state->measure());
  const int64_t workspace_bytes = state->run.workspace_bytes_max();
  LACUNA_ASSIGN_OR_RETURN(state->workspace,
                          DeviceMemory::allocate(runtime, device.index, workspace_bytes));
  state->run.set_timing(options.profile);
  state->run.set_launch({.workspace = state->workspace.data(), .workspace_bytes = workspace_bytes});

  EngineInfo& info = state->info;
  info.architecture = config.architecture;
  info.num_layers = config.num_hidden_layers;
  info.num_leader_layers =
      std::count(config.layer_has_indexer.begin(), config.layer_has_indexer.end(), true);
  info.num_heads = config.num_attention_heads;
  info.index_topk = config.index_topk;
  info.vocab_size = config.vocab_size;
  info.max_model_len = options.max_model_len;
  info.kv_cache_tokens = num_blocks * options.block_size;
  info.weight_bytes = state->checkpoint.total_bytes();
  info.kv_cache_bytes = num_blocks * PagedKvCache::block_bytes(cache_options);
  info.activation_bytes =
      state->model->buffer_bytes() + workspace_bytes + state->logits_memory.bytes();
  const DeviceInfo& device_info = context.state().devices.front();
  info.device = device_info.name + ", " + device_info.isa + ", " +
                std::to_string(device_info.num_threads) + " threads";
  info.dtype = std::string(dtype_name(options.dtype));
  info.kv_format = std::string(kv_format_name(cache_options.latent_layout.format));
  info.index_format = std::string(kv_format_name(cache_options.index_layout.format));
  return std::unique_ptr<Engine>(new Engine(std::move(state)));
}

int64_t Engine::State::rows_max() const {
  return std::min(options.max_num_batched_tokens, options.max_model_len * options.max_num_seqs);
}

Status Engine::State::measure() {
  run.set_measuring(true);
  const int64_t model_len = options.max_model_len;
  // Steps that the masked lane cannot hold take the sparse one.
  std::vector<RoutingLimits> routes = {limits};
  if (limits.masked == MaskedMha::kAlways) {
    routes.push_back(limits);
    routes.back().force_mqa = true;
  }
  const auto measure_forward = [&](int64_t rows, int64_t requests, int64_t num_keys) -> Status {
    measure_batch(rows, requests, num_keys);
    for (const RoutingLimits& route : routes) {
      plan_attention(batch, route, &plan);
      LACUNA_RETURN_IF_ERROR(
          model->forward(run, batch, host_tensors(batch, plan), plan, cache, options.selection));
    }
    return ok_status();
  };
  // Kernels may be chosen by the number of rows, so each power of two is asked: of one request and
  // of as many as there can be, at the shortest context (dense lane) and at the longest (sparse
  // lane).
  for (int64_t rows = 1;; rows = std::min(2 * rows, rows_max())) {
    for (const int64_t requests : {int64_t{1}, std::min(rows, options.max_num_seqs)}) {
      const int64_t rows_each = (rows + requests - 1) / requests;
      if (rows_each > model_len) {
        continue;
      }
      for (const int64_t seq_len :
           {std::max(rows_each, std::min(model_len, limits.index_topk)), model_len}) {
        LACUNA_RETURN_IF_ERROR(measure_forward(rows, requests, requests * seq_len));
      }
    }
    const int64_t logits_rows = std::min(rows, logits_rows_max);
    const ConstTensorView row_ids =
        view_of(static_cast<const int32_t*>(batch.positions.data()), {logits_rows});
    const TensorView out = view_of(static_cast<float*>(logits_memory.data()),
                                   {logits_rows, model->config().vocab_size});
    LACUNA_RETURN_IF_ERROR(model->logits(run, row_ids, out));
    LACUNA_RETURN_IF_ERROR(sampler.measure(run, out));
    if (rows == rows_max()) {
      break;
    }
  }
  // The dense lane's largest step: with contexts from earlier steps it has more keys than rows.
  for (const int64_t requests : {int64_t{1}, std::min(rows_max(), options.max_num_seqs)}) {
    const int64_t num_keys =
        std::min(limits.mha_keys_max, requests * std::min(model_len, limits.index_topk));
    LACUNA_RETURN_IF_ERROR(
        measure_forward(std::min(rows_max(), num_keys), std::min(requests, num_keys), num_keys));
  }
  run.set_measuring(false);
  return ok_status();
}

// `requests` sequences that share `rows` rows and `num_keys` tokens, both as evenly as they go.
void Engine::State::measure_batch(int64_t rows, int64_t requests, int64_t num_keys) {
  batch.clear();
  batch.table_width = (options.max_model_len + options.block_size - 1) / options.block_size;
  batch.block_table.assign(requests * batch.table_width, 0);
  batch.query_starts.push_back(0);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t count = rows / requests + (r < rows % requests ? 1 : 0);
    const int64_t seq_len = num_keys / requests + (r < num_keys % requests ? 1 : 0);
    batch.seq_lens.push_back(static_cast<int32_t>(seq_len));
    batch.num_decodes += count == 1 && seq_len == options.max_model_len ? 1 : 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t position = seq_len - count + i;
      batch.token_ids.push_back(0);
      batch.positions.push_back(static_cast<int32_t>(position));
      batch.visible_lengths.push_back(static_cast<int32_t>(position + 1));
      batch.request_ids.push_back(static_cast<int32_t>(r));
      batch.slot_mapping.push_back(position);
    }
    batch.query_starts.push_back(static_cast<int32_t>(batch.num_rows()));
  }
  // Decoding requests come first; those with one row more do not decode.
  batch.num_decodes = batch.num_decodes == requests ? static_cast<int>(requests) : 0;
}

const EngineInfo& Engine::info() const { return state_->info; }

EngineCounters Engine::counters() const {
  EngineCounters counters = state_->counters;
  counters.num_running = state_->scheduler.num_running();
  counters.num_waiting = state_->scheduler.num_waiting();
  counters.num_preemptions = state_->scheduler.num_preemptions();
  counters.prefix_queries = state_->scheduler.prefix_queries();
  counters.prefix_hits = state_->scheduler.prefix_hits();
  counters.blocks_total = state_->pool.num_blocks();
  counters.blocks_used = state_->pool.num_used();
  for (const auto& [name, use] : state_->run.uses()) {
    counters.kernel_calls[name] = use.calls;
    if (state_->options.profile) {
      counters.kernel_seconds[name] = use.seconds;
    }
  }
  return counters;
}

Result<std::vector<int32_t>> Engine::encode(std::string_view text) const {
  if (!state_->tokenizer.has_value()) {
    return invalid_argument("prompt: given as text, but the tokenizer was skipped; give token ids");
  }
  return state_->tokenizer->encode(text);
}

std::string Engine::decode(std::span<const int32_t> ids) const {
  return state_->tokenizer.has_value() ? state_->tokenizer->decode(ids) : std::string();
}

Result<std::string> Engine::apply_chat_template(std::string_view messages_json,
                                                std::string_view options_json) const {
  if (!state_->chat_template.ok()) {
    return state_->chat_template.status();
  }
  LACUNA_ASSIGN_OR_RETURN(const ChatOptions options, parse_chat_options(options_json));
  return state_->chat_template->render(messages_json, options);
}

std::string_view Engine::token_bytes(int32_t id) const {
  return state_->tokenizer.has_value() ? state_->tokenizer->token_bytes(id) : std::string_view();
}

void Engine::set_tap(Tap tap) { state_->tap = std::move(tap); }

Result<int64_t> Engine::submit(Request request) {
  State& s = *state_;
  const int64_t length = static_cast<int64_t>(request.prompt.size());
  if (length == 0) {
    return invalid_argument("prompt: no tokens, expected at least one");
  }
  if (length >= s.info.max_model_len) {
    return invalid_argument("prompt: " + std::to_string(length) + " tokens, the context of " +
                            std::to_string(s.info.max_model_len) +
                            " tokens (max_model_len) leaves no room for an answer");
  }
  if (length >= s.info.kv_cache_tokens) {
    return invalid_argument("prompt: " + std::to_string(length) + " tokens, the cache holds " +
                            std::to_string(s.info.kv_cache_tokens) + " (kv_cache_tokens)");
  }
  for (int64_t i = 0; i < length; ++i) {
    if (request.prompt[i] < 0 || request.prompt[i] >= s.info.vocab_size) {
      return invalid_argument("prompt: token " + std::to_string(i) + " is " +
                              std::to_string(request.prompt[i]) + ", expected 0 to " +
                              std::to_string(s.info.vocab_size - 1));
    }
  }
  for (const int32_t token : request.forced_tokens) {
    if (token < 0 || token >= s.info.vocab_size) {
      return invalid_argument("forced_tokens: " + std::to_string(token) + ", expected 0 to " +
                              std::to_string(s.info.vocab_size - 1));
    }
  }
  if (request.prompt_top_logprobs < 0 || request.prompt_top_logprobs > 20) {
    return invalid_argument("prompt_top_logprobs: " + std::to_string(request.prompt_top_logprobs) +
                            ", expected 0 to 20");
  }
  request.prompt_logprobs = request.prompt_logprobs || request.prompt_top_logprobs > 0;
  LACUNA_RETURN_IF_ERROR(check_sampling(request.sampling, s.info.vocab_size));
  if (!request.sampling.stop.empty() && !s.tokenizer.has_value()) {
    return invalid_argument(
        "stop: text needs the tokenizer, which was skipped; use stop_token_ids");
  }
  const int64_t id = s.next_id++;
  const int64_t answer_max = std::min(request.sampling.max_tokens, s.info.max_model_len - length);
  auto sequence = std::make_unique<Sequence>(id, std::move(request), s.tokenizer, &s.pool,
                                             s.options.block_size);
  sequence->tokens.reserve(length + answer_max);
  s.scheduler.add(std::move(sequence));
  return id;
}

void Engine::cancel(int64_t request_id) {
  if (Sequence* sequence = state_->scheduler.find(request_id)) {
    sequence->cancelled = true;
  }
}

bool Engine::has_work() const { return !state_->scheduler.empty(); }

RequestRecord Engine::take_record(int64_t request_id) {
  const auto found = state_->records.find(request_id);
  if (found == state_->records.end()) {
    return {};
  }
  RequestRecord record = std::move(found->second);
  state_->records.erase(found);
  return record;
}

Status Engine::State::forward_step(const std::vector<ScheduledRows>& rows,
                                   std::vector<StepInfo>* step_infos) {
  const auto start = std::chrono::steady_clock::now();
  fill_batch(rows, &batch);
  plan_attention(batch, limits, &plan);
  counters.schedule_seconds += seconds_since(start);
  Tap step_tap;
  const bool records_selection = std::any_of(rows.begin(), rows.end(), [](const ScheduledRows& r) {
    return r.sequence->request.record_selection;
  });
  if (tap || records_selection) {
    step_tap = [this, &rows](std::string_view name, int layer, const ConstTensorView& tensor) {
      if (tap) {
        tap(name, layer, tensor);
      }
      if (name != "topk") {
        return;
      }
      for (size_t r = 0; r < rows.size(); ++r) {
        if (!rows[r].sequence->request.record_selection) {
          continue;
        }
        std::vector<int32_t>& lists = rows[r].sequence->record.selected_keys[layer];
        // Rows of the dense lane come after the lists.
        const int64_t end = std::min<int64_t>(batch.query_starts[r + 1], tensor.shape[0]);
        for (int64_t t = batch.query_starts[r]; t < end; ++t) {
          const int32_t* list = tensor.as<int32_t>() + t * tensor.strides[0];
          lists.insert(lists.end(), list, list + tensor.shape[1]);
        }
      }
    };
  }
  LACUNA_RETURN_IF_ERROR(
      model->forward(run, batch, host_tensors(batch, plan), plan, cache, options.selection, step_tap));
  step_infos->assign(rows.size(), {});
  for (size_t r = 0; r < rows.size(); ++r) {
    StepInfo& info_of_step = (*step_infos)[r];
    info_of_step.decode = static_cast<int>(r) < batch.num_decodes;
    for (int64_t t = batch.query_starts[r]; t < batch.query_starts[r + 1]; ++t) {
      const Lane lane = t < plan.num_mqa_rows ? Lane::kSparseMqa : plan.prefill_lane;
      ++info_of_step.rows_by_lane[static_cast<int>(lane)];
      info_of_step.keys_read += keys_read(batch, plan, limits.index_topk, t);
      info_of_step.keys_visible += batch.visible_lengths[t];
      if (rows[r].sequence->request.record_selection && t >= plan.num_list_rows) {
        // The dense lane has no lists: every visible key was read.
        for (int layer = 0; layer < model->config().num_hidden_layers; ++layer) {
          if (model->config().layer_has_indexer[layer]) {
            std::vector<int32_t>& lists = rows[r].sequence->record.selected_keys[layer];
            lists.resize(lists.size() + limits.index_topk, -1);
          }
        }
      }
    }
    counters.keys_read += info_of_step.keys_read;
    counters.keys_visible += info_of_step.keys_visible;
    for (int lane = 0; lane < kNumLanes; ++lane) {
      counters.rows_by_lane[lane] += info_of_step.rows_by_lane[lane];
    }
  }
  return ok_status();
}

// `first_row`: the batch row of the sequence's first row in this step.
Status Engine::State::prompt_logprobs(const ScheduledRows& rows, int64_t first_row) {
  Sequence& sequence = *rows.sequence;
  // Row at position p predicts token p + 1; only prompt tokens count.
  const int64_t begin = sequence.num_computed;
  const int64_t end = std::min(begin + rows.num_rows, sequence.num_prompt() - 1);
  const int64_t vocab = model->config().vocab_size;
  for (int64_t first = begin; first < end; first += logits_rows_max) {
    const int64_t count = std::min(logits_rows_max, end - first);
    row_list.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      row_list[i] = static_cast<int32_t>(first_row + first - begin + i);
    }
    const TensorView out = view_of(static_cast<float*>(logits_memory.data()), {count, vocab});
    LACUNA_RETURN_IF_ERROR(
        model->logits(run, view_of(static_cast<const int32_t*>(row_list.data()), {count}), out));
    if (tap) {
      tap("prompt_logits", -1, out);
    }
    std::vector<float>& logprobs = sequence.record.prompt_logprobs;
    logprobs.resize(first + count);
    LACUNA_RETURN_IF_ERROR(run(TokenLogprobsArgs{
        .logits = out,
        .ids = view_of(static_cast<const int32_t*>(sequence.tokens.data() + first + 1), {count}),
        .out = view_of(logprobs.data() + first, {count})}));
    if (sequence.request.prompt_top_logprobs > 0) {
      std::vector<std::vector<TokenLogprob>> top;
      LACUNA_RETURN_IF_ERROR(most_likely(run, out, sequence.request.prompt_top_logprobs, &top));
      sequence.record.prompt_top_logprobs.resize(first);
      for (std::vector<TokenLogprob>& row : top) {
        sequence.record.prompt_top_logprobs.push_back(std::move(row));
      }
    }
  }
  return ok_status();
}

Status Engine::State::sample() {
  const int64_t num_logits = static_cast<int64_t>(batch.logits_rows.size());
  if (num_logits == 0) {
    return ok_status();
  }
  const TensorView logits =
      view_of(static_cast<float*>(logits_memory.data()), {num_logits, model->config().vocab_size});
  LACUNA_RETURN_IF_ERROR(model->logits(run, host_tensors(batch, plan).logits_rows, logits));
  if (tap) {
    tap("logits", -1, logits);
  }
  sampler.clear();
  for (const ScheduledRows& rows : scheduled) {
    if (rows.samples) {
      sampler.add(*rows.sequence);
    }
  }
  return sampler.draw(run, logits);
}

TokenEvent Engine::State::accept_token(Sequence& sequence, size_t row) {
  const int32_t token = sampler.ids()[row];
  TokenEvent event{.request_id = sequence.id,
                   .token_id = token,
                   .logprob = sampler.logprobs()[row],
                   .top_logprobs = sampler.top()[row]};
  const SamplingParams& params = sequence.request.sampling;
  sequence.tokens.push_back(token);
  ++counters.generated_tokens;
  const std::vector<int32_t>& eos = model->config().eos_token_ids;
  const bool ends = (!params.ignore_eos && std::find(eos.begin(), eos.end(), token) != eos.end()) ||
                    std::find(params.stop_token_ids.begin(), params.stop_token_ids.end(), token) !=
                        params.stop_token_ids.end();
  if (!ends || params.include_stop_in_text) {
    event.text = sequence.text.feed(token);
  }
  if (ends || sequence.text.stopped()) {
    event.finish = FinishReason::kStop;
  } else if (sequence.num_generated() >= params.max_tokens ||
             sequence.num_tokens() >= info.max_model_len ||
             sequence.num_tokens() >= info.kv_cache_tokens) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish != FinishReason::kNone) {
    event.text += sequence.text.flush();
  }
  return event;
}

// Takes a sequence out; its blocks are released with it.
void Engine::State::finish(int64_t id) {
  std::unique_ptr<Sequence> sequence = scheduler.remove(id);
  if (sequence != nullptr &&
      (sequence->request.prompt_logprobs || sequence->request.record_selection)) {
    records[id] = std::move(sequence->record);
  }
}

Result<std::vector<TokenEvent>> Engine::step() {
  State& s = *state_;
  std::vector<TokenEvent> events;
  const auto start = std::chrono::steady_clock::now();
  for (const std::unique_ptr<Sequence>& sequence : s.scheduler.take_cancelled()) {
    TokenEvent event{.request_id = sequence->id, .finish = FinishReason::kCancelled};
    event.text = sequence->text.flush();
    events.push_back(std::move(event));
  }
  Sequence* stuck = nullptr;
  s.scheduler.schedule(&s.scheduled, &stuck);
  s.counters.schedule_seconds += seconds_since(start);
  if (stuck != nullptr) {
    // The cache is full of this one sequence: its answer ends here.
    TokenEvent event{.request_id = stuck->id, .finish = FinishReason::kLength};
    event.text = stuck->text.flush();
    s.finish(stuck->id);
    events.push_back(std::move(event));
    return events;
  }
  if (s.scheduled.empty()) {
    return events;
  }
  events.reserve(events.size() + s.scheduled.size());
  auto run_step = [&]() -> Status {
    LACUNA_RETURN_IF_ERROR(s.forward_step(s.scheduled, &s.infos));
    for (size_t r = 0; r < s.scheduled.size(); ++r) {
      const ScheduledRows& rows = s.scheduled[r];
      if (rows.sequence->request.prompt_logprobs) {
        LACUNA_RETURN_IF_ERROR(s.prompt_logprobs(rows, s.batch.query_starts[r]));
      }
      s.counters.prompt_tokens += std::clamp<int64_t>(
          rows.sequence->num_prompt() - rows.sequence->num_computed, 0, rows.num_rows);
    }
    LACUNA_RETURN_IF_ERROR(s.sample());
    s.scheduler.commit(s.scheduled);
    ++s.counters.steps;
    return ok_status();
  };
  if (Status status = run_step(); !status.ok()) {
    for (const ScheduledRows& rows : s.scheduled) {
      s.scheduler.remove(rows.sequence->id);
    }
    return status;
  }
  const double seconds = seconds_since(start);
  s.counters.step_seconds += seconds;
  size_t sampled = 0;
  for (size_t r = 0; r < s.scheduled.size(); ++r) {
    Sequence& sequence = *s.scheduled[r].sequence;
    TokenEvent event{.request_id = sequence.id};
    if (s.scheduled[r].samples) {
      event = s.accept_token(sequence, sampled++);
    }
    event.step = s.infos[r];
    event.step.seconds = seconds;
    event.step.cached_tokens = std::exchange(sequence.num_cached, 0);
    if (event.finish != FinishReason::kNone) {
      s.finish(sequence.id);
    }
    events.push_back(std::move(event));
  }
  return events;
}

}  // namespace lacuna
