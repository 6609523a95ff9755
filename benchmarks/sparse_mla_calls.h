// Calls of sparse_mla to be timed on a GPU: a pool of random cached tokens, and for a shape as many
// lists as a graph has nodes, so that no call finds its keys where the last one left them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "benchmarks/gpu_bench.h"

namespace lacuna::bench {

// The view is of memory that the pool owns.
struct SparseMlaPool {
  DeviceMemory memory;
  KvCacheView kv;
};

// `context` tokens, written by the library; 0: 4 GB of them.
Result<SparseMlaPool> make_sparse_mla_pool(GpuBench& gpu, const KvLayout& layout, int64_t context);

class SparseMlaCalls {
 public:
  // `count`: each row's list has that many entries, which the operation is told as valid_counts,
  // and is -1 from there on. None: all topk, and the operation gets no counts.
  static Result<SparseMlaCalls> create(GpuBench& gpu, const KvCacheView& kv, int64_t heads,
                                       int64_t topk, int64_t rows,
                                       std::optional<int64_t> count = std::nullopt);

  // The entries of each call's lists, without what follows them; their number is that of a graph's
  // nodes.
  const std::vector<ConstTensorView>& lists() const { return lists_; }
  SparseMlaArgs args(int64_t i, std::string_view kernel) const;

 private:
  KvCacheView kv_;
  ConstTensorView q_;
  TensorView out_;
  TensorView lse_;
  std::vector<ConstTensorView> indices_;  // [rows, topk]
  std::vector<ConstTensorView> lists_;    // [rows, count]
  ConstTensorView valid_counts_;
  std::vector<DeviceMemory> memory_;  // of all the above but kv_
};

}  // namespace lacuna::bench
