// The engine's own operations on the CPU against double-precision references written here, with odd
// sizes, strides and dtypes. The public operations have the conformance suite.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "ops/dispatch.h"
#include "ops/model_ops.h"
#include "tests/reference/element.h"
#include "tests/support/buffer_set.h"
#include "tests/support/poison.h"
#include "tests/support/random.h"

namespace lacuna {
namespace {

using reference::element;
using testing::BufferSet;
using testing::Random;
using testing::Role;
using testing::Side;
using testing::TensorOptions;
using testing::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

const Context& context_of(int num_threads) {
  static const Context contexts[] = {*Context::create({.num_threads = 1}),
                                     *Context::create({.num_threads = 3})};
  return contexts[num_threads == 1 ? 0 : 1];
}

testing::TestDevice cpu_device() {
  const ContextState& state = context_of(1).state();
  return {state.backends[0]->runtime, state.devices[0].device};
}

// Runs the operation on one and on three threads, over two old contents of a workspace of exactly
// the size asked for; all must give the same bits and leave every other byte alone.
template <class Args>
void run_everywhere(BufferSet& buffers, const Args& args) {
  std::vector<std::vector<uint8_t>> first;
  for (int num_threads : {1, 3}) {
    for (uint8_t garbage : testing::kWorkspaceFills) {
      const Context& context = context_of(num_threads);
      const Result<int64_t> bytes = op_workspace_bytes(context, args);
      ASSERT_TRUE(bytes.ok()) << bytes.status().message();
      testing::DeviceBuffer workspace(buffers.where(), *bytes);
      workspace.fill(garbage);
      buffers.upload();
      const Status status =
          run_op(context, args, {.workspace = workspace.data(), .workspace_bytes = *bytes});
      ASSERT_TRUE(status.ok()) << status.message();
      buffers.download();
      ASSERT_EQ(buffers.untouched_error(), "");
      ASSERT_EQ(workspace.canary_error(), "");
      if (first.empty()) {
        first = buffers.output_bytes();
      }
      ASSERT_TRUE(first == buffers.output_bytes())
          << "other bits with " << num_threads << " threads";
    }
  }
}

// Half an ulp of the output, relative to the smallest number of its binade.
double rounding_of(DType dtype) { return dtype == kBf16 ? 0x1p-8 : 0x1p-24; }

// The error of a float sum of n products: random-walk growth, with room.
double sum_error(int64_t n) { return 0x1p-23 * (4 + std::sqrt(static_cast<double>(n))); }

// Reports the first mismatch of a test only.
void expect_close(double actual, double expected, double tolerance, const std::string& where) {
  if (::testing::Test::HasFailure()) {
    return;
  }
  if (std::isnan(expected)) {
    ASSERT_TRUE(std::isnan(actual)) << where << ": " << actual << ", expected NaN";
    return;
  }
  ASSERT_LE(std::fabs(actual - expected), tolerance)
      << where << ": " << actual << ", expected " << expected;
}

std::string at(int64_t t, int64_t i) {
  return "[" + std::to_string(t) + ", " + std::to_string(i) + "]";
}

TensorOptions row_stride(int64_t stride) { return {.strides = {stride, 1}, .offset = 1}; }

const std::vector<int64_t> kRowCounts = {0, 1, 3, 8, 9, 64};

// ---- Rows ----

TEST(CpuEmbedding, WidensRowsAndZeroesUnknownIds) {
  for (DType dtype : {kF32, kBf16}) {
    for (int64_t width : {1, 7, 64, 130}) {
      BufferSet buffers(cpu_device());
      Random random(1, width);
      const std::vector<int32_t> id_list = {4, -1, 0, 5, 2, 2147483647, 4};
      const int64_t rows = static_cast<int64_t>(id_list.size());
      TestTensor ids = buffers.ints("ids", id_list);
      TestTensor table = buffers.tensor("table", Role::kInput, dtype, {5, width});
      table.fill([&] { return random.bell(); });
      TestTensor out =
          buffers.tensor("out", Role::kOutput, kF32, {rows, width}, row_stride(width + 3));
      run_everywhere(buffers, EmbeddingArgs{.ids = ids.view(Side::kDevice),
                                            .table = table.view(Side::kDevice),
                                            .out = out.view(Side::kDevice)});
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t i = 0; i < width; ++i) {
          const bool known = id_list[t] >= 0 && id_list[t] < 5;
          ASSERT_EQ(element(out.result(), t, i), known ? table.get(id_list[t], i) : 0.0)
              << at(t, i);
        }
      }
    }
  }
}

struct NormCase {
  int64_t rows;
  int64_t width;
  DType weight;
  DType out;
  bool add;
};

std::vector<NormCase> norm_cases() {
  std::vector<NormCase> cases;
  for (int64_t rows : kRowCounts) {
    for (int64_t width : {1, 5, 16, 33, 576}) {
      const bool odd = (rows + width) % 2 == 1;
      cases.push_back({rows, width, odd ? kBf16 : kF32, odd ? kF32 : kBf16, odd});
      cases.push_back({rows, width, odd ? kF32 : kBf16, odd ? kF32 : kBf16, !odd});
    }
  }
  return cases;
}

TEST(CpuRmsNorm, AddsNormalisesAndWritesTheSumBack) {
  for (const NormCase& c : norm_cases()) {
    BufferSet buffers(cpu_device());
    Random random(2, c.rows * 1000 + c.width);
    TestTensor x =
        buffers.tensor("x", Role::kInOut, kF32, {c.rows, c.width}, row_stride(c.width + 5));
    x.fill([&] { return 3 * random.bell(); });
    TestTensor add;
    if (c.add) {
      add = buffers.tensor("add", Role::kInput, kF32, {c.rows, c.width}, row_stride(c.width + 1));
      add.fill([&] { return random.bell(); });
    }
    TestTensor weight = buffers.tensor("weight", Role::kInput, c.weight, {c.width});
    weight.fill([&] { return random.bell(); });
    TestTensor out =
        buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.width}, row_stride(c.width + 2));
    const double eps = 1e-6;
    RmsNormArgs args = {.x = x.view(Side::kDevice),
                        .weight = weight.view(Side::kDevice),
                        .eps = eps,
                        .out = out.view(Side::kDevice)};
    if (c.add) {
      args.add = add.view(Side::kDevice);
    }
    run_everywhere(buffers, args);
    for (int64_t t = 0; t < c.rows; ++t) {
      std::vector<double> h(c.width);
      double squares = 0;
      for (int64_t i = 0; i < c.width; ++i) {
        h[i] = static_cast<float>(x.get(t, i)) + (c.add ? static_cast<float>(add.get(t, i)) : 0.0f);
        h[i] = static_cast<float>(h[i]);
        ASSERT_EQ(element(x.result(), t, i), h[i]) << at(t, i);
        squares += h[i] * h[i];
      }
      for (int64_t i = 0; i < c.width; ++i) {
        const double expected =
            h[i] / std::sqrt(squares / static_cast<double>(c.width) + eps) * weight.get(i);
        expect_close(element(out.result(), t, i), expected,
                     std::fabs(expected) * (rounding_of(c.out) + sum_error(c.width)), at(t, i));
      }
    }
  }
}

TEST(CpuLayerNorm, SurvivesALargeMean) {
  for (const NormCase& c : norm_cases()) {
    BufferSet buffers(cpu_device());
    Random random(3, c.rows * 1000 + c.width);
    TestTensor x =
        buffers.tensor("x", Role::kInput, kF32, {c.rows, c.width}, row_stride(c.width + 5));
    x.fill([&] { return (c.add ? 300.0f : 0.0f) + random.bell(); });
    TestTensor weight = buffers.tensor("weight", Role::kInput, c.weight, {c.width});
    TestTensor bias = buffers.tensor("bias", Role::kInput, c.weight, {c.width});
    weight.fill([&] { return random.bell(); });
    bias.fill([&] { return random.bell(); });
    TestTensor out =
        buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.width}, row_stride(c.width + 2));
    const double eps = 1e-5;
    run_everywhere(buffers, LayerNormArgs{.x = x.view(Side::kDevice),
                                          .weight = weight.view(Side::kDevice),
                                          .bias = bias.view(Side::kDevice),
                                          .eps = eps,
                                          .out = out.view(Side::kDevice)});
    for (int64_t t = 0; t < c.rows; ++t) {
      double mean = 0;
      double variance = 0;
      for (int64_t i = 0; i < c.width; ++i) {
        mean += x.get(t, i) / static_cast<double>(c.width);
      }
      for (int64_t i = 0; i < c.width; ++i) {
        variance += (x.get(t, i) - mean) * (x.get(t, i) - mean) / static_cast<double>(c.width);
      }
      const double inverse = 1 / std::sqrt(variance + eps);
      for (int64_t i = 0; i < c.width; ++i) {
        const double scaled = (x.get(t, i) - mean) * inverse * weight.get(i);
        const double expected = scaled + bias.get(i);
        const double tolerance = std::fabs(expected) * rounding_of(c.out) +
                                 (std::fabs(scaled) + std::fabs(bias.get(i))) * sum_error(c.width) +
                                 sum_error(c.width) * std::fabs(weight.get(i));
        expect_close(element(out.result(), t, i), expected, tolerance, at(t, i));
      }
    }
  }
}

TEST(CpuSiluMul, HoldsAtExtremes) {
  for (DType dtype : {kF32, kBf16}) {
    for (int64_t rows : kRowCounts) {
      for (int64_t width : {1, 15, 16, 65}) {
        BufferSet buffers(cpu_device());
        Random random(4, rows * 1000 + width);
        TestTensor gate =
            buffers.tensor("gate", Role::kInput, kF32, {rows, width}, row_stride(width + 3));
        TestTensor up =
            buffers.tensor("up", Role::kInput, kF32, {rows, width}, row_stride(2 * width));
        const float extremes[] = {0.0f, -200.0f, 200.0f, -88.0f, 1e30f, -1e30f, 1e-30f, kNan};
        gate.fill([&] { return random.chance(0.2) ? extremes[random.bits() % 8] : random.bell(); });
        up.fill([&] { return random.bell(); });
        TestTensor out =
            buffers.tensor("out", Role::kOutput, dtype, {rows, width}, row_stride(width + 1));
        run_everywhere(buffers, SiluMulArgs{.gate = gate.view(Side::kDevice),
                                            .up = up.view(Side::kDevice),
                                            .out = out.view(Side::kDevice)});
        for (int64_t t = 0; t < rows; ++t) {
          for (int64_t i = 0; i < width; ++i) {
            const double g = gate.get(t, i);
            const double expected = g / (1 + std::exp(-g)) * up.get(t, i);
            const double tolerance = std::fabs(expected) * (rounding_of(dtype) + 0x1p-20) + 1e-36;
            expect_close(element(out.result(), t, i), expected, tolerance, at(t, i));
          }
        }
      }
    }
  }
}

struct RopeCase {
  int64_t rows;
  int64_t heads;
  int64_t width;
  int64_t pairs;
  int64_t offset;
  bool interleaved;
  DType out;
  bool in_place;
};

TEST(CpuRope, RotatesPairsAndCopiesTheRest) {
  std::vector<RopeCase> cases;
  for (bool interleaved : {false, true}) {
    for (int64_t rows : kRowCounts) {
      cases.push_back({rows, 3, 64, 32, 0, interleaved, kF32, true});
      cases.push_back({rows, 3, 70, 32, 6, interleaved, kBf16, false});
      cases.push_back({rows, 1, 128, 13, 5, interleaved, kF32, false});
      cases.push_back({rows, 2, 11, 5, 1, interleaved, kF32, true});
    }
  }
  for (const RopeCase& c : cases) {
    BufferSet buffers(cpu_device());
    Random random(5, c.rows * 1000 + c.width);
    const int64_t positions = 40;
    std::vector<int32_t> position_list(c.rows);
    for (int32_t& position : position_list) {
      position = static_cast<int32_t>(random.integer(0, positions - 1));
    }
    TestTensor position_tensor = buffers.ints("positions", position_list);
    TestTensor cosine = buffers.tensor("cos", Role::kInput, kF32, {positions, c.pairs});
    TestTensor sine = buffers.tensor("sin", Role::kInput, kF32, {positions, c.pairs});
    cosine.fill([&] { return random.bell(); });
    sine.fill([&] { return random.bell(); });
    const TensorOptions options = {.strides = {c.heads * c.width + 9, c.width + 2, 1}};
    TestTensor x = buffers.tensor("x", c.in_place ? Role::kInOut : Role::kInput, kF32,
                                  {c.rows, c.heads, c.width}, options);
    x.fill([&] { return random.bell(); });
    TestTensor out = x;
    if (!c.in_place) {
      out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.heads, c.width},
                           {.strides = {c.heads * c.width + 1, c.width, 1}});
    }
    run_everywhere(buffers, RopeArgs{.x = x.view(Side::kDevice),
                                     .positions = position_tensor.view(Side::kDevice),
                                     .cos_table = cosine.view(Side::kDevice),
                                     .sin_table = sine.view(Side::kDevice),
                                     .interleaved = c.interleaved,
                                     .offset = c.offset,
                                     .out = out.view(Side::kDevice)});
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        std::vector<double> expected(c.width);
        std::vector<double> slack(c.width, 0.0);
        for (int64_t i = 0; i < c.width; ++i) {
          expected[i] = x.get(t, h, i);
        }
        for (int64_t i = 0; i < c.pairs; ++i) {
          const int64_t low = c.offset + (c.interleaved ? 2 * i : i);
          const int64_t high = c.interleaved ? low + 1 : low + c.pairs;
          const double a = x.get(t, h, low);
          const double b = x.get(t, h, high);
          const double cos_value = cosine.get(position_list[t], i);
          const double sin_value = sine.get(position_list[t], i);
          expected[low] = a * cos_value - b * sin_value;
          expected[high] = a * sin_value + b * cos_value;
          slack[low] = slack[high] = 0x1p-22 * (std::fabs(a) + std::fabs(b)) *
                                     (std::fabs(cos_value) + std::fabs(sin_value));
        }
        for (int64_t i = 0; i < c.width; ++i) {
          expect_close(element(out.result(), t, h, i), expected[i],
                       slack[i] + std::fabs(expected[i]) * rounding_of(c.out), at(t, i));
        }
      }
    }
  }
}

// ---- Products ----

struct LinearCase {
  int64_t rows;
  int64_t columns;
  int64_t depth;
  DType x;
  DType weight;
  DType out;
};

std::vector<LinearCase> linear_cases() {
  std::vector<LinearCase> cases;
  const int64_t sizes[][2] = {{1, 1}, {7, 3}, {64, 64}, {33, 129}, {130, 48}, {400, 257}};
  const DType dtypes[] = {kF32, kBf16};
  int turn = 0;
  for (int64_t rows : kRowCounts) {
    for (const auto& size : sizes) {
      for (int i = 0; i < 3; ++i, turn += 3) {
        cases.push_back({rows, size[0], size[1], dtypes[turn & 1], dtypes[(turn >> 1) & 1],
                         dtypes[(turn >> 2) & 1]});
      }
    }
  }
  // More rows than a tile of the GEMM, and no depth at all.
  cases.push_back({300, 100, 40, kBf16, kBf16, kBf16});
  cases.push_back({300, 100, 40, kF32, kF32, kF32});
  cases.push_back({5, 20, 0, kF32, kBf16, kF32});
  cases.push_back({20, 20, 0, kBf16, kF32, kBf16});
  return cases;
}

class CpuLinear : public ::testing::TestWithParam<const char*> {};

TEST_P(CpuLinear, MultipliesByTheTransposedWeight) {
  for (const LinearCase& c : linear_cases()) {
    BufferSet buffers(cpu_device());
    Random random(6, c.rows * 100000 + c.columns * 1000 + c.depth);
    TestTensor x =
        buffers.tensor("x", Role::kInput, c.x, {c.rows, c.depth}, row_stride(c.depth + 3));
    TestTensor weight = buffers.tensor("weight", Role::kInput, c.weight, {c.columns, c.depth},
                                       row_stride(c.depth + 1));
    x.fill([&] { return random.bell(); });
    weight.fill([&] { return random.bell(); });
    TestTensor out =
        buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.columns}, row_stride(c.columns + 5));
    run_everywhere(buffers, LinearArgs{.x = x.view(Side::kDevice),
                                       .weight = weight.view(Side::kDevice),
                                       .out = out.view(Side::kDevice),
                                       .kernel = GetParam()});
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t n = 0; n < c.columns; ++n) {
        double expected = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < c.depth; ++k) {
          const double product = x.get(t, k) * weight.get(n, k);
          expected += product;
          magnitude += std::fabs(product);
        }
        expect_close(element(out.result(), t, n), expected,
                     magnitude * sum_error(c.depth) + std::fabs(expected) * rounding_of(c.out),
                     at(t, n));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CpuLinear,
                         ::testing::Values("cpu/linear_gemv", "cpu/linear_gemm"),
                         [](const auto& info) { return std::string(info.param).substr(4); });

TEST(CpuLinearDispatch, TakesTheGemmFrom33RowsOn) {
  std::vector<float> data(64 * 16);
  for (int64_t rows : {1, 32, 33}) {
    const LinearArgs args = {.x = view_of(data.data(), {rows, 16}),
                             .weight = view_of(data.data(), {16, 16}),
                             .out = view_of(data.data(), {rows, 16})};
    const Explanation chosen = explain_op(context_of(1), args);
    ASSERT_TRUE(chosen.status.ok()) << chosen.status.message();
    EXPECT_EQ(chosen.kernel, rows <= 32 ? "cpu/linear_gemv" : "cpu/linear_gemm");
  }
}

TEST(CpuLinearGemv, GivesARowTheSameBitsInAnyBatch) {
  Random random(7);
  const int64_t depth = 131;
  const int64_t columns = 37;
  std::vector<float> x(8 * depth), weight(columns * depth), all(8 * columns), one(columns);
  std::generate(x.begin(), x.end(), [&] { return random.bell(); });
  std::generate(weight.begin(), weight.end(), [&] { return random.bell(); });
  LinearArgs args = {.x = view_of(x.data(), {8, depth}),
                     .weight = view_of(weight.data(), {columns, depth}),
                     .out = view_of(all.data(), {8, columns})};
  ASSERT_TRUE(run_op(context_of(3), args, {}).ok());
  for (int64_t t = 0; t < 8; ++t) {
    args.x = view_of(x.data() + t * depth, {1, depth});
    args.out = view_of(one.data(), {1, columns});
    ASSERT_TRUE(run_op(context_of(1), args, {}).ok());
    EXPECT_TRUE(std::equal(one.begin(), one.end(), all.begin() + t * columns)) << "row " << t;
  }
}

TEST(CpuHeadLinear, MultipliesEachHeadByItsMatrix) {
  struct Case {
    int64_t rows, heads, columns, depth;
    bool columns_contiguous;
    DType x, weight, out;
  };
  std::vector<Case> cases;
  int turn = 0;
  const DType dtypes[] = {kF32, kBf16};
  for (int64_t rows : {0, 1, 3, 8, 9, 64, 150}) {
    for (bool columns_contiguous : {false, true}) {
      for (const auto& size : {std::pair{5, 17}, std::pair{64, 32}, std::pair{129, 3}}) {
        for (int i = 0; i < 2; ++i, turn += 3) {
          cases.push_back({rows, 3, size.first, size.second, columns_contiguous, dtypes[turn & 1],
                           dtypes[(turn >> 1) & 1], dtypes[(turn >> 2) & 1]});
        }
      }
    }
  }
  for (const Case& c : cases) {
    BufferSet buffers(cpu_device());
    Random random(8, c.rows * 1000 + c.columns);
    TestTensor x = buffers.tensor("x", Role::kInput, c.x, {c.rows, c.heads, c.depth},
                                  {.strides = {c.heads * (c.depth + 2) + 1, c.depth + 2, 1}});
    TestTensor weight =
        buffers.tensor("weight", Role::kInput, c.weight, {c.heads, c.columns, c.depth},
                       c.columns_contiguous
                           ? TensorOptions{.strides = {c.depth * (c.columns + 1), 1, c.columns + 1}}
                           : TensorOptions{.strides = {c.columns * (c.depth + 1), c.depth + 1, 1}});
    x.fill([&] { return random.bell(); });
    weight.fill([&] { return random.bell(); });
    TestTensor out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.heads, c.columns},
                                    {.strides = {c.heads * (c.columns + 3), c.columns + 3, 1}});
    run_everywhere(buffers, HeadLinearArgs{.x = x.view(Side::kDevice),
                                           .weight = weight.view(Side::kDevice),
                                           .out = out.view(Side::kDevice)});
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t n = 0; n < c.columns; ++n) {
          double expected = 0;
          double magnitude = 0;
          for (int64_t k = 0; k < c.depth; ++k) {
            const double product = x.get(t, h, k) * weight.get(h, n, k);
            expected += product;
            magnitude += std::fabs(product);
          }
          expect_close(element(out.result(), t, h, n), expected,
                       magnitude * sum_error(c.depth) + std::fabs(expected) * rounding_of(c.out),
                       at(t, n));
        }
      }
    }
  }
}

// ---- Indexer ----

// A cache of no blocks may have no block size either: nothing may divide by it.
TEST(CpuIndexLogits, ScoresNothingInACacheWithoutBlocks) {
  BufferSet buffers(cpu_device());
  TestTensor zero = buffers.ints("zero", {0});
  TestTensor one = buffers.ints("one", {1});
  TestTensor table = buffers.tensor("table", Role::kInput, kI32, {1, 1});
  table.fill([] { return 0; });
  TestTensor q = buffers.tensor("q", Role::kInput, kF32, {1, 2, 16});
  q.fill([] { return 1; });
  TestTensor weights = buffers.tensor("weights", Role::kInput, kF32, {1, 2});
  weights.fill([] { return 1; });
  TestTensor logits = buffers.tensor("logits", Role::kOutput, kF32, {1, 3});
  run_everywhere(buffers,
                 IndexLogitsArgs{.q = q.view(Side::kDevice),
                                 .head_weights = weights.view(Side::kDevice),
                                 .keys = paged_rows(nullptr, KvLayout::index_f32(16), 0, 0),
                                 .request_ids = zero.view(Side::kDevice),
                                 .visible_lengths = one.view(Side::kDevice),
                                 .block_table = table.view(Side::kDevice),
                                 .logits = logits.view(Side::kDevice)});
  for (int64_t j = 0; j < 3; ++j) {
    EXPECT_EQ(element(logits.result(), 0, j), -kInf);
  }
}

// ---- Experts ----

struct RouteCase {
  int64_t rows;
  int64_t experts;
  int64_t chosen;
  int num_groups;
  int groups_kept;
  bool normalize;
};

TEST(CpuMoeRoute, FollowsTheRouterOfDeepSeekV3) {
  const std::vector<RouteCase> cases = {{0, 8, 2, 1, 1, true},    {1, 8, 2, 1, 1, true},
                                        {64, 8, 8, 1, 1, false},  {9, 64, 6, 8, 3, true},
                                        {3, 256, 8, 8, 4, true},  {8, 160, 6, 80, 5, false},
                                        {3, 1500, 4, 1, 1, true}, {3, 1500, 5, 100, 7, true}};
  for (const RouteCase& c : cases) {
    BufferSet buffers(cpu_device());
    Random random(9, c.experts);
    TestTensor logits = buffers.tensor("logits", Role::kInput, kF32, {c.rows, c.experts},
                                       row_stride(c.experts + 1));
    // Few distinct values: many ties.
    logits.fill([&] { return static_cast<double>(random.integer(-6, 6)) / 2; });
    TestTensor bias = buffers.tensor("bias", Role::kInput, kF32, {c.experts});
    bias.fill([&] { return static_cast<double>(random.integer(0, 3)) / 8; });
    TestTensor ids = buffers.tensor("ids", Role::kOutput, kI32, {c.rows, c.chosen});
    TestTensor weights = buffers.tensor("weights", Role::kOutput, kF32, {c.rows, c.chosen});
    run_everywhere(buffers, MoeRouteArgs{.logits = logits.view(Side::kDevice),
                                         .bias = bias.view(Side::kDevice),
                                         .num_groups = c.num_groups,
                                         .groups_kept = c.groups_kept,
                                         .normalize = c.normalize,
                                         .scale = 2.5,
                                         .ids = ids.view(Side::kDevice),
                                         .weights = weights.view(Side::kDevice)});
    for (int64_t t = 0; t < c.rows; ++t) {
      const auto score = [&](int64_t e) {
        return 1.0f / (1.0f + std::exp(-static_cast<float>(logits.get(t, e))));
      };
      const auto choice = [&](int64_t e) { return score(e) + static_cast<float>(bias.get(e)); };
      const int64_t group_size = c.experts / c.num_groups;
      std::vector<float> group_scores(c.num_groups, 0.0f);
      for (int64_t g = 0; g < c.num_groups && c.num_groups > 1; ++g) {
        std::vector<float> choices;
        for (int64_t e = g * group_size; e < (g + 1) * group_size; ++e) {
          choices.push_back(choice(e));
        }
        std::sort(choices.rbegin(), choices.rend());
        group_scores[g] = choices[0] + choices[1];
      }
      std::vector<int64_t> groups(c.num_groups);
      std::iota(groups.begin(), groups.end(), 0);
      std::stable_sort(groups.begin(), groups.end(),
                       [&](int64_t a, int64_t b) { return group_scores[a] > group_scores[b]; });
      groups.resize(c.groups_kept);
      std::vector<int64_t> competing;
      for (int64_t e = 0; e < c.experts; ++e) {
        if (std::find(groups.begin(), groups.end(), e / group_size) != groups.end()) {
          competing.push_back(e);
        }
      }
      std::stable_sort(competing.begin(), competing.end(),
                       [&](int64_t a, int64_t b) { return choice(a) > choice(b); });
      competing.resize(c.chosen);
      std::sort(competing.begin(), competing.end());
      double sum = 1e-20;
      for (int64_t e : competing) {
        sum += score(e);
      }
      for (int64_t i = 0; i < c.chosen; ++i) {
        ASSERT_EQ(element(ids.result(), t, i), competing[i]) << at(t, i);
        const double expected = score(competing[i]) * 2.5 / (c.normalize ? sum : 1.0);
        expect_close(element(weights.result(), t, i), expected, expected * 1e-6, at(t, i));
      }
    }
  }
}

struct MoeCase {
  int64_t rows;
  int64_t width;
  int64_t hidden;
  int64_t chosen;
  int64_t experts;
  DType x;
  DType weight;
};

TEST(CpuMoeExperts, SumsTheChosenExperts) {
  std::vector<MoeCase> cases;
  const DType dtypes[] = {kF32, kBf16};
  int turn = 0;
  for (int64_t rows : kRowCounts) {
    for (int i = 0; i < 4; ++i, ++turn) {
      cases.push_back({rows, 33, 20, 2, 4, dtypes[i & 1], dtypes[i >> 1]});
      cases.push_back({rows, 101, 130, 3, 5, dtypes[i & 1], dtypes[i >> 1]});
    }
  }
  // One expert takes everything: several tiles of rows.
  cases.push_back({200, 40, 24, 1, 1, kBf16, kBf16});
  for (const MoeCase& c : cases) {
    BufferSet buffers(cpu_device());
    Random random(10, c.rows * 1000 + c.width);
    TestTensor x =
        buffers.tensor("x", Role::kInput, c.x, {c.rows, c.width}, row_stride(c.width + 3));
    x.fill([&] { return random.bell(); });
    TestTensor ids = buffers.tensor("ids", Role::kInput, kI32, {c.rows, c.chosen});
    // Also ids that name no expert, and the same expert twice.
    ids.fill([&] {
      return c.experts == 1 ? 0.0 : static_cast<double>(random.integer(-1, c.experts - 1));
    });
    TestTensor weights = buffers.tensor("weights", Role::kInput, kF32, {c.rows, c.chosen});
    weights.fill([&] { return random.uniform(); });
    std::vector<TestTensor> gates, ups, downs;
    std::vector<ExpertWeights> experts;
    const float spread = 1 / std::sqrt(static_cast<float>(c.width));
    for (int64_t e = 0; e < c.experts; ++e) {
      gates.push_back(buffers.tensor("gate", Role::kInput, c.weight, {c.hidden, c.width}));
      ups.push_back(buffers.tensor("up", Role::kInput, c.weight, {c.hidden, c.width}));
      downs.push_back(buffers.tensor("down", Role::kInput, c.weight, {c.width, c.hidden}));
      for (TestTensor* tensor : {&gates.back(), &ups.back(), &downs.back()}) {
        tensor->fill([&] { return spread * random.bell(); });
      }
      experts.push_back({gates.back().view(Side::kDevice), ups.back().view(Side::kDevice),
                         downs.back().view(Side::kDevice)});
    }
    TestTensor out =
        buffers.tensor("out", Role::kOutput, kF32, {c.rows, c.width}, row_stride(c.width + 1));
    run_everywhere(buffers, MoeExpertsArgs{.x = x.view(Side::kDevice),
                                           .ids = ids.view(Side::kDevice),
                                           .weights = weights.view(Side::kDevice),
                                           .experts = experts,
                                           .out = out.view(Side::kDevice)});
    for (int64_t t = 0; t < c.rows; ++t) {
      std::vector<double> expected(c.width, 0.0);
      std::vector<double> slack(c.width, 0.0);
      for (int64_t k = 0; k < c.chosen; ++k) {
        const int64_t e = static_cast<int64_t>(ids.get(t, k));
        if (e < 0) {
          continue;
        }
        for (int64_t f = 0; f < c.hidden; ++f) {
          double gate = 0;
          double up = 0;
          for (int64_t i = 0; i < c.width; ++i) {
            gate += x.get(t, i) * gates[e].get(f, i);
            up += x.get(t, i) * ups[e].get(f, i);
          }
          const double hidden = gate / (1 + std::exp(-gate)) * up;
          // Rounding of the hidden activation is part of the contract, but a float that differs in
          // its last bit may round the other way: a whole ulp of bf16.
          const double hidden_error = (std::fabs(hidden) + 0.01) * (c.x == kBf16 ? 0x1p-8 : 1e-5);
          for (int64_t i = 0; i < c.width; ++i) {
            const double factor = weights.get(t, k) * downs[e].get(i, f);
            expected[i] += factor * hidden;
            slack[i] += std::fabs(factor) * hidden_error;
          }
        }
      }
      for (int64_t i = 0; i < c.width; ++i) {
        expect_close(element(out.result(), t, i), expected[i], slack[i] + 1e-6, at(t, i));
      }
    }
  }
}

// ---- Sampling ----

struct SampleRow {
  float temperature = 1;
  int32_t top_k = 0;
  float top_p = 1;
  float min_p = 0;
  float uniform = 0;
};

struct Drawn {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
};

// One row of logits, drawn once per entry of `rows`.
Drawn draw(const std::vector<float>& logits, const std::vector<SampleRow>& rows) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  const int64_t count = static_cast<int64_t>(rows.size());
  BufferSet buffers(cpu_device());
  TestTensor x =
      buffers.tensor("logits", Role::kInput, kF32, {count, vocab}, row_stride(vocab + 1));
  int64_t next = 0;
  x.fill([&] { return logits[next++ % vocab]; });
  const auto column = [&](const char* name, DType dtype, auto value) {
    TestTensor tensor = buffers.tensor(name, Role::kInput, dtype, {count}, {.strides = {2}});
    int64_t t = 0;
    tensor.fill([&] { return value(rows[t++]); });
    return tensor.view(Side::kDevice);
  };
  SampleArgs args = {.logits = x.view(Side::kDevice)};
  args.temperature = column("temperature", kF32, [](const SampleRow& r) { return r.temperature; });
  args.top_k = column("top_k", kI32, [](const SampleRow& r) { return r.top_k; });
  args.top_p = column("top_p", kF32, [](const SampleRow& r) { return r.top_p; });
  args.min_p = column("min_p", kF32, [](const SampleRow& r) { return r.min_p; });
  args.uniform = column("uniform", kF32, [](const SampleRow& r) { return r.uniform; });
  TestTensor ids = buffers.tensor("ids", Role::kOutput, kI32, {count}, {.strides = {3}});
  TestTensor logprobs = buffers.tensor("logprobs", Role::kOutput, kF32, {count});
  args.ids = ids.view(Side::kDevice);
  args.logprobs = logprobs.view(Side::kDevice);
  run_everywhere(buffers, args);
  Drawn drawn;
  for (int64_t t = 0; t < count; ++t) {
    drawn.ids.push_back(static_cast<int32_t>(element(ids.result(), t)));
    drawn.logprobs.push_back(static_cast<float>(element(logprobs.result(), t)));
  }
  return drawn;
}

// Probabilities after the filters, by sorting.
std::vector<double> filtered(const std::vector<float>& logits, const SampleRow& row) {
  const int64_t vocab = static_cast<int64_t>(logits.size());
  const float largest = *std::max_element(logits.begin(), logits.end());
  std::vector<double> p(vocab);
  for (int64_t i = 0; i < vocab; ++i) {
    p[i] = std::exp((static_cast<double>(logits[i]) - largest) / row.temperature);
  }
  std::vector<int64_t> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  if (row.top_k > 0 && row.top_k < vocab) {
    order.resize(row.top_k);
  }
  double total = 0;
  for (int64_t i : order) {
    total += p[i];
  }
  if (row.top_p < 1) {
    double mass = 0;
    size_t kept = 0;
    while (kept < order.size() && (kept == 0 || mass < row.top_p * total)) {
      mass += p[order[kept++]];
    }
    order.resize(kept);
  }
  std::erase_if(order, [&](int64_t i) { return p[i] < row.min_p * p[order[0]]; });
  std::vector<double> result(vocab, 0.0);
  total = 0;
  for (int64_t i : order) {
    total += p[i];
  }
  for (int64_t i : order) {
    result[i] = p[i] / total;
  }
  return result;
}

TEST(CpuSample, IsGreedyAtTemperatureZero) {
  const SampleRow greedy = {.temperature = 0, .uniform = 0.9f};
  EXPECT_EQ(draw({1, 5, 2, 5, 0}, {greedy}).ids[0], 1);  // ties: lowest id
  EXPECT_EQ(draw({kNan, -kInf, -3, kNan}, {greedy}).ids[0], 2);
  EXPECT_EQ(draw({kNan, -kInf, -kInf}, {greedy}).ids[0], 0);
  EXPECT_EQ(draw({0, kInf, 3, kInf}, {greedy}).ids[0], 1);
  std::vector<float> long_row(1000, -1.0f);
  long_row[777] = 2;
  const Drawn drawn = draw(long_row, {greedy});
  EXPECT_EQ(drawn.ids[0], 777);
  EXPECT_NEAR(drawn.logprobs[0], -std::log(1 + 999 * std::exp(-3.0)), 1e-5);
}

TEST(CpuSample, NeverDrawsNanOrMinusInfinity) {
  const std::vector<float> logits = {kNan, -kInf, 0, kNan, 0, -kInf};
  const Drawn drawn = draw(logits, {{.uniform = 0.0f},
                                    {.uniform = 0.49f},
                                    {.uniform = 0.51f},
                                    {.uniform = 0.99999994f},
                                    {.top_k = 5, .uniform = 0.99f},
                                    {.top_p = 0.9999f, .uniform = 0.99f},
                                    {.temperature = 1e30f, .uniform = 0.99f},
                                    {.temperature = kInf, .uniform = 0.0f},
                                    {.temperature = 1e-40f, .uniform = 0.7f}});
  EXPECT_EQ(drawn.ids, (std::vector<int32_t>{2, 2, 4, 4, 4, 4, 4, 2, 4}));
  EXPECT_NEAR(drawn.logprobs[0], -std::log(2.0), 1e-6);
  EXPECT_EQ(draw({-kInf, kNan, -kInf}, {{.uniform = 0.7f}}).ids[0], 0);
  // Infinite logits share everything.
  EXPECT_EQ(draw({1, kInf, 2, kInf}, {{.uniform = 0.4f}, {.uniform = 0.6f}}).ids,
            (std::vector<int32_t>{1, 3}));
}

TEST(CpuSample, KeepsExactlyTopKWithTiesByLowestId) {
  const std::vector<float> logits = {1, 2, 1, 2, 1, 1};
  std::vector<SampleRow> rows;
  for (int i = 0; i < 50; ++i) {
    rows.push_back({.temperature = 100, .top_k = 3, .uniform = static_cast<float>(i) / 50});
  }
  for (int32_t id : draw(logits, rows).ids) {
    EXPECT_TRUE(id == 0 || id == 1 || id == 3) << id;
  }
  // -0 and +0 tie.
  EXPECT_EQ(draw({-1, -0.0f, 0.0f}, {{.top_k = 1, .uniform = 0.9f}}).ids[0], 1);
}

TEST(CpuSample, TopPIncludesTheCrossingToken) {
  // Masses 1/2, 1/4, 1/8, 1/8.
  const std::vector<float> logits = {std::log(0.125f), std::log(0.5f), std::log(0.25f),
                                     std::log(0.125f)};
  const Drawn drawn = draw(logits, {{.top_p = 0.49f, .uniform = 0.99f},
                                    {.top_p = 0.51f, .uniform = 0.99f},
                                    {.top_p = 0.76f, .uniform = 0.0f},
                                    {.top_p = 0.76f, .uniform = 0.99f},
                                    {.top_p = 0.0f, .uniform = 0.99f},
                                    {.top_p = -1.0f, .uniform = 0.5f}});
  EXPECT_EQ(drawn.ids, (std::vector<int32_t>{1, 2, 0, 2, 1, 1}));
}

TEST(CpuSample, MinPIsRelativeToTheBest) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.6f), std::log(0.3f)};
  const Drawn drawn = draw(logits, {{.min_p = 0.4f, .uniform = 0.0f},
                                    {.min_p = 0.4f, .uniform = 0.99f},
                                    {.min_p = 0.6f, .uniform = 0.99f}});
  EXPECT_EQ(drawn.ids, (std::vector<int32_t>{1, 2, 1}));
}

// The drawn token is where the running sum passes the uniform: checked at every quantile, which
// pins the whole distribution.
TEST(CpuSample, InvertsTheDistributionThatTheFiltersLeave) {
  Random random(11);
  for (const int64_t vocab : {1, 5, 100, 3000}) {
    std::vector<float> logits(vocab);
    std::generate(logits.begin(), logits.end(), [&] { return 3 * random.bell(); });
    if (vocab > 5) {
      logits[4] = logits[3] = logits[2];
    }
    for (SampleRow row :
         {SampleRow{}, SampleRow{.temperature = 0.5f}, SampleRow{.temperature = 2, .top_k = 40},
          SampleRow{.top_p = 0.9f}, SampleRow{.min_p = 0.05f},
          SampleRow{.temperature = 1.5f, .top_k = 60, .top_p = 0.8f, .min_p = 0.02f}}) {
      const std::vector<double> p = filtered(logits, row);
      std::vector<SampleRow> rows;
      for (int i = 0; i < 60; ++i) {
        row.uniform = (static_cast<float>(i) + random.uniform()) / 60;
        rows.push_back(row);
      }
      const Drawn drawn = draw(logits, rows);
      double normaliser = 0;
      for (float logit : logits) {
        normaliser += std::exp(static_cast<double>(logit));
      }
      for (size_t i = 0; i < rows.size(); ++i) {
        const int32_t id = drawn.ids[i];
        ASSERT_GE(id, 0);
        ASSERT_LT(id, vocab);
        EXPECT_GT(p[id], 0) << "token " << id << " was filtered out";
        double before = 0;
        for (int32_t j = 0; j < id; ++j) {
          before += p[j];
        }
        EXPECT_LE(before, rows[i].uniform + 1e-5) << "vocab " << vocab << " row " << i;
        EXPECT_GE(before + p[id], rows[i].uniform - 1e-5) << "vocab " << vocab << " row " << i;
        EXPECT_NEAR(drawn.logprobs[i], logits[id] - std::log(normaliser), 2e-5);
      }
    }
  }
}

}  // namespace
}  // namespace lacuna
