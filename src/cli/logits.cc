// `lacuna logits`: the logits of every row of a prompt (and, if asked, what each layer made of it)
// as a safetensors file.
#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "engine/recorder.h"

namespace lacuna::cli {
namespace {

struct LogitsFlags {
  EngineFlags engine;
  std::string prompt;
  std::string tokens;
  std::string output;
  bool intermediates = false;
};

Status logits(const LogitsFlags& flags) {
  const bool by_tokens = !flags.tokens.empty();
  Request request;
  if (by_tokens) {
    LACUNA_ASSIGN_OR_RETURN(request.prompt, parse_tokens(flags.tokens));
  }
  LACUNA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(flags.output));
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          make_engine(flags.engine, /*quiet=*/true, by_tokens));
  if (!by_tokens) {
    LACUNA_ASSIGN_OR_RETURN(request.prompt, engine->encode(flags.prompt));
  }
  const std::vector<int32_t> prompt = request.prompt;
  request.prompt_logprobs = true;
  request.sampling.max_tokens = 1;
  Recorder recorder;
  engine->set_tap(recorder.tap());
  LACUNA_RETURN_IF_ERROR(engine->submit(std::move(request)).status());
  print_loaded(flags.engine, *engine);
  while (engine->has_work()) {
    LACUNA_RETURN_IF_ERROR(engine->step().status());
  }
  std::map<std::string, RecordedTensor> out;
  RecordedTensor& all = out["logits"];
  for (const char* part : {"prompt_logits", "logits"}) {
    if (const RecordedTensor* tensor = recorder.find(part)) {
      all.width = tensor->width;
      all.floats.insert(all.floats.end(), tensor->floats.begin(), tensor->floats.end());
    }
  }
  out["input_ids"] = {.integers = true, .ints = prompt, .width = 1};
  if (flags.intermediates) {
    for (const auto& [name, tensor] : recorder.tensors()) {
      if (name != "logits" && name != "prompt_logits") {
        out[name] = tensor;
      }
    }
  }
  LACUNA_RETURN_IF_ERROR(write_safetensors(std::move(file), out));
  fmt::print("{}: {} tensors, logits [{}, {}]\n", flags.output, out.size(), all.rows(), all.width);
  return ok_status();
}

}  // namespace

void add_logits(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "logits", "Write the logits of a prompt to a safetensors file, for comparison");
  auto flags = std::make_shared<LogitsFlags>();
  add_engine_flags(*command, flags->engine, /*selection=*/true);
  auto* source = command->add_option_group("prompt", "What to run");
  source->add_option("-p,--prompt", flags->prompt, "The prompt as text");
  source->add_option("--tokens", flags->tokens, "The prompt as token ids: 1,2,3");
  source->require_option(1);
  command->add_option("-o,--output", flags->output, "The file to write")->required();
  command->add_flag("--intermediates", flags->intermediates,
                    "Also write attention outputs, hidden states, index lists and router choices "
                    "of each layer");
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = logits(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
