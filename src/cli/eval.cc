// `lacuna eval`: exact answers per kind and the prompts' mean negative log-likelihood, against a
// gate if asked.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/problems.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/file_map.h"
#include "core/output_file.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::json;

struct EvalFlags {
  EngineFlags engine;
  std::string data;
  int64_t every = 1;
  int64_t max_tokens = 16;
  std::vector<std::string> stop = {"\\n"};
  std::string output;
  std::string expect;
  std::string commit;
};

struct Score {
  int64_t num = 0;
  int64_t exact = 0;
};

// The gate of an expect file: {"gate": {"exact_all": ">= 99.8 ...", "context_nll_per_token":
// "1.9191 +- 0.001"}} and, for subsets, "context_nll_by_id": {"id": [nll summed over the prompt,
// tokens]}.
struct Gate {
  double exact_min = 0;
  double nll = 0;
  double nll_tolerance = 0;
  Json nll_by_id;
  Json source;
};

Result<Gate> load_gate(const std::string& path) {
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, int64_t{64} << 20));
  const Json json = Json::parse(text, nullptr, false);
  const auto bad = [&](const char* what) {
    return data_loss(path + ": " + what +
                     ", expected {\"gate\": {\"exact_all\": \">= PERCENT\", "
                     "\"context_nll_per_token\": \"NLL +- TOLERANCE\"}}");
  };
  if (!json.is_object() || !json.contains("gate") || !json["gate"].is_object()) {
    return bad("no gate");
  }
  Gate gate;
  gate.source = json["gate"];
  if (!gate.source.contains("exact_all") || !gate.source["exact_all"].is_string() ||
      !gate.source.contains("context_nll_per_token") ||
      !gate.source["context_nll_per_token"].is_string()) {
    return bad("the gate lacks exact_all or context_nll_per_token");
  }
  if (std::sscanf(gate.source["exact_all"].get<std::string>().c_str(), ">= %lf", &gate.exact_min) !=
      1) {
    return bad("exact_all is not \">= PERCENT\"");
  }
  if (std::sscanf(gate.source["context_nll_per_token"].get<std::string>().c_str(), "%lf +- %lf",
                  &gate.nll, &gate.nll_tolerance) != 2) {
    return bad("context_nll_per_token is not \"NLL +- TOLERANCE\"");
  }
  if (json.contains("context_nll_by_id") && json["context_nll_by_id"].is_object()) {
    gate.nll_by_id = json["context_nll_by_id"];
  }
  return gate;
}

Result<int> evaluate(const EvalFlags& flags) {
  if (flags.every < 1) {
    return invalid_argument("--every: " + std::to_string(flags.every) + ", expected at least 1");
  }
  std::string data = flags.data;
  if (data.empty()) {
    data = (flags.engine.model.empty() ? default_model_dir() : flags.engine.model) + "/eval.jsonl";
  }
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Problem> problems, load_problems(data));
  Gate gate;
  if (!flags.expect.empty()) {
    LACUNA_ASSIGN_OR_RETURN(gate, load_gate(flags.expect));
  }
  std::optional<OutputFile> file;
  if (!flags.output.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output));
  }
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine, make_engine(flags.engine, false));

  std::vector<const Problem*> chosen;
  for (size_t i = 0; i < problems.size(); i += flags.every) {
    chosen.push_back(&problems[i]);
  }
  std::map<std::string, Score> scores;
  Score all;
  double nll_sum = 0;
  int64_t nll_tokens = 0;
  Json wrong = Json::array();
  Json nll_by_id = Json::object();
  const auto start = std::chrono::steady_clock::now();
  Progress progress;
  for (const Problem* problem : chosen) {
    Request request;
    LACUNA_ASSIGN_OR_RETURN(request.prompt, engine->encode(problem->prompt));
    request.prompt_logprobs = true;
    request.sampling.max_tokens = flags.max_tokens;
    for (const std::string& stop : flags.stop) {
      request.sampling.stop.push_back(unescape(stop));
    }
    LACUNA_ASSIGN_OR_RETURN(const int64_t id, engine->submit(std::move(request)));
    std::string answer;
    while (engine->has_work()) {
      LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine->step());
      for (const TokenEvent& event : events) {
        answer += event.text;
      }
    }
    const RequestRecord record = engine->take_record(id);
    double nll = 0;
    for (const float logprob : record.prompt_logprobs) {
      nll -= logprob;
    }
    nll_sum += nll;
    nll_tokens += static_cast<int64_t>(record.prompt_logprobs.size());
    nll_by_id[std::to_string(problem->id)] = {std::round(nll * 1e4) / 1e4,
                                              record.prompt_logprobs.size()};
    const bool exact = answer == problem->answer;
    Score& score = scores[problem->kind];
    ++score.num;
    ++all.num;
    score.exact += exact;
    all.exact += exact;
    if (!exact) {
      wrong.push_back({{"id", problem->id},
                       {"kind", problem->kind},
                       {"expected", problem->answer},
                       {"answered", answer}});
    }
    progress.update(all.num, static_cast<int64_t>(chosen.size()),
                    fmt::format("exact {:.2f} %  context nll {:.4f}", 100.0 * all.exact / all.num,
                                nll_sum / std::max<int64_t>(1, nll_tokens)));
  }
  progress.finish();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double exact_percent = 100.0 * all.exact / all.num;
  const double nll = nll_sum / std::max<int64_t>(1, nll_tokens);
  const EngineCounters counters = engine->counters();

  Json result;
  result["model"] =
      std::filesystem::path(flags.engine.model.empty() ? default_model_dir() : flags.engine.model)
          .filename()
          .string();
  result["data"] = std::filesystem::path(data).filename().string();
  result["every"] = flags.every;
  result["device"] = engine->info().device;
  result["dtype"] = engine->info().dtype;
  result["kv_format"] = engine->info().kv_format;
  result["index_format"] = engine->info().index_format;
  result["selection"] = flags.engine.selection;
  result["commit"] = flags.commit;
  result["seconds"] = std::round(seconds * 10) / 10;
  result["problems"] = all.num;
  result["exact_percent"] = exact_percent;
  result["context_nll_per_token"] = nll;
  for (const auto& [kind, score] : scores) {
    result["kinds"][kind] = {{"problems", score.num},
                             {"exact_percent", 100.0 * score.exact / score.num}};
  }
  result["wrong"] = wrong;
  for (int lane = 0; lane < kNumRowLanes; ++lane) {
    result["rows_by_lane"][std::string(row_lane_name(lane))] = counters.rows_by_lane[lane];
  }
  result["keys_read"] = counters.keys_read;
  result["keys_visible"] = counters.keys_visible;
  result["prompt_tokens"] = counters.prompt_tokens;
  result["generated_tokens"] = counters.generated_tokens;
  result["kernel_calls"] = counters.kernel_calls;
  result["context_nll_by_id"] = nll_by_id;

  fmt::print("{} problems, {:.2f} % exact, context nll {:.5f}, {:.1f} s ({:.0f} prompt tokens/s)\n",
             all.num, exact_percent, nll, seconds, counters.prompt_tokens / seconds);
  for (const auto& [kind, score] : scores) {
    fmt::print("  {:<12} {:>4} problems  {:>6.2f} %\n", kind, score.num,
               100.0 * score.exact / score.num);
  }
  fmt::print("{}\n", lanes_text(counters.rows_by_lane, counters.keys_read, counters.keys_visible));
  for (const Json& miss : wrong) {
    if (wrong.size() > 20) {
      fmt::print("{} wrong answers (the JSON result lists them)\n", wrong.size());
      break;
    }
    fmt::print("  wrong: {} {} expected \"{}\", answered \"{}\"\n", miss["id"].get<int64_t>(),
               miss["kind"].get<std::string>(), one_line(miss["expected"].get<std::string>()),
               one_line(miss["answered"].get<std::string>()));
  }

  int exit_code = 0;
  if (!flags.expect.empty()) {
    result["gate"] = gate.source;
    double nll_expected = gate.nll;
    bool judge_nll = chosen.size() == problems.size();
    if (!judge_nll && !gate.nll_by_id.is_null()) {
      // A subset is judged against the same problems of the run that the file records.
      double sum = 0;
      int64_t tokens = 0;
      judge_nll = true;
      for (const auto& [id, ours] : nll_by_id.items()) {
        if (!gate.nll_by_id.contains(id)) {
          judge_nll = false;
          break;
        }
        sum += gate.nll_by_id[id][0].get<double>();
        tokens += gate.nll_by_id[id][1].get<int64_t>();
      }
      nll_expected = sum / std::max<int64_t>(1, tokens);
    }
    const bool exact_ok = exact_percent >= gate.exact_min;
    const bool nll_ok = !judge_nll || std::fabs(nll - nll_expected) <= gate.nll_tolerance;
    fmt::print("gate: exact {:.2f} % (at least {:.2f}) {}; context nll {:.5f} ({}) {}\n",
               exact_percent, gate.exact_min, exact_ok ? "met" : "MISSED", nll,
               judge_nll ? fmt::format("{:.5f} +- {:.5f}", nll_expected, gate.nll_tolerance)
                         : std::string("no reference for this subset"),
               nll_ok ? (judge_nll ? "met" : "not judged") : "MISSED");
    exit_code = exact_ok && nll_ok ? 0 : 1;
  }
  if (file.has_value()) {
    const std::string text = result.dump(1) + "\n";
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return exit_code;
}

}  // namespace

void add_eval(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("eval", "Exact-match accuracy and context likelihood on a problem file");
  auto flags = std::make_shared<EvalFlags>();
  add_engine_flags(*command, flags->engine, /*selection=*/true);
  command->add_option("--data", flags->data,
                      "Problems, a JSON object a line (id, kind, prompt, answer); default: the "
                      "model's eval.jsonl");
  command->add_option("--every", flags->every, "Take every Nth problem")->capture_default_str();
  command->add_option("--max-tokens", flags->max_tokens, "Longest answer")->capture_default_str();
  command->add_option("--stop", flags->stop, "Text that ends an answer")->capture_default_str();
  command->add_option("-o,--output", flags->output, "Write the result as JSON to this file");
  command->add_option("--expect", flags->expect,
                      "Exit with 1 unless the gate of this file is met (an expected.json, or an "
                      "earlier result that had one)");
  command->add_option("--commit", flags->commit, "Recorded in the result");
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = evaluate(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
