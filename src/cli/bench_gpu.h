// What `lacuna bench` measures on a GPU: grids of shapes to a table and a CSV file.
#pragma once

#include <string>

#include "benchmarks/indexer_gpu.h"
#include "benchmarks/mha_gpu.h"
#include "benchmarks/sparse_mla_gpu.h"
#include "cli/bench_table.h"
#include "lacuna/status.h"

namespace lacuna::cli {

// The GPU that --device (auto, cpu or cuda) asks for; null: the CPU.
Result<const DeviceInfo*> find_gpu(const std::string& device, const Context& context);

// The exit code; an error when the program was built without the benchmarks. `peer`: path of a
// shared library, empty: none.
Result<int> bench_attention_gpu(const Context& context, const DeviceInfo& gpu,
                                const TableFlags& flags, const bench::SparseMlaGrid& grid,
                                const std::string& peer);
Result<int> bench_indexer_gpu(const Context& context, const DeviceInfo& gpu,
                              const TableFlags& flags, const bench::IndexerGrid& grid);
Result<int> bench_mha_gpu(const Context& context, const DeviceInfo& gpu, const TableFlags& flags,
                          const bench::MhaGrid& grid);

}  // namespace lacuna::cli
