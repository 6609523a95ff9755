// The indexer's operations on a GPU: scores, top-k, the two fused, and translation to cache rows,
// each timed cold and warm beside a stream of the bytes that it must read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/gpu_bench.h"

namespace lacuna::bench {

inline constexpr const char* kIndexerOps[] = {"index_logits", "top_k", "select_keys",
                                              "translate_indices"};
// Of keys and queries: bf16, fp8, and FP8 keys under the bf16 queries that the engine makes.
inline constexpr const char* kIndexerDTypes[] = {"bf16", "fp8", "fp8_bf16q"};

inline constexpr int64_t kIndexerBlockSize = 64;  // tokens; a context is whole blocks

struct IndexerGrid {
  std::vector<std::string> ops;  // of kIndexerOps
  std::vector<int64_t> heads;
  std::vector<int64_t> topk;
  // 0 rows: no such shape. Decode: each row is a request with a context of its own.
  std::vector<int64_t> rows;
  std::vector<int64_t> prefill_rows;  // the last rows of one context
  std::vector<int64_t> contexts;
  std::vector<std::string> dtypes;  // of kIndexerDTypes
  std::string kernel;               // forces a kernel; empty: dispatch
};

// Measures the whole grid; every operation over those of its extents that it has. `tell` is called
// with each line as it is measured.
Status measure_indexer(GpuBench gpu, const IndexerGrid& grid, const TellLine& tell);

// How it was measured, in words.
std::string indexer_method(const GpuMethod& method);

}  // namespace lacuna::bench
