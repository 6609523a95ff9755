// `lacuna bench prefill`: prompt tokens a second at given context lengths, and which kernels the
// time went to.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <optional>

#include "cli/bench.h"
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
  std::string csv;
  std::string commit;
};

Status bench_prefill(PrefillFlags flags) {
  if (flags.repeats < 1) {
    return invalid_argument("--repeats: " + std::to_string(flags.repeats) +
                            ", expected at least 1");
  }
  flags.engine.profile = true;
  std::optional<OutputFile> file;
  if (!flags.csv.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.csv));
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
    const std::time_t now = std::time(nullptr);
    char date[32];
    std::strftime(date, sizeof(date), "%Y-%m-%d", std::gmtime(&now));
    const std::string text =
        fmt::format(
            "# commit {}; {}; {}; {}\n# wall time of steps; shares of the time inside kernels\n",
            flags.commit, engine->info().device, engine->info().dtype, date) +
        csv;
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return ok_status();
}

}  // namespace

void add_bench_prefill(CLI::App& bench, Action& action) {
  CLI::App* command =
      bench.add_subcommand("prefill", "Prompt tokens a second, and where the time goes");
  auto flags = std::make_shared<PrefillFlags>();
  add_engine_flags(*command, flags->engine);
  command->add_option("--context", flags->contexts, "Prompt lengths")->capture_default_str();
  command->add_option("--repeats", flags->repeats, "Prompts a length")->capture_default_str();
  command->add_option("--csv", flags->csv, "Also write the results to this file");
  command->add_option("--commit", flags->commit, "What the CSV says was measured");
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = bench_prefill(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
