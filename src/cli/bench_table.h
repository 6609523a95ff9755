// What the tables of `lacuna bench` have in common: flags, lists of extents, and CSV files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "benchmarks/bench_line.h"
#include "lacuna/status.h"

namespace CLI {
class App;
}

namespace lacuna::cli {

// How lines are measured on a GPU, and the file that they go to from any device.
struct TableFlags {
  std::string timing = "graph";  // or event
  int64_t rounds = 11;
  std::string csv;
  std::string commit;
};

void add_table_flags(CLI::App& command, TableFlags& flags);

// A flag with a list of extents, separated by commas or spaces.
void add_extents(CLI::App& command, const char* flag, std::vector<int64_t>& values,
                 const char* text);
// Every value of a list flag must lie within [least, most].
Status check_extents(const char* flag, const std::vector<int64_t>& values, int64_t least,
                     int64_t most);

// The head of a CSV file: comments, of which `more` are lines of the caller's, then the columns.
std::string csv_head(const std::string& commit, const std::string& device,
                     const std::string& method, const std::string& more = {});
std::string csv_line(const bench::BenchLine& line);

}  // namespace lacuna::cli
