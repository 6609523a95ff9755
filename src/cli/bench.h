// The parts of `lacuna bench`.
#pragma once

#include "cli/commands.h"

namespace lacuna::cli {

void add_bench_indexer(CLI::App& bench, Action& action);
void add_bench_prefill(CLI::App& bench, Action& action);
void add_bench_offline(CLI::App& bench, Action& action);  // latency and throughput

}  // namespace lacuna::cli
