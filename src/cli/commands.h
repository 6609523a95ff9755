// The subcommands of `lacuna`: each file adds one to the parser and says what to do when it is
// chosen. Exit codes: 0 done, 1 the work failed, 2 the command line is wrong.
#pragma once

#include <functional>

namespace CLI {
class App;
}

namespace lacuna::cli {

using Action = std::function<int()>;

void add_generate(CLI::App& app, Action& action);
void add_eval(CLI::App& app, Action& action);
void add_info(CLI::App& app, Action& action);
void add_logits(CLI::App& app, Action& action);
void add_probe(CLI::App& app, Action& action);
void add_bench(CLI::App& app, Action& action);
void add_tune(CLI::App& app, Action& action);
void add_serve(CLI::App& app, Action& action);
void add_demo(CLI::App& app, Action& action);

}  // namespace lacuna::cli
