// Promises of the engine's own operations that one call cannot show, and draws whose result is
// known without an oracle.
#include <cmath>
#include <limits>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kI32 = DType::kInt32;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- Threads ----

const Context& context_of(int num_threads) {
  static const Context contexts[] = {*Context::create({.num_threads = 1}),
                                     *Context::create({.num_threads = 3})};
  return contexts[num_threads == 1 ? 0 : 1];
}

// Every kernel of the CPU gives the same bits on one and on three threads.
template <class Problem, class Case>
void expect_thread_independence(const std::vector<Case>& cases) {
  for (const KernelOnDevice& kernel : kernels_of<typename Problem::Args>(context_of(1))) {
    if (kernel.where.device.kind != DeviceKind::kCpu) {
      continue;
    }
    for (const Case& test_case : cases) {
      Problem problem(test_case, kernel.where);
      typename Problem::Args args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      if (!explain(context_of(1), args).status.ok()) {
        continue;
      }
      std::vector<std::vector<uint8_t>> first;
      for (int num_threads : {1, 3}) {
        problem.buffers.upload();
        const Status status = call_with_workspace(context_of(num_threads), args, kernel.where);
        ASSERT_TRUE(status.ok()) << kernel.name << " " << test_case.name << status.message();
        problem.buffers.download();
        if (first.empty()) {
          first = problem.buffers.output_bytes();
        }
        ASSERT_TRUE(first == problem.buffers.output_bytes()) << kernel.name << test_case.name;
      }
    }
  }
}

TEST(ModelThreads, DoNotChangeTheBits) {
  expect_thread_independence<EmbeddingProblem>(embedding_cases());
  expect_thread_independence<RmsNormProblem>(rms_norm_cases());
  expect_thread_independence<LayerNormProblem>(layer_norm_cases());
  expect_thread_independence<SiluMulProblem>(silu_mul_cases());
  expect_thread_independence<AddProblem>(add_cases());
  expect_thread_independence<RopeProblem>(rope_cases());
  expect_thread_independence<MoeRouteProblem>(moe_route_cases());
  expect_thread_independence<AdjustLogitsProblem>(adjust_logits_cases());
  expect_thread_independence<TokenLogprobsProblem>(token_logprobs_cases());
  expect_thread_independence<PickTokensProblem>(pick_tokens_cases());
  expect_thread_independence<SampleProblem>(sample_cases());
  expect_thread_independence<LinearProblem>(linear_cases());
  expect_thread_independence<HeadLinearProblem>(head_linear_cases());
  expect_thread_independence<MoeExpertsProblem>(moe_experts_cases());
}

// ---- Rows by themselves ----

// A row's token and log-probability are the same bits whatever rows are drawn beside it.
TEST(SampleRows, DoNotDependOnEachOther) {
  for (const KernelOnDevice& kernel : kernels_of<SampleArgs>(conformance_context())) {
    for (const SampleCase& test_case : sample_cases()) {
      if (!test_case.logprobs || test_case.vocabulary > 20000) {
        continue;
      }
      SampleProblem problem(test_case, kernel.where);
      SampleArgs args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      problem.buffers.upload();
      ASSERT_TRUE(call_with_workspace(conformance_context(), args, kernel.where).ok());
      problem.buffers.download();
      const std::vector<std::vector<uint8_t>> together = problem.buffers.output_bytes();
      problem.buffers.upload();
      for (int64_t t = 0; t < args.ids.shape[0]; ++t) {
        SampleArgs one = args;
        for (ConstTensorView* view :
             {&one.logits, &one.temperature, &one.top_k, &one.top_p, &one.min_p, &one.uniform}) {
          *view = view->slice(0, t, 1);
        }
        one.ids = args.ids.slice(0, t, 1);
        one.logprobs = args.logprobs.slice(0, t, 1);
        ASSERT_TRUE(call_with_workspace(conformance_context(), one, kernel.where).ok());
      }
      problem.buffers.download();
      EXPECT_TRUE(together == problem.buffers.output_bytes()) << kernel.name << test_case.name;
    }
  }
}

// An edit and its restoration leave the logits as they were, to the bit.
TEST(AdjustLogits, RestoreUndoesTheEdit) {
  for (const KernelOnDevice& kernel : kernels_of<AdjustLogitsArgs>(conformance_context())) {
    for (const AdjustLogitsCase& test_case : adjust_logits_cases()) {
      AdjustLogitsProblem problem(test_case, kernel.where);
      AdjustLogitsArgs args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      problem.buffers.upload();
      for (bool restore : {false, true}) {
        args.restore = restore;
        ASSERT_TRUE(adjust_logits(conformance_context(), args).ok());
      }
      problem.buffers.download();
      for (int64_t t = 0; t < test_case.rows; ++t) {
        for (int64_t i = 0; i < test_case.vocabulary; ++i) {
          ASSERT_EQ(reference::element(problem.logits.result(), t, i), problem.logits.get(t, i))
              << kernel.name << " " << t << ", " << i;
        }
      }
    }
  }
}

// ---- Draws that can be told ----

struct Drawn {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

// One row of logits, drawn once per entry of `rows`.
Drawn draw(const KernelOnDevice& kernel, const std::vector<float>& logits,
           const std::vector<SampleRow>& rows) {
  const int64_t vocabulary = static_cast<int64_t>(logits.size());
  const int64_t count = static_cast<int64_t>(rows.size());
  BufferSet buffers(kernel.where);
  TestTensor x = buffers.tensor("logits", Role::kInput, kF32, {count, vocabulary});
  int64_t next = 0;
  x.fill([&] { return logits[next++ % vocabulary]; });
  const auto column = [&](const char* name, DType dtype, auto value) {
    TestTensor tensor = buffers.tensor(name, Role::kInput, dtype, {count});
    int64_t t = 0;
    tensor.fill([&] { return value(rows[t++]); });
    return tensor.view(Side::kDevice);
  };
  SampleArgs args = {.logits = x.view(Side::kDevice), .kernel = kernel.name};
  args.temperature = column("temperature", kF32, [](const SampleRow& r) { return r.temperature; });
  args.top_k = column("top_k", kI32, [](const SampleRow& r) { return r.top_k; });
  args.top_p = column("top_p", kF32, [](const SampleRow& r) { return r.top_p; });
  args.min_p = column("min_p", kF32, [](const SampleRow& r) { return r.min_p; });
  args.uniform = column("uniform", kF32, [](const SampleRow& r) { return r.uniform; });
  TestTensor ids = buffers.tensor("ids", Role::kOutput, kI32, {count});
  TestTensor logprobs = buffers.tensor("logprobs", Role::kOutput, kF32, {count});
  args.ids = ids.view(Side::kDevice);
  args.logprobs = logprobs.view(Side::kDevice);
  buffers.upload();
  const Status status = call_with_workspace(conformance_context(), args, kernel.where);
  EXPECT_TRUE(status.ok()) << status.message();
  buffers.download();
  Drawn drawn;
  for (int64_t t = 0; t < count; ++t) {
    drawn.ids.push_back(static_cast<int32_t>(reference::integer(ids.result(), t)));
    drawn.logprobs.push_back(static_cast<float>(reference::element(logprobs.result(), t)));
  }
  return drawn;
}

class SampleByHand : public ::testing::TestWithParam<KernelOnDevice> {
 protected:
  Drawn drawn(const std::vector<float>& logits, const std::vector<SampleRow>& rows) {
    return draw(GetParam(), logits, rows);
  }
};

TEST_P(SampleByHand, IsGreedyAtTemperatureZero) {
  const SampleRow greedy = {.temperature = 0, .uniform = 0.9f};
  EXPECT_EQ(drawn({1, 5, 2, 5, 0}, {greedy}).ids[0], 1);  // ties: lowest id
  EXPECT_EQ(drawn({kNan, -kInf, -3, kNan}, {greedy}).ids[0], 2);
  EXPECT_EQ(drawn({kNan, -kInf, -kInf}, {greedy}).ids[0], 0);
  EXPECT_EQ(drawn({0, kInf, 3, kInf}, {greedy}).ids[0], 1);
  EXPECT_EQ(drawn({-1, -0.0f, 0.0f}, {greedy}).ids[0], 1);  // -0 and +0 tie
  std::vector<float> long_row(1000, -1.0f);
  long_row[777] = 2;
  const Drawn result = drawn(long_row, {greedy});
  EXPECT_EQ(result.ids[0], 777);
  EXPECT_NEAR(result.logprobs[0], -std::log(1 + 999 * std::exp(-3.0)), 1e-5);
}

TEST_P(SampleByHand, NeverDrawsNanOrMinusInfinity) {
  const std::vector<float> logits = {kNan, -kInf, 0, kNan, 0, -kInf};
  const Drawn result = drawn(logits, {{.uniform = 0.0f},
                                      {.uniform = 0.49f},
                                      {.uniform = 0.51f},
                                      {.uniform = 0.99999994f},
                                      {.top_k = 5, .uniform = 0.99f},
                                      {.top_p = 0.9999f, .uniform = 0.99f},
                                      {.temperature = 1e30f, .uniform = 0.99f},
                                      {.temperature = kInf, .uniform = 0.0f},
                                      {.temperature = 1e-40f, .uniform = 0.7f}});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{2, 2, 4, 4, 4, 4, 4, 2, 4}));
  EXPECT_NEAR(result.logprobs[0], -std::log(2.0), 1e-6);
  EXPECT_EQ(drawn({-kInf, kNan, -kInf}, {{.uniform = 0.7f}}).ids[0], 0);
  // Infinite logits share everything.
  EXPECT_EQ(drawn({1, kInf, 2, kInf}, {{.uniform = 0.4f},
                                       {.uniform = 0.6f},
                                       {.top_k = 1, .uniform = 0.9f},
                                       {.top_p = 0.4f, .uniform = 0.9f},
                                       {.top_k = 3, .uniform = 0.9f}})
                .ids,
            (std::vector<int32_t>{1, 3, 1, 1, 3}));
}

TEST_P(SampleByHand, KeepsExactlyTopKWithTiesByLowestId) {
  const std::vector<float> logits = {1, 2, 1, 2, 1, 1};
  std::vector<SampleRow> rows;
  for (int i = 0; i < 50; ++i) {
    rows.push_back({.temperature = 100, .top_k = 3, .uniform = static_cast<float>(i) / 50});
  }
  const Drawn result = drawn(logits, rows);
  for (int32_t id : result.ids) {
    EXPECT_TRUE(id == 0 || id == 1 || id == 3) << id;
  }
  EXPECT_EQ(result.ids.front(), 0);
  EXPECT_EQ(result.ids.back(), 3);
  // -0 and +0 tie.
  EXPECT_EQ(drawn({-1, -0.0f, 0.0f}, {{.top_k = 1, .uniform = 0.9f}}).ids[0], 1);
}

// All logits equal: top_k and top_p keep the lowest ids, in a row of any length.
TEST_P(SampleByHand, KeepsTheLowestIdsOfEqualLogits) {
  for (int64_t vocabulary : {100, 5000, 20000, 100000}) {
    const std::vector<float> logits(vocabulary, 3.25f);
    const float last = 0.99999994f;
    const int32_t half = static_cast<int32_t>(vocabulary / 2);
    EXPECT_EQ(drawn(logits, {{.uniform = last},
                             {.top_k = 7, .uniform = last},
                             {.top_k = half, .uniform = last},
                             {.top_k = half, .uniform = 0},
                             {.top_p = 0.25f, .uniform = last},
                             {.top_k = half, .top_p = 0.5f, .uniform = last}})
                  .ids,
              (std::vector<int32_t>{static_cast<int32_t>(vocabulary) - 1, 6, half - 1, 0,
                                    half / 2 - 1, half / 2 - 1}))
        << vocabulary;
  }
}

TEST_P(SampleByHand, TopPIncludesTheCrossingToken) {
  // Masses 1/2, 1/4, 1/8, 1/8.
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.25f),
                                     std::log(0.125f)};
  const Drawn result = drawn(logits, {{.top_p = 0.49f, .uniform = 0.99f},
                                      {.top_p = 0.51f, .uniform = 0.99f},
                                      {.top_p = 0.76f, .uniform = 0.0f},
                                      {.top_p = 0.76f, .uniform = 0.99f},
                                      {.top_p = 0.0f, .uniform = 0.99f},
                                      {.top_p = -1.0f, .uniform = 0.5f}});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{1, 2, 0, 2, 1, 1}));
}

TEST_P(SampleByHand, MinPIsRelativeToTheBest) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.6f), std::log(0.3f)};
  const Drawn result = drawn(logits, {{.min_p = 0.4f, .uniform = 0.0f},
                                      {.min_p = 0.4f, .uniform = 0.99f},
                                      {.min_p = 0.6f, .uniform = 0.99f}});
  EXPECT_EQ(result.ids, (std::vector<int32_t>{1, 2, 1}));
}

INSTANTIATE_TEST_SUITE_P(Kernels, SampleByHand,
                         ::testing::ValuesIn(kernels_of<SampleArgs>(conformance_context())),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '/', '_');
                           return name + std::to_string(info.param.where.device.index);
                         });

}  // namespace
}  // namespace lacuna::testing
