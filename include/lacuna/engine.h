// The engine: text or token ids in, tokens out, from a checkpoint folder. One step at a time, on
// the caller's thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/context.h"
#include "lacuna/dtype.h"
#include "lacuna/engine_types.h"
#include "lacuna/status.h"

namespace lacuna {

struct EngineOptions {
  std::string model_dir;
  std::string device = "auto";  // cpu, cuda, or auto: cuda where there is a usable GPU
  // Arithmetic: bf16 = bf16 weights, GEMM inputs and caches; f32 residual, norms, router, softmax
  // and logits. f32 = everything f32, bf16 weights read exactly.
  DType dtype = DType::kBFloat16;
  std::string kv_cache_dtype = "auto";     // auto (= dtype), bfloat16, float32, fp8_ds_mla
  std::string index_cache_dtype = "auto";  // auto (= dtype), bfloat16, float32, fp8
  int64_t max_model_len = 0;               // 0: max_position_embeddings
  int64_t max_num_batched_tokens = 1024;   // rows of a step; longer prompts are prefilled in chunks
  int64_t max_num_seqs = 1;                // sequences that run at a time
  int64_t block_size = 64;
  int64_t kv_cache_tokens = 0;  // 0: what kv_cache_memory_bytes holds
  int64_t kv_cache_memory_bytes =
      0;  // 0: room for max_num_seqs sequences of max_model_len, at most 4 GiB
  bool enable_prefix_caching = true;
  uint64_t prefix_salt = 0;                                 // part of every block's hash
  std::map<std::string, std::string, std::less<>> kernels;  // operation -> kernel forced by name
  SelectionSource selection;
  bool skip_tokenizer = false;  // token ids only: no tokenizer.json is read, events carry no text
  std::string chat_template;    // a Jinja template or a file with one; empty: the model's
  // EngineCounters::kernel_seconds and op_seconds. On a GPU every operation is launched and timed
  // by itself then, without graphs.
  bool profile = false;
  // On a GPU: no CUDA graphs; decode steps have the same shapes and the same bits as with them.
  bool enforce_eager = false;
  // On a GPU: a step is launched before the tokens of the one before it are read, where all of its
  // sequences allow that. step() reports the tokens of a step when they are known.
  bool async_scheduling = true;
  // On a GPU: whatever makes the host wait for the device in a step, except reading the tokens, is
  // an error of the step. Requests that record what only the host can keep are refused.
  bool check_sync = false;
  // Lane of prefill rows: "auto" = by the routing rule (docs/attention.md); "mqa" = sparse MQA;
  // "masked" = masked MHA wherever dense MHA does not serve and the buffers allow it.
  std::string prefill_lane = "auto";
  bool force_mqa = false;    // the same as prefill_lane "mqa"
  int64_t mha_keys_max = 0;  // un-absorbed keys that the MHA lanes hold at a time; 0: automatic
};

struct Request {
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  int priority = 0;                 // lower runs first; equal ones in order of arrival
  bool prompt_logprobs = false;     // see RequestRecord
  int32_t prompt_top_logprobs = 0;  // most likely tokens to record with each prompt token, 0..20
  bool record_selection = false;    // see RequestRecord
  // Teacher forcing: the i-th generated token is forced_tokens[i] whatever was sampled (its logprob
  // is reported).
  std::vector<int32_t> forced_tokens;
};

enum class FinishReason { kNone = 0, kStop, kLength, kCancelled };

inline constexpr int kNumRowLanes = 3;
std::string_view row_lane_name(int lane);  // "sparse MQA", "dense MHA", "masked MHA"

// What attention did for one request in one step, a layer: rows by lane, and keys read out of keys
// visible, summed over the rows.
struct StepInfo {
  std::array<int64_t, kNumRowLanes> rows_by_lane = {};
  int64_t keys_read = 0;
  int64_t keys_visible = 0;
  bool decode = false;
  int64_t cached_tokens =
      0;  // prompt tokens that the prefix cache held, in the request's first step
  double seconds = 0;
};

// A step of a request. A prefill step that does not finish the prompt has no token (token_id -1).
struct TokenEvent {
  int64_t request_id = 0;
  int32_t token_id = -1;
  float logprob = 0;  // of the token, before temperature and filters
  std::vector<TokenLogprob>
      top_logprobs;  // SamplingParams::top_logprobs of them, most likely first
  std::string text;  // what may be shown now; text that might begin a stop string is held back
  FinishReason finish = FinishReason::kNone;
  StepInfo step;
};

// What was recorded of a request on demand.
struct RequestRecord {
  // log p(prompt[i + 1] | prompt[0..i]), prompt length - 1 entries.
  std::vector<float> prompt_logprobs;
  // Request::prompt_top_logprobs alternatives for each of them, most likely first.
  std::vector<std::vector<TokenLogprob>> prompt_top_logprobs;
  // Leader layer -> [rows, index_topk], one row for each prompt and decode row in order: positions
  // ascending, -1 tail. Rows of the dense MHA lane read every visible key and are recorded as -1
  // only.
  std::map<int, std::vector<int32_t>> selected_keys;
};

struct EngineInfo {
  std::string architecture;
  int64_t num_layers = 0;
  int64_t num_leader_layers = 0;
  int64_t num_heads = 0;
  int64_t index_topk = 0;
  int64_t vocab_size = 0;
  int64_t max_model_len = 0;
  int64_t kv_cache_tokens = 0;
  int64_t weight_bytes = 0;
  int64_t kv_cache_bytes = 0;
  int64_t activation_bytes = 0;  // buffers and workspace
  int64_t num_graphs = 0;        // captured decode steps, on a GPU
  std::string device;            // "AMD EPYC, AVX3, 2 threads"
  std::string dtype;
  std::string kv_format;
  std::string index_format;
};

struct EngineCounters {
  int64_t steps = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  std::array<int64_t, kNumRowLanes> rows_by_lane = {};
  int64_t keys_read = 0;     // a layer
  int64_t keys_visible = 0;  // a layer
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t num_preemptions = 0;
  int64_t blocks_total = 0;
  int64_t blocks_used = 0;     // by running sequences; cached blocks that nobody uses count as free
  int64_t prefix_queries = 0;  // tokens looked up
  int64_t prefix_hits = 0;     // tokens found
  double schedule_seconds = 0;  // scheduler's and planner's own time
  double step_seconds = 0;
  std::map<std::string, int64_t, std::less<>> kernel_calls;
  std::map<std::string, double, std::less<>> kernel_seconds;  // with EngineOptions::profile
  std::map<std::string, double, std::less<>> op_seconds;      // with EngineOptions::profile
  // On a GPU.
  int64_t graph_steps = 0;
  std::map<std::string, int64_t, std::less<>> eager_steps;  // by why they were not captured
  int64_t padded_rows = 0;    // rows that did nothing, added to reach the size of a graph
  int64_t ahead_steps = 0;    // launched before the step before them was known
  int64_t device_waits = 0;   // besides the wait for a step's tokens: taps and records
  double device_seconds = 0;  // from a step's first kernel to its last
};

class Engine {
 public:
  // Loads weights and sizes every buffer: nothing is allocated for tensors afterwards.
  static Result<std::unique_ptr<Engine>> create(const Context& context,
                                                const EngineOptions& options);
  ~Engine();

  const EngineInfo& info() const;
  EngineCounters counters() const;

  Result<std::vector<int32_t>> encode(std::string_view text) const;
  std::string decode(std::span<const int32_t> ids) const;

  // The prompt's text for a conversation, by the model's chat template. `messages_json` is the list
  // `messages` of the OpenAI chat API. `options_json`, an object, may hold add_generation_prompt
  // (default true), continue_final_message, tools and chat_template_kwargs. encode() finds special
  // tokens in the text; it adds none.
  Result<std::string> apply_chat_template(std::string_view messages_json,
                                          std::string_view options_json = {}) const;

  // The bytes that one token stands for, perhaps a part of a character.
  std::string_view token_bytes(int32_t id) const;

  // Queues a request. The id names it in events.
  Result<int64_t> submit(Request request);
  // Stops a request; its next event (from step) has kCancelled. An unknown or finished id is
  // ignored.
  void cancel(int64_t request_id);
  bool has_work() const;
  // Runs one step and reports what became known: with async_scheduling, of the step before, so
  // that the list may be empty while there is work. An error leaves the engine without the request
  // that caused it.
  Result<std::vector<TokenEvent>> step();
  // The record of a request; the engine forgets it. Empty for an unknown id.
  RequestRecord take_record(int64_t request_id);

  // Reports intermediate tensors of every step by name ("attn_out", "hidden", "router_ids",
  // "router_weights", and in leader layers "index_k", "index_q", "index_head_weights", "topk", with
  // their layer; "prompt_logits" and "logits" without one), for comparison with oracles. On a
  // GPU the host waits for each, and there are no graphs; so also with the following.
  void set_tap(Tap tap);
  // Reports every sparse_mla call of every step.
  void set_sparse_mla_tap(SparseMlaTap tap);

 private:
  struct State;
  explicit Engine(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace lacuna
