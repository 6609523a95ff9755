// Flags to a grid, a grid to lines. The measuring is in benchmarks/.
#include "cli/bench_attention_gpu.h"

#ifdef LACUNA_HAVE_GPU_BENCH
#include <fmt/format.h>

#include <cstdio>
#include <optional>

#include "benchmarks/gather_floor.h"
#include "benchmarks/peer_library.h"
#include "benchmarks/sparse_mla_gpu.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/output_file.h"
#include "ops/dispatch.h"
#ifdef LACUNA_HAVE_PEER_CHECK
#include "benchmarks/peer_check.h"
#endif
#endif

namespace lacuna::cli {

#ifndef LACUNA_HAVE_GPU_BENCH

Result<int> bench_attention_gpu(const GpuBenchFlags&) {
  return unsupported(
      "--device cuda: this program was built without CUDA or without LACUNA_BENCHMARKS");
}

#else

namespace {

std::string csv_line(const bench::SparseMlaTime& line) {
  return fmt::format(
      "sparse_mla,{},{},{},{},{},{},{},{},{},{:.2f},{:.2f},{:.2f},{:.2f},{:.0f},"
      "{:.0f}\n",
      line.kernel, line.peer, line.heads, line.d_qk, line.topk, line.rows, line.context, line.dtype,
      line.cache, line.timing.us_median, line.timing.us_p10, line.timing.us_p90, line.floor_us,
      line.bytes, line.flops);
}

void print_line(const bench::SparseMlaTime& line) {
  fmt::print("{:>5} {:>5} {:>5} {:>6} {:>5}  {:>9.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>7.2f}  {}\n",
             line.heads, line.d_qk, line.topk, line.rows, line.cache, line.timing.us_median,
             line.timing.us_p10, line.timing.us_p90, line.floor_us,
             line.timing.us_median / line.floor_us, line.kernel);
  std::fflush(stdout);
}

Status check_flags(const GpuBenchFlags& flags) {
  for (const auto& [name, values, max] : {std::tuple{"--heads", &flags.heads, int64_t{1024}},
                                          std::tuple{"--topk", &flags.topk, int64_t{1} << 20},
                                          std::tuple{"--rows", &flags.rows, int64_t{1} << 16}}) {
    for (const int64_t value : *values) {
      if (value < 1 || value > max) {
        return invalid_argument(
            fmt::format("{}: {}, expected values from 1 to {}", name, value, max));
      }
    }
  }
  if (flags.timing != "graph" && flags.timing != "event") {
    return invalid_argument("--timing: \"" + flags.timing + "\", expected graph or event");
  }
  if (flags.rounds < 1 || flags.rounds > 100000) {
    return invalid_argument(fmt::format("--rounds: {}, expected 1 to 100000", flags.rounds));
  }
  if (flags.context < 0 || flags.context > int64_t{1} << 26) {
    return invalid_argument(fmt::format(
        "--context: {}, expected 0 (4 GB of tokens) to 2^26 cached tokens", flags.context));
  }
  return ok_status();
}

Status hold_against_oracle(const Context& context, const DeviceInfo& device,
                           const bench::Peer& peer, const GpuBenchFlags& flags) {
#ifdef LACUNA_HAVE_PEER_CHECK
  for (const int64_t d_qk : flags.d_qk) {
    const KvLayout layout = flags.dtype == "f32"          ? KvLayout::latent_f32(512, d_qk - 512)
                            : flags.dtype == "fp8_ds_mla" ? KvLayout::fp8_ds_mla(d_qk - 512)
                                                          : KvLayout::latent_bf16(512, d_qk - 512);
    for (const int64_t heads : flags.heads) {
      for (const int64_t topk : flags.topk) {
        LACUNA_RETURN_IF_ERROR(bench::check_peer(context, device, peer, layout, heads, topk));
      }
    }
  }
  return ok_status();
#else
  return unsupported("--peer: needs the oracle, which is built with LACUNA_TESTS");
#endif
}

}  // namespace

Result<int> bench_attention_gpu(const GpuBenchFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_flags(flags));
  std::optional<OutputFile> file;
  if (!flags.csv.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.csv));
  }
  LACUNA_ASSIGN_OR_RETURN(const Context context, Context::create());
  const DeviceInfo* device = find_device(context.state(), {DeviceKind::kCuda, 0});
  if (device == nullptr) {
    return unsupported("--device cuda: " + context.state().cuda_status);
  }
  const bench::SparseMlaGrid grid = {.heads = flags.heads,
                                     .d_qk = flags.d_qk,
                                     .topk = flags.topk,
                                     .rows = flags.rows,
                                     .dtype = flags.dtype,
                                     .context = flags.context,
                                     .rounds = flags.rounds,
                                     .graphs = flags.timing == "graph",
                                     .kernel = flags.kernel};
  const std::string device_line = device->name + ", " + bench::describe_gpu(device->device.index);
  fmt::print("{}\n", device_line);
  std::optional<bench::Peer> peer;
  if (!flags.peer.empty()) {
    LACUNA_ASSIGN_OR_RETURN(peer, bench::Peer::load(flags.peer));
    LACUNA_RETURN_IF_ERROR(hold_against_oracle(context, *device, *peer, flags));
    fmt::print("peer {}: agrees with the oracle\n", peer->name());
  }
  fmt::print("\n{:>5} {:>5} {:>5} {:>6} {:>5}  {:>9} {:>9} {:>9} {:>9} {:>7}\n", "heads", "d_qk",
             "topk", "rows", "cache", "us median", "us p10", "us p90", "us floor", "ratio");
  LACUNA_ASSIGN_OR_RETURN(
      const std::vector<bench::SparseMlaTime> lines,
      bench::measure_sparse_mla(context, *device, grid, peer.has_value() ? &*peer : nullptr,
                                print_line));
  if (file.has_value()) {
    std::string text = fmt::format(
        "# commit: {}\n# device: {}\n# date: {}\n# method: {}\n"
        "op,kernel,peer,h_q,d_qk,topk,rows,context,kv_dtype,cache,us_median,us_p10,us_p90,"
        "floor_us,bytes,flops\n",
        flags.commit.empty() ? "not given" : flags.commit, device_line, now_text(),
        bench::sparse_mla_method(grid));
    for (const bench::SparseMlaTime& line : lines) {
      text += csv_line(line);
    }
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

#endif

}  // namespace lacuna::cli
