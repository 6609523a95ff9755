// Counters and histograms of served requests, as Prometheus text. Names and buckets are vLLM's, so
// that its dashboards work with the prefix "vllm:". Written by hand: the format is small, and
// prometheus-cpp ties names to families at registration and would own the counters that the engine
// already keeps.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/engine.h"

namespace lacuna::server {

class Histogram {
 public:
  // Ascending upper bounds, without infinity.
  explicit Histogram(std::vector<double> bounds);
  void observe(double value);

  const std::vector<double>& bounds() const { return bounds_; }
  const std::vector<int64_t>& counts() const { return counts_; }  // one more than bounds
  double sum() const { return sum_; }

 private:
  std::vector<double> bounds_;
  std::vector<int64_t> counts_;
  double sum_ = 0;
};

// Times of a finished sequence, in seconds since it arrived; negative: it never came so far.
struct SequenceTimes {
  double scheduled = -1;
  double first_token = -1;
  double last_token = -1;
  double finished = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
};

// What the text shows besides.
struct MetricsScene {
  std::string prefix = "lacuna:";
  std::string model_name;
  EngineCounters counters;
  int64_t num_running = 0;
  int64_t num_waiting = 0;
  int64_t num_connections = 0;
};

// Safe for use by several threads.
class Metrics {
 public:
  Metrics();

  void first_token(double seconds);
  void next_token(double seconds);
  void step(int64_t tokens);
  void finished(const SequenceTimes& times, FinishReason reason);
  void refused();  // the queue was full

  std::string render(const MetricsScene& scene) const;

 private:
  mutable std::mutex mutex_;
  std::array<int64_t, 4> finished_ = {};  // by FinishReason
  int64_t refused_ = 0;
  Histogram time_to_first_token_;
  Histogram inter_token_latency_;
  Histogram time_per_output_token_;
  Histogram e2e_latency_;
  Histogram queue_time_;
  Histogram prefill_time_;
  Histogram decode_time_;
  Histogram inference_time_;
  Histogram iteration_tokens_;
  Histogram prompt_tokens_;
  Histogram generation_tokens_;
};

}  // namespace lacuna::server
