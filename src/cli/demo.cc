// `lacuna demo`: the small model answers questions of its evaluation set, live: the question, the
// streamed answer, right or wrong, how fast, and which lane each step took with how many of how
// many keys it read.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/problems.h"
#include "cli/text.h"
#include "core/check.h"

namespace lacuna::cli {
namespace {

struct DemoFlags {
  EngineFlags engine;
};

// One problem of each kind, the longer contexts among them: sparse attention has something to skip
// there.
constexpr int64_t kShown[] = {334, 600, 830, 1100, 1250};

struct Style {
  explicit Style(bool terminal)
      : bold(terminal ? "\x1b[1m" : ""),
        dim(terminal ? "\x1b[2m" : ""),
        green(terminal ? "\x1b[32m" : ""),
        red(terminal ? "\x1b[31m" : ""),
        reset(terminal ? "\x1b[0m" : "") {}
  const char *bold, *dim, *green, *red, *reset;
};

const char* explain_kind(const std::string& kind) {
  if (kind == "recall") return "what was the value of this key?";
  if (kind == "last-write") return "this key was written several times: the newest value?";
  if (kind == "sum") return "recall two keys and add them";
  if (kind == "copy") return "continue the span that starts so";
  return "add two numbers, nothing to look up";
}

std::string lane_summary(const StepInfo& step) {
  std::string text;
  for (int lane = 0; lane < kNumRowLanes; ++lane) {
    if (step.rows_by_lane[lane] > 0) {
      text += fmt::format("{}{} rows {}", text.empty() ? "" : ", ",
                          with_commas(step.rows_by_lane[lane]), row_lane_name(lane));
    }
  }
  return text;
}

Status demo(const DemoFlags& flags) {
  const std::string model = flags.engine.model.empty() ? default_model_dir() : flags.engine.model;
  if (model.empty()) {
    return not_found("the model that ships with the project was not found, name one with --model");
  }
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Problem> problems,
                          load_problems(model + "/eval.jsonl"));
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, make_engine(flags.engine, false));
  const Style style(isatty(STDOUT_FILENO) != 0);
  fmt::print(
      "\nIts prompts are up to 4,096 bytes of random text with facts in it; each token reads only "
      "the {} "
      "keys that the indexer picks.\n",
      engine->info().index_topk);
  int right = 0;
  int asked = 0;
  for (const int64_t id : kShown) {
    const Problem* problem = nullptr;
    for (const Problem& candidate : problems) {
      problem = candidate.id == id ? &candidate : problem;
    }
    if (problem == nullptr) {
      continue;
    }
    Request request;
    LACUNA_ASSIGN_OR_RETURN(request.prompt, engine->encode(problem->prompt));
    const int64_t num_prompt = static_cast<int64_t>(request.prompt.size());
    request.sampling.max_tokens = 16;
    request.sampling.stop = {"\n"};
    const size_t cut = problem->prompt.size() > 36 ? problem->prompt.size() - 36 : 0;
    fmt::print("\n{}{}: {}{}\n  {}{} tokens of context, ending in:{} ...{}\n", style.bold,
               problem->kind, explain_kind(problem->kind), style.reset, style.dim,
               with_commas(num_prompt), style.reset, one_line(problem->prompt.substr(cut)));
    LACUNA_RETURN_IF_ERROR(engine->submit(std::move(request)).status());
    std::string answer;
    int64_t prompt_done = 0;
    int64_t generated = 0;
    double prefill_seconds = 0;
    double decode_seconds = 0;
    StepInfo last;
    bool prompt_open = true;
    while (engine->has_work()) {
      LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine->step());
      for (const TokenEvent& event : events) {
        if (!event.step.decode) {
          for (const int64_t rows : event.step.rows_by_lane) {
            prompt_done += rows;
          }
          prefill_seconds += event.step.seconds;
          fmt::print("  {}prefill {:>5}/{}  {}; {} of {} keys a layer{}\n", style.dim,
                     with_commas(prompt_done), with_commas(num_prompt), lane_summary(event.step),
                     with_commas(event.step.keys_read), with_commas(event.step.keys_visible),
                     style.reset);
        } else {
          decode_seconds += event.step.seconds;
          last = event.step;
        }
        if (event.token_id >= 0) {
          if (prompt_open) {
            fmt::print("  answer: {}", style.bold);
            prompt_open = false;
          }
          ++generated;
          answer += event.text;
          fmt::print("{}", one_line(event.text));
        }
        std::fflush(stdout);
      }
    }
    const bool ok = answer == problem->answer;
    right += ok;
    ++asked;
    fmt::print("{}  {}{}{}\n", style.reset, ok ? style.green : style.red,
               ok ? "right" : fmt::format("wrong, expected {}", one_line(problem->answer)),
               style.reset);
    fmt::print(
        "  {}prefill {:.0f} tokens/s; decode {:.0f} tokens/s, last step {}: {} of {} keys a "
        "layer{}\n",
        style.dim, num_prompt / std::max(prefill_seconds, 1e-9),
        (generated - 1) / std::max(decode_seconds, 1e-9), lane_summary(last),
        with_commas(last.keys_read), with_commas(last.keys_visible), style.reset);
  }
  fmt::print("\n{} of {} right.\n\n", right, asked);
  fmt::print(
      "Next:\n"
      "  lacuna serve                                  an OpenAI-compatible server and a page, at "
      "http://127.0.0.1:8000\n"
      "  lacuna generate -p '#12+34=' --stop '\\n'     ask it yourself\n"
      "  lacuna serve --model DIR                      another DeepSeek-V3.2 or GLM-5.x folder "
      "(BF16, F16, F32, FP8)\n"
      "  lacuna eval --every 20                        its accuracy on part of its problems\n"
      "  lacuna info                                   devices and kernels\n");
  if (right != asked) {
    return internal_error("the demo model answered " + std::to_string(asked - right) +
                          " questions wrongly");
  }
  return ok_status();
}

}  // namespace

void add_demo(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("demo", "Ask the small model that ships with the project a few questions");
  auto flags = std::make_shared<DemoFlags>();
  add_engine_flags(*command, flags->engine);
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = demo(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
