// Sparse MLA on a GPU against what the memory allows: a grid of shapes, each timed cold and warm
// beside a kernel that only gathers, and beside a peer if there is one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu_bench.h"

namespace lacuna::bench {

class Peer;

struct SparseMlaGrid {
  std::vector<int64_t> heads;
  std::vector<KvLayout> layouts;
  std::vector<int64_t> topk;
  std::vector<int64_t> counts;  // valid entries of the lists of topk; empty: all, and none given
  std::vector<int64_t> rows;
  std::string dtype;    // what the lines call the layouts
  int64_t context = 0;  // cached tokens; 0: 4 GB of them
  std::string kernel;   // forces a kernel; empty: dispatch
};

// Measures every shape of the grid. `peer` may be null. `tell` is called with each line as it is
// measured.
Status measure_sparse_mla(GpuBench gpu, const SparseMlaGrid& grid, const Peer* peer,
                          const TellLine& tell);

// How it was measured, in words.
std::string sparse_mla_method(const GpuMethod& method);

}  // namespace lacuna::bench
