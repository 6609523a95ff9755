// `lacuna probe`: the sparse attention calls that an engine makes, replayed on every kernel of
// every device against the oracle in double precision.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "core/check.h"
#ifdef LACUNA_HAVE_ORACLE
#include "cli/captured_call.h"
#include "cli/problems.h"
#include "cli/text.h"
#include "core/output_file.h"
#include "ops/dispatch.h"
#endif

namespace lacuna::cli {
namespace {

struct ProbeFlags {
  EngineFlags engine;
  std::string prompt;
  std::string tokens;
  std::string data;
  int64_t max_tokens = 8;
  std::string layers = "all";
  std::string steps = "all";
  std::string output;
  std::string commit;
};

#ifndef LACUNA_HAVE_ORACLE

Result<int> probe(const ProbeFlags&) {
  return unsupported("probe: needs the oracle, which is built with LACUNA_TESTS");
}

#else

// Numbers of layers or steps; empty: all.
Result<std::set<int64_t> > parse_numbers(const char* flag, const std::string& text) {
  std::set<int64_t> numbers;
  if (text == "all") {
    return numbers;
  }
  const char* at = text.data();
  const char* end = at + text.size();
  do {
    int64_t number = -1;
    const auto [next, error] = std::from_chars(at, end, number);
    if (error != std::errc() || number < 0 || (next != end && *next != ',')) {
      return invalid_argument(
          fmt::format("{}: \"{}\", expected all or numbers from 0 like 0,2,5", flag, text));
    }
    numbers.insert(number);
    at = next == end ? end : next + 1;
  } while (at < end);
  return numbers;
}

// What one kernel made of all calls.
struct KernelSummary {
  int64_t probes = 0;
  int64_t refused = 0;
  int64_t bit_equal = 0;
  int64_t wrong = 0;
  double max_abs = 0;
  double rel_frobenius = 0;
  double lse_error = 0;
  std::string refusal;  // the last one
};

class Probe {
 public:
  Probe(const Context& context, std::set<int64_t> layers, std::set<int64_t> steps, OutputFile* file)
      : context_(context), layers_(std::move(layers)), steps_(std::move(steps)), file_(file) {}

  void write(const nlohmann::ordered_json& line) {
    const std::string text = line.dump() + "\n";
    file_->write(text.data(), static_cast<int64_t>(text.size()));
  }

  Status replay(const SparseMlaCall& call) {
    ++num_calls_;
    if ((!layers_.empty() && layers_.count(call.layer) == 0) ||
        (!steps_.empty() && steps_.count(call.step) == 0)) {
      return ok_status();
    }
    const ContextState& state = context_.state();
    const Runtime* engines_runtime = nullptr;
    for (const Backend* backend : state.backends) {
      if (backend->device_kind == call.args.out.device.kind) {
        engines_runtime = backend->runtime;
      }
    }
    LACUNA_CHECK(engines_runtime != nullptr);
    LACUNA_ASSIGN_OR_RETURN(const CapturedCall captured,
                            CapturedCall::copy(call.args, engines_runtime));
    ++num_captured_;
    for (const Backend* backend : state.backends) {
      for (const DeviceInfo& device : state.devices) {
        if (device.device.kind != backend->device_kind || !backend->available(device)) {
          continue;
        }
        for (const Kernel<SparseMlaArgs>& kernel : backend->sparse_mla) {
          LACUNA_ASSIGN_OR_RETURN(const Replay replay,
                                  captured.replay(context_, device, backend->runtime, kernel.name));
          note(call, captured, device.device, kernel.name, replay);
        }
      }
    }
    return ok_status();
  }

  // The table and the verdict: 0, or 1 when something is wrong.
  Result<int> finish() const {
    if (num_captured_ == 0) {
      return invalid_argument(
          num_calls_ == 0
              ? "probe: no step attended over a list: a longer prompt, more --max-tokens or "
                "--force-mqa would work"
              : fmt::format("--layers, --steps: name none of the {} calls of this run",
                            num_calls_));
    }
    fmt::print("{:<28} {:<7} {:>7} {:>8} {:>9} {:>9} {:>9} {:>10} {:>6}\n", "kernel", "device",
               "probes", "refused", "max abs", "rel frob", "lse", "same bits", "wrong");
    int64_t wrong = 0;
    for (const auto& [name, kernel] : kernels_) {
      const auto error = [&](double value) {
        return kernel.probes == 0 ? "-" : fmt::format("{:.2e}", value);
      };
      fmt::print("{:<28} {:<7} {:>7} {:>8} {:>9} {:>9} {:>9} {:>10} {:>6}{}\n", name.first,
                 name.second, kernel.probes, kernel.refused, error(kernel.max_abs),
                 error(kernel.rel_frobenius), error(kernel.lse_error), kernel.bit_equal,
                 kernel.wrong, kernel.refusal.empty() ? "" : "  " + kernel.refusal);
      wrong += kernel.wrong;
    }
    fmt::print("{} calls captured, the engine's own kernel {}; {} replays beyond their bound{}\n",
               num_captured_,
               num_other_bits_ == 0 ? "gives its bits again"
                                    : fmt::format("gives other bits in {}", num_other_bits_),
               wrong, first_error_.empty() ? "" : ": " + first_error_);
    return wrong == 0 && num_other_bits_ == 0 ? 0 : 1;
  }

 private:
  void note(const SparseMlaCall& call, const CapturedCall& captured, Device device,
            const std::string& name, const Replay& replay) {
    const bool is_engines = name == call.kernel && device == call.args.out.device;
    nlohmann::ordered_json line = {
        {"layer", call.layer},         {"step", call.step}, {"rows", captured.num_rows()},
        {"keys", captured.num_keys()}, {"kernel", name},    {"device", device_text(device)},
        {"engines_own", is_engines}};
    KernelSummary& kernel = kernels_[{name, device_text(device)}];
    if (!replay.refusal.empty()) {
      line["refused"] = replay.refusal;
      kernel.refusal = replay.refusal;
      ++kernel.refused;
    } else {
      line["max_abs"] = replay.max_abs;
      line["rel_frobenius"] = replay.rel_frobenius;
      line["lse_error"] = replay.lse_error;
      line["bit_equal"] = replay.bit_equal;
      line["within_bound"] = replay.error.empty();
      ++kernel.probes;
      grow(&kernel.max_abs, replay.max_abs);
      grow(&kernel.rel_frobenius, replay.rel_frobenius);
      grow(&kernel.lse_error, replay.lse_error);
      kernel.bit_equal += replay.bit_equal ? 1 : 0;
      num_other_bits_ += is_engines && !replay.bit_equal ? 1 : 0;
      if (!replay.error.empty()) {
        line["error"] = replay.error;
        ++kernel.wrong;
        if (first_error_.empty()) {
          first_error_ =
              fmt::format("{}, layer {}, step {}: {}", name, call.layer, call.step, replay.error);
        }
      }
    }
    write(line);
  }

  const Context& context_;
  std::set<int64_t> layers_;
  std::set<int64_t> steps_;
  OutputFile* file_;
  std::map<std::pair<std::string, std::string>, KernelSummary> kernels_;
  int64_t num_calls_ = 0;
  int64_t num_captured_ = 0;
  int64_t num_other_bits_ = 0;  // calls that the engine's own kernel does not repeat
  std::string first_error_;
};

Result<std::vector<std::vector<int32_t> > > read_prompts(const ProbeFlags& flags,
                                                         const Engine& engine) {
  std::vector<std::vector<int32_t> > prompts;
  if (!flags.tokens.empty()) {
    LACUNA_ASSIGN_OR_RETURN(prompts.emplace_back(), parse_tokens(flags.tokens));
  } else if (flags.data.empty()) {
    LACUNA_ASSIGN_OR_RETURN(prompts.emplace_back(), engine.encode(flags.prompt));
  } else {
    LACUNA_ASSIGN_OR_RETURN(const std::vector<Problem> problems, load_problems(flags.data));
    for (const Problem& problem : problems) {
      LACUNA_ASSIGN_OR_RETURN(prompts.emplace_back(), engine.encode(problem.prompt));
    }
  }
  return prompts;
}

Result<int> probe(const ProbeFlags& flags) {
  LACUNA_ASSIGN_OR_RETURN(std::set<int64_t> layers, parse_numbers("--layers", flags.layers));
  LACUNA_ASSIGN_OR_RETURN(std::set<int64_t> steps, parse_numbers("--steps", flags.steps));
  LACUNA_ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(flags.output));
  LACUNA_ASSIGN_OR_RETURN(
      std::unique_ptr<Engine> engine,
      make_engine(flags.engine, /*quiet=*/true, /*skip_tokenizer=*/!flags.tokens.empty()));
  if (!layers.empty() && *layers.rbegin() >= engine->info().num_layers) {
    return invalid_argument(fmt::format("--layers: {}, the model has layers 0 to {}",
                                        *layers.rbegin(), engine->info().num_layers - 1));
  }
  LACUNA_ASSIGN_OR_RETURN(const auto prompts, read_prompts(flags, *engine));
  for (const std::vector<int32_t>& prompt : prompts) {
    Request request;
    request.prompt = prompt;
    request.sampling.max_tokens = flags.max_tokens;
    request.sampling.ignore_eos = true;
    LACUNA_RETURN_IF_ERROR(engine->submit(std::move(request)).status());
  }
  print_loaded(flags.engine, *engine);
  // Every device, whichever one the engine is on.
  LACUNA_ASSIGN_OR_RETURN(const Context context,
                          Context::create({.num_threads = flags.engine.threads,
                                           .tuning_file = flags.engine.tuning_file}));
  Probe probe(context, std::move(layers), std::move(steps), &file);
  const EngineInfo& info = engine->info();
  probe.write({{"model", info.architecture},
               {"device", info.device},
               {"dtype", info.dtype},
               {"kv_format", info.kv_format},
               {"commit", flags.commit},
               {"date", now_text()}});
  Status replayed;
  engine->set_sparse_mla_tap([&](const SparseMlaCall& call) {
    if (replayed.ok()) {
      replayed = probe.replay(call);
    }
  });
  while (engine->has_work()) {
    LACUNA_RETURN_IF_ERROR(engine->step().status());
    LACUNA_RETURN_IF_ERROR(replayed);
  }
  LACUNA_ASSIGN_OR_RETURN(const int exit_code, probe.finish());
  LACUNA_RETURN_IF_ERROR(file.commit());
  return exit_code;
}

#endif

}  // namespace

void add_probe(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand(
      "probe", "Replay an engine's sparse attention on every kernel, against the oracle");
  auto flags = std::make_shared<ProbeFlags>();
  add_engine_flags(*command, flags->engine, /*selection=*/true);
  auto* source = command->add_option_group("prompt", "What to run");
  source->add_option("-p,--prompt", flags->prompt, "The prompt as text");
  source->add_option("--tokens", flags->tokens, "The prompt as token ids: 1,2,3");
  source->add_option("--data", flags->data, "The prompts of a file of problems, as of lacuna eval");
  source->require_option(1);
  command->add_option("-n,--max-tokens", flags->max_tokens, "Tokens of each answer")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--max-num-seqs", flags->engine.max_num_seqs, "Prompts that run at a time")
      ->capture_default_str();
  command->add_option("--layers", flags->layers, "all, or layers to capture: 0,2")
      ->capture_default_str();
  command->add_option("--steps", flags->steps, "all, or steps of the engine to capture: 0,1,7")
      ->capture_default_str();
  command
      ->add_option("-o,--output", flags->output,
                   "The file to write: a line of JSON for the run, then one a call and kernel")
      ->required();
  command->add_option("--commit", flags->commit, "Commit hash, written into the file");
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> exit_code = probe(*flags);
      return exit_code.ok() ? *exit_code : report(exit_code.status());
    };
  });
}

}  // namespace lacuna::cli
