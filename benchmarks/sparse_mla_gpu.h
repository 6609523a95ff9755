// Sparse MLA on a GPU against what the memory allows: a grid of shapes, each timed cold and warm
// beside a kernel that only gathers, and beside a peer if there is one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "benchmarks/gpu_timer.h"
#include "ops/backend.h"

namespace lacuna::bench {

class Peer;

struct SparseMlaGrid {
  std::vector<int64_t> heads;
  std::vector<int64_t> d_qk;  // 576 or 512: latent 512 with rope 64 or none
  std::vector<int64_t> topk;
  std::vector<int64_t> rows;
  std::string dtype = "bf16";  // of the cache: bf16, f32 or fp8_ds_mla
  int64_t context = 0;         // cached tokens; 0: 4 GB of them
  int64_t rounds = 11;
  bool graphs = true;  // false: events around single calls
  std::string kernel;  // forces a kernel; empty: dispatch
};

// A line of the table.
struct SparseMlaTime {
  std::string kernel;
  std::string peer;  // "none": the library itself
  int64_t heads = 0;
  int64_t d_qk = 0;
  int64_t topk = 0;
  int64_t rows = 0;
  int64_t context = 0;
  std::string dtype;
  std::string cache;  // "cold" or "warm"
  Timing timing;
  double floor_us = 0;
  double bytes = 0;
  double flops = 0;
};

// Measures every shape of the grid on the context's GPU `device`. `peer` may be null. `tell` is
// called with each line as it is measured.
Result<std::vector<SparseMlaTime>> measure_sparse_mla(
    const Context& context, const DeviceInfo& device, const SparseMlaGrid& grid, const Peer* peer,
    const std::function<void(const SparseMlaTime&)>& tell);

// How it was measured, in words.
std::string sparse_mla_method(const SparseMlaGrid& grid);

}  // namespace lacuna::bench
