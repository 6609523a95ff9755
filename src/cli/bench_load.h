// What `lacuna bench serve` sends, to whom, and what comes back.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/bench_stats.h"
#include "lacuna/status.h"

namespace lacuna::cli {

struct LoadPrompt {
  std::vector<int32_t> ids;  // when empty: `text`
  std::string text;
  int64_t max_tokens = 0;
};

struct RandomDataset {
  int64_t num_prompts = 0;
  int64_t input_len = 0;
  int64_t output_len = 0;
  int64_t prefix_len = 0;  // the same ids before every prompt
  double range_ratio = 0;  // lengths are uniform in [(1 - r) * length, (1 + r) * length]
  int64_t vocab_size = 0;
  uint64_t seed = 0;
};

std::vector<LoadPrompt> random_prompts(const RandomDataset& dataset);
// One JSON object a line: "prompt", a text or a list of ids, and perhaps "output_len".
Result<std::vector<LoadPrompt>> jsonl_prompts(const std::string& path, int64_t num_prompts,
                                              int64_t output_len, bool shuffle, uint64_t seed);
std::string hash_of(const std::vector<LoadPrompt>& prompts);

// Seconds after the start at which each request is due; empty when all are due at once. Gaps have a
// gamma distribution of shape `burstiness`: 1 is a Poisson process.
std::vector<double> arrival_times(int64_t count, double rate, double burstiness, uint64_t seed);

struct LoadTarget {
  std::string url;
  std::string endpoint = "/v1/completions";
  std::string model;
  std::string api_key;
  double timeout_seconds = 3600;
};

struct LoadOptions {
  int64_t max_concurrency = 0;  // 0: as many as there are requests, up to 4096
  bool ignore_eos = false;
  double temperature = 0;
  bool temperature_given = false;
  std::vector<double> due;  // see arrival_times
};

// Sends every prompt and waits for the last answer.
LoadRun send_load(const LoadTarget& target, const std::vector<LoadPrompt>& prompts,
                  const LoadOptions& options);

// What a server says about itself, before anything is sent.
struct ServerFacts {
  std::vector<std::string> models;
  nlohmann::ordered_json version;  // the body of /version; null when there is none
};
// Fails, naming the URL, unless a server with a loaded model is there. Asks for `wait_seconds`
// long.
Result<ServerFacts> preflight(const LoadTarget& target, double wait_seconds);

// Counters of /metrics, whatever their prefix: name -> sum over labels; kernels by name.
struct ServerCounters {
  bool known = false;
  std::map<std::string, double> values;
  std::map<std::string, double> kernel_calls;
};
ServerCounters parse_metrics(const std::string& text);
ServerCounters read_counters(const LoadTarget& target);
ServerSide server_side(const ServerCounters& before, const ServerCounters& after);

}  // namespace lacuna::cli
