// What the conformance suite can not ask of the CPU backend: which kernel dispatch takes, rows of
// one batch against rows alone, and a cache without blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
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
using testing::TestTensor;

constexpr auto kF32 = DType::kFloat32;
constexpr auto kI32 = DType::kInt32;
constexpr float kInf = std::numeric_limits<float>::infinity();

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
