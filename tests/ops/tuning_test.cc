// Tuning tables: what is written is read again, and what is wrong with a text is named by its line.
#include "ops/tuning.h"

#include <gtest/gtest.h>

#include <string>

namespace lacuna {
namespace {

std::string refusal(const std::string& text) {
  const Result<Tuning> tuning = parse_tuning(text, "t.csv");
  return tuning.ok() ? "read" : tuning.status().message();
}

const std::string kHead = "# device: X, 80 GB\n# sm_count: 78\n";
const std::string kColumns = "heads,rows,keys,splits\n";

TEST(Tuning, ReadsWhatItWrote) {
  const Tuning tuning = {
      .device = "NVIDIA H200",
      .sm_count = 132,
      .sparse_mla_splits = {{16, 1, 2048, 32}, {8, 64, 2048, 2}, {16, 133, 2047, kLastWaveSplits}}};
  const std::string text = tuning_text(tuning, {"commit: abc", "date: today"});
  EXPECT_EQ(text,
            "# device: NVIDIA H200\n# sm_count: 132\n# commit: abc\n# date: today\n"
            "heads,rows,keys,splits\n16,1,2048,32\n8,64,2048,2\n16,133,2047,0\n");
  const Result<Tuning> read = parse_tuning(text, "t.csv");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(tuning_text(*read, {"commit: abc", "date: today"}), text);
}

TEST(Tuning, TakesOtherLineEndsAndComments) {
  const Result<Tuning> read = parse_tuning(
      "# a note\r\n\r\n# device: X\r\n# sm_count: 5\r\nheads,rows,keys,splits\r\n1,2,3,4", "t.csv");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read->device, "X");
  EXPECT_EQ(read->sm_count, 5);
  ASSERT_EQ(read->sparse_mla_splits.size(), 1u);
  EXPECT_EQ(read->sparse_mla_splits[0].splits, 4);
}

TEST(Tuning, NamesTheLineThatIsMalformed) {
  for (const char* line : {"16,1,2048", "16,1,2048,2,3", "16,1,2048,", "16,,2048,2", "16,1,2048,-1",
                           "0,1,2048,0", "16,1,0,2", "16,-1,2048,2", "16, 1,2048,2", "16,1,2048,2x",
                           "99999999999999999999,1,1,1", "x"}) {
    EXPECT_EQ(refusal(kHead + kColumns + "8,1,64,1\n" + line + "\n"),
              std::string("t.csv: line 5: \"") + line +
                  "\", expected numbers from 1, splits from 0: heads,rows,keys,splits");
  }
  EXPECT_EQ(refusal(kHead + "heads,rows\n"),
            "t.csv: line 3: \"heads,rows\", expected the columns \"heads,rows,keys,splits\"");
  EXPECT_EQ(refusal("# device: X\n# sm_count: many\n" + kColumns),
            "t.csv: line 2: \"# sm_count: many\", expected a number of SMs");
  EXPECT_EQ(refusal(kHead + kColumns + "8,1,64,1\n8,1,64,2\n"),
            "t.csv: line 5: \"8,1,64,2\", expected each heads,rows,keys once");
}

TEST(Tuning, WantsToKnowWhatWasMeasured) {
  for (const std::string& head : {std::string(), std::string("# device: X\n"),
                                  std::string("# sm_count: 78\n"), std::string("# device: \n")}) {
    EXPECT_EQ(refusal(head + kColumns + "8,1,64,1\n"),
              "t.csv: does not say what it was measured on, expected lines \"# device: NAME\" and "
              "\"# sm_count: N\"");
  }
  EXPECT_EQ(refusal(kHead),
            "t.csv: has no choices, expected the columns \"heads,rows,keys,splits\" and lines "
            "below them");
}

TEST(Tuning, SaysThatAFileIsMissing) {
  const Result<Tuning> read = read_tuning("/nowhere/t.csv");
  EXPECT_EQ(read.status().code(), StatusCode::kNotFound);
  EXPECT_NE(read.status().message().find("tuning_file: /nowhere/t.csv: No such file"),
            std::string::npos);
}

}  // namespace
}  // namespace lacuna
