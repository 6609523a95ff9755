// The `lacuna` command: parses, runs one subcommand, turns its outcome into an exit code.
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/engine_flags.h"

namespace lacuna::cli {
namespace {

// The innermost command that was named: what to ask for help.
const CLI::App& named_command(const CLI::App& app) {
  const std::vector<CLI::App*> named = app.get_subcommands();
  return named.empty() ? app : named_command(*named.front());
}

std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name()
                                     : full_name(*app.get_parent()) + " " + app.get_name();
}

// "--max-tokens" of "Could not convert: --max-tokens = abc" takes an integer.
std::string expected_number(const CLI::App& command, const std::string& what) {
  for (const CLI::Option* option : command.get_options()) {
    if (what.find(": " + option->get_name() + " = ") == std::string::npos) {
      continue;
    }
    const std::string type = option->get_type_name();
    return type == "INT"     ? ", expected an integer in its range"
           : type == "UINT"  ? ", expected an integer from 0"
           : type == "FLOAT" ? ", expected a number"
                             : "";
  }
  return {};
}

// A command is missing, or is none that exists: CLI11 would not say which.
std::string command_missing(const CLI::App& app, const CLI::App& command) {
  std::string names;
  for (const CLI::App* known : command.get_subcommands([](const CLI::App*) { return true; })) {
    names += (names.empty() ? "" : ", ") + known->get_name();
  }
  const std::vector<std::string> given = app.remaining(/*recurse=*/true);
  return (given.empty() ? "no command was given"
                        : "there is no command \"" + given.front() + "\"") +
         ", expected one of: " + names;
}

int parse_failure(const CLI::App& app, const CLI::ParseError& error) {
  const CLI::App& command = named_command(app);
  std::string what = error.what();
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    what += expected_number(command, what);
  } else if (dynamic_cast<const CLI::RequiredError*>(&error) != nullptr &&
             command.get_require_subcommand_min() > 0) {
    what = command_missing(app, command);
  }
  return report(invalid_argument(what + " (see " + full_name(command) + " --help)"));
}

// Output that could not be written is a failure of the work.
int finish(int exit_code) {
  errno = 0;
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    const std::string reason = errno == 0 ? "" : ": " + std::generic_category().message(errno);
    return report(io_error("the output could not be written" + reason));
  }
  return exit_code;
}

// The arguments, last first as CLI11 wants them. Short names of two letters, which CLI11 does not
// have, are what people type at other servers.
std::vector<std::string> long_names(int argc, char** argv) {
  std::vector<std::string> arguments;
  for (int i = argc - 1; i > 0; --i) {
    const std::string_view given = argv[i];
    const bool serves = i > 1 && std::string_view(argv[1]) == "serve";
    arguments.emplace_back(serves && given == "-tp"   ? "--tensor-parallel-size"
                           : serves && given == "-np" ? "--max-num-seqs"
                                                      : given);
  }
  return arguments;
}

int run(int argc, char** argv) {
  CLI::App app{
      "Lacuna: sparse MLA attention for DeepSeek-V3.2 and GLM-5.x, as an engine and its tools."};
  app.name("lacuna");
  app.require_subcommand(1);
  app.set_version_flag("--version", "lacuna " LACUNA_VERSION);
  app.footer(
      "Each command has its own --help. Exit codes: 0 done, 1 the work failed, 2 the command line "
      "is wrong.");
  Action action;
  add_generate(app, action);
  add_serve(app, action);
  add_eval(app, action);
  add_demo(app, action);
  add_info(app, action);
  add_logits(app, action);
  add_probe(app, action);
  add_bench(app, action);
  add_tune(app, action);
  std::vector<std::string> arguments = long_names(argc, argv);
  try {
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp& help) {
    return finish(app.exit(help));
  } catch (const CLI::CallForAllHelp& help) {
    return finish(app.exit(help));
  } catch (const CLI::CallForVersion& version) {
    return finish(app.exit(version));
  } catch (const CLI::ParseError& error) {
    return parse_failure(app, error);
  }
  return finish(action());
}

}  // namespace
}  // namespace lacuna::cli

int main(int argc, char** argv) {
  // The library does not throw; the standard library and fmt may, when memory or the disk is full.
  try {
    return lacuna::cli::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "lacuna: %s\n", error.what());
    return 1;
  }
}
