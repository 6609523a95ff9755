// The step loop: schedule, plan, send, run, draw, fetch; and, when the device has got there, take
// the tokens. Everything is sized, warmed up and captured in create().
#include "lacuna/engine.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <optional>

#include "attention/plan.h"
#include "core/check.h"
#include "engine/prompt_scorer.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/sequence.h"
#include "engine/setup.h"
#include "engine/step_buffers.h"
#include "engine/step_graphs.h"
#include "model/chat_template.h"
#include "model/deepseek_v32.h"
#include "ops/row_steps.h"

namespace lacuna {
namespace {

static_assert(kNumRowLanes == kNumLanes);

// Logits of one call stay within this, so that prompt log-probabilities of a large vocabulary are
// computed in chunks.
constexpr int64_t kLogitsBytesMax = int64_t{64} << 20;

// Edits of logits that the buffers hold: those of any one row, and those of many rows with a part
// of the vocabulary each, up to this. A draw with more is made in groups of rows.
constexpr int64_t kAdjustmentsMax = 65536;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// While it lives the host must not wait for the device.
class SyncGuard {
 public:
  SyncGuard(const Runtime* runtime, bool forbids) : runtime_(forbids ? runtime : nullptr) {
    set(true);
  }
  ~SyncGuard() { set(false); }
  SyncGuard(const SyncGuard&) = delete;
  SyncGuard& operator=(const SyncGuard&) = delete;

 private:
  void set(bool forbidden) {
    if (runtime_ != nullptr) {
      runtime_->forbid_sync(forbidden);
    }
  }
  const Runtime* runtime_;
};

// A step from its launch until its tokens are known.
struct Flight {
  explicit Flight(int side_in) : side(side_in) {}

  int side;  // of the step buffers
  std::vector<ScheduledRows> scheduled;
  std::vector<int32_t> draw_rows;  // of each, or -1: yields no token
  std::vector<StepInfo> infos;
  Sampler sampler{{}};
  Clock::time_point start;
  EventHandle begin, end;    // of the step's work on the device
  bool is_recorded = false;  // something of it was or must be read by the host
};

// Rows a request, when all have the same number and it is at most kUniformRowsMax; else 0.
int64_t uniform_rows(const std::vector<ScheduledRows>& scheduled) {
  const int64_t rows = scheduled.front().num_rows;
  const bool same = std::all_of(scheduled.begin(), scheduled.end(),
                                [&](const ScheduledRows& r) { return r.num_rows == rows; });
  return same && rows <= kUniformRowsMax ? rows : 0;
}

bool needs_history(const SamplingParams& params) {
  return params.presence_penalty != 0 || params.frequency_penalty != 0 ||
         params.repetition_penalty != 1;
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
  ~State() {
    // Nothing may be freed under a step that is still under way.
    if (stream.get() != nullptr) {
      (void)runtime->synchronize(device.index, stream.get());
    }
  }

  bool on_host() const { return device.kind == DeviceKind::kCpu; }
  int64_t rows_max() const;  // of a step
  StepSizes capacity() const;
  TensorView logits(int64_t rows) const {
    return view_of(static_cast<float*>(logits_memory.data()), {rows, model->config().vocab_size},
                   device);
  }

  // Calls `visit` with `batch`, `plan` and a flight's sampler made for the largest steps of every
  // kind that can come. Their rows do nothing.
  template <class Visit>
  Status visit_steps(Visit visit);
  Status measure();
  Status warm_up();
  Status capture();
  void make_batch(int64_t rows, int64_t requests, int64_t num_keys);
  void make_uniform_batch(int64_t query_len, int64_t requests);

  // Of a step: launches everything.
  Status launch(Flight& flight);
  Status run_rows(Flight& flight, const Tap& step_tap);
  Status run_uniform(const StepTensors& tensors, int64_t requests);
  Status draw(Flight& flight, const StepSizes& sizes, const std::vector<DrawGroup>& groups);
  Status score_prompts(Flight& flight);
  void note_rows(Flight& flight);
  Tap host_tap(const Tap& to);
  Tap step_tap(const Flight& flight);
  // Waits for a step and takes its tokens.
  Status complete(Flight& flight, std::vector<TokenEvent>* events);
  void take_tokens(Flight& flight, double seconds, std::vector<TokenEvent>* events);
  TokenEvent accept_token(Sequence& sequence, const Flight& flight, int32_t row);
  bool may_run_ahead_of(const Flight& flight) const;
  void keep_while_in_flight(std::unique_ptr<Sequence> sequence);
  void finish(int64_t id);

  Context context;
  EngineOptions options;
  Checkpoint checkpoint;
  std::optional<Tokenizer> tokenizer;
  // A model without a template runs; the reason is told to who asks for one.
  Result<ChatTemplate> chat_template = internal_error("chat_template: not loaded");
  const Runtime* runtime = nullptr;
  Device device;
  StreamHandle stream;
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
  int64_t table_width_max = 0;
  std::unique_ptr<StepBuffers> buffers;
  std::unique_ptr<PromptScorer> prompt_scorer;
  // Padded numbers of requests by rows a request; empty on the CPU, where nothing is padded.
  std::array<std::vector<int64_t>, kUniformRowsMax + 1> padded;
  StepGraphs graphs;
  int64_t next_id = 1;
  Tap tap;
  bool taps_sparse_mla = false;
  std::vector<char> tapped;                  // a tensor that a tap sees, on the host
  Status tap_status;                         // of the step's copies for taps
  std::map<int64_t, RequestRecord> records;  // of finished requests

  // Steps take turns; at most the other one is under way when one is launched.
  std::array<Flight, StepBuffers::kSides> flights = {Flight(0), Flight(1)};
  int turn = 0;
  Flight* pending = nullptr;
  // Sequences that are finished or cancelled and have rows in a step under way.
  std::vector<std::unique_ptr<Sequence>> leaving;
  Clock::time_point last_known;  // when the last step's tokens were

  // Of the step in hand; kept for their memory.
  Batch batch;
  AttentionPlan plan;
};

Engine::Engine(std::unique_ptr<State> state) : state_(std::move(state)) {}
Engine::~Engine() = default;

Result<std::unique_ptr<Engine>> Engine::create(const Context& context, const EngineOptions& given) {
  const ContextState& devices = context.state();
  LACUNA_ASSIGN_OR_RETURN(const DeviceInfo* device_info, choose_device(devices, given));
  const Device device = device_info->device;
  LACUNA_RETURN_IF_ERROR(check_forced_kernels(devices, device.kind, given.kernels));
  LACUNA_ASSIGN_OR_RETURN(const ModelConfig config, load_config(given.model_dir));
  LACUNA_ASSIGN_OR_RETURN(const EngineOptions options, resolve_options(given, config));
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
  PagedKvCacheOptions cache_options{.device = device,
                                    .layer_has_indexer = config.layer_has_indexer,
                                    .block_size = options.block_size};
  LACUNA_ASSIGN_OR_RETURN(cache_options.latent_layout, latent_layout(config, options));
  LACUNA_ASSIGN_OR_RETURN(cache_options.index_layout, index_layout(config, options));
  LACUNA_ASSIGN_OR_RETURN(
      cache_options.num_blocks,
      count_blocks(options, cache_options, *device_info, checkpoint.total_bytes()));
  auto state =
      std::make_unique<State>(context, options, std::move(checkpoint), std::move(tokenizer),
                              static_cast<int32_t>(cache_options.num_blocks));
  State& s = *state;
  s.chat_template = ChatTemplate::load(options.model_dir, config.model_type, options.chat_template);
  if (!s.chat_template.ok() && !options.chat_template.empty()) {
    return s.chat_template.status();
  }
  const Runtime* runtime = runtime_of(devices, device.kind);
  LACUNA_CHECK(runtime != nullptr);
  s.runtime = runtime;
  s.device = device;
  LACUNA_ASSIGN_OR_RETURN(s.stream, make_stream(runtime, device.index));
  LACUNA_ASSIGN_OR_RETURN(ModelWeights weights,
                          ModelWeights::load(config, s.checkpoint, options.dtype, runtime, device));
  LACUNA_ASSIGN_OR_RETURN(s.cache, PagedKvCache::create(runtime, cache_options));

  const int64_t rows_max = s.rows_max();
  LACUNA_ASSIGN_OR_RETURN(s.limits, routing_limits(config, options, rows_max));
  s.logits_rows_max = std::clamp<int64_t>(kLogitsBytesMax / (4 * config.vocab_size),
                                          std::min(rows_max, options.max_num_seqs), rows_max);
  s.table_width_max = (options.max_model_len + options.block_size - 1) / options.block_size;
  const bool host_lists = options.selection.kind != SelectionSource::Kind::kIndexer &&
                          options.selection.kind != SelectionSource::Kind::kDense;
  LACUNA_ASSIGN_OR_RETURN(s.model,
                          DeepseekV32::create(context, runtime, config, std::move(weights),
                                              {.device = device,
                                               .dtype = options.dtype,
                                               .rows_max = rows_max,
                                               .requests_max = options.max_num_seqs,
                                               .model_len_max = options.max_model_len,
                                               .logits_rows_max = s.logits_rows_max,
                                               .mha_keys_max = s.limits.mha_keys_max,
                                               .chunked_rows_max = s.limits.chunked_rows_max,
                                               .mask_words_max = s.limits.mask_words_max,
                                               .stream = s.stream.get(),
                                               .host_lists = host_lists}));
  LACUNA_RETURN_IF_ERROR(s.model->form_groups(s.cache));
  LACUNA_ASSIGN_OR_RETURN(
      s.logits_memory,
      DeviceMemory::allocate(runtime, device.index, 4 * s.logits_rows_max * config.vocab_size));
  LACUNA_ASSIGN_OR_RETURN(s.buffers,
                          StepBuffers::create(runtime, device, s.stream.get(), s.capacity()));
  LACUNA_ASSIGN_OR_RETURN(s.prompt_scorer,
                          PromptScorer::create(runtime, device, s.stream.get(), s.logits_rows_max));
  for (Flight& flight : s.flights) {
    flight.sampler = Sampler(config.eos_token_ids);
    LACUNA_ASSIGN_OR_RETURN(flight.begin, make_event(runtime, device.index));
    LACUNA_ASSIGN_OR_RETURN(flight.end, make_event(runtime, device.index));
  }
  if (!s.on_host() && options.selection.kind == SelectionSource::Kind::kIndexer) {
    for (int64_t query_len = 1; query_len <= kUniformRowsMax; ++query_len) {
      s.padded[query_len] = padded_requests(query_len, options.max_num_seqs, rows_max);
    }
  }
  LACUNA_RETURN_IF_ERROR(s.measure());
  const int64_t workspace_bytes = s.run.workspace_bytes_max();
  LACUNA_ASSIGN_OR_RETURN(s.workspace,
                          DeviceMemory::allocate(runtime, device.index, workspace_bytes));
  s.run.set_launch({.stream = s.stream.get(),
                    .workspace = s.workspace.data(),
                    .workspace_bytes = workspace_bytes});
  if (!s.on_host()) {
    LACUNA_RETURN_IF_ERROR(s.warm_up());
    if (!options.enforce_eager && !options.profile && runtime->begin_capture != nullptr) {
      LACUNA_RETURN_IF_ERROR(s.capture());
    }
  }
  s.run.set_timing(options.profile, s.on_host() ? nullptr : runtime, device.index);

  EngineInfo& info = s.info;
  info.architecture = config.architecture;
  info.num_layers = config.num_hidden_layers;
  info.num_leader_layers =
      std::count(config.layer_has_indexer.begin(), config.layer_has_indexer.end(), true);
  info.num_heads = config.num_attention_heads;
  info.index_topk = config.index_topk;
  info.vocab_size = config.vocab_size;
  info.max_model_len = options.max_model_len;
  info.kv_cache_tokens = cache_options.num_blocks * options.block_size;
  info.weight_bytes = s.checkpoint.total_bytes();
  info.kv_cache_bytes = cache_options.num_blocks * PagedKvCache::block_bytes(cache_options);
  info.activation_bytes =
      s.model->buffer_bytes() + workspace_bytes + s.logits_memory.bytes() + s.buffers->bytes();
  info.device = describe_device(*device_info);
  info.dtype = std::string(dtype_name(options.dtype));
  info.kv_format = std::string(kv_format_name(cache_options.latent_layout.format));
  info.index_format = std::string(kv_format_name(cache_options.index_layout.format));
  info.num_graphs = static_cast<int64_t>(s.graphs.size());
  return std::unique_ptr<Engine>(new Engine(std::move(state)));
}

int64_t Engine::State::rows_max() const {
  return std::min(options.max_num_batched_tokens, options.max_model_len * options.max_num_seqs);
}

StepSizes Engine::State::capacity() const {
  const int64_t requests = std::min(options.max_num_seqs, rows_max());
  // Every request once with its own keys; and if contexts come in chunks, once more and whenever
  // one is cut by the end of a chunk.
  const int64_t chunks =
      limits.chunked_rows_max > 0
          ? options.max_num_seqs * options.max_model_len / std::max<int64_t>(1, limits.mha_keys_max)
          : 0;
  const int64_t entries = chunks > 0 ? 2 * requests + chunks + 1 : requests;
  const int64_t vocab = model->config().vocab_size;
  return {.rows = rows_max(),
          .requests = requests,
          .table_width = table_width_max,
          .draw_rows = requests,
          .mha_entries = entries,
          .mha_bounds = entries + chunks + 2,
          .adjustments = std::max(vocab, std::min(kAdjustmentsMax, requests * vocab / 4))};
}

// `requests` sequences that share `rows` rows and `num_keys` tokens, both as evenly as they go.
void Engine::State::make_batch(int64_t rows, int64_t requests, int64_t num_keys) {
  batch.clear();
  batch.table_width = table_width_max;
  batch.block_table.assign(requests * batch.table_width, 0);
  batch.query_starts.push_back(0);
  for (int64_t r = 0; r < requests; ++r) {
    const int64_t count = rows / requests + (r < rows % requests ? 1 : 0);
    const int64_t seq_len = num_keys / requests + (r < num_keys % requests ? 1 : 0);
    batch.seq_lens.push_back(static_cast<int32_t>(seq_len));
    batch.num_decodes += count == 1 && seq_len == options.max_model_len ? 1 : 0;
    batch.query_starts.push_back(static_cast<int32_t>(batch.query_starts.back() + count));
  }
  batch.token_ids.assign(rows, 0);
  batch.positions.assign(rows, 0);
  batch.visible_lengths.assign(rows, 0);
  batch.request_ids.assign(rows, -1);
  batch.slot_mapping.assign(rows, -1);
  // Decoding requests come first; those with one row more do not decode.
  batch.num_decodes = batch.num_decodes == requests ? static_cast<int>(requests) : 0;
}

void Engine::State::make_uniform_batch(int64_t query_len, int64_t requests) {
  batch.clear();
  batch.table_width = table_width_max;
  batch.query_starts.push_back(0);
  pad_batch(requests, query_len, &batch);
  batch.logits_rows.assign(requests, -1);
  plan_uniform(batch, query_len, options.max_model_len, &plan);
}

template <class Visit>
Status Engine::State::visit_steps(Visit visit) {
  const int64_t model_len = options.max_model_len;
  // Steps that the masked lane cannot hold take the sparse one.
  std::vector<RoutingLimits> routes = {limits};
  if (limits.masked == MaskedMha::kAlways) {
    routes.push_back(limits);
    routes.back().force_mqa = true;
  }
  const auto visit_routes = [&](int64_t rows, int64_t requests, int64_t num_keys) -> Status {
    make_batch(rows, requests, num_keys);
    for (const RoutingLimits& route : routes) {
      plan_attention(batch, route, &plan);
      LACUNA_RETURN_IF_ERROR(visit());
    }
    return ok_status();
  };
  // Kernels may be chosen by the number of rows, so every step of them is asked: of one request and
  // of as many as there can be, at the shortest context (dense lane) and at the longest (sparse
  // lane).
  for (int64_t rows = 1;; rows = next_rows(rows, rows_max())) {
    for (const int64_t requests : {int64_t{1}, std::min(rows, options.max_num_seqs)}) {
      const int64_t rows_each = (rows + requests - 1) / requests;
      if (rows_each > model_len) {
        continue;
      }
      for (const int64_t seq_len :
           {std::max(rows_each, std::min(model_len, limits.index_topk)), model_len}) {
        LACUNA_RETURN_IF_ERROR(visit_routes(rows, requests, requests * seq_len));
      }
    }
    if (rows == rows_max()) {
      break;
    }
  }
  // The dense lane's largest step: with contexts from earlier steps it has more keys than rows.
  for (const int64_t requests : {int64_t{1}, std::min(rows_max(), options.max_num_seqs)}) {
    const int64_t num_keys =
        std::min(limits.mha_keys_max, requests * std::min(model_len, limits.index_topk));
    LACUNA_RETURN_IF_ERROR(
        visit_routes(std::min(rows_max(), num_keys), std::min(requests, num_keys), num_keys));
  }
  for (int64_t query_len = 1; query_len <= kUniformRowsMax; ++query_len) {
    for (const int64_t requests : padded[query_len]) {
      make_uniform_batch(query_len, requests);
      LACUNA_RETURN_IF_ERROR(visit());
    }
  }
  return ok_status();
}

Status Engine::State::measure() {
  run.set_measuring(true);
  LACUNA_RETURN_IF_ERROR(visit_steps([&]() -> Status {
    const StepTensors tensors = buffers->tensors(step_sizes(batch, plan, 0, 0));
    return model->forward(run, batch, tensors.batch, plan, cache, options.selection);
  }));
  for (int64_t rows = 1;; rows = next_rows(rows, logits_rows_max)) {
    // Any list of as many rows will do: only its shape is looked at.
    const int64_t listed = std::min(rows, rows_max());
    const ConstTensorView row_ids =
        buffers->tensors({.rows = listed}).batch.positions.slice(0, 0, listed);
    LACUNA_RETURN_IF_ERROR(model->logits(run, row_ids, logits(listed)));
    const int64_t drawn = std::min(rows, buffers->drawn().shape[0]);
    LACUNA_RETURN_IF_ERROR(draw_tokens(
        run, logits(drawn), buffers->tensors({.draw_rows = drawn, .adjustments = 1}).draw,
        buffers->outputs(0, drawn, 1), true, kTopLogprobsMax));
    LACUNA_RETURN_IF_ERROR(prompt_scorer->measure(run, logits(listed)));
    if (rows == logits_rows_max) {
      break;
    }
  }
  run.set_measuring(false);
  return ok_status();
}

// Runs steps of every kind once, with rows that do nothing: the device loads its code and the
// libraries make their handles now and not in a step.
Status Engine::State::warm_up() {
  Flight& flight = flights[0];
  const auto send = [&](int64_t draw_rows) {
    flight.sampler.clear();
    for (int64_t row = 0; row < draw_rows; ++row) {
      flight.sampler.add_unused();
    }
    batch.logits_rows.assign(draw_rows, -1);
    return buffers->send(0, batch, plan, flight.sampler.lists(), {});
  };
  run.set_warming_up(true);
  const Status visited = visit_steps([&]() -> Status {
    LACUNA_RETURN_IF_ERROR(send(0));
    const StepTensors tensors = buffers->tensors(step_sizes(batch, plan, 0, 0));
    LACUNA_RETURN_IF_ERROR(
        model->forward(run, batch, tensors.batch, plan, cache, options.selection));
    return runtime->synchronize(device.index, stream.get());
  });
  run.set_warming_up(false);
  LACUNA_RETURN_IF_ERROR(visited);
  const int64_t draw_rows_max = buffers->drawn().shape[0];
  for (int64_t rows = 1;; rows = next_rows(rows, draw_rows_max)) {
    make_batch(rows, rows, rows);
    plan_attention(batch, limits, &plan);
    LACUNA_RETURN_IF_ERROR(send(rows));
    const StepTensors tensors = buffers->tensors(step_sizes(batch, plan, rows, 0));
    LACUNA_RETURN_IF_ERROR(run(PickTokensArgs{.given = tensors.batch.token_ids,
                                              .sources = tensors.sources,
                                              .drawn = buffers->drawn(),
                                              .out = tensors.picked_tokens}));
    LACUNA_RETURN_IF_ERROR(model->logits(run, tensors.batch.logits_rows, logits(rows)));
    LACUNA_RETURN_IF_ERROR(draw_tokens(run, logits(rows), tensors.draw,
                                       buffers->outputs(0, rows, 0), true, kTopLogprobsMax));
    // An edit of no row.
    const ConstTensorView none = tensors.batch.logits_rows.slice(0, 0, 1);
    LACUNA_RETURN_IF_ERROR(
        run(AdjustLogitsArgs{.logits = logits(rows),
                             .rows = none,
                             .ids = none,
                             .repetition = tensors.draw.uniform.slice(0, 0, 1),
                             .add = tensors.draw.uniform.slice(0, 0, 1),
                             .saved = buffers->outputs(0, rows, 1).adjust_saved}));
    LACUNA_RETURN_IF_ERROR(buffers->fetch(0, true));
    LACUNA_RETURN_IF_ERROR(buffers->await(0).status());
    if (rows == draw_rows_max) {
      break;
    }
  }
  return runtime->synchronize(device.index, stream.get());
}

Status Engine::State::capture() {
  Flight& flight = flights[0];
  for (int64_t query_len = 1; query_len <= kUniformRowsMax; ++query_len) {
    for (const int64_t requests : padded[query_len]) {
      make_uniform_batch(query_len, requests);
      flight.sampler.clear();
      for (int64_t row = 0; row < requests; ++row) {
        flight.sampler.add_unused();
      }
      const StepTensors tensors = buffers->tensors(step_sizes(batch, plan, requests, 0));
      LACUNA_RETURN_IF_ERROR(buffers->send(0, batch, plan, flight.sampler.lists(), {}));
      // Once for real, so that nothing is done for the first time under capture.
      LACUNA_RETURN_IF_ERROR(run_uniform(tensors, requests));
      LACUNA_RETURN_IF_ERROR(runtime->synchronize(device.index, stream.get()));
      const OpRunner::Uses before = run.uses();
      LACUNA_RETURN_IF_ERROR(runtime->begin_capture(stream.get()));
      const Status captured = run_uniform(tensors, requests);
      Result<void*> graph = runtime->end_capture(stream.get());
      LACUNA_RETURN_IF_ERROR(captured);
      LACUNA_RETURN_IF_ERROR(graph.status());
      graphs[{query_len, requests}] = {GraphHandle(runtime, *graph), run.take_calls_since(before)};
    }
  }
  return runtime->synchronize(device.index, stream.get());
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
  counters.device_waits += state_->prompt_scorer->num_waits();
  for (const auto& [name, use] : state_->run.uses()) {
    counters.kernel_calls[name] = use.calls;
    if (state_->options.profile) {
      counters.kernel_seconds[name] = use.seconds;
      counters.op_seconds[use.op] += use.seconds;
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

void Engine::set_sparse_mla_tap(SparseMlaTap tap) {
  State& s = *state_;
  s.taps_sparse_mla = tap != nullptr;
  if (!s.taps_sparse_mla) {
    s.run.set_sparse_mla_watch({});
    return;
  }
  s.run.set_sparse_mla_watch([&s, tap = std::move(tap)](int layer, const SparseMlaArgs& args,
                                                        const char* kernel) {
    if (!s.on_host()) {
      ++s.counters.device_waits;
      if (Status status = s.runtime->synchronize(s.device.index, s.stream.get()); !status.ok()) {
        s.tap_status = status;
        return;
      }
    }
    tap({.step = s.counters.steps, .layer = layer, .args = args, .kernel = kernel});
  });
}

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
  if (s.options.check_sync && (request.prompt_logprobs || request.record_selection)) {
    return invalid_argument(
        std::string(request.prompt_logprobs ? "prompt_logprobs" : "record_selection") +
        ": the host waits for the device to record it, which check_sync "
        "forbids; one of them would work");
  }
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

bool Engine::has_work() const { return !state_->scheduler.empty() || state_->pending != nullptr; }

RequestRecord Engine::take_record(int64_t request_id) {
  const auto found = state_->records.find(request_id);
  if (found == state_->records.end()) {
    return {};
  }
  RequestRecord record = std::move(found->second);
  state_->records.erase(found);
  return record;
}

// A tap that sees host memory. What the engine's own tap leaves there goes back to the device.
Tap Engine::State::host_tap(const Tap& to) {
  if (on_host()) {
    return to;
  }
  return [this, to](std::string_view name, int layer, const TensorView& tensor) {
    int64_t span = 1;
    for (int d = 0; d < tensor.rank; ++d) {
      span += (tensor.shape[d] - 1) * tensor.strides[d];
    }
    const int64_t bytes = tensor.num_elements() == 0 ? 0 : span * size_bytes(tensor.dtype);
    tapped.resize(std::max<int64_t>(bytes, 1));
    ++counters.device_waits;
    Status status = runtime->copy(tapped.data(), tensor.data, bytes, stream.get());
    if (status.ok()) {
      status = runtime->synchronize(device.index, stream.get());
    }
    if (!status.ok()) {
      tap_status = status;
      return;
    }
    TensorView view = tensor;
    view.data = tapped.data();
    view.device = {};
    to(name, layer, view);
    if (tap) {
      status = runtime->copy(tensor.data, tapped.data(), bytes, stream.get());
      tap_status = status.ok() ? tap_status : status;
    }
  };
}

// What the rows of a step are asked to show: to the engine's tap, and to requests' records.
Tap Engine::State::step_tap(const Flight& flight) {
  const std::vector<ScheduledRows>& rows = flight.scheduled;
  const bool records_selection = std::any_of(rows.begin(), rows.end(), [](const ScheduledRows& r) {
    return r.sequence->request.record_selection;
  });
  if (!tap && !records_selection) {
    return {};
  }
  const Tap record = [this, &rows](std::string_view name, int layer, const TensorView& tensor) {
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
  if (tap) {
    return host_tap(record);
  }
  // Only lists are recorded: nothing else is worth a wait.
  return [filtered = host_tap(record)](std::string_view name, int layer, const TensorView& tensor) {
    if (name == "topk") {
      filtered(name, layer, tensor);
    }
  };
}

// What attention will have done for each request, from the plan.
void Engine::State::note_rows(Flight& flight) {
  const std::vector<ScheduledRows>& rows = flight.scheduled;
  flight.infos.assign(rows.size(), {});
  for (size_t r = 0; r < rows.size(); ++r) {
    StepInfo& step = flight.infos[r];
    step.decode = static_cast<int>(r) < batch.num_decodes;
    for (int64_t t = batch.query_starts[r]; t < batch.query_starts[r + 1]; ++t) {
      const Lane lane = t < plan.num_mqa_rows ? Lane::kSparseMqa : plan.prefill_lane;
      ++step.rows_by_lane[static_cast<int>(lane)];
      step.keys_read += keys_read(batch, plan, limits.index_topk, t);
      step.keys_visible += batch.visible_lengths[t];
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
    counters.keys_read += step.keys_read;
    counters.keys_visible += step.keys_visible;
    for (int lane = 0; lane < kNumLanes; ++lane) {
      counters.rows_by_lane[lane] += step.rows_by_lane[lane];
    }
  }
}

// The launches that a graph holds: all but edits, forced tokens and alternatives.
Status Engine::State::run_uniform(const StepTensors& tensors, int64_t requests) {
  BatchTensors inputs = tensors.batch;
  LACUNA_RETURN_IF_ERROR(run(PickTokensArgs{.given = inputs.token_ids,
                                            .sources = tensors.sources,
                                            .drawn = buffers->drawn(),
                                            .out = tensors.picked_tokens}));
  inputs.token_ids = tensors.picked_tokens;
  LACUNA_RETURN_IF_ERROR(model->forward(run, batch, inputs, plan, cache, options.selection));
  LACUNA_RETURN_IF_ERROR(model->logits(run, inputs.logits_rows, logits(requests)));
  DrawInputs draw = tensors.draw;
  draw.adjust_rows = {};
  return draw_tokens(run, logits(requests), draw, buffers->outputs(0, requests, 0), false, 0);
}

// Draws from the logits, the edits in groups.
Status Engine::State::draw(Flight& flight, const StepSizes& sizes,
                           const std::vector<DrawGroup>& groups) {
  const Sampler& sampler = flight.sampler;
  for (const DrawGroup& group : groups) {
    if (&group != &groups.front()) {
      LACUNA_RETURN_IF_ERROR(buffers->send_adjustments(flight.side, sizes, sampler.lists(), group));
    }
    StepSizes group_sizes = sizes;
    group_sizes.adjustments = group.num_adjustments;
    DrawInputs inputs = buffers->tensors(group_sizes).draw;
    for (ConstTensorView* list :
         {&inputs.temperature, &inputs.top_p, &inputs.min_p, &inputs.uniform, &inputs.top_k,
          &inputs.forced, &inputs.forced_sources}) {
      *list = list->slice(0, group.first_row, group.num_rows);
    }
    DrawOutputs outputs = buffers->outputs(group.first_row, group.num_rows, group.num_adjustments);
    const TensorView rows = logits(sizes.draw_rows).slice(0, group.first_row, group.num_rows);
    LACUNA_RETURN_IF_ERROR(
        draw_tokens(run, rows, inputs, outputs, sampler.forces(), sampler.num_top()));
  }
  return ok_status();
}

// Row at position p predicts token p + 1; only prompt tokens count.
Status Engine::State::score_prompts(Flight& flight) {
  for (size_t r = 0; r < flight.scheduled.size(); ++r) {
    const ScheduledRows& rows = flight.scheduled[r];
    Sequence& sequence = *rows.sequence;
    const int64_t begin = sequence.num_computed;
    const int64_t end = std::min(begin + rows.num_rows, sequence.num_prompt() - 1);
    if (!sequence.request.prompt_logprobs || begin >= end) {
      continue;
    }
    // A preempted sequence scores its prompt anew.
    sequence.record.prompt_logprobs.resize(begin);
    sequence.record.prompt_top_logprobs.resize(sequence.request.prompt_top_logprobs > 0 ? begin
                                                                                        : 0);
    LACUNA_RETURN_IF_ERROR(prompt_scorer->score(
        run, *model, logits(logits_rows_max), batch.query_starts[r],
        std::span(sequence.tokens).subspan(begin + 1, end - begin),
        sequence.request.prompt_top_logprobs, tap ? host_tap(tap) : Tap(), &sequence.record));
  }
  return ok_status();
}

// Everything that the device does for the flight's scheduled rows, from the copy of the inputs to
// the copy of the results.
Status Engine::State::run_rows(Flight& flight, const Tap& tap_of_step) {
  const Clock::time_point start = Clock::now();
  const int64_t num_requests = static_cast<int64_t>(flight.scheduled.size());
  // What keeps a step from having a fixed shape, or null.
  const char* reason = nullptr;
  int64_t requests = num_requests;
  const int64_t query_len = uniform_rows(flight.scheduled);
  if (!on_host()) {
    if (flight.is_recorded) {
      reason = "recorded";
    } else if (padded[1].empty()) {
      reason = "selection";
    } else if (query_len == 0) {
      reason = "ragged";
    } else if (query_len > 1 && limits.masked == MaskedMha::kAlways) {
      reason = "masked lane";
    } else {
      const std::vector<int64_t>& sizes = padded[query_len];
      const auto size = std::lower_bound(sizes.begin(), sizes.end(), num_requests);
      if (size == sizes.end()) {
        reason = "large";
      } else {
        requests = *size;
      }
    }
  }
  const bool uniform = !on_host() && reason == nullptr;

  fill_batch(flight.scheduled, &batch, uniform ? table_width_max : 0);
  flight.sampler.clear();
  flight.draw_rows.assign(num_requests, -1);
  if (uniform) {
    // A row of logits for every request, whether or not it yields a token.
    batch.logits_rows.assign(requests, -1);
    for (int64_t r = 0; r < requests; ++r) {
      if (r < num_requests && flight.scheduled[r].samples) {
        batch.logits_rows[r] = batch.query_starts[r + 1] - 1;
        flight.draw_rows[r] = static_cast<int32_t>(r);
        flight.sampler.add(*flight.scheduled[r].sequence);
      } else {
        flight.sampler.add_unused();
      }
    }
    pad_batch(requests, query_len, &batch);
    plan_uniform(batch, query_len, options.max_model_len, &plan);
    counters.padded_rows += (requests - num_requests) * query_len;
  } else {
    plan_attention(batch, limits, &plan);
    int32_t row = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      if (flight.scheduled[r].samples) {
        flight.draw_rows[r] = row++;
        flight.sampler.add(*flight.scheduled[r].sequence);
      }
    }
  }
  const Sampler& sampler = flight.sampler;
  const int64_t draw_rows = sampler.lists().num_rows();
  const std::vector<DrawGroup> groups = sampler.groups(buffers->adjustments_max());
  const StepSizes sizes = step_sizes(batch, plan, draw_rows, groups.front().num_adjustments);
  LACUNA_RETURN_IF_ERROR(buffers->send(flight.side, batch, plan, sampler.lists(), groups.front()));
  const StepTensors tensors = buffers->tensors(sizes);
  counters.schedule_seconds += seconds_since(start);

  LACUNA_RETURN_IF_ERROR(runtime->record_event(flight.begin.get(), stream.get()));
  bool drawn = false;
  if (uniform) {
    const auto graph = graphs.find({query_len, requests});
    if (graph != graphs.end()) {
      LACUNA_RETURN_IF_ERROR(runtime->launch_graph(graph->second.graph.get(), stream.get()));
      OpRunner::count(graph->second.calls);
      ++counters.graph_steps;
    } else {
      LACUNA_RETURN_IF_ERROR(run_uniform(tensors, requests));
      reason = options.profile ? "profile" : "enforced";
    }
    drawn = sampler.lists().num_adjustments() == 0 && !sampler.forces() && sampler.num_top() == 0;
  } else {
    BatchTensors inputs = tensors.batch;
    if (!batch.token_sources.empty()) {
      LACUNA_RETURN_IF_ERROR(run(PickTokensArgs{.given = inputs.token_ids,
                                                .sources = tensors.sources,
                                                .drawn = buffers->drawn(),
                                                .out = tensors.picked_tokens}));
      inputs.token_ids = tensors.picked_tokens;
    }
    LACUNA_RETURN_IF_ERROR(
        model->forward(run, batch, inputs, plan, cache, options.selection, tap_of_step));
    LACUNA_RETURN_IF_ERROR(score_prompts(flight));
    if (draw_rows > 0) {
      LACUNA_RETURN_IF_ERROR(model->logits(run, inputs.logits_rows, logits(draw_rows)));
      if (tap) {
        host_tap(tap)("logits", -1, logits(draw_rows));
      }
    }
    drawn = draw_rows == 0;
  }
  if (!drawn) {
    LACUNA_RETURN_IF_ERROR(draw(flight, sizes, groups));
  }
  LACUNA_RETURN_IF_ERROR(runtime->record_event(flight.end.get(), stream.get()));
  LACUNA_RETURN_IF_ERROR(buffers->fetch(flight.side, sampler.num_top() > 0));
  if (reason != nullptr) {
    ++counters.eager_steps[reason];
  }
  return tap_status;
}

Status Engine::State::launch(Flight& flight) {
  const SyncGuard guard(runtime, options.check_sync);
  tap_status = ok_status();
  const Tap tap_of_step = step_tap(flight);
  flight.is_recorded =
      tap_of_step || taps_sparse_mla ||
      std::any_of(flight.scheduled.begin(), flight.scheduled.end(), [](const ScheduledRows& rows) {
        const Sequence& sequence = *rows.sequence;
        return sequence.request.prompt_logprobs && sequence.num_computed < sequence.num_prompt();
      });
  LACUNA_RETURN_IF_ERROR(run_rows(flight, tap_of_step));
  note_rows(flight);
  for (const ScheduledRows& rows : flight.scheduled) {
    const Sequence& sequence = *rows.sequence;
    counters.prompt_tokens +=
        std::clamp<int64_t>(sequence.num_prompt() - sequence.num_computed, 0, rows.num_rows);
  }
  scheduler.commit(flight.scheduled);
  ++counters.steps;
  for (size_t r = 0; r < flight.scheduled.size(); ++r) {
    Sequence& sequence = *flight.scheduled[r].sequence;
    ++sequence.num_in_flight;
    if (!flight.scheduled[r].samples) {
      continue;
    }
    sequence.drawn_row = flight.draw_rows[r];
    sequence.tokens.push_back(flight.sampler.lists().forced[sequence.drawn_row]);
    ++sequence.num_unknown;
    sequence.ends = sequence.num_generated() >= sequence.request.sampling.max_tokens ||
                    sequence.num_tokens() >= info.max_model_len ||
                    sequence.num_tokens() >= info.kv_cache_tokens;
  }
  return ok_status();
}

// Whether the next step may be launched before this one's tokens are known.
bool Engine::State::may_run_ahead_of(const Flight& flight) const {
  return !on_host() && options.async_scheduling && !options.profile && !flight.is_recorded &&
         std::none_of(flight.scheduled.begin(), flight.scheduled.end(),
                      [](const ScheduledRows& rows) {
                        return needs_history(rows.sequence->request.sampling);
                      });
}

TokenEvent Engine::State::accept_token(Sequence& sequence, const Flight& flight, int32_t row) {
  const int32_t token = flight.sampler.ids()[row];
  TokenEvent event{.request_id = sequence.id,
                   .token_id = token,
                   .logprob = flight.sampler.logprobs()[row],
                   .top_logprobs = flight.sampler.top()[row]};
  const SamplingParams& params = sequence.request.sampling;
  sequence.tokens[sequence.num_known()] = token;
  --sequence.num_unknown;
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
  } else if (sequence.ends && sequence.num_unknown == 0) {
    event.finish = FinishReason::kLength;
  }
  if (event.finish != FinishReason::kNone) {
    event.text += sequence.text.flush();
  }
  return event;
}

// A sequence that is out of the scheduler's hands stays, with its blocks, while steps write them.
void Engine::State::keep_while_in_flight(std::unique_ptr<Sequence> sequence) {
  if (sequence->num_in_flight > 0) {
    sequence->has_left = true;
    leaving.push_back(std::move(sequence));
  }
}

// Takes a sequence out; its blocks are released with it.
void Engine::State::finish(int64_t id) {
  std::unique_ptr<Sequence> sequence = scheduler.remove(id);
  if (sequence == nullptr) {
    return;
  }
  if (sequence->request.prompt_logprobs || sequence->request.record_selection) {
    records[id] = std::move(sequence->record);
  }
  keep_while_in_flight(std::move(sequence));
}

void Engine::State::take_tokens(Flight& flight, double seconds, std::vector<TokenEvent>* events) {
  for (size_t r = 0; r < flight.scheduled.size(); ++r) {
    Sequence& sequence = *flight.scheduled[r].sequence;
    if (sequence.has_left) {
      continue;  // a surplus row: its sequence ended in the step before
    }
    TokenEvent event{.request_id = sequence.id};
    if (flight.draw_rows[r] >= 0) {
      event = accept_token(sequence, flight, flight.draw_rows[r]);
      scheduler.publish(sequence);
    }
    event.step = flight.infos[r];
    event.step.seconds = seconds;
    event.step.cached_tokens = std::exchange(sequence.num_cached, 0);
    if (event.finish != FinishReason::kNone) {
      finish(sequence.id);
    }
    events->push_back(std::move(event));
  }
}

Status Engine::State::complete(Flight& flight, std::vector<TokenEvent>* events) {
  const auto await_results = [&]() -> Status {
    LACUNA_ASSIGN_OR_RETURN(const DrawOutputs results, buffers->await(flight.side));
    if (flight.sampler.lists().num_rows() > 0) {
      flight.sampler.unpack(results, model->config().vocab_size);
    }
    if (!on_host()) {
      LACUNA_ASSIGN_OR_RETURN(const double ms,
                              runtime->elapsed_ms(flight.begin.get(), flight.end.get()));
      counters.device_seconds += 1e-3 * ms;
    }
    return options.profile ? run.collect_timing() : ok_status();
  };
  const Status status = await_results();
  if (pending == &flight) {
    pending = nullptr;
  }
  const double seconds = seconds_since(std::max(flight.start, last_known));
  last_known = Clock::now();
  counters.step_seconds += seconds;
  for (const ScheduledRows& rows : flight.scheduled) {
    --rows.sequence->num_in_flight;
  }
  if (status.ok()) {
    take_tokens(flight, seconds, events);
  } else {
    for (const ScheduledRows& rows : flight.scheduled) {
      if (!rows.sequence->has_left) {
        keep_while_in_flight(scheduler.remove(rows.sequence->id));
      }
    }
  }
  std::erase_if(leaving, [](const auto& sequence) { return sequence->num_in_flight == 0; });
  return status;
}

Result<std::vector<TokenEvent>> Engine::step() {
  State& s = *state_;
  std::vector<TokenEvent> events;
  for (std::unique_ptr<Sequence>& sequence : s.scheduler.take_cancelled()) {
    TokenEvent event{.request_id = sequence->id, .finish = FinishReason::kCancelled};
    event.text = sequence->text.flush();
    events.push_back(std::move(event));
    s.keep_while_in_flight(std::move(sequence));
  }
  Flight* const before = s.pending;
  Flight& flight = s.flights[s.turn];
  flight.start = Clock::now();
  Sequence* stuck = nullptr;
  s.scheduler.schedule(&flight.scheduled, &stuck);
  s.counters.schedule_seconds += seconds_since(flight.start);
  if (flight.scheduled.empty() && before != nullptr) {
    // Nothing to do until the tokens under way are known.
    LACUNA_RETURN_IF_ERROR(s.complete(*before, &events));
    return events;
  }
  if (stuck != nullptr) {
    // The cache is full of this one sequence: its answer ends here.
    TokenEvent event{.request_id = stuck->id, .finish = FinishReason::kLength};
    event.text = stuck->text.flush();
    s.finish(stuck->id);
    events.push_back(std::move(event));
    return events;
  }
  if (flight.scheduled.empty()) {
    return events;
  }
  if (Status status = s.launch(flight); !status.ok()) {
    for (const ScheduledRows& rows : flight.scheduled) {
      s.keep_while_in_flight(s.scheduler.remove(rows.sequence->id));
    }
    return status;
  }
  s.turn = (s.turn + 1) % StepBuffers::kSides;
  s.pending = &flight;
  if (before != nullptr) {
    ++s.counters.ahead_steps;
    LACUNA_RETURN_IF_ERROR(s.complete(*before, &events));
  }
  if (!s.may_run_ahead_of(flight)) {
    LACUNA_RETURN_IF_ERROR(s.complete(flight, &events));
  }
  return events;
}

}  // namespace lacuna
