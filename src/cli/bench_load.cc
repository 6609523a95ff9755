// Datasets, pacing, the sending threads, and the server's own counters.
#include "cli/bench_load.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cmath>
#include <fstream>
#include <random>
#include <thread>

#include "core/check.h"
#include "core/rng.h"
#include "server/http_client.h"

namespace lacuna::cli {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;
using server::HttpClient;
using server::HttpReply;

// Each request in flight has a thread.
constexpr int64_t kConcurrencyMax = 4096;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

int64_t draw_length(int64_t length, double ratio, uint64_t seed, uint64_t index) {
  const auto low = static_cast<int64_t>(std::floor(static_cast<double>(length) * (1 - ratio)));
  const auto high = static_cast<int64_t>(std::ceil(static_cast<double>(length) * (1 + ratio)));
  const auto span = static_cast<uint64_t>(high - low + 1);
  return std::max<int64_t>(1, low + static_cast<int64_t>(philox4x32(seed, index)[0] % span));
}

// 0 when a server writes something else there.
int64_t count_in(const Json& usage, const char* name) {
  const auto found = usage.find(name);
  return found != usage.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// Takes the events of a stream apart and notes when tokens came.
class EventReader {
 public:
  EventReader(Clock::time_point sent, RequestOutcome* out) : sent_(sent), out_(out) {}

  void take(std::string_view text) {
    const double now = seconds_since(sent_);
    if (text == "[DONE]") {
      ended_ = true;
      return;
    }
    const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object()) {
      out_->error = "an event that is not a JSON object";
      return;
    }
    if (json.contains("error")) {
      out_->error = json["error"].dump();
      return;
    }
    if (const auto usage = json.find("usage"); usage != json.end() && usage->is_object()) {
      has_usage_ = true;
      out_->prompt_tokens = count_in(*usage, "prompt_tokens");
      out_->tokens = count_in(*usage, "completion_tokens");
    }
    const auto choices = json.find("choices");
    if (choices == json.end() || !choices->is_array() || choices->empty()) {
      return;
    }
    const Json& choice = choices->front();
    if (const auto delta = choice.find("delta");
        delta != choice.end() && delta->contains("role") &&
        (!delta->contains("content") || (*delta)["content"].empty() || (*delta)["content"] == "")) {
      return;  // the head of a chat answer: no token yet
    }
    if (num_chunks_++ == 0) {
      out_->first_token = now;
    } else {
      out_->gaps.push_back(now - out_->last_token);
    }
    out_->last_token = now;
  }
  bool ended() const { return ended_; }
  int64_t num_chunks() const { return num_chunks_; }
  bool has_usage() const { return has_usage_; }

 private:
  Clock::time_point sent_;
  RequestOutcome* out_;
  bool ended_ = false;
  bool has_usage_ = false;
  int64_t num_chunks_ = 0;
};

std::string body_of(const LoadTarget& target, const LoadPrompt& prompt,
                    const LoadOptions& options) {
  Json json;
  json["model"] = target.model;
  json["max_tokens"] = prompt.max_tokens;
  json["stream"] = true;
  json["stream_options"] = {{"include_usage", true}};
  if (options.temperature_given) {
    json["temperature"] = options.temperature;
  }
  if (options.ignore_eos) {
    json["ignore_eos"] = true;
  }
  if (target.endpoint.ends_with("/chat/completions")) {
    json["messages"] = {{{"role", "user"}, {"content", prompt.text}}};
  } else if (prompt.ids.empty()) {
    json["prompt"] = prompt.text;
  } else {
    json["prompt"] = prompt.ids;
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Result<HttpClient> connect_to(const LoadTarget& target, double timeout_seconds) {
  return HttpClient::create({.base_url = target.url,
                             .default_path = "",
                             .api_key = target.api_key,
                             .timeout_seconds = timeout_seconds});
}

RequestOutcome send_one(HttpClient& client, const LoadTarget& target, const std::string& body) {
  RequestOutcome outcome;
  EventReader reader(Clock::now(), &outcome);
  const Result<HttpReply> answer =
      client.post_stream(target.endpoint, body, [&](std::string_view event) {
        reader.take(event);
        return true;
      });
  if (!answer.ok()) {
    outcome.error = answer.status().message();
  } else if (answer->status != 200) {
    outcome.error = fmt::format("HTTP {}: {}", answer->status, answer->body.substr(0, 500));
  } else if (outcome.error.empty() && !reader.ended()) {
    outcome.error = "the stream ended without [DONE]";
  } else if (outcome.error.empty() && reader.num_chunks() == 0) {
    outcome.error = "the stream had no token";
  } else if (outcome.error.empty() && !reader.has_usage()) {
    outcome.error = "the stream did not say its usage: lengths are not known";
  }
  outcome.ok = outcome.error.empty();
  return outcome;
}

}  // namespace

std::vector<LoadPrompt> random_prompts(const RandomDataset& dataset) {
  constexpr uint64_t kPrefix = ~uint64_t{0};
  const auto vocab = static_cast<uint32_t>(dataset.vocab_size);
  std::vector<LoadPrompt> prompts(dataset.num_prompts);
  for (int64_t i = 0; i < dataset.num_prompts; ++i) {
    LoadPrompt& prompt = prompts[i];
    const auto index = static_cast<uint64_t>(i);
    const int64_t length =
        draw_length(dataset.input_len, dataset.range_ratio, dataset.seed, 2 * index);
    prompt.max_tokens =
        draw_length(dataset.output_len, dataset.range_ratio, dataset.seed, 2 * index + 1);
    for (int64_t t = 0; t < dataset.prefix_len + length; ++t) {
      const bool in_prefix = t < dataset.prefix_len;
      prompt.ids.push_back(static_cast<int32_t>(
          philox4x32(dataset.seed, static_cast<uint64_t>(t), in_prefix ? kPrefix : index + 1)[0] %
          vocab));
    }
  }
  return prompts;
}

Result<std::vector<LoadPrompt>> jsonl_prompts(const std::string& path, int64_t num_prompts,
                                              int64_t output_len, bool shuffle, uint64_t seed) {
  const auto wrong = [&](int64_t number, const char* what) {
    return invalid_argument(
        fmt::format("--dataset-path: {}:{}: {}, expected an object with \"prompt\" (a text or a "
                    "list of ids) and perhaps \"output_len\"",
                    path, number, what));
  };
  std::ifstream file(path);
  if (!file) {
    return invalid_argument("--dataset-path: \"" + path + "\" cannot be read, expected a file");
  }
  std::vector<LoadPrompt> prompts;
  int64_t number = 0;
  for (std::string row; std::getline(file, row);) {
    ++number;
    if (row.find_first_not_of(" \t\r") == std::string::npos) {
      continue;
    }
    const Json json = Json::parse(row, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object() || !json.contains("prompt")) {
      return wrong(number, "no such object");
    }
    LoadPrompt prompt;
    const Json& given = json["prompt"];
    if (given.is_string()) {
      prompt.text = given.get<std::string>();
    } else if (given.is_array() && !given.empty() &&
               std::all_of(given.begin(), given.end(), [](const Json& id) {
                 return id.is_number_integer() && id.get<int64_t>() >= 0 &&
                        id.get<int64_t>() <= INT32_MAX;
               })) {
      prompt.ids = given.get<std::vector<int32_t>>();
    } else {
      return wrong(number, "\"prompt\" is something else");
    }
    prompt.max_tokens = output_len;
    if (const auto length = json.find("output_len"); length != json.end()) {
      if (!length->is_number_integer() || length->get<int64_t>() < 1) {
        return wrong(number, "\"output_len\" is no length");
      }
      prompt.max_tokens = length->get<int64_t>();
    }
    prompts.push_back(std::move(prompt));
  }
  if (prompts.empty()) {
    return invalid_argument("--dataset-path: \"" + path + "\" has no prompts, expected one a line");
  }
  if (shuffle) {
    for (size_t i = prompts.size(); i > 1; --i) {
      std::swap(prompts[i - 1], prompts[philox4x32(seed, i)[0] % i]);
    }
  }
  const size_t in_file = prompts.size();
  prompts.resize(num_prompts);
  for (size_t i = in_file; i < prompts.size(); ++i) {
    prompts[i] = prompts[i - in_file];
  }
  return prompts;
}

std::string hash_of(const std::vector<LoadPrompt>& prompts) {
  uint64_t hash = 0xcbf29ce484222325u;
  const auto add = [&](uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ (value >> (8 * byte) & 0xff)) * 0x100000001b3u;
    }
  };
  for (const LoadPrompt& prompt : prompts) {
    add(prompt.ids.size());
    for (const int32_t id : prompt.ids) {
      add(static_cast<uint64_t>(id));
    }
    add(prompt.text.size());
    for (const char c : prompt.text) {
      add(static_cast<unsigned char>(c));
    }
    add(static_cast<uint64_t>(prompt.max_tokens));
  }
  return fmt::format("{:016x}", hash);
}

std::vector<double> arrival_times(int64_t count, double rate, double burstiness, uint64_t seed) {
  std::vector<double> due;
  if (std::isinf(rate)) {
    return due;
  }
  std::mt19937_64 bits(seed);
  std::gamma_distribution<double> gap(burstiness, 1 / (rate * burstiness));
  double now = 0;
  for (int64_t i = 0; i < count; ++i) {
    due.push_back(now);
    now += gap(bits);
  }
  return due;
}

LoadRun send_load(const LoadTarget& target, const std::vector<LoadPrompt>& prompts,
                  const LoadOptions& options) {
  LoadRun run;
  run.prompt_hash = hash_of(prompts);
  const bool has_due = !options.due.empty();
  // With a limit on concurrency, waiting for a free place is meant.
  run.paced = has_due && options.max_concurrency == 0;
  run.requests.resize(prompts.size());
  // Bodies are made beforehand: the clock is about the server.
  std::vector<std::string> bodies;
  for (const LoadPrompt& prompt : prompts) {
    bodies.push_back(body_of(target, prompt, options));
  }
  const int64_t count = static_cast<int64_t>(prompts.size());
  const int64_t limit = options.max_concurrency > 0 ? options.max_concurrency : kConcurrencyMax;
  const int64_t num_threads = std::min(limit, count);
  std::atomic<int64_t> next = 0;
  const Clock::time_point begin = Clock::now();
  const auto work = [&] {
    Result<HttpClient> client = connect_to(target, target.timeout_seconds);
    for (int64_t i = next++; i < count; i = next++) {
      double late = 0;
      if (has_due) {
        const auto due = begin + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(options.due[i]));
        std::this_thread::sleep_until(due);
        late = seconds_since(due);
      }
      RequestOutcome& outcome = run.requests[i];
      if (client.ok()) {
        outcome = send_one(*client, target, bodies[i]);
      } else {
        outcome.error = client.status().message();
      }
      outcome.tokens_asked = prompts[i].max_tokens;
      outcome.late = late;
    }
  };
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < num_threads; ++i) {
    threads.emplace_back(work);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  run.seconds = seconds_since(begin);
  return run;
}

Result<ServerFacts> preflight(const LoadTarget& target, double wait_seconds) {
  LACUNA_ASSIGN_OR_RETURN(HttpClient client, connect_to(target, 10));
  const Clock::time_point begin = Clock::now();
  ServerFacts facts;
  while (true) {
    const Result<HttpReply> answer = client.get("/v1/models");
    std::string why;
    if (!answer.ok()) {
      why = fmt::format("GET {}/v1/models: {}", target.url, answer.status().message());
    } else if (answer->status != 200) {
      why = fmt::format("GET {}/v1/models: HTTP {}: {}", target.url, answer->status,
                        answer->body.substr(0, 300));
    } else {
      const Json json = Json::parse(answer->body, nullptr, /*allow_exceptions=*/false);
      if (json.is_object() && json.contains("data") && json["data"].is_array()) {
        for (const Json& model : json["data"]) {
          if (model.is_object() && model.contains("id") && model["id"].is_string()) {
            facts.models.push_back(model["id"].get<std::string>());
          }
        }
      }
      if (!facts.models.empty()) {
        break;
      }
      why = "GET " + target.url + "/v1/models: no models in the answer";
    }
    if (seconds_since(begin) >= wait_seconds) {
      return Status(StatusCode::kIo, "preflight: " + why +
                                         "; expected a server with its model loaded, such as "
                                         "`lacuna serve` (--ready-check-timeout-sec waits for it)");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
  }
  const Result<HttpReply> version = client.get("/version");
  if (version.ok() && version->status == 200) {
    facts.version = nlohmann::ordered_json::parse(version->body, nullptr, false);
    if (facts.version.is_discarded()) {
      facts.version = nullptr;
    }
  }
  return facts;
}

ServerCounters parse_metrics(const std::string& text) {
  ServerCounters counters;
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    if (line.empty() || line.front() == '#') {
      continue;
    }
    // PREFIX:NAME{LABELS} VALUE; a label may hold anything but an unescaped quote.
    const size_t brace = line.find('{');
    const size_t name_end = std::min(brace, line.find(' '));
    const size_t labels_end = brace == std::string_view::npos ? name_end : line.rfind('}');
    const size_t space = line.find(' ', std::min(labels_end, line.size()));
    if (name_end == std::string_view::npos || space == std::string_view::npos) {
      continue;
    }
    const std::string_view digits = line.substr(space + 1);
    double value = 0;
    if (std::from_chars(digits.data(), digits.data() + digits.size(), value).ec != std::errc()) {
      continue;
    }
    std::string_view name = line.substr(0, name_end);
    name = name.substr(name.rfind(':') + 1);
    counters.known = true;
    counters.values[std::string(name)] += value;
    constexpr std::string_view kKernel = "kernel=\"";
    const size_t kernel = line.find(kKernel);
    if (name == "kernel_calls_total" && kernel != std::string_view::npos) {
      const std::string_view rest = line.substr(kernel + kKernel.size());
      counters.kernel_calls[std::string(rest.substr(0, rest.find('"')))] += value;
    }
  }
  return counters;
}

ServerCounters read_counters(const LoadTarget& target) {
  Result<HttpClient> client = connect_to(target, 10);
  if (!client.ok()) {
    return {};
  }
  const Result<HttpReply> answer = client->get("/metrics");
  return answer.ok() && answer->status == 200 ? parse_metrics(answer->body) : ServerCounters{};
}

ServerSide server_side(const ServerCounters& before, const ServerCounters& after) {
  ServerSide side;
  side.known = before.known && after.known;
  if (!side.known) {
    return side;
  }
  const auto at = [](const std::map<std::string, double>& values, const std::string& name) {
    const auto found = values.find(name);
    return found == values.end() ? 0.0 : found->second;
  };
  const auto change = [&](const std::string& name) {
    const double difference = at(after.values, name) - at(before.values, name);
    side.restarted = side.restarted || difference < 0;
    return std::llround(difference);
  };
  side.preemptions = change("num_preemptions_total");
  side.prefix_queries = change("prefix_cache_queries_total");
  side.prefix_hits = change("prefix_cache_hits_total");
  side.requests = change("request_success_total");
  change("generation_tokens_total");
  side.requests_at_begin = std::llround(at(before.values, "num_requests_running") +
                                        at(before.values, "num_requests_waiting"));
  for (const auto& [kernel, calls] : after.kernel_calls) {
    const double earlier = at(before.kernel_calls, kernel);
    side.kernel_calls[kernel] = std::llround(calls - earlier);
    if (earlier == 0 && calls > 0) {
      side.late_kernels.push_back(kernel);
    }
  }
  return side;
}

}  // namespace lacuna::cli
