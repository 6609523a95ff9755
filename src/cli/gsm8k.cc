// Reads GSM8K's files and builds its five-shot prompts.
#include "cli/gsm8k.h"

#include <algorithm>

#include "cli/json_lines.h"
#include "core/check.h"

namespace lacuna::cli {
namespace {

struct Example {
  std::string question;
  std::string answer;
};

Result<std::vector<Example>> load_examples(const std::string& path) {
  std::vector<Example> examples;
  LACUNA_RETURN_IF_ERROR(
      for_each_json_line(path, [&](const nlohmann::json& json, const std::string& where) -> Status {
        Example example;
        LACUNA_RETURN_IF_ERROR(text_field(json, "question", where, example.question));
        LACUNA_RETURN_IF_ERROR(text_field(json, "answer", where, example.answer));
        examples.push_back(std::move(example));
        return ok_status();
      }));
  return examples;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::vector<std::string> gsm8k_stops() { return {"Question", "Assistant:", "<|separator|>"}; }

std::optional<std::string> last_number(std::string_view text) {
  std::string plain;
  std::copy_if(text.begin(), text.end(), std::back_inserter(plain),
               [](char c) { return c != ','; });
  const auto last = std::find_if(plain.rbegin(), plain.rend(), is_digit);
  if (last == plain.rend()) {
    return std::nullopt;
  }
  const auto end = last.base();
  auto begin = std::find_if_not(last, plain.rend(), is_digit).base();
  while (end - begin > 1 && *begin == '0') {
    ++begin;
  }
  return std::string(begin, end);
}

Result<std::vector<Problem>> load_gsm8k(const std::string& folder) {
  const std::string shots_path = folder + "/train_first5.jsonl";
  const std::string test_path = folder + "/test.jsonl";
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Example> shots, load_examples(shots_path));
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Example> tests, load_examples(test_path));
  if (shots.size() < kGsm8kShots) {
    return data_loss(shots_path + ": " + std::to_string(shots.size()) +
                     " worked examples, expected " + std::to_string(kGsm8kShots));
  }
  if (tests.empty()) {
    return data_loss(test_path + ": no problems");
  }
  std::string before;
  for (int i = 0; i < kGsm8kShots; ++i) {
    before += "Question: " + shots[i].question + "\nAnswer: " + shots[i].answer + "\n\n";
  }
  std::vector<Problem> problems;
  for (const Example& test : tests) {
    Problem problem;
    problem.id = static_cast<int64_t>(problems.size());
    problem.kind = "gsm8k";
    problem.prompt = before + "Question: " + test.question + "\nAnswer:";
    const std::optional<std::string> label = last_number(test.answer);
    if (!label.has_value()) {
      return data_loss(test_path + ": the answer of problem " + std::to_string(problem.id) +
                       " has no number");
    }
    problem.answer = *label;
    problems.push_back(std::move(problem));
  }
  return problems;
}

}  // namespace lacuna::cli
