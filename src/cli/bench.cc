// `lacuna bench attention`: how long sparse MLA takes on this machine, beside what the machine can
// do. The ceilings are measured in the same run: a stream of reads, and the library's own f32 GEMM.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "benchmarks/random_values.h"
#include "cli/bench.h"
#include "cli/bench_gpu.h"
#include "cli/bench_serve.h"
#include "cli/bench_table.h"
#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "core/check.h"
#include "core/device_memory.h"
#include "core/output_file.h"
#include "core/rng.h"
#include "ops/dispatch.h"

namespace lacuna::cli {
namespace {

struct BenchFlags {
  std::string device = "auto";
  std::vector<int64_t> heads = {16};
  std::vector<int64_t> d_qk = {576};
  std::vector<int64_t> topk = {2048};
  std::vector<int64_t> counts;
  std::vector<int64_t> rows = {1};
  int64_t context = 0;  // 0: 4096 on the CPU, 4 GB of tokens on a GPU
  std::string dtype = "bf16";
  std::string kernel;
  std::string tuning_file;
  std::string peer;
  int threads = 0;
  int64_t repeats = 200;
  bool grid = false;
  TableFlags table;
};

struct Shape {
  int64_t heads;
  int64_t topk;
  int64_t rows;
  int64_t context;
  KvLayout layout;
};

struct Ceilings {
  double bytes_per_second = 0;
  double flops_per_second = 0;
};

constexpr int kWarmUps = 5;
// Calls of one list in a row would find its rows in cache: the lists are many and take turns.
constexpr int64_t kListsMax = 64;
constexpr int64_t kListEntriesMax = int64_t{16} << 20;
constexpr const char* kMethod =
    "wall time of one call after 5 warm-up calls, each call with another random list of distinct "
    "rows; ceilings of the same run: best of 7 reads of a large array by all threads, and the best "
    "f32 product of cpu/linear_gemm; floor = max(bytes / stream, flops / gemm)";

double seconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Memory of the CPU device, through the runtime that every part of the library allocates by.
Result<DeviceMemory> allocate(const Context& context, int64_t bytes) {
  for (const Backend* backend : context.state().backends) {
    if (backend->device_kind == DeviceKind::kCpu) {
      return DeviceMemory::allocate(backend->runtime, 0, bytes);
    }
  }
  return unsupported("bench: this context has no CPU backend");
}

void fill_random(float* to, int64_t count, uint64_t seed) {
  bench::for_random(count, seed, [&](int64_t i, float x) { to[i] = x; });
}

// Bytes a second of all threads reading an array that no cache holds.
Result<double> stream_bytes_per_second(const Context& context) {
  constexpr int64_t kBytesMin = int64_t{512} << 20;
  constexpr int64_t kChunkWords = int64_t{1} << 17;
  const int64_t l3_bytes = std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
  const int64_t bytes = std::max(kBytesMin, 8 * l3_bytes) / (8 * kChunkWords) * (8 * kChunkWords);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory memory, allocate(context, bytes));
  auto* words = static_cast<uint64_t*>(memory.data());
  const int64_t num_chunks = bytes / (8 * kChunkWords);
  ThreadPool& pool = *context.state().thread_pool;
  pool.parallel_for(num_chunks, [&](int64_t chunk, int) {
    std::fill_n(words + chunk * kChunkWords, kChunkWords, static_cast<uint64_t>(chunk));
  });
  std::vector<uint64_t> sums(num_chunks);
  double best = 0;
  for (int i = 0; i < 7; ++i) {
    const double seconds = seconds_of([&] {
      pool.parallel_for(num_chunks, [&](int64_t chunk, int) {
        const uint64_t* from = words + chunk * kChunkWords;
        sums[chunk] += std::accumulate(from, from + kChunkWords, uint64_t{0});
      });
    });
    best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  // A use of the sums, so that the reads stay.
  const uint64_t total = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
  return total == 1 ? 0.0 : best;
}

// Flops a second of one f32 product [m, k] x [n, k]^T, the best of several.
Result<double> gemm_flops_per_second(const Context& context, int64_t m, int64_t n, int64_t k) {
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory x, allocate(context, 4 * m * k));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory weight, allocate(context, 4 * n * k));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory out, allocate(context, 4 * m * n));
  fill_random(static_cast<float*>(x.data()), m * k, 1);
  fill_random(static_cast<float*>(weight.data()), n * k, 2);
  const LinearArgs args = {.x = view_of(static_cast<const float*>(x.data()), {m, k}),
                           .weight = view_of(static_cast<const float*>(weight.data()), {n, k}),
                           .out = view_of(static_cast<float*>(out.data()), {m, n}),
                           .kernel = "cpu/linear_gemm"};
  LACUNA_ASSIGN_OR_RETURN(const int64_t bytes, workspace_bytes(context, args));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory workspace, allocate(context, bytes));
  const Launch launch = {.workspace = workspace.data(), .workspace_bytes = bytes};
  const double flops =
      2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  const int repeats = std::clamp(static_cast<int>(2e10 / flops), 5, 200);
  double best = 0;
  for (int i = 0; i < repeats; ++i) {
    Status status;
    const double seconds = seconds_of([&] { status = linear(context, args, launch); });
    LACUNA_RETURN_IF_ERROR(status);
    best = std::max(best, flops / seconds);
  }
  return best;
}

Result<Ceilings> measure_ceilings(const Context& context, const Shape& shape) {
  Ceilings ceilings;
  LACUNA_ASSIGN_OR_RETURN(ceilings.bytes_per_second, stream_bytes_per_second(context));
  const std::array<std::array<int64_t, 3>, 3> products = {{
      {1536, 1536, 1536},
      {shape.heads, shape.topk, shape.layout.d_qk()},  // scores
      {shape.heads, shape.layout.latent, shape.topk},  // weighted sum
  }};
  for (const auto& [m, n, k] : products) {
    if (m * n * k == 0) {
      continue;
    }
    LACUNA_ASSIGN_OR_RETURN(const double flops, gemm_flops_per_second(context, m, n, k));
    ceilings.flops_per_second = std::max(ceilings.flops_per_second, flops);
  }
  return ceilings;
}

// A cache of `context` random tokens, written by the library.
Result<DeviceMemory> make_cache(const Context& context, const Shape& shape) {
  constexpr int64_t kTokens = 1024;
  const KvLayout& layout = shape.layout;
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory cache,
                          allocate(context, shape.context * layout.record_bytes()));
  std::vector<float> values(kTokens * layout.d_qk());
  std::vector<int64_t> slots(kTokens);
  for (int64_t first = 0; first < shape.context; first += kTokens) {
    const int64_t count = std::min(kTokens, shape.context - first);
    fill_random(values.data(), count * layout.d_qk(), static_cast<uint64_t>(3 + first));
    std::iota(slots.begin(), slots.end(), first);
    AppendKvArgs args = {
        .latent = view_of(static_cast<const float*>(values.data()), {count, layout.latent}),
        .slot_mapping = view_of(static_cast<const int64_t*>(slots.data()), {count}),
        .kv = flat_rows(cache.data(), layout, shape.context)};
    if (layout.rope > 0) {
      args.rope = view_of(static_cast<const float*>(values.data() + count * layout.latent),
                          {count, layout.rope});
    }
    LACUNA_RETURN_IF_ERROR(append_kv(context, args));
  }
  return cache;
}

// Lists of [rows, topk] distinct rows each: the head of a shuffle.
std::vector<int32_t> make_lists(const Shape& shape, int64_t num_lists) {
  std::vector<int32_t> permutation(shape.context);
  std::iota(permutation.begin(), permutation.end(), 0);
  std::vector<int32_t> lists(num_lists * shape.rows * shape.topk);
  uint64_t draw = 0;
  for (int64_t list = 0; list < num_lists * shape.rows; ++list) {
    for (int64_t i = 0; i < shape.topk; ++i) {
      const uint64_t left = static_cast<uint64_t>(shape.context - i);
      const int64_t other = i + static_cast<int64_t>(philox4x32(7, draw++)[0] % left);
      std::swap(permutation[i], permutation[other]);
      lists[list * shape.topk + i] = permutation[i];
    }
  }
  return lists;
}

Result<bench::BenchLine> measure(const Context& context, const Shape& shape,
                                 const std::string& dtype, int64_t repeats,
                                 const Ceilings& ceilings) {
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory cache, make_cache(context, shape));
  const int64_t list_entries = std::max<int64_t>(1, shape.rows * shape.topk);
  const int64_t num_lists = std::clamp<int64_t>(kListEntriesMax / list_entries, 2, kListsMax);
  const std::vector<int32_t> lists = make_lists(shape, num_lists);
  const int64_t d_qk = shape.layout.d_qk();
  std::vector<float> random(shape.rows * shape.heads * d_qk);
  fill_random(random.data(), static_cast<int64_t>(random.size()), 11);
  std::vector<Bf16> query(random.size());
  std::transform(random.begin(), random.end(), query.begin(), to_bf16);
  std::vector<Bf16> out(shape.rows * shape.heads * shape.layout.latent);
  std::vector<float> lse(shape.rows * shape.heads);
  SparseMlaArgs args = {
      .q = view_of(static_cast<const Bf16*>(query.data()), {shape.rows, shape.heads, d_qk}),
      .kv = flat_rows(cache.data(), shape.layout, shape.context),
      .softmax_scale = 1 / std::sqrt(192.0),
      .out = view_of(out.data(), {shape.rows, shape.heads, shape.layout.latent}),
      .lse = view_of(lse.data(), {shape.rows, shape.heads})};
  const auto use_list = [&](int64_t i) {
    args.indices =
        view_of(lists.data() + i % num_lists * shape.rows * shape.topk, {shape.rows, shape.topk});
  };
  use_list(0);
  const Explanation explanation = explain(context, args);
  LACUNA_RETURN_IF_ERROR(explanation.status);
  LACUNA_ASSIGN_OR_RETURN(const int64_t workspace_size, workspace_bytes(context, args));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory workspace, allocate(context, workspace_size));
  const Launch launch = {.workspace = workspace.data(), .workspace_bytes = workspace_size};

  std::vector<double> us;
  us.reserve(repeats);
  for (int64_t i = 0; i < kWarmUps + repeats; ++i) {
    use_list(i);
    Status status;
    const double seconds = seconds_of([&] { status = sparse_mla(context, args, launch); });
    LACUNA_RETURN_IF_ERROR(status);
    if (i >= kWarmUps) {
      us.push_back(1e6 * seconds);
    }
  }

  const double pairs = static_cast<double>(shape.rows * shape.topk);
  const double query_rows = static_cast<double>(shape.rows * shape.heads);
  const double latent = static_cast<double>(shape.layout.latent);
  bench::BenchLine line = {
      .op = "sparse_mla",
      .kernel = explanation.kernel,
      .heads = shape.heads,
      .d_qk = d_qk,
      .topk = shape.topk,
      .rows = shape.rows,
      .context = shape.context,
      .dtype = dtype,
      .cache = "fresh_lists",
      .timing = bench::timing_of(us),
      // Keys and their ids, query, output and LSE.
      .bytes = pairs * (static_cast<double>(shape.layout.record_bytes()) + 4) +
               query_rows * (2 * static_cast<double>(d_qk) + 2 * latent + 4),
      .flops = 2 * pairs * static_cast<double>(shape.heads) * (static_cast<double>(d_qk) + latent)};
  // The longer of the two times that the ceilings allow.
  line.floor_us = 1e6 * std::max(line.bytes / ceilings.bytes_per_second,
                                 line.flops / ceilings.flops_per_second);
  return line;
}

Result<KvLayout> layout_of(const std::string& dtype, int64_t d_qk) {
  if (d_qk != 576 && d_qk != 512) {
    return invalid_argument(
        fmt::format("--d-qk: {}, expected 576 (latent 512, rope 64) or 512 (latent 512)", d_qk));
  }
  const int64_t rope = d_qk - 512;
  if (dtype == "bf16") {
    return KvLayout::latent_bf16(512, rope);
  }
  if (dtype == "f32") {
    return KvLayout::latent_f32(512, rope);
  }
  if (dtype == "fp8_ds_mla") {
    return KvLayout::fp8_ds_mla(rope);
  }
  return invalid_argument("--dtype: \"" + dtype + "\", expected bf16, f32 or fp8_ds_mla");
}

Result<std::vector<KvLayout>> layouts_of(const BenchFlags& flags) {
  std::vector<KvLayout> layouts;
  for (const int64_t d_qk : flags.d_qk) {
    LACUNA_ASSIGN_OR_RETURN(const KvLayout layout, layout_of(flags.dtype, d_qk));
    layouts.push_back(layout);
  }
  return layouts;
}

Result<std::vector<Shape>> shapes_of(const BenchFlags& flags) {
  LACUNA_ASSIGN_OR_RETURN(const std::vector<KvLayout> layouts, layouts_of(flags));
  LACUNA_RETURN_IF_ERROR(check_extents("--context", {flags.context}, 0, int64_t{1} << 24));
  const int64_t context = flags.context == 0 ? 4096 : flags.context;
  std::vector<Shape> shapes;
  for (const KvLayout& layout : layouts) {
    if (flags.grid) {
      for (const int64_t rows : {1, 8}) {
        for (const int64_t grid_context : {4096, 65536}) {
          shapes.push_back({16, 2048, rows, grid_context, layout});
        }
      }
      continue;
    }
    for (const int64_t heads : flags.heads) {
      for (const int64_t topk : flags.topk) {
        if (topk > context) {
          return invalid_argument(fmt::format(
              "--topk: {} distinct rows do not exist in --context {}, expected at most that", topk,
              context));
        }
        for (const int64_t rows : flags.rows) {
          shapes.push_back({heads, topk, rows, context, layout});
        }
      }
    }
  }
  return shapes;
}

std::string device_line(const Context& context) {
  const DeviceInfo& device = *find_device(context.state(), {DeviceKind::kCpu, 0});
  return fmt::format("{}, {}, {} threads", device.name, device.isa, device.num_threads);
}

void print_table(const std::vector<bench::BenchLine>& results) {
  fmt::print("\n{:>5} {:>5} {:>5} {:>5} {:>8}  {:>10} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6}\n",
             "heads", "d_qk", "topk", "rows", "context", "us median", "us p10", "us p90",
             "us floor", "GB/s", "Gflop/s", "share");
  for (const bench::BenchLine& r : results) {
    fmt::print(
        "{:>5} {:>5} {:>5} {:>5} {:>8}  {:>10.1f} {:>10.1f} {:>10.1f} {:>10.1f} {:>8.2f} {:>8.1f} "
        "{:>5.1f}%\n",
        r.heads, r.d_qk, r.topk, r.rows, r.context, r.timing.us_median, r.timing.us_p10,
        r.timing.us_p90, r.floor_us, r.bytes / r.timing.us_median / 1e3,
        r.flops / r.timing.us_median / 1e3, 100 * r.floor_us / r.timing.us_median);
  }
  // The price of a longer context at the same list width: what sparse attention is to make small.
  for (const bench::BenchLine& longer : results) {
    for (const bench::BenchLine& shorter : results) {
      if (longer.rows == shorter.rows && longer.context > shorter.context) {
        fmt::print("context {} over {} with {} row{}: {:.3f} times the time (p10: {:.3f})\n",
                   longer.context, shorter.context, longer.rows, longer.rows == 1 ? "" : "s",
                   longer.timing.us_median / shorter.timing.us_median,
                   longer.timing.us_p10 / shorter.timing.us_p10);
      }
    }
  }
}

Status check_flags(const BenchFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_extents("--heads", flags.heads, 1, 1024));
  LACUNA_RETURN_IF_ERROR(check_extents("--topk", flags.topk, 1, int64_t{1} << 20));
  // Every count is measured with every topk.
  LACUNA_RETURN_IF_ERROR(check_extents("--counts", flags.counts, 0,
                                       *std::min_element(flags.topk.begin(), flags.topk.end())));
  LACUNA_RETURN_IF_ERROR(check_extents("--rows", flags.rows, 1, 1 << 16));
  // 2^26 rows of the cache are 77 GB of bf16.
  LACUNA_RETURN_IF_ERROR(check_extents("--context", {flags.context}, 0, int64_t{1} << 26));
  LACUNA_RETURN_IF_ERROR(check_extents("--repeats", {flags.repeats}, 1, 1000000));
  return check_extents("--threads", {flags.threads}, 0, 4096);
}

Result<int> bench_attention(const BenchFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_flags(flags));
  LACUNA_ASSIGN_OR_RETURN(const Context context,
                          Context::create({.num_threads = flags.threads,
                                           .use_cuda = flags.device != "cpu",
                                           .tuning_file = flags.tuning_file}));
  LACUNA_ASSIGN_OR_RETURN(const DeviceInfo* gpu, find_gpu(flags.device, context));
  if (gpu != nullptr) {
    LACUNA_ASSIGN_OR_RETURN(const std::vector<KvLayout> layouts, layouts_of(flags));
    return bench_attention_gpu(context, *gpu, flags.table,
                               {.heads = flags.heads,
                                .layouts = layouts,
                                .topk = flags.topk,
                                .counts = flags.counts,
                                .rows = flags.rows,
                                .dtype = flags.dtype,
                                .context = flags.context,
                                .kernel = flags.kernel},
                               flags.peer);
  }
  if (!flags.peer.empty() || !flags.counts.empty()) {
    return invalid_argument(fmt::format("{}: measured on a GPU only (--device cuda)",
                                        flags.counts.empty() ? "--peer" : "--counts"));
  }
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Shape> shapes, shapes_of(flags));
  std::optional<OutputFile> file;
  if (!flags.table.csv.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.table.csv));
  }
  const std::string device = device_line(context);
  fmt::print("{}\n", device);
  std::fflush(stdout);
  LACUNA_ASSIGN_OR_RETURN(const Ceilings ceilings, measure_ceilings(context, shapes.front()));
  fmt::print("stream {:.1f} GB/s, f32 GEMM {:.1f} Gflop/s\n", ceilings.bytes_per_second / 1e9,
             ceilings.flops_per_second / 1e9);
  std::fflush(stdout);
  std::vector<bench::BenchLine> results;
  for (const Shape& shape : shapes) {
    LACUNA_ASSIGN_OR_RETURN(bench::BenchLine result,
                            measure(context, shape, flags.dtype, flags.repeats, ceilings));
    results.push_back(std::move(result));
  }
  print_table(results);
  if (file.has_value()) {
    std::string text =
        csv_head(flags.table.commit, device, kMethod,
                 fmt::format("# ceilings: stream {:.4g} bytes/s, gemm {:.4g} flop/s\n",
                             ceilings.bytes_per_second, ceilings.flops_per_second));
    for (const bench::BenchLine& line : results) {
      text += csv_line(line);
    }
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

}  // namespace

void add_bench(CLI::App& app, Action& action) {
  CLI::App* bench = app.add_subcommand("bench", "Measures the library on this machine");
  bench->require_subcommand(1);
  CLI::App* command = bench->add_subcommand(
      "attention", "Sparse MLA: time, and share of what memory and f32 arithmetic allow");
  auto flags = std::make_shared<BenchFlags>();
  command
      ->add_option("--device", flags->device,
                   "cpu, cuda, or auto: cuda where there is a usable GPU")
      ->capture_default_str();
  add_extents(*command, "--heads", flags->heads,
              "Query heads; several make a grid, like the three below");
  add_extents(*command, "--d-qk", flags->d_qk, "Width of a key: 576 or 512 (latent 512)");
  add_extents(*command, "--topk", flags->topk, "Keys a row reads");
  add_extents(*command, "--rows", flags->rows, "Query rows");
  command
      ->add_option("--counts", flags->counts,
                   "GPU: of the --topk entries of each row's list only so many are keys, and the "
                   "operation is told so; 0: none. Without: all are, and it is told nothing")
      ->delimiter(',');
  command->add_option("--context", flags->context,
                      "Cached tokens; 0: 4096, and 4 GB of them on a GPU");
  command->add_option("--dtype", flags->dtype, "Cache: bf16, f32 or fp8_ds_mla")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "CPU threads; 0: one per core");
  command->add_option("--repeats", flags->repeats, "Measured calls")->capture_default_str();
  command->add_option("--kernel", flags->kernel, "GPU: this kernel; without: as dispatch chooses");
  command->add_option("--tuning-file", flags->tuning_file,
                      "GPU: the table that lacuna tune measured on it");
  command->add_option(
      "--peer", flags->peer,
      "GPU: a shared library with the interface of benchmarks/peer.h, measured too");
  add_table_flags(*command, flags->table);
  command->add_flag("--grid", flags->grid,
                    "16 heads, topk 2048: 1 and 8 rows, contexts 4096 and 65536, instead of one "
                    "shape");
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = bench_attention(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
  add_bench_indexer(*bench, action);
  add_bench_prefill(*bench, action);
  add_bench_offline(*bench, action);
  add_bench_serve(*bench, action);
}

}  // namespace lacuna::cli
