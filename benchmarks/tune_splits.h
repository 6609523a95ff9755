// Measures into how many splits sm90/sparse_mla_small_head should cut a shape's rows: every cut
// that the kernel takes, beside the one that it chooses by itself.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/gpu_bench.h"

namespace lacuna::bench {

struct TuneGrid {
  std::vector<int64_t> heads;
  std::vector<int64_t> rows;
  std::vector<int64_t> topk;
  int64_t context = 0;  // cached tokens; 0: 4 GB of them
};

struct TunedShape {
  SplitChoice choice;  // the fastest
  double us = 0;
  std::string own_cut;  // what the kernel chooses by itself, in its words
  double own_us = 0;
  int64_t num_cuts = 0;  // measured
};

// `tell` is called with each shape as it is measured.
Status tune_splits(GpuBench gpu, const TuneGrid& grid,
                   const std::function<void(const TunedShape&)>& tell);

// How it was measured, in words.
std::string tune_method(const GpuMethod& method);

}  // namespace lacuna::bench
