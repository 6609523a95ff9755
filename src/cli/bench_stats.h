// The numbers of `lacuna bench serve`: percentiles of one run, and what two runs may be compared
// for. No I/O.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lacuna::cli {

// Of the sorted values, with linear interpolation between neighbours; 0 of none.
double percentile(std::vector<double> values, double percent);
double mean(const std::vector<double>& values);
double standard_deviation(const std::vector<double>& values);  // of the population

// One request as its client saw it; seconds.
struct RequestOutcome {
  bool ok = false;
  std::string error;
  int64_t prompt_tokens = 0;  // as the server counted
  int64_t tokens_asked = 0;
  int64_t tokens = 0;
  double first_token = 0;  // from sending
  double last_token = 0;
  double late = 0;           // sent that long after it was due
  std::vector<double> gaps;  // between tokens
};

// What the server says it did during a run.
struct ServerSide {
  bool known = false;  // it has /metrics that we can read
  int64_t preemptions = 0;
  int64_t prefix_queries = 0;
  int64_t prefix_hits = 0;
  int64_t requests = 0;           // that ended during the run, anybody's
  int64_t requests_at_begin = 0;  // that ran or waited before the run
  bool restarted = false;
  std::map<std::string, int64_t> kernel_calls;
  std::vector<std::string> late_kernels;  // called in the run, never before it
};

struct LoadRun {
  std::string prompt_hash;
  double seconds = 0;
  bool paced = false;  // requests were due at times of their own
  std::vector<RequestOutcome> requests;
  ServerSide server;

  int64_t completed() const;
  int64_t tokens_in() const;
  int64_t tokens_out() const;
  int64_t late_sends() const;  // more than 10 ms late
  // Of the requests that finished; seconds.
  std::vector<double> ttft() const;
  std::vector<double> tpot() const;
  std::vector<double> itl() const;
  std::vector<double> e2el() const;
};

// Why the two runs of a round have no ratio: a request that failed or has another length than was
// asked for, or inputs that differ. Empty: they have one.
std::string why_no_ratio(const LoadRun& first, const LoadRun& second);

// What happened in a round that is not the arms' own speed.
std::vector<std::string> disturbances(const std::string& label, const LoadRun& run);
std::vector<std::string> pair_disturbances(const LoadRun& first, const LoadRun& second);

struct Spread {
  double median = 0;
  double low = 0;
  double high = 0;
  int64_t count = 0;
};
Spread spread_of(const std::vector<double>& values);

// A/B, B/A, A/B, ...: whether the second arm goes first in round `round` (from 0).
inline bool second_goes_first(int64_t round) { return round % 2 == 1; }

}  // namespace lacuna::cli
