// The attention of prefill on a GPU: multi-head attention over un-absorbed keys, dense and under a
// mask of chosen keys. Arithmetic is its bound, so there is no floor: compare flops.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu_bench.h"

namespace lacuna::bench {

// Width of the values that go with keys of this width in released models; 0: none do.
constexpr int64_t mha_value_width(int64_t d_qk) {
  return d_qk == 192 ? 128 : d_qk == 256 ? 256 : 0;
}

struct MhaGrid {
  std::vector<int64_t> heads;
  std::vector<int64_t> d_qk;      // with a mha_value_width
  std::vector<int64_t> topk;      // keys that a row's mask lets through; 0: no mask
  std::vector<int64_t> contexts;  // keys
  std::vector<int64_t> rows;      // the last ones of a context; 0: all of it
  std::string kernel;             // forces a kernel; empty: dispatch
};

// Measures every shape of the grid. `tell` is called with each line as it is measured.
Status measure_mha(GpuBench gpu, const MhaGrid& grid, const TellLine& tell);

// How it was measured, in words.
std::string mha_method(const GpuMethod& method);

}  // namespace lacuna::bench
