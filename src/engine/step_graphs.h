// The graphs of decode steps: one for each number of rows a request and padded number of requests.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "core/device_handles.h"
#include "ops/op_runner.h"

namespace lacuna {

// Steps whose requests all have up to this many rows have fixed shapes.
inline constexpr int64_t kUniformRowsMax = 4;

// Padded numbers of requests, ascending: dense where decode steps are, and powers of two for more
// rows a request. The last is the largest number that a step of `rows_max` rows can have, up to
// 512: beyond, the launches are short beside the work.
std::vector<int64_t> padded_requests(int64_t query_len, int64_t requests_max, int64_t rows_max);

struct StepGraph {
  GraphHandle graph;
  OpRunner::Tally calls;
};

// By rows a request and padded number of requests.
using StepGraphs = std::map<std::pair<int64_t, int64_t>, StepGraph>;

}  // namespace lacuna
