// The measuring is in benchmarks/; here are the table and the file.
#include "cli/bench_gpu.h"

#include <fmt/format.h>

#include <cstdio>
#include <functional>
#include <optional>
#include <utility>

#include "benchmarks/gather_floor.h"
#include "benchmarks/peer_library.h"
#include "core/check.h"
#include "core/output_file.h"
#ifdef LACUNA_HAVE_PEER_CHECK
#include "benchmarks/peer_check.h"
#endif

namespace lacuna::cli {

Result<const DeviceInfo*> find_gpu(const std::string& device, const Context& context) {
  if (device != "auto" && device != "cpu" && device != "cuda") {
    return invalid_argument("--device: \"" + device + "\", expected auto, cpu or cuda");
  }
  const DeviceInfo* gpu =
      device == "cpu" ? nullptr : find_device(context.state(), {DeviceKind::kCuda, 0});
  if (device == "cuda" && gpu == nullptr) {
    return unsupported("--device cuda: there is no usable GPU: " + context.state().cuda_status);
  }
  return gpu;
}

#ifndef LACUNA_HAVE_GPU_BENCH

namespace {

Result<int> not_built() {
  return unsupported("--device cuda: this program was built without LACUNA_BENCHMARKS");
}

}  // namespace

Result<int> bench_attention_gpu(const Context&, const DeviceInfo&, const TableFlags&,
                                const bench::SparseMlaGrid&, const std::string&) {
  return not_built();
}

Result<int> bench_indexer_gpu(const Context&, const DeviceInfo&, const TableFlags&,
                              const bench::IndexerGrid&) {
  return not_built();
}

Result<int> bench_mha_gpu(const Context&, const DeviceInfo&, const TableFlags&,
                          const bench::MhaGrid&) {
  return not_built();
}

#else

namespace {

void print_columns() {
  fmt::print(
      "\n{:>25} {:>5} {:>5} {:>6} {:>6} {:>8} {:>10} {:>5}  {:>9} {:>9} {:>9} {:>9} {:>6} "
      "{:>8}  {}\n",
      "op", "heads", "d_qk", "topk", "rows", "context", "dtype", "cache", "us median", "us p10",
      "us p90", "us floor", "ratio", "TFLOP/s", "kernel");
}

void print_line(const bench::BenchLine& line) {
  // A dash where there is nothing to divide.
  const auto quotient = [](double over, double under) {
    return over > 0 && under > 0 ? fmt::format("{:.2f}", over / under) : std::string("-");
  };
  fmt::print(
      "{:>25} {:>5} {:>5} {:>6} {:>6} {:>8} {:>10} {:>5}  {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} "
      "{:>6} {:>8}  {}\n",
      line.op, line.heads, line.d_qk, line.topk, line.rows, line.context, line.dtype, line.cache,
      line.timing.us_median, line.timing.us_p10, line.timing.us_p90, line.floor_us,
      quotient(line.timing.us_median, line.floor_us),
      quotient(line.flops / 1e6, line.timing.us_median), line.kernel);
  std::fflush(stdout);
}

using Measure = std::function<Status(bench::GpuBench, const bench::TellLine&)>;

Result<int> run_grid(const Context& context, const DeviceInfo& gpu, const TableFlags& flags,
                     std::string (*method_of)(const bench::GpuMethod&), const Measure& measure) {
  std::optional<OutputFile> file;
  if (!flags.csv.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.csv));
  }
  const bench::GpuMethod method = {.rounds = flags.rounds, .graphs = flags.timing == "graph"};
  const std::string device = gpu.name + ", " + bench::describe_gpu(gpu.device.index);
  fmt::print("{}\n", device);
  print_columns();
  LACUNA_ASSIGN_OR_RETURN(bench::GpuBench bench, bench::GpuBench::create(context, gpu, method));
  std::string csv = csv_head(flags.commit, device, method_of(method));
  LACUNA_RETURN_IF_ERROR(measure(std::move(bench), [&](const bench::BenchLine& line) {
    print_line(line);
    csv += csv_line(line);
  }));
  if (file.has_value()) {
    file->write(csv.data(), static_cast<int64_t>(csv.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

Status hold_against_oracle(const Context& context, const DeviceInfo& gpu, const bench::Peer& peer,
                           const bench::SparseMlaGrid& grid) {
#ifdef LACUNA_HAVE_PEER_CHECK
  for (const KvLayout& layout : grid.layouts) {
    for (const int64_t heads : grid.heads) {
      for (const int64_t topk : grid.topk) {
        LACUNA_RETURN_IF_ERROR(bench::check_peer(context, gpu, peer, layout, heads, topk));
      }
    }
  }
  fmt::print("peer {}: agrees with the oracle\n", peer.name());
  return ok_status();
#else
  return unsupported("--peer: needs the oracle, which is built with LACUNA_TESTS");
#endif
}

}  // namespace

Result<int> bench_attention_gpu(const Context& context, const DeviceInfo& gpu,
                                const TableFlags& flags, const bench::SparseMlaGrid& grid,
                                const std::string& peer_path) {
  std::optional<bench::Peer> peer;
  if (!peer_path.empty()) {
    LACUNA_ASSIGN_OR_RETURN(peer, bench::Peer::load(peer_path));
    LACUNA_RETURN_IF_ERROR(hold_against_oracle(context, gpu, *peer, grid));
  }
  return run_grid(context, gpu, flags, bench::sparse_mla_method,
                  [&](bench::GpuBench bench, const bench::TellLine& tell) {
                    return bench::measure_sparse_mla(std::move(bench), grid,
                                                     peer.has_value() ? &*peer : nullptr, tell);
                  });
}

Result<int> bench_indexer_gpu(const Context& context, const DeviceInfo& gpu,
                              const TableFlags& flags, const bench::IndexerGrid& grid) {
  return run_grid(context, gpu, flags, bench::indexer_method,
                  [&](bench::GpuBench bench, const bench::TellLine& tell) {
                    return bench::measure_indexer(std::move(bench), grid, tell);
                  });
}

Result<int> bench_mha_gpu(const Context& context, const DeviceInfo& gpu, const TableFlags& flags,
                          const bench::MhaGrid& grid) {
  return run_grid(context, gpu, flags, bench::mha_method,
                  [&](bench::GpuBench bench, const bench::TellLine& tell) {
                    return bench::measure_mha(std::move(bench), grid, tell);
                  });
}

#endif

}  // namespace lacuna::cli
