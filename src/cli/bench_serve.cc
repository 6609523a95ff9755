// Flags, rounds and the report of `lacuna bench serve`. Flag names and the keys of a run are those
// of vLLM's bench.
#include "cli/bench_serve.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <thread>

#include "cli/bench_load.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/output_file.h"
#include "server/binary_hash.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::ordered_json;

struct BenchServeFlags {
  std::string backend = "openai";
  std::string base_url;
  std::string host = "127.0.0.1";
  int port = 8000;
  std::string endpoint = "/v1/completions";
  std::string model;
  std::string served_model_name;
  std::string tokenizer;
  std::string api_key;
  std::string dataset_name = "random";
  std::string dataset_path;
  int64_t random_input_len = 1024;
  int64_t random_output_len = 128;
  int64_t random_prefix_len = 0;
  double random_range_ratio = 0;
  int64_t output_len = 256;
  int64_t vocab_size = 0;
  bool disable_shuffle = false;
  int64_t num_prompts = 1000;
  std::string request_rate = "inf";
  double burstiness = 1;
  int64_t max_concurrency = 0;
  int64_t num_warmups = 0;
  uint64_t seed = 0;
  bool ignore_eos = false;
  double temperature = 0;
  bool temperature_given = false;
  double request_timeout = 3600;
  double ready_timeout = 0;
  std::vector<std::string> percentile_metrics = {"ttft", "tpot", "itl", "e2el"};
  std::vector<double> metric_percentiles = {50, 90, 99};
  bool save_result = false;
  bool save_detailed = false;
  std::string result_dir;
  std::string result_filename;
  std::string label = "A";
  std::string second_url;
  std::string second_label = "B";
  std::string second_model;
  int64_t rounds = 0;  // 0: 3 with a second server, else 1
  int64_t reruns = 2;
  std::string commit;
  bool ignored = false;
};

struct Metric {
  const char* name;
  const char* title;
  std::vector<double> (LoadRun::*values)() const;
};
constexpr std::array<Metric, 4> kMetrics = {{
    {"ttft", "time to first token", &LoadRun::ttft},
    {"tpot", "time per output token after the first", &LoadRun::tpot},
    {"itl", "inter-token latency", &LoadRun::itl},
    {"e2el", "end-to-end latency", &LoadRun::e2el},
}};

struct Arm {
  std::string label;
  LoadTarget target;
  ServerFacts facts;
};

struct Round {
  std::vector<size_t> order;  // indices of arms
  std::vector<LoadRun> runs;  // by arm
  std::vector<std::string> disturbed;
  std::string no_ratio;
};

double rate_of(const BenchServeFlags& flags) {
  if (flags.request_rate == "inf") {
    return std::numeric_limits<double>::infinity();
  }
  char* end = nullptr;
  const double rate = std::strtod(flags.request_rate.c_str(), &end);
  return *end == '\0' && rate > 0 && std::isfinite(rate) ? rate : 0;
}

Status check_flags(const BenchServeFlags& flags) {
  const auto one_of = [](const std::string& value, std::initializer_list<const char*> allowed) {
    return std::any_of(allowed.begin(), allowed.end(),
                       [&](const char* name) { return value == name; });
  };
  if (!one_of(flags.backend, {"openai", "openai-chat", "vllm", "lacuna"})) {
    return invalid_argument("--backend: \"" + flags.backend +
                            "\", expected openai, openai-chat, vllm or lacuna");
  }
  if (!one_of(flags.dataset_name, {"random", "jsonl", "custom"})) {
    return invalid_argument("--dataset-name: \"" + flags.dataset_name +
                            "\", expected random or jsonl (any data set as a file of prompts)");
  }
  if (flags.dataset_name != "random" && flags.dataset_path.empty()) {
    return invalid_argument("--dataset-path: not given, expected the file of --dataset-name " +
                            flags.dataset_name);
  }
  const bool chat = flags.endpoint.ends_with("/chat/completions");
  if (!chat && !flags.endpoint.ends_with("/completions")) {
    return invalid_argument("--endpoint: \"" + flags.endpoint +
                            "\", expected /v1/completions or /v1/chat/completions");
  }
  if (chat && flags.dataset_name == "random") {
    return invalid_argument("--endpoint: \"" + flags.endpoint +
                            "\" takes no token ids, expected --dataset-name jsonl with it");
  }
  if (!flags.endpoint.starts_with('/')) {
    return invalid_argument("--endpoint: \"" + flags.endpoint + "\", expected a path from /");
  }
  if (rate_of(flags) == 0) {
    return invalid_argument("--request-rate: \"" + flags.request_rate +
                            "\", expected requests a second, above 0, or inf");
  }
  for (const std::string& name : flags.percentile_metrics) {
    if (!one_of(name, {"ttft", "tpot", "itl", "e2el"})) {
      return invalid_argument("--percentile-metrics: \"" + name +
                              "\", expected some of ttft,tpot,itl,e2el");
    }
  }
  if (flags.second_url.empty() && !flags.second_model.empty()) {
    return invalid_argument("--second-model: given without --second-url");
  }
  if (!flags.second_url.empty() && flags.label == flags.second_label) {
    return invalid_argument("--second-label: \"" + flags.second_label +
                            "\" is the first one's too, expected another");
  }
  return ok_status();
}

Result<Arm> make_arm(const BenchServeFlags& flags, bool second) {
  Arm arm;
  arm.label = second ? flags.second_label : flags.label;
  arm.target.url = second                   ? flags.second_url
                   : flags.base_url.empty() ? fmt::format("http://{}:{}", flags.host, flags.port)
                                            : flags.base_url;
  while (arm.target.url.ends_with('/')) {
    arm.target.url.pop_back();
  }
  arm.target.endpoint = flags.endpoint;
  arm.target.api_key = flags.api_key;
  arm.target.timeout_seconds = flags.request_timeout;
  LACUNA_ASSIGN_OR_RETURN(arm.facts, preflight(arm.target, flags.ready_timeout));
  std::string model = flags.served_model_name.empty() ? flags.model : flags.served_model_name;
  if (second && !flags.second_model.empty()) {
    model = flags.second_model;
  }
  const std::vector<std::string>& served = arm.facts.models;
  if (model.empty()) {
    model = served.front();
  } else if (std::find(served.begin(), served.end(), model) == served.end()) {
    return invalid_argument(fmt::format("--model: \"{}\", expected what {} serves: {}", model,
                                        arm.target.url, fmt::join(served, ", ")));
  }
  arm.target.model = model;
  return arm;
}

Result<std::vector<LoadPrompt>> make_prompts(const BenchServeFlags& flags,
                                             const std::vector<Arm>& arms, bool warm_up) {
  // Warm-up prompts are others: the measured ones must not lie in a prefix cache because of us.
  const uint64_t seed = warm_up ? ~flags.seed : flags.seed;
  const int64_t count = warm_up ? flags.num_warmups : flags.num_prompts;
  if (flags.dataset_name != "random") {
    LACUNA_ASSIGN_OR_RETURN(std::vector<LoadPrompt> prompts,
                            jsonl_prompts(flags.dataset_path, count, flags.output_len,
                                          !flags.disable_shuffle, flags.seed));
    if (warm_up) {
      for (LoadPrompt& prompt : prompts) {
        std::reverse(prompt.ids.begin(), prompt.ids.end());
        std::reverse(prompt.text.begin(), prompt.text.end());
      }
    }
    return prompts;
  }
  int64_t vocab_size = flags.vocab_size;
  for (const Arm& arm : arms) {
    if (flags.vocab_size > 0) {
      break;
    }
    if (!arm.facts.version.is_object() || !arm.facts.version.contains("vocab_size") ||
        !arm.facts.version["vocab_size"].is_number_integer()) {
      return invalid_argument("--vocab-size: not given, and " + arm.target.url +
                              "/version does not say it; expected the number of token ids that "
                              "random prompts may use");
    }
    const auto said = arm.facts.version["vocab_size"].get<int64_t>();
    vocab_size = vocab_size == 0 ? said : std::min(vocab_size, said);
  }
  if (vocab_size < 1) {
    return invalid_argument(fmt::format("--vocab-size: {}, expected at least 1", vocab_size));
  }
  return random_prompts({.num_prompts = count,
                         .input_len = flags.random_input_len,
                         .output_len = flags.random_output_len,
                         .prefix_len = flags.random_prefix_len,
                         .range_ratio = flags.random_range_ratio,
                         .vocab_size = vocab_size,
                         .seed = seed});
}

// A server may count a request as running for a moment after its last byte.
ServerCounters settled_counters(const LoadTarget& target) {
  ServerCounters counters;
  for (int attempt = 0; attempt < 20; ++attempt) {
    counters = read_counters(target);
    if (!counters.known ||
        counters.values["num_requests_running"] + counters.values["num_requests_waiting"] == 0) {
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  return counters;
}

std::vector<double> machine_load() {
  std::array<double, 3> load = {};
  return getloadavg(load.data(), 3) == 3 ? std::vector<double>(load.begin(), load.end())
                                         : std::vector<double>();
}

Json run_json(const BenchServeFlags& flags, const LoadRun& run) {
  Json json;
  const double seconds = std::max(run.seconds, 1e-9);
  json["duration"] = run.seconds;
  json["completed"] = run.completed();
  json["failed"] = static_cast<int64_t>(run.requests.size()) - run.completed();
  json["total_input_tokens"] = run.tokens_in();
  json["total_output_tokens"] = run.tokens_out();
  json["request_throughput"] = static_cast<double>(run.completed()) / seconds;
  json["output_throughput"] = static_cast<double>(run.tokens_out()) / seconds;
  json["total_token_throughput"] =
      static_cast<double>(run.tokens_in() + run.tokens_out()) / seconds;
  for (const Metric& metric : kMetrics) {
    if (std::find(flags.percentile_metrics.begin(), flags.percentile_metrics.end(), metric.name) ==
        flags.percentile_metrics.end()) {
      continue;
    }
    const std::vector<double> values = (run.*metric.values)();
    const std::string suffix = fmt::format("_{}_ms", metric.name);
    json["mean" + suffix] = 1e3 * mean(values);
    json["median" + suffix] = 1e3 * percentile(values, 50);
    json["std" + suffix] = 1e3 * standard_deviation(values);
    for (const double percent : flags.metric_percentiles) {
      json[fmt::format("p{}", percent) + suffix] = 1e3 * percentile(values, percent);
    }
  }
  json["prompt_hash"] = run.prompt_hash;
  json["late_sends"] = run.late_sends();
  Json& server = json["server"];
  if (run.server.known) {
    server["preemptions"] = run.server.preemptions;
    server["prefix_queries"] = run.server.prefix_queries;
    server["prefix_hits"] = run.server.prefix_hits;
    server["requests_ended"] = run.server.requests;
    server["requests_at_begin"] = run.server.requests_at_begin;
    server["restarted"] = run.server.restarted;
    server["late_kernels"] = run.server.late_kernels;
    server["kernel_calls"] = run.server.kernel_calls;
  }
  Json& errors = json["errors"] = Json::array();
  for (const RequestOutcome& request : run.requests) {
    if (!request.ok) {
      errors.push_back(request.error);
    }
  }
  if (flags.save_detailed) {
    Json& requests = json["requests"] = Json::array();
    for (const RequestOutcome& request : run.requests) {
      requests.push_back({{"ok", request.ok},
                          {"error", request.error},
                          {"input_len", request.prompt_tokens},
                          {"output_len_asked", request.tokens_asked},
                          {"output_len", request.tokens},
                          {"ttft", request.first_token},
                          {"e2el", request.last_token},
                          {"late", request.late},
                          {"itl", request.gaps}});
    }
  }
  return json;
}

LoadRun measure(const BenchServeFlags& flags, const Arm& arm,
                const std::vector<LoadPrompt>& warm_ups, const std::vector<LoadPrompt>& prompts) {
  LoadOptions options = {.max_concurrency = flags.max_concurrency,
                         .ignore_eos = flags.ignore_eos,
                         .temperature = flags.temperature,
                         .temperature_given = flags.temperature_given,
                         .due = {}};
  if (!warm_ups.empty()) {
    send_load(arm.target, warm_ups, options);
  }
  options.due = arrival_times(flags.num_prompts, rate_of(flags), flags.burstiness, flags.seed);
  const ServerCounters before = settled_counters(arm.target);
  LoadRun run = send_load(arm.target, prompts, options);
  run.server = server_side(before, settled_counters(arm.target));
  return run;
}

void print_run(const BenchServeFlags& flags, const Arm& arm, const LoadRun& run) {
  const double seconds = std::max(run.seconds, 1e-9);
  fmt::print("{} ({}): {} of {} requests in {:.2f} s, {} tokens in, {} out\n", arm.label,
             arm.target.url, run.completed(), run.requests.size(), run.seconds, run.tokens_in(),
             run.tokens_out());
  fmt::print("  {:.2f} requests/s, {:.1f} output tokens/s, {:.1f} tokens/s\n",
             static_cast<double>(run.completed()) / seconds,
             static_cast<double>(run.tokens_out()) / seconds,
             static_cast<double>(run.tokens_in() + run.tokens_out()) / seconds);
  for (const Metric& metric : kMetrics) {
    if (std::find(flags.percentile_metrics.begin(), flags.percentile_metrics.end(), metric.name) ==
        flags.percentile_metrics.end()) {
      continue;
    }
    const std::vector<double> values = (run.*metric.values)();
    std::string line = fmt::format("  {:<5} ms: mean {:.2f}", metric.name, 1e3 * mean(values));
    for (const double percent : flags.metric_percentiles) {
      line += fmt::format(", p{} {:.2f}", percent, 1e3 * percentile(values, percent));
    }
    fmt::print("{}\n", line);
  }
  for (const RequestOutcome& request : run.requests) {
    if (!request.ok) {
      fmt::print("  first failure: {}\n", one_line(request.error));
      break;
    }
  }
  std::fflush(stdout);
}

// Ratios second / first of the rounds that have one. Throughput: above 1 the second is faster;
// latencies: below 1 it is.
Json ratios_json(const std::vector<Round>& rounds, bool with_disturbed, bool print) {
  struct Quantity {
    std::string name;
    std::function<double(const LoadRun&)> value;
  };
  std::vector<Quantity> quantities = {{"output_throughput", [](const LoadRun& run) {
                                         return static_cast<double>(run.tokens_out()) / run.seconds;
                                       }}};
  for (const Metric& metric : kMetrics) {
    quantities.push_back({fmt::format("median_{}", metric.name), [metric](const LoadRun& run) {
                            return percentile((run.*metric.values)(), 50);
                          }});
  }
  Json json = Json::object();
  for (const Quantity& quantity : quantities) {
    std::vector<double> ratios;
    for (const Round& round : rounds) {
      if (!round.no_ratio.empty() || (!with_disturbed && !round.disturbed.empty())) {
        continue;
      }
      const double first = quantity.value(round.runs[0]);
      if (first > 0) {
        ratios.push_back(quantity.value(round.runs[1]) / first);
      }
    }
    if (ratios.empty()) {
      continue;
    }
    const Spread spread = spread_of(ratios);
    json[quantity.name] = {
        {"median", spread.median}, {"range", {spread.low, spread.high}}, {"rounds", ratios}};
    if (print) {
      fmt::print("  {:<18} {:.5f} [{:.5f}, {:.5f}] of {} rounds\n", quantity.name, spread.median,
                 spread.low, spread.high, spread.count);
    }
  }
  return json;
}

Json flags_json(const BenchServeFlags& flags) {
  Json json;
  json["endpoint"] = flags.endpoint;
  json["dataset_name"] = flags.dataset_name;
  if (flags.dataset_name == "random") {
    json["random_input_len"] = flags.random_input_len;
    json["random_output_len"] = flags.random_output_len;
    json["random_prefix_len"] = flags.random_prefix_len;
    json["random_range_ratio"] = flags.random_range_ratio;
  } else {
    json["dataset_path"] = flags.dataset_path;
    json["output_len"] = flags.output_len;
  }
  json["num_prompts"] = flags.num_prompts;
  json["request_rate"] = flags.request_rate;
  json["burstiness"] = flags.burstiness;
  json["max_concurrency"] = flags.max_concurrency == 0 ? Json() : Json(flags.max_concurrency);
  json["num_warmups"] = flags.num_warmups;
  json["seed"] = flags.seed;
  json["ignore_eos"] = flags.ignore_eos;
  json["temperature"] = flags.temperature_given ? Json(flags.temperature) : Json();
  return json;
}

Json arm_json(const Arm& arm) {
  Json json;
  json["url"] = arm.target.url;
  json["model_id"] = arm.target.model;
  json["version"] = arm.facts.version;
  return json;
}

Status bench_serve(const BenchServeFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_flags(flags));
  std::optional<OutputFile> file;
  const bool paired = !flags.second_url.empty();
  if (flags.save_result || flags.save_detailed || !flags.result_filename.empty()) {
    std::string path = flags.result_filename.empty()
                           ? fmt::format("lacuna-bench-serve-{}.json", now_text("%Y%m%d-%H%M%S"))
                           : flags.result_filename;
    if (!flags.result_dir.empty() && !path.starts_with('/')) {
      path = flags.result_dir + "/" + path;
    }
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(path));
  }
  std::vector<Arm> arms;
  for (int i = 0; i < (paired ? 2 : 1); ++i) {
    LACUNA_ASSIGN_OR_RETURN(Arm arm, make_arm(flags, i == 1));
    arms.push_back(std::move(arm));
  }
  LACUNA_ASSIGN_OR_RETURN(const std::vector<LoadPrompt> prompts, make_prompts(flags, arms, false));
  LACUNA_ASSIGN_OR_RETURN(const std::vector<LoadPrompt> warm_ups, make_prompts(flags, arms, true));

  const std::string date = now_text();
  const std::vector<double> load_before = machine_load();
  const int64_t wanted = flags.rounds > 0 ? flags.rounds : paired ? 3 : 1;
  std::vector<Round> rounds;
  int64_t good = 0;
  // A disturbed round stays in the file, and both arms run once more.
  while (good < wanted &&
         static_cast<int64_t>(rounds.size()) < wanted + (paired ? flags.reruns : 0)) {
    const auto number = static_cast<int64_t>(rounds.size());
    Round round;
    round.order = {0};
    if (paired) {
      round.order =
          second_goes_first(number) ? std::vector<size_t>{1, 0} : std::vector<size_t>{0, 1};
    }
    round.runs.resize(arms.size());
    for (const size_t i : round.order) {
      if (paired || wanted > 1) {
        fmt::print("round {}: ", number + 1);
      }
      round.runs[i] = measure(flags, arms[i], warm_ups, prompts);
      print_run(flags, arms[i], round.runs[i]);
      for (std::string& what : disturbances(arms[i].label, round.runs[i])) {
        round.disturbed.push_back(std::move(what));
      }
    }
    if (paired) {
      round.no_ratio = why_no_ratio(round.runs[0], round.runs[1]);
      for (std::string& what : pair_disturbances(round.runs[0], round.runs[1])) {
        round.disturbed.push_back(std::move(what));
      }
    }
    for (const std::string& what : round.disturbed) {
      fmt::print("  disturbed: {}\n", what);
    }
    if (!round.no_ratio.empty()) {
      fmt::print("  no ratio: {}\n", round.no_ratio);
    }
    good += round.disturbed.empty() && round.no_ratio.empty() ? 1 : 0;
    rounds.push_back(std::move(round));
    if (!paired && static_cast<int64_t>(rounds.size()) == wanted) {
      break;
    }
  }

  Json json;
  json["schema"] = "lacuna-bench-serve-1";
  json["date"] = date;
  json["backend"] = flags.backend;
  json["label"] = flags.label;
  json["model_id"] = arms.front().target.model;
  json["tokenizer_id"] = flags.tokenizer.empty() ? Json() : Json(flags.tokenizer);
  json["commit"] = flags.commit;
  json["client_binary_hash"] = server::binary_hash();
  json.update(flags_json(flags));
  json["load_average"] = {{"before", load_before}, {"after", machine_load()}};
  for (const Arm& arm : arms) {
    json["arms"][arm.label] = arm_json(arm);
  }
  int64_t failed = 0;
  for (size_t i = 0; i < rounds.size(); ++i) {
    const Round& round = rounds[i];
    Json entry;
    entry["round"] = i + 1;
    entry["disturbed"] = round.disturbed;
    if (paired) {
      entry["no_ratio"] = round.no_ratio.empty() ? Json() : Json(round.no_ratio);
    }
    for (const size_t arm : round.order) {
      entry["order"].push_back(arms[arm].label);
      entry["runs"][arms[arm].label] = run_json(flags, round.runs[arm]);
      failed += static_cast<int64_t>(round.runs[arm].requests.size()) - round.runs[arm].completed();
    }
    json["rounds"].push_back(std::move(entry));
  }
  if (!paired && rounds.size() == 1) {
    // One run: its numbers where vLLM has them.
    json.update(run_json(flags, rounds.front().runs.front()));
  }
  if (paired) {
    fmt::print("{} over {}, median [range]:\n", flags.second_label, flags.label);
    json["ratio_of"] = {flags.second_label, flags.label};
    json["ratios"] = ratios_json(rounds, false, true);
    json["ratios_with_disturbed_rounds"] = ratios_json(rounds, true, false);
    if (json["ratios"].empty()) {
      fmt::print("  no undisturbed round has a ratio\n");
    }
  }
  if (file.has_value()) {
    const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  if (failed > 0) {
    return Status(StatusCode::kIo, fmt::format("{} requests failed", failed));
  }
  return ok_status();
}

}  // namespace

void add_bench_serve(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "serve", "A server under load: TTFT, TPOT, ITL, E2E; two servers in paired rounds");
  auto flags = std::make_shared<BenchServeFlags>();
  command->add_option("--backend", flags->backend, "openai, openai-chat, vllm or lacuna: one API")
      ->capture_default_str();
  command->add_option("--base-url", flags->base_url, "http://HOST:PORT, instead of the next two");
  command->add_option("--host", flags->host)->capture_default_str();
  command->add_option("--port", flags->port)->check(CLI::Range(1, 65535))->capture_default_str();
  command->add_option("--endpoint", flags->endpoint)->capture_default_str();
  command->add_option("-m,--model", flags->model, "Default: the first that the server has");
  command->add_option("--served-model-name", flags->served_model_name, "Instead of --model");
  command->add_option("--tokenizer", flags->tokenizer, "Only written to the result");
  command->add_option("--api-key", flags->api_key);
  command->add_option("--dataset-name", flags->dataset_name, "random or jsonl")
      ->capture_default_str();
  command->add_option("--dataset-path", flags->dataset_path, "File of jsonl");
  command->add_option("--random-input-len", flags->random_input_len)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--random-output-len", flags->random_output_len)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--random-prefix-len", flags->random_prefix_len, "Common to all prompts")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--random-range-ratio", flags->random_range_ratio, "Lengths vary by this")
      ->check(CLI::Range(0.0, 0.999))
      ->capture_default_str();
  command->add_option("--output-len,--custom-output-len", flags->output_len, "Of jsonl")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--vocab-size", flags->vocab_size, "Of random ids; default: the server's");
  command->add_flag("--disable-shuffle", flags->disable_shuffle, "jsonl in the file's order");
  command->add_option("--num-prompts", flags->num_prompts)
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--request-rate", flags->request_rate, "A second; inf: all at once")
      ->capture_default_str();
  command->add_option("--burstiness", flags->burstiness, "1: Poisson; below: bursts")
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
  command->add_option("--max-concurrency", flags->max_concurrency, "Default: 4096")
      ->check(CLI::Range(1, 1 << 14));
  command->add_option("--num-warmups", flags->num_warmups, "Requests before each run")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--seed", flags->seed)->capture_default_str();
  command->add_flag("--ignore-eos", flags->ignore_eos, "Answers have the asked length");
  command
      ->add_option_function<double>("--temperature",
                                    [flags](const double value) {
                                      flags->temperature = value;
                                      flags->temperature_given = true;
                                    })
      ->check(CLI::Range(0.0, 100.0));
  command->add_option("--request-timeout", flags->request_timeout, "Seconds of silence")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  command
      ->add_option("--ready-check-timeout-sec", flags->ready_timeout, "Wait for the server so long")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  command->add_option("--percentile-metrics", flags->percentile_metrics)->delimiter(',');
  command->add_option("--metric-percentiles", flags->metric_percentiles)
      ->delimiter(',')
      ->check(CLI::Range(0.0, 100.0));
  command->add_flag("--save-result", flags->save_result, "Write a JSON file");
  command->add_flag("--save-detailed", flags->save_detailed, "With every request");
  command->add_option("--result-dir", flags->result_dir);
  command->add_option("--result-filename,-o,--output", flags->result_filename, "The JSON file");
  command->add_option("--label", flags->label)->capture_default_str();
  command->add_option("--second-url", flags->second_url, "Compare with this server, in rounds");
  command->add_option("--second-label", flags->second_label)->capture_default_str();
  command->add_option("--second-model", flags->second_model, "Default: as the first");
  command->add_option("--rounds", flags->rounds, "Default: 3 with --second-url, else 1")
      ->check(CLI::Range(1, 1000));
  command->add_option("--reruns", flags->reruns, "More rounds if some are disturbed, at most")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  command->add_option("--commit", flags->commit, "What the JSON says was measured");
  command->add_flag("--disable-tqdm,--trust-remote-code", flags->ignored,
                    "Accepted, without effect");
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = bench_serve(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
