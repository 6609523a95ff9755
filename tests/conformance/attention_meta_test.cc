// The suite must be able to fail: deliberately wrong kernels go through the same checking function,
// and it has to object to each of them. The right one, built the same way, passes.
#include <cmath>
#include <functional>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/attention_cases.h"

namespace lacuna::testing {
namespace {

struct Fault {
  bool drop_last_key = false;
  bool ignore_none = false;      // reads -1 as row 0
  bool ignore_count = false;     // reads the whole list
  bool write_next_head = false;  // writes head H of a wider buffer
  bool sink_in_lse = false;
  bool empty_lse_plus_inf = false;  // FlashMLA's convention
  bool base_two_lse = false;
  bool no_duplicates = false;  // counts a duplicate once
  bool write_before = false;   // one byte before the output
  bool depend_on_workspace = false;
  bool leave_row_unwritten = false;
  double scale_error = 1;  // of softmax_scale
};

// A kernel made of the oracle: computes on host views and writes what the oracle says, but for the
// fault.
void run_faulty(SparseMlaProblem& problem, const Fault& fault, uint8_t garbage) {
  SparseMlaArgs args = problem.args(Side::kHost);
  const int64_t num_rows = args.indices.shape[0];
  const int64_t width = args.indices.shape[1];
  std::vector<int32_t> list(num_rows * width);
  for (int64_t t = 0; t < num_rows; ++t) {
    int64_t last = -1;
    const int64_t count =
        fault.ignore_count
            ? width
            : std::clamp<int64_t>(reference::integer_or(args.valid_counts, t, width), 0, width);
    for (int64_t i = 0; i < width; ++i) {
      const int32_t id = static_cast<int32_t>(reference::integer(args.indices, t, i));
      int32_t& entry = list[t * width + i];
      entry = i < count ? id : -1;
      if (entry >= 0 && entry < args.kv.num_rows()) {
        last = i;
      }
      if (fault.ignore_none && entry == -1 && i < count) {
        entry = list[t * width];
      }
      for (int64_t before = 0; fault.no_duplicates && before < i; ++before) {
        if (list[t * width + before] == entry) {
          entry = -1;
        }
      }
    }
    if (fault.drop_last_key && last >= 0) {
      list[t * width + last] = -1;
    }
  }
  args.indices = view_of(static_cast<const int32_t*>(list.data()), {num_rows, width});
  args.valid_counts = {};
  args.softmax_scale *= fault.scale_error;
  reference::AttentionResult result = reference::sparse_mla(args);

  const SparseMlaArgs device = problem.args(Side::kDevice);
  const int64_t num_heads = args.out.shape[1];
  const int64_t d_v = args.out.shape[2];
  const auto put16 = [&](int64_t t, int64_t h, int64_t i, double value) {
    const Bf16 bits = to_bf16(static_cast<float>(value));
    std::memcpy(static_cast<char*>(device.out.data) +
                    2 * (t * device.out.strides[0] + h * device.out.strides[1] + i),
                &bits, 2);
  };
  for (int64_t t = 0; t < num_rows; ++t) {
    if (fault.leave_row_unwritten && t == num_rows - 1) {
      continue;
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      double lse = result.lse[t * num_heads + h];
      if (fault.sink_in_lse && !args.sink.empty()) {
        lse = std::log(std::exp(lse) + std::exp(reference::element(args.sink, h)));
      }
      if (fault.empty_lse_plus_inf && std::isinf(lse)) {
        lse = -lse;
      }
      if (fault.base_two_lse) {
        lse /= std::log(2.0);
      }
      for (int64_t i = 0; i < d_v; ++i) {
        put16(t, h, i,
              result.out[(t * num_heads + h) * d_v + i] +
                  (fault.depend_on_workspace ? 1e-2 * garbage / 255.0 : 0));
      }
      float* lse_at =
          device.lse.as<float>() + t * device.lse.strides[0] + h * device.lse.strides[1];
      *lse_at = static_cast<float>(lse);
      device.max_logits
          .as<float>()[t * device.max_logits.strides[0] + h * device.max_logits.strides[1]] =
          static_cast<float>(result.max_logits[t * num_heads + h]);
    }
  }
  if (fault.write_next_head) {
    put16(0, num_heads, 0, 0);
  }
  if (fault.write_before) {
    static_cast<char*>(device.out.data)[-1] = 0;
  }
}

const SparseMlaCase kHostileCase = {.name = "meta",
                                    .seed = 7,
                                    .rows = 6,
                                    .heads = 4,
                                    .width = 60,
                                    .list = ListPattern::kHostile,
                                    .counts = CountPattern::kRagged,
                                    .sink = true,
                                    .out_heads_wide = 6,
                                    .lse_row_gap = 1};

std::string error_of(const Fault& fault, const SparseMlaCase& test_case = kHostileCase) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    if (where.device.kind == DeviceKind::kCpu) {
      SparseMlaProblem problem(test_case, where);
      return check_problem_with(problem,
                                [&](uint8_t garbage) {
                                  run_faulty(problem, fault, garbage);
                                  return ok_status();
                                })
          .error;
    }
  }
  return "there is no CPU device";
}

TEST(ConformanceItself, AcceptsTheOracle) { EXPECT_EQ(error_of({}), ""); }

TEST(ConformanceItself, ObjectsToEveryFault) {
  SparseMlaCase empty_rows = kHostileCase;
  empty_rows.list = ListPattern::kEmptyRows;
  SparseMlaCase long_list = {.name = "meta_long", .rows = 1, .heads = 8, .width = 2048};
  EXPECT_NE(error_of({.drop_last_key = true}), "");
  EXPECT_NE(error_of({.drop_last_key = true}, long_list), "") << "one key of 2048 is lost";
  EXPECT_NE(error_of({.ignore_none = true}), "");
  EXPECT_NE(error_of({.ignore_count = true}), "");
  EXPECT_NE(error_of({.write_next_head = true}), "");
  EXPECT_NE(error_of({.sink_in_lse = true}), "");
  EXPECT_NE(error_of({.empty_lse_plus_inf = true}, empty_rows), "");
  EXPECT_NE(error_of({.base_two_lse = true}), "");
  EXPECT_NE(error_of({.no_duplicates = true}), "");
  EXPECT_NE(error_of({.write_before = true}), "");
  EXPECT_NE(error_of({.depend_on_workspace = true}), "");
  EXPECT_NE(error_of({.leave_row_unwritten = true}), "");
  EXPECT_NE(error_of({.scale_error = 1.01}), "");
}

TEST(ConformanceItself, NamesTheFirstWrongCoordinate) {
  const std::string error = error_of({.leave_row_unwritten = true});
  EXPECT_NE(error.find("out[5, 0, 0]"), std::string::npos) << error;
  EXPECT_NE(error.find("expected"), std::string::npos) << error;
}

}  // namespace
}  // namespace lacuna::testing
