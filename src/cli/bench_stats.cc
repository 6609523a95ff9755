// Percentiles, and the rules by which two runs have a ratio.
#include "cli/bench_stats.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lacuna::cli {
namespace {

constexpr double kLateSeconds = 0.01;

template <class Get>
int64_t sum_of(const std::vector<RequestOutcome>& requests, Get get) {
  int64_t sum = 0;
  for (const RequestOutcome& request : requests) {
    sum += request.ok ? get(request) : 0;
  }
  return sum;
}

std::string why_unfinished(const char* which, const LoadRun& run) {
  int64_t failed = 0;
  int64_t other_length = 0;
  for (const RequestOutcome& request : run.requests) {
    failed += request.ok ? 0 : 1;
    other_length += request.ok && request.tokens != request.tokens_asked ? 1 : 0;
  }
  if (run.requests.empty()) {
    return fmt::format("{}: no requests", which);
  }
  if (failed > 0) {
    return fmt::format("{}: {} of {} requests failed", which, failed, run.requests.size());
  }
  if (other_length > 0) {
    return fmt::format("{}: {} of {} requests have another length than was asked for", which,
                       other_length, run.requests.size());
  }
  return {};
}

}  // namespace

double percentile(std::vector<double> values, double percent) {
  if (values.empty()) {
    return 0;
  }
  std::sort(values.begin(), values.end());
  const double at = std::clamp(percent, 0.0, 100.0) / 100 * static_cast<double>(values.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, values.size() - 1);
  return values[low] + (at - static_cast<double>(low)) * (values[high] - values[low]);
}

double mean(const std::vector<double>& values) {
  return values.empty() ? 0
                        : std::accumulate(values.begin(), values.end(), 0.0) /
                              static_cast<double>(values.size());
}

double standard_deviation(const std::vector<double>& values) {
  const double middle = mean(values);
  double squares = 0;
  for (const double value : values) {
    squares += (value - middle) * (value - middle);
  }
  return values.empty() ? 0 : std::sqrt(squares / static_cast<double>(values.size()));
}

int64_t LoadRun::completed() const {
  return sum_of(requests, [](const RequestOutcome&) { return 1; });
}

int64_t LoadRun::tokens_in() const {
  return sum_of(requests, [](const RequestOutcome& request) { return request.prompt_tokens; });
}

int64_t LoadRun::tokens_out() const {
  return sum_of(requests, [](const RequestOutcome& request) { return request.tokens; });
}

int64_t LoadRun::late_sends() const {
  return std::count_if(requests.begin(), requests.end(),
                       [](const RequestOutcome& request) { return request.late > kLateSeconds; });
}

std::vector<double> LoadRun::ttft() const {
  std::vector<double> values;
  for (const RequestOutcome& request : requests) {
    if (request.ok) {
      values.push_back(request.first_token);
    }
  }
  return values;
}

std::vector<double> LoadRun::tpot() const {
  std::vector<double> values;
  for (const RequestOutcome& request : requests) {
    if (request.ok && request.tokens > 1) {
      values.push_back((request.last_token - request.first_token) /
                       static_cast<double>(request.tokens - 1));
    }
  }
  return values;
}

std::vector<double> LoadRun::itl() const {
  std::vector<double> values;
  for (const RequestOutcome& request : requests) {
    if (request.ok) {
      values.insert(values.end(), request.gaps.begin(), request.gaps.end());
    }
  }
  return values;
}

std::vector<double> LoadRun::e2el() const {
  std::vector<double> values;
  for (const RequestOutcome& request : requests) {
    if (request.ok) {
      values.push_back(request.last_token);
    }
  }
  return values;
}

std::string why_no_ratio(const LoadRun& first, const LoadRun& second) {
  if (std::string why = why_unfinished("first", first); !why.empty()) {
    return why;
  }
  if (std::string why = why_unfinished("second", second); !why.empty()) {
    return why;
  }
  if (first.prompt_hash != second.prompt_hash || first.requests.size() != second.requests.size()) {
    return "the prompts differ";
  }
  for (size_t i = 0; i < first.requests.size(); ++i) {
    if (first.requests[i].prompt_tokens != second.requests[i].prompt_tokens) {
      return fmt::format("request {}: the servers counted {} and {} prompt tokens", i,
                         first.requests[i].prompt_tokens, second.requests[i].prompt_tokens);
    }
    if (first.requests[i].tokens_asked != second.requests[i].tokens_asked) {
      return fmt::format("request {}: {} and {} tokens were asked for", i,
                         first.requests[i].tokens_asked, second.requests[i].tokens_asked);
    }
  }
  return {};
}

std::vector<std::string> disturbances(const std::string& label, const LoadRun& run) {
  std::vector<std::string> found;
  const int64_t failed = static_cast<int64_t>(run.requests.size()) - run.completed();
  if (failed > 0) {
    found.push_back(fmt::format("{}: {} requests failed", label, failed));
  }
  // One request in a hundred may slip without moving a percentile that anybody reads.
  if (run.paced && 100 * run.late_sends() > static_cast<int64_t>(run.requests.size())) {
    found.push_back(
        fmt::format("{}: {} requests were sent more than 10 ms late", label, run.late_sends()));
  }
  const ServerSide& server = run.server;
  if (!server.known) {
    return found;
  }
  if (server.restarted) {
    found.push_back(fmt::format("{}: the server restarted", label));
    return found;
  }
  if (server.preemptions > 0) {
    found.push_back(fmt::format("{}: {} preemptions", label, server.preemptions));
  }
  if (server.requests_at_begin > 0) {
    found.push_back(
        fmt::format("{}: {} requests of others ran before it", label, server.requests_at_begin));
  }
  const int64_t others = server.requests - run.completed();
  if (failed == 0 && others > 0) {
    found.push_back(fmt::format("{}: {} requests of others ended meanwhile", label, others));
  }
  if (!server.late_kernels.empty()) {
    found.push_back(fmt::format("{}: {} kernels ran for the first time, {} among them", label,
                                server.late_kernels.size(), server.late_kernels.front()));
  }
  return found;
}

std::vector<std::string> pair_disturbances(const LoadRun& first, const LoadRun& second) {
  if (first.server.known && second.server.known &&
      first.server.prefix_hits != second.server.prefix_hits) {
    return {fmt::format("prefix cache hits differ: {} and {} tokens", first.server.prefix_hits,
                        second.server.prefix_hits)};
  }
  return {};
}

Spread spread_of(const std::vector<double>& values) {
  return {.median = percentile(values, 50),
          .low = percentile(values, 0),
          .high = percentile(values, 100),
          .count = static_cast<int64_t>(values.size())};
}

}  // namespace lacuna::cli
