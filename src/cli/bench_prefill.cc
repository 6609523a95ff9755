// `lacuna bench prefill`: prompt tokens a second of a model at given context lengths, and which
// kernels the time went to; on a GPU, when no model is named, the attention kernels of prefill.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <string_view>

#include "cli/bench.h"
#include "cli/bench_gpu.h"
#include "cli/bench_table.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/output_file.h"
#include "core/rng.h"

namespace lacuna::cli {
namespace {

struct PrefillFlags {
  EngineFlags engine;
  std::vector<int64_t> contexts = {1024, 4096};
  int repeats = 5;
  std::vector<int64_t> heads = {16, 128};
  std::vector<int64_t> d_qk = {192};
  std::vector<int64_t> topk = {0, 2048};
  std::vector<int64_t> rows = {0};
  TableFlags table;
};

Result<bench::MhaGrid> mha_grid(const PrefillFlags& flags) {
  LACUNA_RETURN_IF_ERROR(check_extents("--heads", flags.heads, 1, 1024));
  LACUNA_RETURN_IF_ERROR(check_extents("--topk", flags.topk, 0, 1 << 20));
  // The mask of 2^17 rows over as many keys is 2 GB.
  LACUNA_RETURN_IF_ERROR(check_extents("--context", flags.contexts, 1, 1 << 17));
  const int64_t context_min = *std::min_element(flags.contexts.begin(), flags.contexts.end());
  for (const int64_t rows : flags.rows) {
    if (rows < 0 || rows > context_min) {
      return invalid_argument(fmt::format(
          "--rows: {}, expected 0 (every one) to the shortest --context, {}", rows, context_min));
    }
  }
  for (const int64_t d_qk : flags.d_qk) {
    if (bench::mha_value_width(d_qk) == 0) {
      return invalid_argument(
          fmt::format("--d-qk: {}, expected 192 (values of 128) or 256 (values of 256)", d_qk));
    }
  }
  bench::MhaGrid grid = {.heads = flags.heads,
                         .d_qk = flags.d_qk,
                         .topk = flags.topk,
                         .contexts = flags.contexts,
                         .rows = flags.rows};
  constexpr std::string_view kMha = "mha=";
  for (const std::string& kernel : flags.engine.kernels) {
    if (!kernel.starts_with(kMha)) {
      return invalid_argument("--kernel: \"" + kernel +
                              "\", expected mha=NAME where no --model runs");
    }
    grid.kernel = kernel.substr(kMha.size());
  }
  return grid;
}

Result<int> bench_prefill(PrefillFlags flags) {
  if (flags.repeats < 1) {
    return invalid_argument("--repeats: " + std::to_string(flags.repeats) +
                            ", expected at least 1");
  }
  if (flags.engine.model.empty() && flags.engine.device != "cpu") {
    // Not an error yet: where auto is the CPU, a model runs, with flags of its own.
    const Result<bench::MhaGrid> grid = mha_grid(flags);
    LACUNA_RETURN_IF_ERROR(flags.engine.device == "cuda" ? grid.status() : ok_status());
    LACUNA_ASSIGN_OR_RETURN(const Context context, Context::create({.num_threads = 1}));
    LACUNA_ASSIGN_OR_RETURN(const DeviceInfo* gpu, find_gpu(flags.engine.device, context));
    if (gpu != nullptr) {
      LACUNA_RETURN_IF_ERROR(grid.status());
      return bench_mha_gpu(context, *gpu, flags.table, *grid);
    }
  }
  flags.engine.profile = true;
  std::optional<OutputFile> file;
  if (!flags.table.csv.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.table.csv));
  }
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, make_engine(flags.engine, false));
  std::string csv = "op,context,rows_a_step,repeats,tokens_per_s_median,kernel,share_percent\n";
  for (const int64_t context : flags.contexts) {
    std::vector<double> rates;
    const EngineCounters before = engine->counters();
    for (int repeat = 0; repeat < flags.repeats; ++repeat) {
      Request request;
      request.sampling.max_tokens = 1;
      for (int64_t i = 0; i < context - 1; ++i) {
        // Any tokens do: the work does not depend on them. Letters keep clear of special ids.
        request.prompt.push_back(
            static_cast<int32_t>(97 + philox4x32(1, static_cast<uint64_t>(i), repeat)[0] % 26));
      }
      LACUNA_RETURN_IF_ERROR(engine->submit(std::move(request)).status());
      double seconds = 0;
      while (engine->has_work()) {
        LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine->step());
        for (const TokenEvent& event : events) {
          seconds += event.step.seconds;
        }
      }
      rates.push_back((context - 1) / seconds);
    }
    std::sort(rates.begin(), rates.end());
    const double rate = rates[rates.size() / 2];
    EngineCounters after = engine->counters();
    std::vector<std::pair<double, std::string>> shares;
    double total = 0;
    for (const auto& [name, seconds] : after.kernel_seconds) {
      const auto found = before.kernel_seconds.find(name);
      const double spent = seconds - (found == before.kernel_seconds.end() ? 0 : found->second);
      shares.emplace_back(spent, name);
      total += spent;
    }
    std::sort(shares.rbegin(), shares.rend());
    fmt::print("context {}: {:.0f} tokens/s (median of {})\n", with_commas(context), rate,
               flags.repeats);
    for (const auto& [spent, name] : shares) {
      const double percent = 100 * spent / total;
      if (percent >= 0.5) {
        fmt::print("  {:<24} {:>5.1f} %\n", name, percent);
      }
      csv += fmt::format("prefill,{},{},{},{:.0f},{},{:.1f}\n", context,
                         flags.engine.max_num_batched_tokens, flags.repeats, rate, name, percent);
    }
  }
  if (file.has_value()) {
    const std::string text =
        fmt::format(
            "# commit {}; {}; {}; {}\n# wall time of steps; shares of the time inside kernels\n",
            flags.table.commit, engine->info().device, engine->info().dtype, now_text("%Y-%m-%d")) +
        csv;
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

}  // namespace

void add_bench_prefill(CLI::App& bench, Action& action) {
  CLI::App* command = bench.add_subcommand(
      "prefill",
      "A model's prompt tokens a second, and where the time goes; on a GPU, without --model: the "
      "attention kernels of prefill alone");
  auto flags = std::make_shared<PrefillFlags>();
  add_engine_flags(*command, flags->engine);
  add_extents(*command, "--context", flags->contexts, "Prompt lengths");
  command->add_option("--repeats", flags->repeats, "Prompts a length")->capture_default_str();
  add_extents(*command, "--heads", flags->heads,
              "Without a model: heads; several make a grid, like the three below");
  add_extents(*command, "--d-qk", flags->d_qk,
              "Without a model: width of a key: 192 (values of 128) or 256 (values of 256)");
  add_extents(*command, "--topk", flags->topk,
              "Without a model: keys that a row's mask lets through; 0: no mask");
  add_extents(*command, "--rows", flags->rows,
              "Without a model: query rows, the last of the prompt; 0: all of them");
  add_table_flags(*command, flags->table);
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = bench_prefill(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
