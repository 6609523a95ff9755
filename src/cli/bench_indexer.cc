// `lacuna bench indexer`: the indexer's operations on a GPU.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "cli/bench.h"
#include "cli/bench_gpu.h"
#include "cli/bench_table.h"
#include "cli/engine_flags.h"
#include "core/check.h"

namespace lacuna::cli {
namespace {

template <size_t kCount>
std::vector<std::string> list_of(const char* const (&names)[kCount]) {
  return {names, names + kCount};
}

std::string joined(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, ", "));
}

struct IndexerFlags {
  std::string device = "auto";
  bench::IndexerGrid grid = {.ops = list_of(bench::kIndexerOps),
                             .heads = {64},
                             .topk = {2048},
                             .rows = {1, 8, 64},
                             .prefill_rows = {1024},
                             .contexts = {8192, 32768, 131072},
                             .dtypes = list_of(bench::kIndexerDTypes)};
  TableFlags table;
};

Status check_names(const char* flag, const std::vector<std::string>& names,
                   const std::vector<std::string>& known) {
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      return invalid_argument(
          fmt::format("{}: \"{}\", expected some of {}", flag, name, joined(known)));
    }
  }
  return ok_status();
}

Status check_flags(const bench::IndexerGrid& grid) {
  LACUNA_RETURN_IF_ERROR(check_names("--ops", grid.ops, list_of(bench::kIndexerOps)));
  LACUNA_RETURN_IF_ERROR(check_names("--dtype", grid.dtypes, list_of(bench::kIndexerDTypes)));
  LACUNA_RETURN_IF_ERROR(check_extents("--heads", grid.heads, 1, 1024));
  LACUNA_RETURN_IF_ERROR(check_extents("--topk", grid.topk, 1, 1 << 20));
  LACUNA_RETURN_IF_ERROR(check_extents("--rows", grid.rows, 0, 1024));
  LACUNA_RETURN_IF_ERROR(check_extents("--prefill-rows", grid.prefill_rows, 0, 1 << 16));
  LACUNA_RETURN_IF_ERROR(check_extents("--context", grid.contexts, 1, 1 << 20));
  for (const int64_t context : grid.contexts) {
    if (context % bench::kIndexerBlockSize != 0) {
      return invalid_argument(fmt::format("--context: {}, expected multiples of a block, {} tokens",
                                          context, bench::kIndexerBlockSize));
    }
    for (const int64_t rows : grid.prefill_rows) {
      if (rows > context) {
        return invalid_argument(fmt::format(
            "--prefill-rows: {}, expected at most the shortest --context, {}", rows, context));
      }
    }
  }
  if (!grid.kernel.empty() && grid.ops.size() != 1) {
    return invalid_argument(fmt::format(
        "--kernel: {} belongs to one operation, expected --ops with that one alone", grid.kernel));
  }
  return ok_status();
}

Result<int> bench_indexer(const IndexerFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_flags(flags.grid));
  LACUNA_ASSIGN_OR_RETURN(const Context context,
                          Context::create({.num_threads = 1, .use_cuda = flags.device != "cpu"}));
  LACUNA_ASSIGN_OR_RETURN(const DeviceInfo* gpu, find_gpu(flags.device, context));
  if (gpu == nullptr) {
    return unsupported("--device " + flags.device + ": the indexer is measured on a GPU only" +
                       (flags.device == "cpu"
                            ? ""
                            : ", and there is no usable one: " + context.state().cuda_status));
  }
  return bench_indexer_gpu(context, *gpu, flags.table, flags.grid);
}

}  // namespace

void add_bench_indexer(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "indexer", "The indexer's operations on a GPU: time, beside a stream of what they read");
  auto flags = std::make_shared<IndexerFlags>();
  bench::IndexerGrid& grid = flags->grid;
  command
      ->add_option("--device", flags->device,
                   "cpu, cuda, or auto: cuda where there is a usable GPU")
      ->capture_default_str();
  command->add_option("--ops", grid.ops, "Operations: some of " + joined(grid.ops))
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--dtype", grid.dtypes,
                   "Keys and queries: bf16, fp8, or fp8_bf16q: FP8 keys, bf16 queries")
      ->delimiter(',')
      ->capture_default_str();
  add_extents(*command, "--heads", grid.heads,
              "Heads of the query; several make a grid, like the four below");
  add_extents(*command, "--topk", grid.topk, "Keys to choose for a row");
  add_extents(*command, "--rows", grid.rows,
              "Decode rows, each with a context of its own; 0: none");
  add_extents(*command, "--prefill-rows", grid.prefill_rows, "The last rows of a context; 0: none");
  add_extents(*command, "--context", grid.contexts, "Cached tokens of a row");
  command->add_option("--kernel", grid.kernel, "This kernel of the only one of --ops");
  add_table_flags(*command, flags->table);
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = bench_indexer(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
