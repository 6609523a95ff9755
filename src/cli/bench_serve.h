// `lacuna bench serve`: one server under load, or two in paired rounds.
#pragma once

#include "cli/commands.h"

namespace lacuna::cli {

void add_bench_serve(CLI::App& bench, Action& action);

}  // namespace lacuna::cli
