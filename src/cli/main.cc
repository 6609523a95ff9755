// The `lacuna` command: parses, runs one subcommand, turns its outcome into an exit code.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{
      "Lacuna: sparse MLA attention for DeepSeek-V3.2 and GLM-5.x, as an engine and its tools."};
  app.name("lacuna");
  app.require_subcommand(1);
  app.set_version_flag("--version", "lacuna " LACUNA_VERSION);
  app.footer(
      "Each command has its own --help. Exit codes: 0 done, 1 the work failed, 2 the command line "
      "is wrong.");
  lacuna::cli::Action action;
  lacuna::cli::add_generate(app, action);
  lacuna::cli::add_eval(app, action);
  lacuna::cli::add_demo(app, action);
  lacuna::cli::add_info(app, action);
  lacuna::cli::add_logits(app, action);
  lacuna::cli::add_bench(app, action);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForAllHelp& help) {
    return app.exit(help);
  } catch (const CLI::CallForVersion& version) {
    return app.exit(version);
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "lacuna: %s (see lacuna --help)\n", error.what());
    return 2;
  }
  return action();
}
