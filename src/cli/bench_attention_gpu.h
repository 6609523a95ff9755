// `lacuna bench attention --device cuda`: the grid of shapes, the table and the CSV.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lacuna/status.h"

namespace lacuna::cli {

struct GpuBenchFlags {
  std::vector<int64_t> heads;
  std::vector<int64_t> d_qk;
  std::vector<int64_t> topk;
  std::vector<int64_t> rows;
  int64_t context = 0;  // 0: 4 GB of tokens
  std::string dtype;
  std::string timing = "graph";  // or event
  int64_t rounds = 11;
  std::string kernel;
  std::string peer;  // path of a shared library; empty: none
  std::string csv;
  std::string commit;
};

// The exit code; an error when there is no GPU, or the program was built without the benchmarks.
Result<int> bench_attention_gpu(const GpuBenchFlags& flags);

}  // namespace lacuna::cli
