// `lacuna tune`: measures on a GPU how sparse MLA should cut its rows, and writes the table that
// --tuning-file reads.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/gather_floor.h"
#include "benchmarks/tune_splits.h"
#include "cli/bench_table.h"
#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/output_file.h"
#include "ops/dispatch.h"

namespace lacuna::cli {
namespace {

struct TuneFlags {
  std::vector<int64_t> heads = {8, 16, 32};
  std::vector<int64_t> rows = {1, 2, 4, 8, 16, 32, 64, 96, 128, 132, 160, 192, 256};
  std::vector<int64_t> topk = {2048};
  int64_t context = 0;  // 4 GB of tokens
  int64_t rounds = 11;
  std::string output;
  std::string commit;
};

#ifdef LACUNA_HAVE_GPU_BENCH

Result<int> measure(const Context& context, const DeviceInfo& gpu, const TuneFlags& flags) {
  std::optional<OutputFile> file;
  if (!flags.output.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output));
  }
  const bench::GpuMethod method = {.rounds = flags.rounds};
  LACUNA_ASSIGN_OR_RETURN(bench::GpuBench bench, bench::GpuBench::create(context, gpu, method));
  Tuning tuning = {.device = gpu.name, .sm_count = gpu.sm_count};
  fmt::print("{}, {}\n\n{:>5} {:>6} {:>6} {:>5} {:>7} {:>9} {:>9}  {}\n", gpu.name,
             bench::describe_gpu(gpu.device.index), "heads", "rows", "keys", "cuts", "splits", "us",
             "us own", "own choice");
  LACUNA_RETURN_IF_ERROR(bench::tune_splits(
      std::move(bench),
      {.heads = flags.heads, .rows = flags.rows, .topk = flags.topk, .context = flags.context},
      [&](const bench::TunedShape& shape) {
        tuning.sparse_mla_splits.push_back(shape.choice);
        fmt::print("{:>5} {:>6} {:>6} {:>5} {:>7} {:>9.2f} {:>9.2f}  {}\n", shape.choice.heads,
                   shape.choice.rows, shape.choice.keys, shape.num_cuts, shape.choice.splits,
                   shape.us, shape.own_us, shape.own_cut);
        std::fflush(stdout);
      }));
  if (file.has_value()) {
    const std::string text =
        tuning_text(tuning, {bench::describe_gpu(gpu.device.index),
                             "commit: " + (flags.commit.empty() ? "not given" : flags.commit),
                             "date: " + now_text(), "method: " + bench::tune_method(method)});
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

#else

Result<int> measure(const Context&, const DeviceInfo&, const TuneFlags&) {
  return unsupported("tune: this program was built without LACUNA_BENCHMARKS");
}

#endif

Result<int> tune(const TuneFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_extents("--heads", flags.heads, 1, 32));
  LACUNA_RETURN_IF_ERROR(check_extents("--rows", flags.rows, 1, 1 << 16));
  LACUNA_RETURN_IF_ERROR(check_extents("--topk", flags.topk, 1, int64_t{1} << 20));
  LACUNA_RETURN_IF_ERROR(check_extents("--context", {flags.context}, 0, int64_t{1} << 26));
  LACUNA_ASSIGN_OR_RETURN(const Context context, Context::create({.num_threads = 1}));
  const DeviceInfo* gpu = find_device(context.state(), {DeviceKind::kCuda, 0});
  if (gpu == nullptr) {
    return unsupported("tune: there is no usable GPU: " + context.state().cuda_status);
  }
  return measure(context, *gpu, flags);
}

}  // namespace

void add_tune(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "tune", "Measure on a GPU how sparse MLA should cut its rows; a table for --tuning-file");
  auto flags = std::make_shared<TuneFlags>();
  add_extents(*command, "--heads", flags->heads, "Query heads");
  add_extents(*command, "--rows", flags->rows, "Query rows");
  add_extents(*command, "--topk", flags->topk, "List widths");
  command->add_option("--context", flags->context, "Cached tokens; 0: 4 GB of them");
  command->add_option("--rounds", flags->rounds, "Launches of each graph")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("-o,--output", flags->output, "Write the table to this file");
  command->add_option("--commit", flags->commit, "What the table says was measured");
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = tune(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
