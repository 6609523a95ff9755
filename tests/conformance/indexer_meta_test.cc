// The suite must be able to fail: deliberately wrong selections go through the same checking
// function, and it has to object to each of them.
#include <cmath>
#include <cstring>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/indexer_cases.h"

namespace lacuna::testing {
namespace {

enum class Fault {
  kNone,
  kStaleTail,       // entries past the count keep what was there
  kTiesFromTheEnd,  // of equal scores the last positions win
  kByScore,         // the list in order of score
  kChoosesNan,
  kZeroesDiffer,  // -0 below +0
  kOneTooFew,
  kCountsWidth,
  kIgnoresRowStart,
};

void write(const TensorView& tensor, int64_t i, int64_t j, int32_t value) {
  std::memcpy(tensor.as<int32_t>() + i * tensor.strides[0] + j * tensor.strides[1], &value, 4);
}

// A kernel made of the oracle, but for the fault.
void run_faulty(TopKProblem& problem, Fault fault) {
  TopKArgs args = problem.args(Side::kHost);
  const int64_t num_rows = args.logits.shape[0];
  const int64_t columns = args.logits.shape[1];
  std::vector<float> logits(num_rows * columns);
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t j = 0; j < columns; ++j) {
      float& value = logits[t * columns + j];
      value = static_cast<float>(reference::element(args.logits, t, j));
      if (fault == Fault::kChoosesNan && std::isnan(value)) {
        value = 0.5f;
      }
      if (fault == Fault::kZeroesDiffer && value == 0) {
        value = std::signbit(value) ? -1e-30f : 1e-30f;
      }
      if (fault == Fault::kTiesFromTheEnd && std::isfinite(value)) {
        value += 1e-4f * static_cast<float>(j);
      }
    }
  }
  args.logits = view_of(static_cast<const float*>(logits.data()), {num_rows, columns});
  if (fault == Fault::kIgnoresRowStart) {
    args.row_starts = {};
  }
  reference::Selection chosen = reference::top_k(args);
  const SelectionOutputs device = problem.args(Side::kDevice).outputs;
  for (int64_t t = 0; t < num_rows; ++t) {
    int64_t count = chosen.counts[t];
    int32_t* list = &chosen.indices[t * chosen.width];
    if (fault == Fault::kByScore && count > 1) {
      std::swap(list[0], list[count - 1]);
    }
    if (fault == Fault::kOneTooFew && count > 0) {
      list[--count] = -1;
    }
    for (int64_t i = 0; i < chosen.width; ++i) {
      if (fault != Fault::kStaleTail || i < count) {
        write(device.indices, t, i, list[i]);
      }
    }
    std::memcpy(device.counts.as<int32_t>() + t, &count, 4);
    if (fault == Fault::kCountsWidth) {
      const int32_t width = static_cast<int32_t>(chosen.width);
      std::memcpy(device.counts.as<int32_t>() + t, &width, 4);
    }
  }
}

std::string error_of(Fault fault, ScoreFamily family) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    if (where.device.kind == DeviceKind::kCpu) {
      TopKProblem problem({.name = "meta",
                           .lengths = {200, 300, 10, 33},
                           .k = 32,
                           .family = family,
                           .row_starts = true,
                           .scores = false},
                          where);
      return check_problem_with(problem,
                                [&](uint8_t) {
                                  run_faulty(problem, fault);
                                  return ok_status();
                                })
          .error;
    }
  }
  return "there is no CPU device";
}

TEST(SelectionCheckItself, AcceptsTheOracle) {
  for (ScoreFamily family : {ScoreFamily::kRandom, ScoreFamily::kManyTies, ScoreFamily::kSpecial,
                             ScoreFamily::kSignedZeros}) {
    EXPECT_EQ(error_of(Fault::kNone, family), "");
  }
}

TEST(SelectionCheckItself, ObjectsToEveryFault) {
  EXPECT_NE(error_of(Fault::kStaleTail, ScoreFamily::kRandom), "");
  EXPECT_NE(error_of(Fault::kTiesFromTheEnd, ScoreFamily::kManyTies), "");
  EXPECT_NE(error_of(Fault::kByScore, ScoreFamily::kRandom), "");
  EXPECT_NE(error_of(Fault::kChoosesNan, ScoreFamily::kSpecial), "");
  EXPECT_NE(error_of(Fault::kZeroesDiffer, ScoreFamily::kSignedZeros), "");
  EXPECT_NE(error_of(Fault::kOneTooFew, ScoreFamily::kRandom), "");
  EXPECT_NE(error_of(Fault::kCountsWidth, ScoreFamily::kRandom), "");
  EXPECT_NE(error_of(Fault::kIgnoresRowStart, ScoreFamily::kRandom), "");
}

}  // namespace
}  // namespace lacuna::testing
