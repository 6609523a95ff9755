// `lacuna eval`: exact answers per kind and the prompts' mean negative log-likelihood, against a
// gate if asked; of the engine or of a server; and what changed between two results.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/eval_answers.h"
#include "cli/eval_compare.h"
#include "cli/gsm8k.h"
#include "cli/problems.h"
#include "cli/text.h"
#include "core/check.h"
#include "core/file_map.h"
#include "core/output_file.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kProblemsTask = "problems";
constexpr std::string_view kGsm8kTask = "gsm8k";

struct EvalFlags {
  EngineFlags engine;
  std::string task{kProblemsTask};
  std::string data;
  std::string data_dir;
  std::string base_url;
  std::string api_key;
  std::vector<std::string> compare;
  int64_t concurrency = 0;  // 0: by where the answers come from
  int64_t every = 1;
  int64_t max_tokens = 0;  // 0: the task's
  std::vector<std::string> stop;
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

std::string model_dir(const EvalFlags& flags) {
  return flags.engine.model.empty() ? default_model_dir() : flags.engine.model;
}

Status check_flags(const EvalFlags& flags) {
  if (flags.every < 1) {
    return invalid_argument("--every: " + std::to_string(flags.every) + ", expected at least 1");
  }
  if (flags.task != kProblemsTask && flags.task != kGsm8kTask) {
    return invalid_argument("--task: \"" + flags.task + "\", expected problems or gsm8k");
  }
  const bool gsm8k = flags.task == kGsm8kTask;
  if (gsm8k && flags.data_dir.empty()) {
    return invalid_argument(
        "--data-dir: missing, expected the folder of GSM8K's train_first5.jsonl and test.jsonl");
  }
  if (gsm8k && !flags.data.empty()) {
    return invalid_argument("--data: not with --task gsm8k, expected --data-dir");
  }
  if (!gsm8k && !flags.data_dir.empty()) {
    return invalid_argument("--data-dir: only with --task gsm8k, expected --data");
  }
  if (gsm8k && !flags.expect.empty()) {
    return invalid_argument("--expect: not with --task gsm8k; compare two results with --compare");
  }
  return ok_status();
}

struct Task {
  std::string data;  // where the problems are from
  std::vector<Problem> problems;
  AskOptions ask;
};

Result<Task> load_task(const EvalFlags& flags) {
  Task task;
  if (flags.task == kGsm8kTask) {
    task.data = flags.data_dir + "/test.jsonl";
    LACUNA_ASSIGN_OR_RETURN(task.problems, load_gsm8k(flags.data_dir));
    task.ask.max_tokens = kGsm8kMaxTokens;
    task.ask.seed = kGsm8kSeed;
    task.ask.stop = gsm8k_stops();
  } else {
    // With a server, --model is a name there; the problems are then those of the model here.
    task.data = !flags.data.empty()      ? flags.data
                : flags.base_url.empty() ? model_dir(flags) + "/eval.jsonl"
                                         : default_model_dir() + "/eval.jsonl";
    LACUNA_ASSIGN_OR_RETURN(task.problems, load_problems(task.data));
    task.ask.max_tokens = 16;
    task.ask.stop = {"\n"};
    task.ask.nll = flags.base_url.empty();
  }
  if (flags.max_tokens > 0) {
    task.ask.max_tokens = flags.max_tokens;
  }
  if (!flags.stop.empty()) {
    task.ask.stop.clear();
    for (const std::string& stop : flags.stop) {
      task.ask.stop.push_back(unescape(stop));
    }
  }
  constexpr int64_t kServerConcurrency = 8;
  const int64_t concurrency = flags.base_url.empty() ? 1 : kServerConcurrency;
  task.ask.concurrency = flags.concurrency > 0 ? flags.concurrency : concurrency;
  return task;
}

Result<int> evaluate(EvalFlags flags) {
  LACUNA_RETURN_IF_ERROR(check_flags(flags));
  const bool gsm8k = flags.task == kGsm8kTask;
  const bool remote = !flags.base_url.empty();
  LACUNA_ASSIGN_OR_RETURN(const Task task, load_task(flags));
  Gate gate;
  if (!flags.expect.empty()) {
    LACUNA_ASSIGN_OR_RETURN(gate, load_gate(flags.expect));
  }
  std::optional<OutputFile> file;
  if (!flags.output.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output));
  }
  std::unique_ptr<Engine> engine;
  ServerFlags server;
  if (remote) {
    server = {flags.base_url, flags.api_key, flags.engine.model};
    if (const char* key = std::getenv("LACUNA_API_KEY"); server.api_key.empty() && key != nullptr) {
      server.api_key = key;
    }
    LACUNA_ASSIGN_OR_RETURN(server.model, server_model(server));
  } else {
    flags.engine.max_num_seqs = task.ask.concurrency;
    LACUNA_ASSIGN_OR_RETURN(engine, make_engine(flags.engine, false));
  }

  std::vector<const Problem*> chosen;
  for (size_t i = 0; i < task.problems.size(); i += flags.every) {
    chosen.push_back(&task.problems[i]);
  }
  std::map<std::string, Score> scores;
  Score all;
  double nll_sum = 0;
  int64_t nll_tokens = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  std::vector<Json> misses(chosen.size());  // in the order of problems; answers come in another
  Json exact_by_id = Json::object();
  Json answer_by_id = Json::object();
  Json nll_by_id = Json::object();
  const auto start = std::chrono::steady_clock::now();
  Progress progress;
  const auto score_answer = [&](size_t index, const Answer& answer) {
    const Problem& problem = *chosen[index];
    const std::string id = std::to_string(problem.id);
    bool exact = answer.text == problem.answer;
    if (gsm8k) {
      const std::optional<std::string> number = last_number(answer.text);
      exact = number == problem.answer;
      answer_by_id[id] = number.has_value() ? Json(*number) : Json();
    }
    exact_by_id[id] = exact;
    if (task.ask.nll) {
      nll_sum += answer.nll;
      nll_tokens += answer.nll_tokens;
      nll_by_id[id] = {std::round(answer.nll * 1e4) / 1e4, answer.nll_tokens};
    }
    prompt_tokens += answer.prompt_tokens;
    generated_tokens += answer.generated_tokens;
    Score& score = scores[problem.kind];
    ++score.num;
    ++all.num;
    score.exact += exact;
    all.exact += exact;
    if (!exact) {
      misses[index] = {{"id", problem.id},
                       {"kind", problem.kind},
                       {"expected", problem.answer},
                       {"answered", answer.text}};
    }
    std::string note = fmt::format("exact {:.2f} %", 100.0 * all.exact / all.num);
    if (task.ask.nll) {
      note += fmt::format("  context nll {:.4f}", nll_sum / std::max<int64_t>(1, nll_tokens));
    }
    progress.update(all.num, static_cast<int64_t>(chosen.size()), note);
  };
  const Status asked = remote ? ask_server(server, chosen, task.ask, score_answer)
                              : ask_engine(*engine, chosen, task.ask, score_answer);
  progress.finish();
  LACUNA_RETURN_IF_ERROR(asked);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double exact_percent = 100.0 * all.exact / all.num;
  const double nll = nll_sum / std::max<int64_t>(1, nll_tokens);
  Json wrong = Json::array();
  std::copy_if(misses.begin(), misses.end(), std::back_inserter(wrong),
               [](const Json& miss) { return !miss.is_null(); });

  Json result;
  result["task"] = flags.task;
  result["data"] = std::filesystem::path(task.data).filename().string();
  result["every"] = flags.every;
  result["problems_hash"] = problems_hash(chosen);
  result["max_tokens"] = task.ask.max_tokens;
  result["concurrency"] = task.ask.concurrency;
  result["commit"] = flags.commit;
  result["seconds"] = std::round(seconds * 10) / 10;
  result["problems"] = all.num;
  result["exact_percent"] = exact_percent;
  for (const auto& [kind, score] : scores) {
    result["kinds"][kind] = {{"problems", score.num},
                             {"exact_percent", 100.0 * score.exact / score.num}};
  }
  result["wrong"] = wrong;
  result["exact_by_id"] = exact_by_id;
  if (gsm8k) {
    result["shots"] = kGsm8kShots;
    result["temperature"] = 0;
    result["seed"] = task.ask.seed;
    result["answer_by_id"] = answer_by_id;
  }
  if (task.ask.nll) {
    result["context_nll_per_token"] = nll;
    result["context_nll_by_id"] = nll_by_id;
  }
  result["prompt_tokens"] = prompt_tokens;
  result["generated_tokens"] = generated_tokens;
  EngineCounters counters;
  if (remote) {
    result["model"] = server.model;
    result["server"] = flags.base_url;
  } else {
    counters = engine->counters();
    result["model"] = std::filesystem::path(model_dir(flags)).filename().string();
    result["device"] = engine->info().device;
    result["dtype"] = engine->info().dtype;
    result["kv_format"] = engine->info().kv_format;
    result["index_format"] = engine->info().index_format;
    result["selection"] = flags.engine.selection;
    for (int lane = 0; lane < kNumRowLanes; ++lane) {
      result["rows_by_lane"][std::string(row_lane_name(lane))] = counters.rows_by_lane[lane];
    }
    result["keys_read"] = counters.keys_read;
    result["keys_visible"] = counters.keys_visible;
    result["kernel_calls"] = counters.kernel_calls;
  }

  fmt::print("{} problems, {:.2f} % exact{}, {:.1f} s ({:.0f} prompt tokens/s)\n", all.num,
             exact_percent, task.ask.nll ? fmt::format(", context nll {:.5f}", nll) : std::string(),
             seconds, prompt_tokens / seconds);
  for (const auto& [kind, score] : scores) {
    fmt::print("  {:<12} {:>4} problems  {:>6.2f} %\n", kind, score.num,
               100.0 * score.exact / score.num);
  }
  if (!remote) {
    fmt::print("{}\n",
               lanes_text(counters.rows_by_lane, counters.keys_read, counters.keys_visible));
  }
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
    bool judge_nll = task.ask.nll && chosen.size() == task.problems.size();
    if (task.ask.nll && !judge_nll && !gate.nll_by_id.is_null()) {
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
    std::string nll_text = "context nll not asked of a server";
    if (task.ask.nll) {
      nll_text =
          fmt::format("context nll {:.5f} ({}) {}", nll,
                      judge_nll ? fmt::format("{:.5f} +- {:.5f}", nll_expected, gate.nll_tolerance)
                                : std::string("no reference for this subset"),
                      nll_ok ? (judge_nll ? "met" : "not judged") : "MISSED");
    }
    fmt::print("gate: exact {:.2f} % (at least {:.2f}) {}; {}\n", exact_percent, gate.exact_min,
               exact_ok ? "met" : "MISSED", nll_text);
    exit_code = exact_ok && nll_ok ? 0 : 1;
  }
  if (file.has_value()) {
    const std::string text = result.dump(1) + "\n";
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return exit_code;
}

std::string ids_text(const std::vector<std::string>& ids) {
  constexpr size_t kShown = 40;
  std::string text;
  for (size_t i = 0; i < ids.size() && i < kShown; ++i) {
    text += (i == 0 ? ": " : ", ") + ids[i];
  }
  return ids.size() > kShown ? text + fmt::format(", and {} more", ids.size() - kShown) : text;
}

Result<int> compare(const EvalFlags& flags) {
  std::optional<OutputFile> file;
  if (!flags.output.empty()) {
    LACUNA_ASSIGN_OR_RETURN(file, OutputFile::create(flags.output));
  }
  const std::string& path_a = flags.compare[0];
  const std::string& path_b = flags.compare[1];
  LACUNA_ASSIGN_OR_RETURN(const Comparison both, compare_results(path_a, path_b));
  for (const auto& [name, path, exact] :
       {std::tuple{"A", &path_a, both.exact_a}, std::tuple{"B", &path_b, both.exact_b}}) {
    fmt::print("{}: {} of {} exact ({:.2f} %)  {}\n", name, exact, both.num_problems,
               100.0 * exact / both.num_problems, *path);
  }
  fmt::print("{} exact in A only{}\n", both.only_a.size(), ids_text(both.only_a));
  fmt::print("{} exact in B only{}\n", both.only_b.size(), ids_text(both.only_b));
  fmt::print(
      "exact two-sided binomial p of the {} discordant pairs: {:.6f} (a large p proves no "
      "equivalence)\n",
      both.only_a.size() + both.only_b.size(), both.p);
  if (file.has_value()) {
    const Json result = {{"a", std::filesystem::path(path_a).filename().string()},
                         {"b", std::filesystem::path(path_b).filename().string()},
                         {"problems", both.num_problems},
                         {"exact_a", both.exact_a},
                         {"exact_b", both.exact_b},
                         {"only_a", both.only_a},
                         {"only_b", both.only_b},
                         {"binomial_p", both.p}};
    const std::string text = result.dump(1) + "\n";
    file->write(text.data(), static_cast<int64_t>(text.size()));
    LACUNA_RETURN_IF_ERROR(file->commit());
  }
  return 0;
}

}  // namespace

void add_eval(CLI::App& app, Action& action) {
  CLI::App* command =
      app.add_subcommand("eval", "Exact-match accuracy and context likelihood on a problem file");
  auto flags = std::make_shared<EvalFlags>();
  add_engine_flags(*command, flags->engine, /*selection=*/true);
  command
      ->add_option("--task", flags->task,
                   "problems: a file of them, answered word for word; gsm8k: five-shot, the last "
                   "number counts")
      ->capture_default_str();
  command->add_option("--data", flags->data,
                      "Problems, a JSON object a line (id, kind, prompt, answer); default: the "
                      "model's eval.jsonl");
  command->add_option("--data-dir", flags->data_dir,
                      "GSM8K: the folder of train_first5.jsonl and test.jsonl");
  command->add_option("--base-url", flags->base_url,
                      "Ask an OpenAI-compatible server, http://HOST:PORT/v1, whose name for the "
                      "model --model then is (default: the first it lists)");
  command->add_option("--api-key", flags->api_key, "The server's; default: LACUNA_API_KEY");
  command
      ->add_option("--concurrency", flags->concurrency,
                   "Problems asked at a time; default: 8 of a server, else 1")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option("--compare", flags->compare,
                   "Two results over the same problems: asks none, says which flipped and the "
                   "exact binomial p")
      ->expected(2);
  command->add_option("--every", flags->every, "Take every Nth problem")->capture_default_str();
  command->add_option("--max-tokens", flags->max_tokens, "Longest answer; default: 16, GSM8K 512")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 30));
  command->add_option("--stop", flags->stop,
                      "Text that ends an answer; default: a new line, GSM8K \"Question\"");
  command->add_option("-o,--output", flags->output, "Write the result as JSON to this file");
  command->add_option("--expect", flags->expect,
                      "Exit with 1 unless the gate of this file is met (an expected.json, or an "
                      "earlier result that had one)");
  command->add_option("--commit", flags->commit, "Recorded in the result");
  command->callback([flags, &action] {
    action = [flags] {
      const Result<int> code = flags->compare.empty() ? evaluate(*flags) : compare(*flags);
      return code.ok() ? *code : report(code.status());
    };
  });
}

}  // namespace lacuna::cli
