// The Prometheus text exposition format, version 0.0.4.
#include "server/metrics.h"

#include <fmt/format.h>

#include <algorithm>

namespace lacuna::server {
namespace {

std::vector<double> first_token_bounds() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
          1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
}
std::vector<double> token_bounds() {
  return {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
          0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
}
std::vector<double> request_bounds() {
  return {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
          30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
}
std::vector<double> step_bounds() {
  return {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
}
std::vector<double> length_bounds() {
  std::vector<double> bounds;
  for (double decade = 1; decade < 1e6; decade *= 10) {
    for (const double step : {1, 2, 5}) {
      bounds.push_back(decade * step);
    }
  }
  return bounds;
}

std::string escape_label(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '\\' || c == '"') {
      out += '\\';
    }
    out += c;
  }
  return out;
}

class TextWriter {
 public:
  explicit TextWriter(const MetricsScene& scene)
      : prefix_(scene.prefix),
        model_(fmt::format("model_name=\"{}\"", escape_label(scene.model_name))) {}

  void begin(std::string_view name, std::string_view type, std::string_view help) {
    name_ = prefix_ + std::string(name);
    text_ += fmt::format("# HELP {0} {1}\n# TYPE {0} {2}\n", name_, help, type);
  }
  void value(double number, std::string_view labels = {}) { sample("", number, labels); }
  void single(std::string_view name, std::string_view type, std::string_view help, double number) {
    begin(name, type, help);
    value(number);
  }
  void histogram(std::string_view name, std::string_view help, const Histogram& histogram) {
    begin(name, "histogram", help);
    int64_t count = 0;
    for (size_t i = 0; i < histogram.bounds().size(); ++i) {
      count += histogram.counts()[i];
      sample("_bucket", static_cast<double>(count),
             fmt::format("le=\"{}\"", histogram.bounds()[i]));
    }
    count += histogram.counts().back();
    sample("_bucket", static_cast<double>(count), "le=\"+Inf\"");
    sample("_sum", histogram.sum(), {});
    sample("_count", static_cast<double>(count), {});
  }
  std::string take() { return std::move(text_); }

 private:
  void sample(std::string_view suffix, double number, std::string_view labels) {
    text_ += fmt::format("{}{}{{{}{}{}}} {}\n", name_, suffix, model_, labels.empty() ? "" : ",",
                         labels, number);
  }

  std::string prefix_;
  std::string model_;
  std::string name_;
  std::string text_;
};

}  // namespace

Histogram::Histogram(std::vector<double> bounds)
    : bounds_(std::move(bounds)), counts_(bounds_.size() + 1) {}

void Histogram::observe(double value) {
  const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
  ++counts_[bound - bounds_.begin()];
  sum_ += value;
}

Metrics::Metrics()
    : time_to_first_token_(first_token_bounds()),
      inter_token_latency_(token_bounds()),
      time_per_output_token_(token_bounds()),
      e2e_latency_(request_bounds()),
      queue_time_(request_bounds()),
      prefill_time_(request_bounds()),
      decode_time_(request_bounds()),
      inference_time_(request_bounds()),
      iteration_tokens_(step_bounds()),
      prompt_tokens_(length_bounds()),
      generation_tokens_(length_bounds()) {}

void Metrics::first_token(double seconds) {
  const std::lock_guard lock(mutex_);
  time_to_first_token_.observe(seconds);
}

void Metrics::next_token(double seconds) {
  const std::lock_guard lock(mutex_);
  inter_token_latency_.observe(seconds);
}

void Metrics::step(int64_t tokens) {
  const std::lock_guard lock(mutex_);
  iteration_tokens_.observe(static_cast<double>(tokens));
}

void Metrics::finished(const SequenceTimes& times, FinishReason reason) {
  const std::lock_guard lock(mutex_);
  ++finished_[static_cast<int>(reason)];
  if (reason == FinishReason::kCancelled || times.scheduled < 0 || times.first_token < 0) {
    return;
  }
  e2e_latency_.observe(times.finished);
  queue_time_.observe(times.scheduled);
  prefill_time_.observe(times.first_token - times.scheduled);
  decode_time_.observe(times.last_token - times.first_token);
  inference_time_.observe(times.last_token - times.scheduled);
  prompt_tokens_.observe(static_cast<double>(times.prompt_tokens));
  generation_tokens_.observe(static_cast<double>(times.generated_tokens));
  if (times.generated_tokens > 1) {
    time_per_output_token_.observe((times.last_token - times.first_token) /
                                   static_cast<double>(times.generated_tokens - 1));
  }
}

void Metrics::refused() {
  const std::lock_guard lock(mutex_);
  ++refused_;
}

std::string Metrics::render(const MetricsScene& scene) const {
  const EngineCounters& counters = scene.counters;
  const std::lock_guard lock(mutex_);
  TextWriter out(scene);
  out.single("num_requests_running", "gauge", "Sequences that the engine runs.",
             static_cast<double>(scene.num_running));
  out.single("num_requests_waiting", "gauge", "Sequences that wait for the engine.",
             static_cast<double>(scene.num_waiting));
  const double blocks = static_cast<double>(std::max<int64_t>(counters.blocks_total, 1));
  out.single("kv_cache_usage_perc", "gauge", "Cache blocks in use, 0 to 1.",
             static_cast<double>(counters.blocks_used) / blocks);
  out.single("num_preemptions_total", "counter", "Sequences that gave way and started over.",
             static_cast<double>(counters.num_preemptions));
  out.single("prompt_tokens_total", "counter", "Prompt tokens computed.",
             static_cast<double>(counters.prompt_tokens));
  out.single("generation_tokens_total", "counter", "Tokens generated.",
             static_cast<double>(counters.generated_tokens));
  out.begin("request_success_total", "counter", "Finished sequences by reason.");
  out.value(static_cast<double>(finished_[static_cast<int>(FinishReason::kStop)]),
            "finished_reason=\"stop\"");
  out.value(static_cast<double>(finished_[static_cast<int>(FinishReason::kLength)]),
            "finished_reason=\"length\"");
  out.value(static_cast<double>(finished_[static_cast<int>(FinishReason::kCancelled)]),
            "finished_reason=\"abort\"");
  out.single("prefix_cache_queries_total", "counter", "Tokens looked up in the prefix cache.",
             static_cast<double>(counters.prefix_queries));
  out.single("prefix_cache_hits_total", "counter", "Tokens found in the prefix cache.",
             static_cast<double>(counters.prefix_hits));
  out.histogram("time_to_first_token_seconds", "From arrival to the first token.",
                time_to_first_token_);
  out.histogram("inter_token_latency_seconds", "Between two tokens of a sequence.",
                inter_token_latency_);
  out.histogram("request_time_per_output_token_seconds",
                "Mean time between the tokens of a finished sequence.", time_per_output_token_);
  out.histogram("e2e_request_latency_seconds", "From arrival to the end.", e2e_latency_);
  out.histogram("request_queue_time_seconds", "From arrival to the first step.", queue_time_);
  out.histogram("request_prefill_time_seconds", "From the first step to the first token.",
                prefill_time_);
  out.histogram("request_decode_time_seconds", "From the first token to the last.", decode_time_);
  out.histogram("request_inference_time_seconds", "From the first step to the last token.",
                inference_time_);
  out.histogram("iteration_tokens_total", "Rows of a step.", iteration_tokens_);
  out.histogram("request_prompt_tokens", "Prompt tokens of a finished sequence.", prompt_tokens_);
  out.histogram("request_generation_tokens", "Generated tokens of a finished sequence.",
                generation_tokens_);

  // What sparse attention adds.
  out.single("num_connections", "gauge", "Open connections.",
             static_cast<double>(scene.num_connections));
  out.single("requests_refused_total", "counter", "Requests refused because the queue was full.",
             static_cast<double>(refused_));
  out.single("steps_total", "counter", "Steps of the engine.", static_cast<double>(counters.steps));
  out.begin("lane_rows_total", "counter", "Attention rows by lane, a layer.");
  for (int lane = 0; lane < kNumRowLanes; ++lane) {
    std::string name(row_lane_name(lane));
    std::replace(name.begin(), name.end(), ' ', '_');
    out.value(static_cast<double>(counters.rows_by_lane[lane]), fmt::format("lane=\"{}\"", name));
  }
  out.single("attention_keys_read_total", "counter", "Keys that attention read, a layer.",
             static_cast<double>(counters.keys_read));
  out.single("attention_keys_visible_total", "counter",
             "Keys in context that dense attention would have read, a layer.",
             static_cast<double>(counters.keys_visible));
  out.single("step_seconds_total", "counter", "Time in steps.", counters.step_seconds);
  out.single("schedule_seconds_total", "counter", "Time of scheduler and planner.",
             counters.schedule_seconds);
  out.begin("kernel_calls_total", "counter", "Calls by kernel: which ones were chosen.");
  for (const auto& [kernel, calls] : counters.kernel_calls) {
    out.value(static_cast<double>(calls), fmt::format("kernel=\"{}\"", escape_label(kernel)));
  }
  if (!counters.kernel_seconds.empty()) {
    out.begin("kernel_seconds_total", "counter", "Time by kernel.");
    for (const auto& [kernel, seconds] : counters.kernel_seconds) {
      out.value(seconds, fmt::format("kernel=\"{}\"", escape_label(kernel)));
    }
  }
  return out.take();
}

}  // namespace lacuna::server
