// Flags and CSV text.
#include "cli/bench_table.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/text.h"

namespace lacuna::cli {

void add_table_flags(CLI::App& command, TableFlags& flags) {
  command
      .add_option("--timing", flags.timing, "GPU: graph (many calls a launch) or event (each call)")
      ->check(CLI::IsMember({"graph", "event"}))
      ->capture_default_str();
  command.add_option("--rounds", flags.rounds, "GPU: launches of each graph, or events a shape")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command.add_option("--csv", flags.csv, "Also write the results to this file");
  command.add_option("--commit", flags.commit, "What the CSV says was measured");
}

void add_extents(CLI::App& command, const char* flag, std::vector<int64_t>& values,
                 const char* text) {
  command.add_option(flag, values, text)->delimiter(',')->capture_default_str();
}

Status check_extents(const char* flag, const std::vector<int64_t>& values, int64_t least,
                     int64_t most) {
  for (const int64_t value : values) {
    if (value < least || value > most) {
      return invalid_argument(
          fmt::format("{}: {}, expected values from {} to {}", flag, value, least, most));
    }
  }
  return ok_status();
}

std::string csv_head(const std::string& commit, const std::string& device,
                     const std::string& method, const std::string& more) {
  return fmt::format(
      "# commit: {}\n# device: {}\n# date: {}\n# method: {}\n{}"
      "op,kernel,peer,h_q,d_qk,topk,rows,context,kv_dtype,cache,us_median,us_p10,us_p90,floor_us,"
      "bytes,flops\n",
      commit.empty() ? "not given" : commit, device, now_text(), method, more);
}

std::string csv_line(const bench::BenchLine& line) {
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{:.2f},{:.2f},{:.2f},{:.2f},{:.0f},{:.0f}\n",
                     line.op, line.kernel, line.peer, line.heads, line.d_qk, line.topk, line.rows,
                     line.context, line.dtype, line.cache, line.timing.us_median,
                     line.timing.us_p10, line.timing.us_p90, line.floor_us, line.bytes, line.flops);
}

}  // namespace lacuna::cli
