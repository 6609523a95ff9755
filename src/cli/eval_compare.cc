// Reads what two results say of each problem and counts the discordant pairs.
#include "cli/eval_compare.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/file_map.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::json;

// Numbers in order of value: "9" before "10".
struct IdOrder {
  bool operator()(const std::string& a, const std::string& b) const {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  }
};

struct Outcome {
  std::string task = "problems";
  std::string hash;  // empty: the result does not say
  std::map<std::string, bool, IdOrder> exact;
};

Result<Outcome> load_outcome(const std::string& path) {
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, int64_t{256} << 20));
  const Json json = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto bad = [&] {
    return data_loss(path + ": no \"exact_by_id\", expected a result of `lacuna eval -o`");
  };
  if (!json.is_object()) {
    return bad();
  }
  Outcome outcome;
  outcome.task =
      json.value("task", Json()).is_string() ? json["task"].get<std::string>() : outcome.task;
  if (json.contains("problems_hash") && json["problems_hash"].is_string()) {
    outcome.hash = json["problems_hash"].get<std::string>();
  }
  if (json.contains("exact_by_id") && json["exact_by_id"].is_object()) {
    for (const auto& [id, exact] : json["exact_by_id"].items()) {
      if (!exact.is_boolean()) {
        return bad();
      }
      outcome.exact[id] = exact.get<bool>();
    }
  } else if (json.contains("context_nll_by_id") && json["context_nll_by_id"].is_object() &&
             json.contains("wrong") && json["wrong"].is_array()) {
    // Results from before exact_by_id name each problem here, and the wrong ones there.
    for (const auto& [id, unused] : json["context_nll_by_id"].items()) {
      outcome.exact[id] = true;
    }
    for (const Json& wrong : json["wrong"]) {
      if (!wrong.is_object() || !wrong.contains("id") || !wrong["id"].is_number_integer()) {
        return bad();
      }
      outcome.exact[std::to_string(wrong["id"].get<int64_t>())] = false;
    }
  }
  if (outcome.exact.empty()) {
    return bad();
  }
  return outcome;
}

}  // namespace

double binomial_two_sided(int64_t a, int64_t b) {
  const double n = static_cast<double>(a + b);
  double tail = 0;
  for (int64_t k = 0; k <= std::min(a, b); ++k) {
    const double i = static_cast<double>(k);
    tail += std::exp(std::lgamma(n + 1) - std::lgamma(i + 1) - std::lgamma(n - i + 1) -
                     n * std::log(2.0));
  }
  return std::min(1.0, 2 * tail);
}

Result<Comparison> compare_results(const std::string& path_a, const std::string& path_b) {
  LACUNA_ASSIGN_OR_RETURN(const Outcome a, load_outcome(path_a));
  LACUNA_ASSIGN_OR_RETURN(const Outcome b, load_outcome(path_b));
  const auto differ = [&](const std::string& what) {
    return invalid_argument("--compare: " + path_a + " and " + path_b +
                            " are not about the same problems: " + what +
                            ", expected two results over the same ones");
  };
  if (a.task != b.task) {
    return differ("task \"" + a.task + "\" and \"" + b.task + "\"");
  }
  for (const auto& [mine, other, name] :
       {std::tuple{&a, &b, &path_b}, std::tuple{&b, &a, &path_a}}) {
    for (const auto& [id, unused] : mine->exact) {
      if (!other->exact.contains(id)) {
        return differ("problem " + id + " is not in " + *name);
      }
    }
  }
  if (!a.hash.empty() && !b.hash.empty() && a.hash != b.hash) {
    return differ("the ids are the same but not the texts");
  }
  Comparison comparison;
  comparison.num_problems = static_cast<int64_t>(a.exact.size());
  for (const auto& [id, exact_a] : a.exact) {
    const bool exact_b = b.exact.at(id);
    comparison.exact_a += exact_a;
    comparison.exact_b += exact_b;
    if (exact_a && !exact_b) {
      comparison.only_a.push_back(id);
    } else if (exact_b && !exact_a) {
      comparison.only_b.push_back(id);
    }
  }
  comparison.p = binomial_two_sided(static_cast<int64_t>(comparison.only_a.size()),
                                    static_cast<int64_t>(comparison.only_b.size()));
  return comparison;
}

}  // namespace lacuna::cli
