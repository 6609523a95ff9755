// What the conformance suite can not ask of the CPU backend: which kernel dispatch takes, rows of
// one batch against rows alone, and a cache without blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "ops/dispatch.h"
#include "ops/model_ops.h"
#include "tests/backends/each_target.h"
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
using testing::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kI32 = DType::kInt32;
constexpr float kInf = std::numeric_limits<float>::infinity();

const Context& context_of(int num_threads) {
  static const Context contexts[] = {*Context::create({.num_threads = 1}),
                                     *Context::create({.num_threads = 3})};
  return contexts[num_threads == 1 ? 0 : 1];
}

testing::TestDevice cpu_device() {
  const std::vector<const Backend*>& backends = context_of(1).state().backends;
  const auto cpu = std::find_if(backends.begin(), backends.end(), [](const Backend* backend) {
    return backend->device_kind == DeviceKind::kCpu;
  });
  return {(*cpu)->runtime, Device{}};
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

// Runs the operation on `num_threads` threads in a workspace of the size asked for.
template <class Args>
void run_once(const Args& args, int num_threads) {
  const Context& context = context_of(num_threads);
  const Result<int64_t> bytes = op_workspace_bytes(context, args);
  ASSERT_TRUE(bytes.ok()) << bytes.status().message();
  testing::DeviceBuffer workspace(cpu_device(), *bytes);
  const Status status =
      run_op(context, args, {.workspace = workspace.data(), .workspace_bytes = *bytes});
  ASSERT_TRUE(status.ok()) << status.message();
}

// 23 rows are blocks of 8, 4, 2 and 1; 19 are not; depths are whole pairs of vectors and not.
constexpr int64_t kBatches[] = {23, 19, 16, 6, 2};

// Row `row` of the product in double: each of at most depth additions rounds what was added so far.
void expect_close(const float* got, const TestTensor& x, const TestTensor& weight, int64_t row,
                  const char* target) {
  const int64_t depth = x.extent(1);
  for (int64_t n = 0; n < weight.extent(0); ++n) {
    double sum = 0;
    double magnitude = 0;
    for (int64_t k = 0; k < depth; ++k) {
      sum += x.get(row, k) * weight.get(n, k);
      magnitude += std::fabs(x.get(row, k) * weight.get(n, k));
    }
    const double bound = static_cast<double>(depth) * 0x1p-24 * magnitude;
    ASSERT_NEAR(got[n], sum, bound) << target << ", row " << row << ", column " << n;
  }
}

void gives_a_row_the_same_bits(const char* target) {
  const int64_t columns = 37;
  for (const DType x_dtype : {kF32, kBf16}) {
    for (const DType weight_dtype : {kF32, kBf16}) {
      for (const int64_t depth : {131, 256, 40}) {
        Random random(7);
        BufferSet buffers(cpu_device());
        TestTensor x = buffers.tensor("x", Role::kInput, x_dtype, {23, depth});
        x.fill([&] { return random.bell(); });
        TestTensor weight = buffers.tensor("weight", Role::kInput, weight_dtype, {columns, depth});
        weight.fill([&] { return random.bell(); });
        buffers.upload();
        std::vector<float> all(23 * columns), one(columns);
        for (const int64_t rows : kBatches) {
          run_once(LinearArgs{.x = x.view(Side::kDevice).slice(0, 0, rows),
                              .weight = weight.view(Side::kDevice),
                              .out = view_of(all.data(), {rows, columns}),
                              .kernel = "cpu/linear_gemv"},
                   3);
          for (int64_t t = 0; t < rows; ++t) {
            run_once(LinearArgs{.x = x.view(Side::kDevice).slice(0, t, 1),
                                .weight = weight.view(Side::kDevice),
                                .out = view_of(one.data(), {1, columns})},
                     1);
            ASSERT_TRUE(std::equal(one.begin(), one.end(), all.begin() + t * columns))
                << target << ", row " << t << " of " << rows << ", depth " << depth;
          }
          ASSERT_NO_FATAL_FAILURE(
              expect_close(&all[(rows - 1) * columns], x, weight, rows - 1, target));
        }
      }
    }
  }
}

TEST(CpuLinearGemv, GivesARowTheSameBitsInAnyBatch) {
  testing::for_each_target(gives_a_row_the_same_bits);
}

void gives_a_row_of_heads_the_same_bits(const char* target) {
  const int64_t heads = 3;
  for (const bool columns_contiguous : {false, true}) {
    for (const auto& [columns, depth] : {std::pair<int64_t, int64_t>{37, 131}, {64, 32}}) {
      for (const DType out_dtype : {kF32, kBf16}) {
        Random random(8);
        BufferSet buffers(cpu_device());
        TestTensor x = buffers.tensor("x", Role::kInput, kBf16, {23, heads, depth});
        x.fill([&] { return random.bell(); });
        TestTensor weight = buffers.tensor(
            "weight", Role::kInput, kBf16,
            {heads, columns_contiguous ? depth : columns, columns_contiguous ? columns : depth});
        weight.fill([&] { return random.bell(); });
        TestTensor all = buffers.tensor("all", Role::kOutput, out_dtype, {23, heads, columns});
        TestTensor one = buffers.tensor("one", Role::kOutput, out_dtype, {1, heads, columns});
        buffers.upload();
        ConstTensorView w = weight.view(Side::kDevice);
        if (columns_contiguous) {
          std::swap(w.shape[1], w.shape[2]);
          std::swap(w.strides[1], w.strides[2]);
        }
        const int64_t row_bytes = heads * columns * size_bytes(out_dtype);
        for (const int64_t rows : kBatches) {
          run_once(HeadLinearArgs{.x = x.view(Side::kDevice).slice(0, 0, rows),
                                  .weight = w,
                                  .out = all.view(Side::kDevice).slice(0, 0, rows)},
                   3);
          for (int64_t t = 0; t < rows; ++t) {
            run_once(HeadLinearArgs{.x = x.view(Side::kDevice).slice(0, t, 1),
                                    .weight = w,
                                    .out = one.view(Side::kDevice)},
                     1);
            ASSERT_EQ(std::memcmp(one.view(Side::kDevice).as<char>(),
                                  all.view(Side::kDevice).as<char>() + t * row_bytes, row_bytes),
                      0)
                << target << ", row " << t << " of " << rows << ", depth " << depth;
          }
        }
      }
    }
  }
}

TEST(CpuHeadLinear, GivesARowTheSameBitsInAnyBatch) {
  testing::for_each_target(gives_a_row_of_heads_the_same_bits);
}

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

}  // namespace
}  // namespace lacuna
