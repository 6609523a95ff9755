// `lacuna bench latency` and `lacuna bench throughput`: the engine without a server.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <optional>

#include "cli/bench.h"
#include "cli/bench_load.h"
#include "cli/bench_stats.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/output_file.h"
#include "server/binary_hash.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct OfflineFlags {
  EngineFlags engine;
  int64_t input_len = 32;
  int64_t output_len = 128;
  int64_t batch_size = 8;
  int64_t num_iters = 10;
  int64_t num_iters_warmup = 2;
  int64_t num_prompts = 100;
  std::string dataset = "random";
  std::string dataset_path;
  bool disable_shuffle = false;
  uint64_t seed = 0;
  std::string output_json;
  std::string commit;
};

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// Of all threads of this process; on a busy machine steadier than the wall's, but waiting threads
// may spin.
double cpu_seconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// One batch, from the first step to the last.
struct BatchTimes {
  double seconds = 0;
  // Steps in which every sequence had its first token already.
  double decode_seconds = 0;
  int64_t decode_tokens = 0;
  std::vector<double> decode_steps;
  std::vector<double> decode_cpu;  // CPU seconds of the same steps
  int64_t tokens_out = 0;
};

Result<BatchTimes> run_batch(Engine& engine, const std::vector<LoadPrompt>& prompts) {
  for (const LoadPrompt& prompt : prompts) {
    Request request;
    request.prompt = prompt.ids;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = prompt.max_tokens;
    request.sampling.ignore_eos = true;
    LACUNA_RETURN_IF_ERROR(engine.submit(std::move(request)).status());
  }
  BatchTimes times;
  const Clock::time_point begin = Clock::now();
  Clock::time_point before = begin;
  double cpu_before = cpu_seconds();
  while (engine.has_work()) {
    LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine.step());
    const Clock::time_point after = Clock::now();
    const double cpu_after = cpu_seconds();
    const bool decodes = std::all_of(events.begin(), events.end(),
                                     [](const TokenEvent& event) { return event.step.decode; });
    const int64_t tokens = std::count_if(
        events.begin(), events.end(), [](const TokenEvent& event) { return event.token_id >= 0; });
    times.tokens_out += tokens;
    if (decodes && tokens > 0) {
      times.decode_steps.push_back(seconds_between(before, after));
      times.decode_cpu.push_back(cpu_after - cpu_before);
      times.decode_seconds += times.decode_steps.back();
      times.decode_tokens += tokens;
    }
    before = after;
    cpu_before = cpu_after;
  }
  times.seconds = seconds_between(begin, before);
  return times;
}

Json load_average() {
  std::array<double, 3> load = {};
  return getloadavg(load.data(), 3) == 3 ? Json(load) : Json();
}

Json head_json(const OfflineFlags& flags, const Engine& engine, const char* schema) {
  const EngineInfo& info = engine.info();
  Json json;
  json["schema"] = schema;
  json["date"] = now_text();
  json["commit"] = flags.commit;
  json["binary_hash"] = server::binary_hash();
  json["model"] = flags.engine.model.empty() ? "dsa-nano" : flags.engine.model;
  json["device"] = info.device;
  json["dtype"] = info.dtype;
  json["kv_format"] = info.kv_format;
  json["index_format"] = info.index_format;
  json["load_average_before"] = load_average();
  return json;
}

Json summary_ms(const std::vector<double>& seconds) {
  Json json;
  json["mean"] = 1e3 * mean(seconds);
  json["std"] = 1e3 * standard_deviation(seconds);
  for (const int percent : {10, 50, 90, 99}) {
    json[fmt::format("p{}", percent)] = 1e3 * percentile(seconds, percent);
  }
  return json;
}

// What the time of an operation is counted as, side by side.
constexpr std::array<const char*, 4> kTimeClasses = {"attention", "indexer", "gemm", "other"};

int time_class(std::string_view op) {
  constexpr std::string_view kAttention[] = {"sparse_mla", "build_schedule", "mha",
                                             "build_mask", "merge_states",   "rescale_by_lse",
                                             "append_kv",  "gather_kv"};
  constexpr std::string_view kIndexer[] = {"index_logits", "top_k", "select_keys",
                                           "translate_indices", "append_index_keys"};
  constexpr std::string_view kGemm[] = {"linear", "head_linear", "moe_experts"};
  const auto has = [&](const auto& list) {
    return std::find(std::begin(list), std::end(list), op) != std::end(list);
  };
  return has(kAttention) ? 0 : has(kIndexer) ? 1 : has(kGemm) ? 2 : 3;
}

// Where the time of the steps went, by kind of work, when it was measured.
void print_classes(const EngineCounters& before, const EngineCounters& after, int64_t steps,
                   Json* json) {
  std::array<double, kTimeClasses.size()> seconds = {};
  double total = 0;
  for (const auto& [op, spent] : after.op_seconds) {
    const auto found = before.op_seconds.find(op);
    const double since = spent - (found == before.op_seconds.end() ? 0 : found->second);
    seconds[time_class(op)] += since;
    total += since;
  }
  if (total <= 0 || steps <= 0) {
    return;
  }
  std::string text;
  for (size_t i = 0; i < kTimeClasses.size(); ++i) {
    const double ms = 1e3 * seconds[i] / static_cast<double>(steps);
    (*json)["step_ms_by_class"][kTimeClasses[i]] = ms;
    text += fmt::format("{}{} {:.3f} ms ({:.0f} %)", i == 0 ? "" : ", ", kTimeClasses[i], ms,
                        100 * seconds[i] / total);
  }
  fmt::print("  a step: {}\n", text);
}

// What ran on a GPU how.
void print_device(const EngineCounters& before, const EngineCounters& after, Json* json) {
  const int64_t graphs = after.graph_steps - before.graph_steps;
  Json eager = Json::object();
  std::string text;
  for (const auto& [reason, count] : after.eager_steps) {
    const auto found = before.eager_steps.find(reason);
    const int64_t since = count - (found == before.eager_steps.end() ? 0 : found->second);
    if (since > 0) {
      eager[reason] = since;
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", since, reason);
    }
  }
  if (graphs == 0 && eager.empty()) {
    return;
  }
  const double device = after.device_seconds - before.device_seconds;
  const double steps = after.step_seconds - before.step_seconds;
  const double busy = steps > 0 ? 100 * device / steps : 0;
  (*json)["graph_steps"] = graphs;
  (*json)["eager_steps"] = eager;
  (*json)["padded_rows"] = after.padded_rows - before.padded_rows;
  (*json)["ahead_steps"] = after.ahead_steps - before.ahead_steps;
  (*json)["device_busy_percent"] = busy;
  fmt::print("  GPU busy {:.1f} % of the steps; {} graph steps, eager: {}; {} launched ahead\n",
             busy, graphs, text.empty() ? "none" : text, after.ahead_steps - before.ahead_steps);
}

// What the engine counted between two moments, printed and as JSON.
Json engine_json(const EngineCounters& before, const EngineCounters& after) {
  Json json;
  const int64_t steps = after.steps - before.steps;
  const double step_seconds = after.step_seconds - before.step_seconds;
  const double schedule_seconds = after.schedule_seconds - before.schedule_seconds;
  const double share = step_seconds > 0 ? 100 * schedule_seconds / step_seconds : 0;
  json["steps"] = steps;
  json["step_ms_mean"] = steps > 0 ? 1e3 * step_seconds / static_cast<double>(steps) : 0;
  json["scheduler_share_percent"] = share;
  json["preemptions"] = after.num_preemptions - before.num_preemptions;
  json["prefix_hits"] = after.prefix_hits - before.prefix_hits;
  fmt::print("  {} steps of {:.3f} ms; scheduler {:.2f} % of them; {} preemptions\n", steps,
             json["step_ms_mean"].get<double>(), share, json["preemptions"].get<int64_t>());
  print_device(before, after, &json);
  print_classes(before, after, steps, &json);
  struct Kernel {
    double seconds;
    int64_t calls;
    std::string name;
  };
  std::vector<Kernel> kernels;
  double total = 0;
  for (const auto& [name, calls] : after.kernel_calls) {
    const auto calls_before = before.kernel_calls.find(name);
    const auto seconds_after = after.kernel_seconds.find(name);
    const auto seconds_before = before.kernel_seconds.find(name);
    Kernel kernel = {.seconds = 0, .calls = calls, .name = name};
    kernel.calls -= calls_before == before.kernel_calls.end() ? 0 : calls_before->second;
    if (seconds_after != after.kernel_seconds.end()) {
      kernel.seconds = seconds_after->second;
      kernel.seconds -= seconds_before == before.kernel_seconds.end() ? 0 : seconds_before->second;
    }
    total += kernel.seconds;
    kernels.push_back(std::move(kernel));
  }
  std::sort(kernels.begin(), kernels.end(), [](const Kernel& a, const Kernel& b) {
    return a.seconds != b.seconds ? a.seconds > b.seconds : a.calls > b.calls;
  });
  json["kernels"] = Json::array();
  if (total > 0) {
    fmt::print("  {:<28} {:>8} {:>10} {:>9} {:>7}\n", "kernel", "calls", "seconds", "us/call",
               "share");
  }
  for (const Kernel& kernel : kernels) {
    if (kernel.calls == 0) {
      continue;
    }
    Json entry = {{"name", kernel.name}, {"calls", kernel.calls}};
    if (total > 0) {
      entry["seconds"] = kernel.seconds;
      fmt::print("  {:<28} {:>8} {:>10.4f} {:>9.1f} {:>5.1f} %\n", kernel.name, kernel.calls,
                 kernel.seconds, 1e6 * kernel.seconds / static_cast<double>(kernel.calls),
                 100 * kernel.seconds / total);
    }
    json["kernels"].push_back(std::move(entry));
  }
  return json;
}

Status write_json(std::optional<OutputFile>& file, Json json) {
  if (!file.has_value()) {
    return ok_status();
  }
  json["load_average_after"] = load_average();
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  file->write(text.data(), static_cast<int64_t>(text.size()));
  return file->commit();
}

Status check_lengths(const OfflineFlags& flags, const Engine& engine) {
  const int64_t length = flags.input_len + flags.output_len;
  if (length > engine.info().max_model_len) {
    return invalid_argument(
        fmt::format("--input-len, --output-len: {} + {} tokens, expected at most {}: the context",
                    flags.input_len, flags.output_len, engine.info().max_model_len));
  }
  return ok_status();
}

Status bench_latency(OfflineFlags flags) {
  std::optional<OutputFile> file;
  if (!flags.output_json.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output_json));
  }
  flags.engine.max_num_seqs = std::max(flags.engine.max_num_seqs, flags.batch_size);
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          make_engine(flags.engine, /*quiet=*/false, /*skip_tokenizer=*/true));
  LACUNA_RETURN_IF_ERROR(check_lengths(flags, *engine));
  Json json = head_json(flags, *engine, "lacuna-bench-latency-1");
  std::vector<double> totals;
  std::vector<double> token_seconds;
  std::vector<double> steps;
  std::vector<double> cpu;
  std::vector<double> rates;
  EngineCounters before;
  for (int64_t i = 0; i < flags.num_iters_warmup + flags.num_iters; ++i) {
    // Other prompts each time: a prefix cache, where it is on, must not find them.
    const std::vector<LoadPrompt> prompts =
        random_prompts({.num_prompts = flags.batch_size,
                        .input_len = flags.input_len,
                        .output_len = flags.output_len,
                        .vocab_size = engine->info().vocab_size,
                        .seed = flags.seed + static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15u});
    if (i == flags.num_iters_warmup) {
      before = engine->counters();
    }
    LACUNA_ASSIGN_OR_RETURN(const BatchTimes times, run_batch(*engine, prompts));
    if (i < flags.num_iters_warmup) {
      continue;
    }
    totals.push_back(times.seconds);
    token_seconds.push_back(times.seconds / static_cast<double>(flags.output_len));
    steps.insert(steps.end(), times.decode_steps.begin(), times.decode_steps.end());
    cpu.insert(cpu.end(), times.decode_cpu.begin(), times.decode_cpu.end());
    if (times.decode_seconds > 0) {
      rates.push_back(static_cast<double>(times.decode_tokens) / times.decode_seconds);
    }
  }
  fmt::print("batch of {}, {} tokens in, {} out: {:.2f} ms (median of {}), {:.3f} ms a token\n",
             flags.batch_size, flags.input_len, flags.output_len, 1e3 * percentile(totals, 50),
             flags.num_iters, 1e3 * percentile(token_seconds, 50));
  fmt::print("  decode: step {:.3f} ms (p10 {:.3f}, p90 {:.3f}; CPU {:.3f}), {:.1f} tokens/s\n",
             1e3 * percentile(steps, 50), 1e3 * percentile(steps, 10), 1e3 * percentile(steps, 90),
             1e3 * percentile(cpu, 50), percentile(rates, 50));
  json["batch_size"] = flags.batch_size;
  json["input_len"] = flags.input_len;
  json["output_len"] = flags.output_len;
  json["num_iters"] = flags.num_iters;
  json["num_iters_warmup"] = flags.num_iters_warmup;
  json["seed"] = flags.seed;
  json["avg_latency"] = mean(totals);
  json["latencies"] = totals;
  json["latency_ms"] = summary_ms(totals);
  json["latency_per_token_ms"] = summary_ms(token_seconds);
  json["decode_step_ms"] = summary_ms(steps);
  json["decode_step_cpu_ms"] = summary_ms(cpu);
  json["decode_tokens_per_second"] = percentile(rates, 50);
  json["decode_tokens_per_second_rounds"] = rates;
  json["engine"] = engine_json(before, engine->counters());
  return write_json(file, std::move(json));
}

Status bench_throughput(OfflineFlags flags) {
  if (flags.dataset != "random" && flags.dataset != "jsonl" && flags.dataset != "custom") {
    return invalid_argument("--dataset-name: \"" + flags.dataset +
                            "\", expected random or jsonl (any data set as a file of prompts)");
  }
  const bool random = flags.dataset == "random";
  std::vector<LoadPrompt> prompts;
  if (!random) {
    LACUNA_ASSIGN_OR_RETURN(prompts,
                            jsonl_prompts(flags.dataset_path, flags.num_prompts, flags.output_len,
                                          !flags.disable_shuffle, flags.seed));
  }
  std::optional<OutputFile> file;
  if (!flags.output_json.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output_json));
  }
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          make_engine(flags.engine, /*quiet=*/false, /*skip_tokenizer=*/random));
  if (random) {
    LACUNA_RETURN_IF_ERROR(check_lengths(flags, *engine));
    prompts = random_prompts({.num_prompts = flags.num_prompts,
                              .input_len = flags.input_len,
                              .output_len = flags.output_len,
                              .vocab_size = engine->info().vocab_size,
                              .seed = flags.seed});
  }
  int64_t tokens_in = 0;
  for (LoadPrompt& prompt : prompts) {
    if (prompt.ids.empty()) {
      LACUNA_ASSIGN_OR_RETURN(prompt.ids, engine->encode(prompt.text));
    }
    tokens_in += static_cast<int64_t>(prompt.ids.size());
  }
  const std::string prompt_hash = hash_of(prompts);
  Json json = head_json(flags, *engine, "lacuna-bench-throughput-1");
  // Memory is touched and threads run before the clock starts.
  std::vector<LoadPrompt> warm_up = {prompts.front()};
  std::reverse(warm_up.front().ids.begin(), warm_up.front().ids.end());
  warm_up.front().max_tokens = std::min<int64_t>(warm_up.front().max_tokens, 8);
  LACUNA_RETURN_IF_ERROR(run_batch(*engine, warm_up).status());
  const EngineCounters before = engine->counters();
  LACUNA_ASSIGN_OR_RETURN(const BatchTimes times, run_batch(*engine, prompts));
  const double seconds = std::max(times.seconds, 1e-9);
  const auto rate = [&](int64_t count) { return static_cast<double>(count) / seconds; };
  fmt::print(
      "{} prompts, {} sequences at a time: {:.2f} s, {:.2f} requests/s, {:.1f} output "
      "tokens/s, {:.1f} tokens/s\n",
      prompts.size(), flags.engine.max_num_seqs, times.seconds,
      rate(static_cast<int64_t>(prompts.size())), rate(times.tokens_out),
      rate(tokens_in + times.tokens_out));
  json["dataset_name"] = flags.dataset;
  json["prompt_hash"] = prompt_hash;
  json["num_requests"] = prompts.size();
  json["max_num_seqs"] = flags.engine.max_num_seqs;
  json["input_len"] = random ? Json(flags.input_len) : Json();
  json["output_len"] = random ? Json(flags.output_len) : Json();
  json["seed"] = flags.seed;
  json["elapsed_time"] = times.seconds;
  json["total_input_tokens"] = tokens_in;
  json["total_output_tokens"] = times.tokens_out;
  json["requests_per_second"] = rate(static_cast<int64_t>(prompts.size()));
  json["output_tokens_per_second"] = rate(times.tokens_out);
  json["tokens_per_second"] = rate(tokens_in + times.tokens_out);
  json["engine"] = engine_json(before, engine->counters());
  return write_json(file, std::move(json));
}

void add_offline(CLI::App& bench, Action& action, bool latency) {
  CLI::App* command =
      latency ? bench.add_subcommand("latency", "One batch through the engine: latency by token")
              : bench.add_subcommand("throughput", "Many prompts through the engine: tokens/s");
  auto flags = std::make_shared<OfflineFlags>();
  flags->engine.enable_prefix_caching = false;
  flags->engine.max_num_seqs = latency ? 1 : 16;
  flags->input_len = latency ? 32 : 256;
  add_engine_flags(*command, flags->engine);
  add_serving_flags(*command, flags->engine);
  const auto positive = CLI::Range(int64_t{1}, int64_t{1} << 24);
  command->add_option("--input-len,--random-input-len", flags->input_len)
      ->check(positive)
      ->capture_default_str();
  command->add_option("--output-len,--random-output-len", flags->output_len)
      ->check(positive)
      ->capture_default_str();
  if (latency) {
    command->add_option("--batch-size", flags->batch_size)
        ->check(CLI::Range(1, 1 << 16))
        ->capture_default_str();
    command->add_option("--num-iters", flags->num_iters)->check(positive)->capture_default_str();
    command->add_option("--num-iters-warmup", flags->num_iters_warmup)
        ->check(CLI::Range(0, 1 << 20))
        ->capture_default_str();
  } else {
    command->add_option("--num-prompts", flags->num_prompts)
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    command->add_option("--dataset-name,--dataset", flags->dataset, "random or jsonl")
        ->capture_default_str();
    command->add_option("--dataset-path", flags->dataset_path, "File of jsonl");
    command->add_flag("--disable-shuffle", flags->disable_shuffle, "jsonl in the file's order");
  }
  command->add_option("--seed", flags->seed)->capture_default_str();
  command->add_flag("--profile", flags->engine.profile, "Time by kernel");
  command->add_option("-o,--output-json", flags->output_json, "Write a JSON file");
  command->add_option("--commit", flags->commit, "What the JSON says was measured");
  command->callback([flags, latency, &action] {
    action = [flags, latency] {
      const Status status = latency ? bench_latency(*flags) : bench_throughput(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace

void add_bench_offline(CLI::App& bench, Action& action) {
  add_offline(bench, action, /*latency=*/true);
  add_offline(bench, action, /*latency=*/false);
}

}  // namespace lacuna::cli
