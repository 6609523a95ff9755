// `lacuna generate`: one prompt in, the answer streamed to the terminal.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/file_map.h"

namespace lacuna::cli {
namespace {

struct GenerateFlags {
  EngineFlags engine;
  std::string prompt;
  std::string prompt_file;
  std::string tokens;
  bool chat = false;
  std::string system;
  SamplingParams sampling;
  bool quiet = false;
};

constexpr int64_t kPromptBytesMax = int64_t{64} << 20;

Result<std::string> read_prompt(const GenerateFlags& flags) {
  if (!flags.prompt_file.empty()) {
    if (flags.prompt_file == "-") {
      return std::string(std::istreambuf_iterator<char>(std::cin), {});
    }
    return read_file(flags.prompt_file, kPromptBytesMax);
  }
  return flags.prompt;
}

// Where the prompt came from, for messages.
std::string prompt_source(const GenerateFlags& flags) {
  const std::string& file = flags.prompt_file;
  return file.empty() ? "--prompt" : file == "-" ? "stdin" : file;
}

// The ids of `text`; an error names `source`.
Result<std::vector<int32_t>> encode(const Engine& engine, std::string_view text,
                                    const std::string& source) {
  Result<std::vector<int32_t>> ids = engine.encode(text);
  if (!ids.ok()) {
    return Status(ids.status().code(), source + ": " + ids.status().message());
  }
  return ids;
}

// One turn, rendered through the model's chat template.
Result<std::vector<int32_t>> encode_chat(const Engine& engine, const GenerateFlags& flags,
                                         const std::string& prompt) {
  nlohmann::json messages = nlohmann::json::array();
  if (!flags.system.empty()) {
    LACUNA_RETURN_IF_ERROR(encode(engine, flags.system, "--system").status());  // is it UTF-8?
    messages.push_back({{"role", "system"}, {"content", flags.system}});
  }
  messages.push_back({{"role", "user"}, {"content", prompt}});
  LACUNA_ASSIGN_OR_RETURN(const std::string text, engine.apply_chat_template(messages.dump()));
  return engine.encode(text);
}

Status generate(const GenerateFlags& flags) {
  LACUNA_ASSIGN_OR_RETURN(const std::string prompt, read_prompt(flags));
  const bool by_tokens = !flags.tokens.empty();
  Request request;
  if (by_tokens) {
    LACUNA_ASSIGN_OR_RETURN(request.prompt, parse_tokens(flags.tokens));
  }
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          make_engine(flags.engine, /*quiet=*/true, by_tokens));
  if (!by_tokens) {
    LACUNA_ASSIGN_OR_RETURN(request.prompt, encode(*engine, prompt, prompt_source(flags)));
    if (flags.chat) {
      LACUNA_ASSIGN_OR_RETURN(request.prompt, encode_chat(*engine, flags, prompt));
    }
  }
  const int64_t num_prompt = static_cast<int64_t>(request.prompt.size());
  request.sampling = flags.sampling;
  for (std::string& stop : request.sampling.stop) {
    stop = unescape(stop);
  }
  LACUNA_RETURN_IF_ERROR(engine->submit(std::move(request)).status());
  if (!flags.quiet) {
    print_loaded(flags.engine, *engine);
  }
  double prefill_seconds = 0;
  double decode_seconds = 0;
  FinishReason finish = FinishReason::kNone;
  bool first = true;
  while (engine->has_work()) {
    LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine->step());
    for (const TokenEvent& event : events) {
      if (!by_tokens) {
        std::fwrite(event.text.data(), 1, event.text.size(), stdout);
      } else if (event.token_id >= 0) {
        fmt::print("{}{}", first ? "" : ",", event.token_id);
        first = false;
      }
      std::fflush(stdout);
      (event.step.decode ? decode_seconds : prefill_seconds) += event.step.seconds;
      finish = event.finish;
    }
  }
  std::fputc('\n', stdout);
  if (!flags.quiet) {
    const EngineCounters counters = engine->counters();
    fmt::print(stderr, "{} prompt tokens in {:.2f} s ({:.0f}/s), {} generated ({:.1f}/s), {}\n",
               num_prompt, prefill_seconds, num_prompt / std::max(prefill_seconds, 1e-9),
               counters.generated_tokens,
               std::max<int64_t>(0, counters.generated_tokens - 1) / std::max(decode_seconds, 1e-9),
               finish == FinishReason::kLength ? "stopped at the length limit" : "stopped");
    fmt::print(stderr, "{}\n",
               lanes_text(counters.rows_by_lane, counters.keys_read, counters.keys_visible));
  }
  return ok_status();
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("generate", "Answer one prompt");
  auto flags = std::make_shared<GenerateFlags>();
  add_engine_flags(*command, flags->engine);
  auto* source = command->add_option_group("prompt", "What to answer");
  source->add_option("-p,--prompt", flags->prompt, "The prompt");
  source->add_option("-f,--prompt-file", flags->prompt_file, "A file with the prompt; - is stdin");
  CLI::Option* tokens =
      source->add_option("--tokens", flags->tokens,
                         "The prompt as token ids, 1,2,3: no tokenizer is read, the answer is ids "
                         "too");
  source->require_option(1);
  CLI::Option* chat = command->add_flag(
      "--chat", flags->chat, "The prompt is a question, put in the form of the chat template");
  chat->excludes(tokens);
  command->add_option("--system", flags->system, "The system message of --chat")->needs(chat);
  command
      ->add_option("--chat-template", flags->engine.chat_template,
                   "A Jinja template, or a file with one, instead of the model's")
      ->needs(chat);
  SamplingParams& sampling = flags->sampling;
  command->add_option("-n,--max-tokens", sampling.max_tokens, "Longest answer, in tokens")
      ->capture_default_str();
  command->add_option("--temperature", sampling.temperature, "0: greedy")->capture_default_str();
  command->add_option("--top-p", sampling.top_p, "Nucleus; 1: off")->capture_default_str();
  command->add_option("--top-k", sampling.top_k, "0: off")->capture_default_str();
  command->add_option("--min-p", sampling.min_p, "0: off")->capture_default_str();
  command->add_option("--seed", sampling.seed, "Of sampling")->capture_default_str();
  command->add_option("--stop", sampling.stop,
                      "Text that ends the answer (repeatable; \\n and \\t are understood)");
  command->add_flag("--ignore-eos", sampling.ignore_eos, "Go on after an end-of-sequence token");
  command->add_flag("-q,--quiet", flags->quiet, "The answer only");
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = generate(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
