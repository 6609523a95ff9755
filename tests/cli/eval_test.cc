// How `lacuna eval` reads answers of GSM8K, and how it compares two results.
#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>

#include "cli/eval_compare.h"
#include "cli/gsm8k.h"
#include "cli/problems.h"

namespace lacuna::cli {
namespace {

class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "lacuna_eval_XXXXXX";
    path_ = mkdtemp(name.data());
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name, const std::string& text) const {
    std::ofstream(path_ + "/" + name) << text;
    return path_ + "/" + name;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(LastNumber, IsTheLastRunOfDigitsWithoutCommas) {
  EXPECT_EQ(last_number(" She earned 0.2*50 = $10.\n#### 10"), "10");
  EXPECT_EQ(last_number("It costs $1,234,567 dollars."), "1234567");
  EXPECT_EQ(last_number("first 3, then 42 clips!"), "42");
  EXPECT_EQ(last_number("7"), "7");
  EXPECT_EQ(last_number("-12"), "12");
  EXPECT_EQ(last_number("007"), "7");
  EXPECT_EQ(last_number("0"), "0");
  EXPECT_EQ(last_number("000"), "0");
  EXPECT_EQ(last_number("10.50"), "50");  // as in the harnesses that this one is compared with
  EXPECT_EQ(last_number("99999999999999999999999999"), "99999999999999999999999999");
  EXPECT_EQ(last_number("none at all"), std::nullopt);
  EXPECT_EQ(last_number(""), std::nullopt);
  EXPECT_EQ(last_number(",,,"), std::nullopt);
}

TEST(Gsm8k, PromptsHoldFiveExamplesAndTheQuestion) {
  const Folder folder;
  std::string shots;
  for (int i = 0; i < 6; ++i) {
    shots += "{\"question\": \"q" + std::to_string(i) + "?\", \"answer\": \"so\\n#### " +
             std::to_string(i) + "\"}\n";
  }
  folder.file("train_first5.jsonl", shots);
  folder.file("test.jsonl", "{\"question\": \"How?\", \"answer\": \"1+1 = 2\\n#### 2,000\"}\n");
  const Result<std::vector<Problem>> problems = load_gsm8k(folder.path());
  ASSERT_TRUE(problems.ok()) << problems.status().message();
  ASSERT_EQ(problems->size(), 1u);
  EXPECT_EQ(problems->front().answer, "2000");
  EXPECT_EQ(problems->front().prompt,
            "Question: q0?\nAnswer: so\n#### 0\n\nQuestion: q1?\nAnswer: so\n#### 1\n\n"
            "Question: q2?\nAnswer: so\n#### 2\n\nQuestion: q3?\nAnswer: so\n#### 3\n\n"
            "Question: q4?\nAnswer: so\n#### 4\n\nQuestion: How?\nAnswer:");
}

TEST(Gsm8k, BadFilesAreNamed) {
  const Folder folder;
  EXPECT_FALSE(load_gsm8k(folder.path()).ok());
  folder.file("train_first5.jsonl", "{\"question\": \"q\", \"answer\": \"#### 1\"}\n");
  folder.file("test.jsonl", "{\"question\": \"q\", \"answer\": \"none\"}\n");
  EXPECT_NE(load_gsm8k(folder.path()).status().message().find("1 worked examples, expected 5"),
            std::string::npos);
  folder.file("test.jsonl", "{\"question\": \"q\"}\n");
  EXPECT_NE(load_gsm8k(folder.path()).status().message().find("test.jsonl line 1: field"),
            std::string::npos);
}

TEST(Problems, AnIdAppearsOnce) {
  const Folder folder;
  const std::string row = "{\"id\": 3, \"kind\": \"k\", \"prompt\": \"p\", \"answer\": \"a\"}\n";
  const auto twice = load_problems(folder.file("data.jsonl", row + row));
  ASSERT_FALSE(twice.ok());
  EXPECT_NE(twice.status().message().find("line 2: the id 3 is another problem's"),
            std::string::npos);
}

TEST(Problems, TheHashTellsTextsApart) {
  const Problem a = {1, "k", "ab", "c"};
  const Problem b = {1, "k", "a", "bc"};
  const Problem* list_a[] = {&a};
  const Problem* list_b[] = {&b};
  EXPECT_EQ(problems_hash(list_a), problems_hash(list_a));
  EXPECT_NE(problems_hash(list_a), problems_hash(list_b));
  EXPECT_EQ(problems_hash(list_a).size(), 16u);
}

TEST(Binomial, TwoSided) {
  EXPECT_NEAR(binomial_two_sided(30, 24), 0.496617, 5e-7);
  EXPECT_NEAR(binomial_two_sided(24, 30), 0.496617, 5e-7);
  EXPECT_EQ(binomial_two_sided(0, 0), 1);
  EXPECT_EQ(binomial_two_sided(5, 5), 1);
  EXPECT_NEAR(binomial_two_sided(1, 0), 1, 1e-12);
  EXPECT_NEAR(binomial_two_sided(10, 0), 2.0 / 1024, 1e-12);
  EXPECT_NEAR(binomial_two_sided(3, 1), 0.625, 1e-12);
  EXPECT_NEAR(binomial_two_sided(659, 660), 1, 1e-9);
  EXPECT_GT(binomial_two_sided(0, 1000), 0);
}

TEST(Compare, CountsFlipsBothWays) {
  const Folder folder;
  const std::string a = folder.file("a.json",
                                    R"({"exact_by_id": {"2": true, "10": false, "9": false,
                                        "1": true}})");
  const std::string b = folder.file("b.json",
                                    R"({"exact_by_id": {"1": true, "2": false, "9": true,
                                        "10": true}})");
  const Result<Comparison> both = compare_results(a, b);
  ASSERT_TRUE(both.ok()) << both.status().message();
  EXPECT_EQ(both->num_problems, 4);
  EXPECT_EQ(both->exact_a, 2);
  EXPECT_EQ(both->exact_b, 3);
  EXPECT_EQ(both->only_a, std::vector<std::string>({"2"}));
  EXPECT_EQ(both->only_b, std::vector<std::string>({"9", "10"}));
  EXPECT_NEAR(both->p, 1, 1e-12);
}

TEST(Compare, ReadsResultsFromBeforeExactById) {
  const std::string results = std::string(LACUNA_SOURCE_DIR) + "/benchmarks/results/cpu/";
  const Result<Comparison> same =
      compare_results(results + "eval_dsa_nano_bf16.json", results + "eval_dsa_nano_bf16.json");
  ASSERT_TRUE(same.ok()) << same.status().message();
  EXPECT_EQ(same->num_problems, 1319);
  EXPECT_EQ(same->p, 1);
  const Folder folder;
  const std::string a = folder.file("a.json", R"({"context_nll_by_id": {"1": [1, 1], "2": [1, 1]},
                                                  "wrong": [{"id": 2}]})");
  const std::string b = folder.file("b.json", R"({"exact_by_id": {"1": false, "2": true}})");
  const Result<Comparison> apart = compare_results(a, b);
  ASSERT_TRUE(apart.ok()) << apart.status().message();
  EXPECT_EQ(apart->only_a, std::vector<std::string>({"1"}));
  EXPECT_EQ(apart->only_b, std::vector<std::string>({"2"}));
}

TEST(Compare, RefusesOtherProblems) {
  const Folder folder;
  const std::string a = folder.file("a.json", R"({"exact_by_id": {"1": true, "2": true}})");
  const auto refused = [&](const std::string& text, const std::string& why) {
    for (const bool swapped : {false, true}) {
      const std::string b = folder.file("b.json", text);
      const auto both = swapped ? compare_results(b, a) : compare_results(a, b);
      ASSERT_FALSE(both.ok()) << text;
      EXPECT_NE(both.status().message().find(why), std::string::npos) << both.status().message();
    }
  };
  refused(R"({"exact_by_id": {"1": true}})", "problem 2 is not in");
  refused(R"({"exact_by_id": {"1": true, "3": true}})", " is not in ");
  refused(R"({"task": "gsm8k", "exact_by_id": {"1": true, "2": true}})", "task ");
  refused(R"({"exact_by_id": {"1": 1}})", "expected a result of `lacuna eval -o`");
  refused(R"({"exact_by_id": {}})", "expected a result");
  refused(R"([1])", "expected a result");
  refused("", "expected a result");
  const std::string c =
      folder.file("c.json", R"({"problems_hash": "x", "exact_by_id": {"1": true}})");
  const std::string d =
      folder.file("d.json", R"({"problems_hash": "y", "exact_by_id": {"1": true}})");
  EXPECT_NE(compare_results(c, d).status().message().find("not the texts"), std::string::npos);
}

}  // namespace
}  // namespace lacuna::cli
