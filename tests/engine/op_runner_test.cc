// How the engine calls operations: counts, forced kernels, and measuring without running.
#include "ops/op_runner.h"

#include <gtest/gtest.h>

#include <vector>

#include "engine/nano.h"
#include "engine/setup.h"

namespace lacuna {
namespace {

struct Sum {
  std::vector<float> x = {1, 2, 3};
  std::vector<float> out = {10, 20, 30};
  AddArgs args() {
    return {.x = view_of(static_cast<const float*>(x.data()), {1, 3}),
            .out = view_of(out.data(), {1, 3})};
  }
};

TEST(OpRunner, CountsCallsByKernel) {
  const Context context = one_thread();
  OpRunner run(context);
  Sum sum;
  EXPECT_TRUE(run.uses().empty());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(run(sum.args()).ok());
  }
  EXPECT_EQ(sum.out, (std::vector<float>{13, 26, 39}));
  ASSERT_EQ(run.uses().size(), 1u);
  EXPECT_EQ(run.uses().begin()->first, "cpu/add");
  EXPECT_EQ(run.uses().begin()->second.calls, 3);
}

TEST(OpRunner, TimesCallsWhenAsked) {
  const Context context = one_thread();
  OpRunner run(context);
  Sum sum;
  ASSERT_TRUE(run(sum.args()).ok());
  EXPECT_EQ(run.uses().begin()->second.seconds, 0);
  run.set_timing(true);
  ASSERT_TRUE(run(sum.args()).ok());
  EXPECT_GT(run.uses().begin()->second.seconds, 0);
}

TEST(OpRunner, CapturedCallsCountWhenTheyAreReplayed) {
  const Context context = one_thread();
  OpRunner run(context);
  Sum sum;
  ASSERT_TRUE(run(sum.args()).ok());
  const OpRunner::Uses before = run.uses();
  for (int i = 0; i < 2; ++i) {
    ASSERT_TRUE(run(sum.args()).ok());
  }
  const OpRunner::Tally tally = run.take_calls_since(before);
  EXPECT_EQ(run.uses().begin()->second.calls, 1);
  ASSERT_EQ(tally.size(), 1u);
  OpRunner::count(tally);
  OpRunner::count(tally);
  EXPECT_EQ(run.uses().begin()->second.calls, 5);
  EXPECT_STREQ(run.uses().begin()->second.op, "add");
}

TEST(OpRunner, ADeviceThatRunsBehindIsTimedByEvents) {
  const Context context = one_thread();
  Runtime runtime = *runtime_of(context.state(), DeviceKind::kCpu);
  runtime.elapsed_ms = [](void*, void*) { return Result<double>(2.0); };
  OpRunner run(context);
  run.set_timing(true, &runtime);
  Sum sum;
  for (int round = 1; round <= 2; ++round) {
    ASSERT_TRUE(run(sum.args()).ok());
    ASSERT_TRUE(run(sum.args()).ok());
    ASSERT_TRUE(run.collect_timing().ok());
    EXPECT_EQ(run.uses().begin()->second.calls, 2 * round);
    EXPECT_DOUBLE_EQ(run.uses().begin()->second.seconds, 0.004 * round);
  }
}

TEST(OpRunner, ACallThatFailsValidationIsNoKernelsCall) {
  const Context context = one_thread();
  OpRunner run(context);
  Sum sum;
  AddArgs args = sum.args();
  args.x.shape[1] = 2;
  EXPECT_EQ(run(args).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(run.uses().empty());
}

TEST(OpRunner, MeasuringRunsNothingAndKeepsTheLargestWorkspace) {
  const Context context = one_thread();
  OpRunner run(context);
  run.set_measuring(true);
  Sum sum;
  ASSERT_TRUE(run(sum.args()).ok());
  EXPECT_EQ(sum.out, (std::vector<float>{10, 20, 30}));
  EXPECT_TRUE(run.uses().empty());

  std::vector<float> logits(4 * 1000);
  std::vector<float> floats(4);
  std::vector<int32_t> ints(4);
  const auto sample = [&](int64_t rows, int64_t vocab) {
    const auto f = [&] { return view_of(static_cast<const float*>(floats.data()), {rows}); };
    return SampleArgs{.logits = view_of(static_cast<const float*>(logits.data()), {rows, vocab}),
                      .temperature = f(),
                      .top_k = view_of(static_cast<const int32_t*>(ints.data()), {rows}),
                      .top_p = f(),
                      .min_p = f(),
                      .uniform = f(),
                      .ids = view_of(ints.data(), {rows})};
  };
  int64_t largest = 0;
  for (const auto& [rows, vocab] : {std::pair<int64_t, int64_t>{1, 10}, {4, 1000}, {2, 50}}) {
    const Result<int64_t> bytes = workspace_bytes(context, sample(rows, vocab));
    ASSERT_TRUE(bytes.ok());
    largest = std::max(largest, *bytes);
    ASSERT_TRUE(run(sample(rows, vocab)).ok());
  }
  EXPECT_GT(largest, 0);
  EXPECT_EQ(run.workspace_bytes_max(), largest);
}

TEST(OpRunner, AForcedKernelIsTakenOrNothingIs) {
  const Context context = one_thread();
  Sum sum;
  std::vector<float> product(2);
  const std::vector<float> weight = {1, 0, 0, 0, 1, 0};
  const LinearArgs linear = {.x = view_of(static_cast<const float*>(sum.x.data()), {1, 3}),
                             .weight = view_of(weight.data(), {2, 3}),
                             .out = view_of(product.data(), {1, 2})};
  for (const char* kernel : {"cpu/linear_gemv", "cpu/linear_gemm"}) {
    OpRunner run(context, {{"linear", kernel}});
    std::vector<std::byte> memory(1 << 20);
    const uintptr_t at = reinterpret_cast<uintptr_t>(memory.data());
    run.set_launch(
        {.workspace = memory.data() + (64 - at % 64) % 64, .workspace_bytes = (1 << 20) - 64});
    ASSERT_TRUE(run(linear).ok());
    EXPECT_EQ(product, (std::vector<float>{1, 2}));
    ASSERT_TRUE(run(sum.args()).ok());  // other operations are free
    EXPECT_EQ(run.uses().count(kernel), 1u);
    EXPECT_EQ(run.uses().size(), 2u);
  }
  OpRunner run(context, {{"linear", "cpu/other"}});
  const Status status = run(linear);
  EXPECT_EQ(status.code(), StatusCode::kNotFound);
  for (const char* part : {"linear: there is no kernel \"cpu/other\"",
                           "cpu/linear_gemv: not the kernel that was asked for",
                           "cpu/linear_gemm: not the kernel that was asked for"}) {
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  }
  EXPECT_TRUE(run.uses().empty());
  run.set_measuring(true);
  EXPECT_EQ(run(linear).code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace lacuna
