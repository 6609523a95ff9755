// Promises of the attention operations that one call cannot show: rows independent of their
// neighbours, layouts that must not matter, partial results that join, sizes, and nothing to do.
#include <sys/mman.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <thread>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/attention_cases.h"
#include "tests/support/cache_cases.h"
#include "tests/support/compare.h"
#include "tests/support/host_map.h"

namespace lacuna::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const Context& context() { return conformance_context(); }

// Runs `problem` on one kernel and downloads; the text says what failed.
template <class Problem>
std::string run(Problem& problem, const std::string& kernel, bool invariant = false) {
  auto args = problem.args(Side::kDevice);
  args.kernel = kernel;
  if constexpr (requires { args.batch_invariant; }) {
    args.batch_invariant = args.batch_invariant || invariant;
  }
  problem.buffers.upload();
  const Status status = call_with_workspace(context(), args, problem.buffers.where());
  problem.buffers.download();
  return status.ok() ? problem.buffers.untouched_error() : status.message();
}

// The kernels of an operation that run this problem.
template <class Problem, class Case>
std::vector<KernelOnDevice> kernels_for(const Case& test_case) {
  std::vector<KernelOnDevice> kernels;
  for (const KernelOnDevice& kernel : kernels_of<typename Problem::Args>(context())) {
    Problem problem(test_case, kernel.where);
    auto args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    if (explain(context(), args).status.ok()) {
      kernels.push_back(kernel);
    }
  }
  return kernels;
}

std::vector<uint8_t> row_bytes(const ConstTensorView& tensor, int64_t t) {
  std::vector<uint8_t> bytes;
  for (int64_t j = 0; j < tensor.shape[1]; ++j) {
    for (int64_t k = 0; k < (tensor.rank > 2 ? tensor.shape[2] : 1); ++k) {
      const char* at = reference::element_address(tensor, t, j, k);
      bytes.insert(bytes.end(), at, at + size_bytes(tensor.dtype));
    }
  }
  return bytes;
}

std::vector<uint8_t> row_bytes_of_all(const ConstTensorView& tensor) {
  std::vector<uint8_t> bytes;
  for (int64_t t = 0; t < tensor.shape[0]; ++t) {
    const std::vector<uint8_t> row = row_bytes(tensor, t);
    bytes.insert(bytes.end(), row.begin(), row.end());
  }
  return bytes;
}

// Args of row t alone, everything else as it is.
SparseMlaArgs single_row(SparseMlaArgs args, int64_t t) {
  const auto cut = [&](auto& tensor) {
    if (!tensor.empty()) {
      tensor = tensor.slice(0, t, 1);
    }
  };
  cut(args.q);
  cut(args.q_nope);
  cut(args.q_rope);
  cut(args.indices);
  cut(args.request_ids);
  cut(args.valid_counts);
  cut(args.out);
  cut(args.lse);
  cut(args.max_logits);
  return args;
}

// ---------------------------------------------------------------------------------- sparse_mla

TEST(SparseMlaContract, SingleRowCallsChangeOnlyTheirRow) {
  const SparseMlaCase test_case{.name = "rows", .rows = 5, .heads = 8, .width = 100};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    for (int64_t t = 0; t < test_case.rows; ++t) {
      SparseMlaProblem problem(test_case, kernel.where);
      SparseMlaArgs args = single_row(problem.args(Side::kDevice), t);
      args.kernel = kernel.name;
      problem.buffers.upload();
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      problem.buffers.download();
      // Host images of outputs hold the poison.
      for (int64_t other = 0; other < test_case.rows; ++other) {
        EXPECT_EQ(row_bytes(problem.out.result(), other) ==
                      row_bytes(problem.out.view(Side::kHost), other),
                  other != t)
            << kernel.name << ": call of row " << t << ", row " << other;
      }
      const reference::AttentionResult& all = problem.expected();
      const auto row = [&](const std::vector<double>& values) {
        const auto width = std::ssize(values) / test_case.rows;
        return std::vector<double>(values.begin() + t * width, values.begin() + (t + 1) * width);
      };
      const reference::AttentionResult expected = {.out = row(all.out),
                                                   .lse = row(all.lse),
                                                   .max_logits = row(all.max_logits),
                                                   .score_scale = row(all.score_scale),
                                                   .weight_scale = row(all.weight_scale)};
      EXPECT_EQ(
          compare_attention(problem.out.result().slice(0, t, 1), {}, {}, expected, 576, false), "")
          << kernel.name;
    }
  }
}

TEST(SparseMlaContract, BatchInvariantRowsHaveTheBitsOfASingleRowCall) {
  for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
    for (int64_t rows : {2, 5, 33}) {
      const SparseMlaCase test_case{.name = "invariant",
                                    .seed = 3,
                                    .rows = rows,
                                    .heads = 16,
                                    .width = 1030,
                                    .layout = layout,
                                    .counts = CountPattern::kRagged,
                                    .batch_invariant = true};
      for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
        SparseMlaProblem problem(test_case, kernel.where);
        ASSERT_EQ(run(problem, kernel.name), "");
        SparseMlaProblem alone(test_case, kernel.where);
        alone.buffers.upload();
        for (int64_t t = 0; t < rows; ++t) {
          SparseMlaArgs args = single_row(alone.args(Side::kDevice), t);
          args.kernel = kernel.name;
          ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        }
        alone.buffers.download();
        EXPECT_EQ(problem.buffers.output_bytes(), alone.buffers.output_bytes())
            << kernel.name << ", " << rows << " rows";
      }
    }
  }
}

TEST(SparseMlaContract, BitsDoNotDependOnTheBlockSize) {
  // The same tokens at the same positions, in caches of every block size.
  for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
    SparseMlaCase test_case{.name = "blocks",
                            .heads = 8,
                            .width = 160,
                            .layout = layout,
                            .seq_lens = {700, 333},
                            .query_lens = {2, 1}};
    for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
      std::vector<uint8_t> first;
      for (int64_t block : {1, 2, 16, 32, 61, 64, 128, 256, 576, 640}) {
        test_case.block_size = block;
        test_case.rows = 3;
        SparseMlaProblem problem(test_case, kernel.where);
        // The data of a case depends on its blocks: lay the tokens out anew, by position.
        TestCache& cache = problem.cache;
        const SparseMlaArgs host = problem.args(Side::kHost);
        std::vector<float> values(layout.d_qk());
        for (int64_t r = 0; r < 2; ++r) {
          for (int64_t p = 0; p < test_case.seq_lens[r]; ++p) {
            Random random(11 + r, p);
            for (float& value : values) {
              value = random.bell();
            }
            const int64_t at = reference::integer(host.block_table, r, p / block);
            cache.set_record(at * block + p % block, values);
          }
        }
        Random random(5);
        problem.q.fill([&] { return random.bell(); });
        for (int64_t t = 0; t < 3; ++t) {
          const int64_t length = t < 2 ? 699 : 333;
          for (int64_t i = 0; i < test_case.width; ++i) {
            problem.indices.set(static_cast<double>((i * 37 + t) % length), t, i);
          }
        }
        SparseMlaArgs args = problem.args(Side::kDevice);
        args.kernel = kernel.name;
        if (!explain(context(), args).status.ok()) {
          continue;  // a kernel may serve some block sizes only
        }
        ASSERT_EQ(run(problem, kernel.name), "") << "block size " << block;
        EXPECT_EQ(problem.verify(), "") << kernel.name << ", block size " << block;
        const std::vector<uint8_t> bytes = problem.buffers.output_bytes()[0];
        if (first.empty()) {
          first = bytes;
        }
        EXPECT_EQ(first, bytes) << kernel.name << ", block size " << block;
      }
    }
  }
}

TEST(SparseMlaContract, PositionsAndTranslatedRowsGiveTheSameBits) {
  const SparseMlaCase test_case{.name = "translated",
                                .heads = 8,
                                .width = 120,
                                .block_size = 32,
                                .gap_rows = 3,
                                .list = ListPattern::kHostile,
                                .counts = CountPattern::kRagged,
                                .seq_lens = {200, 77},
                                .query_lens = {3, 2},
                                .padding_row = true,
                                .bad_blocks = true};
  SparseMlaCase with_rows = test_case;
  with_rows.rows = 6;
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(with_rows)) {
    SparseMlaProblem problem(with_rows, kernel.where);
    ASSERT_EQ(run(problem, kernel.name), "");
    const std::vector<std::vector<uint8_t>> by_position = problem.buffers.output_bytes();

    SparseMlaArgs args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    TestTensor rows = problem.buffers.tensor("rows", Role::kInOut, DType::kInt32,
                                             {with_rows.rows, with_rows.width});
    problem.buffers.upload();
    TranslateIndicesArgs translate;
    translate.indices = args.indices;
    translate.request_ids = args.request_ids;
    translate.block_table = args.block_table;
    translate.valid_counts = args.valid_counts;
    translate.num_blocks = args.kv.num_blocks;
    translate.block_size = args.kv.block_size;
    translate.block_stride_rows = args.kv.block_stride_rows();
    translate.rows = rows.view(Side::kDevice);
    ASSERT_TRUE(call_with_workspace(context(), translate, kernel.where).ok());
    args.indices = rows.view(Side::kDevice);
    args.index_kind = IndexKind::kRows;
    args.block_table = {};
    args.request_ids = {};
    ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
    problem.buffers.download();
    EXPECT_EQ(problem.verify(), "") << kernel.name;
    EXPECT_EQ(by_position[0], problem.buffers.output_bytes()[0]) << kernel.name;
  }
}

TEST(SparseMlaContract, PreparedScheduleChangesNothingBeyondRounding) {
  struct Shape {
    int64_t rows, width;
    CountPattern counts;
  };
  for (const Shape& shape :
       {Shape{1, 2048, CountPattern::kAbsent}, Shape{1, 64, CountPattern::kAbsent},
        Shape{3, 2048, CountPattern::kEdges}, Shape{21, 2048, CountPattern::kEdges},
        Shape{33, 300, CountPattern::kRagged}, Shape{6, 300, CountPattern::kHostile},
        Shape{64, 200, CountPattern::kRagged}}) {
    for (bool invariant : {false, true}) {
      const SparseMlaCase test_case{.name = "schedule",
                                    .rows = shape.rows,
                                    .heads = 8,
                                    .width = shape.width,
                                    .counts = shape.counts,
                                    .batch_invariant = invariant};
      for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
        for (const KernelOnDevice& builder : kernels_of<SparseMlaScheduleArgs>(context())) {
          if (!(builder.where.device == kernel.where.device)) {
            continue;
          }
          SparseMlaProblem problem(test_case, kernel.where);
          const int64_t entries = schedule_entries(context(), shape.rows, shape.width);
          ASSERT_GT(entries, 0);
          TestTensor schedule =
              problem.buffers.tensor("schedule", Role::kInOut, DType::kInt32, {entries, 4});
          problem.buffers.upload();
          SparseMlaArgs args = problem.args(Side::kDevice);
          args.kernel = kernel.name;
          SparseMlaScheduleArgs prepare{.num_rows = shape.rows,
                                        .list_width = shape.width,
                                        .num_heads = test_case.heads,
                                        .d_qk = 576,
                                        .valid_counts = args.valid_counts,
                                        .batch_invariant = invariant,
                                        .schedule = schedule.view(Side::kDevice),
                                        .kernel = builder.name};
          ASSERT_TRUE(call_with_workspace(context(), prepare, kernel.where).ok());
          problem.buffers.download();
          const std::vector<uint8_t> prepared = row_bytes_of_all(schedule.result());
          ASSERT_TRUE(
              call_with_workspace(context(), prepare, kernel.where, kWorkspaceFills[1]).ok());
          problem.buffers.download();
          EXPECT_EQ(prepared, row_bytes_of_all(schedule.result())) << builder.name;
          args.schedule = schedule.view(Side::kDevice);
          const Status status = call_with_workspace(context(), args, kernel.where);
          ASSERT_TRUE(status.ok()) << status.message();
          problem.buffers.download();
          EXPECT_EQ(problem.buffers.untouched_error(), "");
          EXPECT_EQ(problem.verify(), "") << kernel.name << " with a schedule of " << builder.name
                                          << ", " << shape.rows << " rows of " << shape.width;
        }
      }
    }
  }
}

TEST(SparseMlaContract, ScheduleEntriesAreMonotone) {
  int64_t last = 0;
  for (int64_t rows : {1, 2, 31, 32, 33, 64, 1024, 4096}) {
    const int64_t entries = schedule_entries(context(), rows, 2048);
    EXPECT_GE(entries, last);
    EXPECT_GE(entries, schedule_entries(context(), rows, 128));
    last = entries;
  }
}

TEST(SparseMlaContract, WorkspaceGrowsWithEveryExtent) {
  for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
    const auto bytes = [&](int64_t rows, int64_t heads, int64_t width, bool lse) {
      // Sizes depend on shapes alone: the memory behind the views is never looked at.
      static int64_t nowhere = 0;
      SparseMlaArgs args;
      const Device device = kernel.where.device;
      args.q = make_view<const void>(&nowhere, DType::kBFloat16, {rows, heads, 576}, device);
      args.kv = flat_rows(&nowhere, KvLayout::latent_bf16(512, 64), 100000, device);
      args.indices = make_view<const void>(&nowhere, DType::kInt32, {rows, width}, device);
      args.softmax_scale = 0.05;
      args.out = make_view<void>(&nowhere, DType::kBFloat16, {rows, heads, 512}, device);
      if (lse) {
        args.lse = make_view<void>(&nowhere, DType::kFloat32, {rows, heads}, device);
      }
      args.kernel = kernel.name;
      const Result<int64_t> needed = workspace_bytes(context(), args);
      if (!needed.ok()) {
        // Above every size: a kernel may refuse larger extents, and no smaller ones.
        EXPECT_EQ(needed.status().code(), StatusCode::kUnsupported) << needed.status().message();
        return std::numeric_limits<int64_t>::max();
      }
      EXPECT_GE(*needed, 0);
      return *needed;
    };
    int64_t last = 0;
    for (int64_t rows : {1, 2, 8, 33, 132, 8191, 8192, 8193, 16384}) {
      for (bool lse : {false, true}) {
        EXPECT_GE(bytes(rows, 16, 2048, lse), last) << kernel.name << ", rows " << rows;
      }
      last = bytes(rows, 16, 2048, true);
    }
    for (int64_t heads = 1; heads < 128; ++heads) {
      EXPECT_LE(bytes(4, heads, 2048, true), bytes(4, heads + 1, 2048, true)) << heads;
    }
    for (int64_t width = 1; width < 4000; width += 61) {
      EXPECT_LE(bytes(4, 16, width, true), bytes(4, 16, width + 61, true)) << width;
    }
  }
}

// Sizes that pass 2^31 and 2^63: an error, or a size that is not negative.
TEST(SparseMlaContract, HugeExtentsNeverGiveANegativeWorkspace) {
  int64_t nowhere = 0;
  for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
    for (int64_t rows : {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 45}) {
      for (int64_t width : {int64_t{2048}, int64_t{1} << 31}) {
        const Device device = kernel.where.device;
        SparseMlaArgs args;
        args.q = make_view<const void>(&nowhere, DType::kBFloat16, {rows, 16, 576}, device);
        args.kv = flat_rows(&nowhere, KvLayout::latent_bf16(512, 64), 100000, device);
        args.indices = make_view<const void>(&nowhere, DType::kInt32, {rows, width}, device);
        args.indices.strides[0] = 0;
        args.softmax_scale = 0.05;
        args.out = make_view<void>(&nowhere, DType::kBFloat16, {rows, 16, 512}, device);
        args.kernel = kernel.name;
        const Result<int64_t> needed = workspace_bytes(context(), args);
        EXPECT_TRUE(!needed.ok() || *needed >= 0) << *needed;
        // Products beyond 2^63, of views that no memory could hold.
        for (int64_t absurd : {int64_t{1} << 52, int64_t{1} << 62}) {
          for (auto* tensor : {&args.q, &args.indices}) {
            tensor->shape[0] = absurd;
            tensor->strides[0] = 0;
          }
          args.out.shape[0] = absurd;
          args.out.strides[0] = 0;
          const Result<int64_t> impossible = workspace_bytes(context(), args);
          EXPECT_TRUE(!impossible.ok() || *impossible >= 0) << *impossible;
        }
      }
    }
  }
}

TEST(SparseMlaContract, NothingToDoSucceedsWithNullPointers) {
  for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
    const Device device = kernel.where.device;
    for (const auto& [rows, heads] : {std::pair{0, 8}, std::pair{3, 0}, std::pair{0, 0}}) {
      SparseMlaArgs args;
      args.q = make_view<const void>(nullptr, DType::kBFloat16, {rows, heads, 576}, device);
      args.kv = {.device = device,
                 .layout = KvLayout::latent_bf16(512, 64),
                 .block_size = 64,
                 .block_stride_bytes = 64 * 1152,
                 .row_bytes = 1152};
      std::vector<int32_t> lists(rows * 16);
      args.indices = make_view<const void>(rows == 0 ? nullptr : lists.data(), DType::kInt32,
                                           {rows, 16}, device);
      args.softmax_scale = 1;
      args.out = make_view<void>(nullptr, DType::kBFloat16, {rows, heads, 512}, device);
      args.lse = make_view<void>(nullptr, DType::kFloat32, {rows, heads}, device);
      args.kernel = kernel.name;
      const Status status = sparse_mla(context(), args);
      EXPECT_TRUE(status.ok()) << status.message();
      const Result<int64_t> needed = workspace_bytes(context(), args);
      EXPECT_TRUE(needed.ok() && *needed == 0);
    }
  }
}

TEST(SparseMlaContract, AnEmptyCacheGivesRowsWithoutKeys) {
  const SparseMlaCase test_case{.name = "empty", .rows = 3, .heads = 8, .width = 20};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    SparseMlaProblem problem(test_case, kernel.where);
    SparseMlaArgs args = problem.args(Side::kDevice);
    args.kv.data = nullptr;
    args.kv.num_blocks = 0;
    args.kernel = kernel.name;
    problem.buffers.upload();
    const Status status = call_with_workspace(context(), args, kernel.where);
    ASSERT_TRUE(status.ok()) << status.message();
    problem.buffers.download();
    EXPECT_EQ(compare("out", problem.out.result(), std::vector<double>(3 * 8 * 512, 0.0), {}), "");
    EXPECT_EQ(compare("lse", problem.lse.result(), std::vector<double>(3 * 8, -kInfinity), {}), "");
  }
}

TEST(SparseMlaContract, ScaleThatVanishesInFloatIsRefused) {
  const SparseMlaCase test_case{.name = "scale", .rows = 1, .heads = 8, .width = 20};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    SparseMlaProblem problem(test_case, kernel.where);
    SparseMlaArgs args = problem.args(Side::kDevice);
    for (double scale : {0.0, -0.0, 1e-60, kInfinity, -kInfinity, 1e300,
                         std::numeric_limits<double>::quiet_NaN()}) {
      args.softmax_scale = scale;
      const Status status = sparse_mla(context(), args);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << scale;
      EXPECT_NE(status.message().find("softmax_scale"), std::string::npos) << status.message();
    }
  }
}

// The number of threads changes the split of the work, never more than rounding; and with
// batch_invariant not even that.
TEST(SparseMlaContract, AnyNumberOfThreads) {
  for (bool invariant : {false, true}) {
    const SparseMlaCase test_case{.name = "threads",
                                  .rows = 3,
                                  .heads = 8,
                                  .width = 1500,
                                  .counts = CountPattern::kRagged,
                                  .batch_invariant = invariant};
    for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
      std::vector<std::vector<uint8_t>> first;
      for (int threads : {1, 2, 3, 7}) {
        const Result<Context> other = Context::create({.num_threads = threads});
        ASSERT_TRUE(other.ok());
        SparseMlaProblem problem(test_case, kernel.where);
        const Verdict verdict = check_problem(*other, kernel.name, problem);
        EXPECT_EQ(verdict.error, "") << kernel.name << ", " << threads << " threads";
        if (invariant) {
          first = first.empty() ? problem.buffers.output_bytes() : first;
          EXPECT_EQ(first, problem.buffers.output_bytes()) << kernel.name << ", " << threads;
        }
      }
    }
  }
}

// One context, many callers at once.
TEST(SparseMlaContract, CallsFromSeveralThreadsDoNotMix) {
  const SparseMlaCase test_case{.name = "callers", .rows = 4, .heads = 8, .width = 300};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    std::vector<std::string> errors(3);
    std::vector<std::thread> callers;
    for (size_t i = 0; i < errors.size(); ++i) {
      callers.emplace_back([&, i] {
        SparseMlaCase own = test_case;
        own.seed = i + 1;
        SparseMlaProblem problem(own, kernel.where);
        for (int round = 0; round < 5 && errors[i].empty(); ++round) {
          errors[i] = check_problem(context(), kernel.name, problem).error;
        }
      });
    }
    for (std::thread& caller : callers) {
      caller.join();
    }
    for (const std::string& error : errors) {
      EXPECT_EQ(error, "") << kernel.name;
    }
  }
}

// Strides may be negative, and 0 broadcasts: rows in reverse order give the outputs in reverse
// order, and one query or list may serve all rows.
TEST(SparseMlaContract, NegativeAndZeroStrides) {
  const SparseMlaCase test_case{
      .name = "strides", .rows = 4, .heads = 6, .width = 150, .counts = CountPattern::kRagged};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    SparseMlaProblem problem(test_case, kernel.where);
    const auto reverse = [](auto view) {
      view = view.slice(0, view.shape[0] - 1, view.shape[0]);
      view.strides[0] = -view.strides[0];
      return view;
    };
    for (bool broadcast : {false, true}) {
      const auto change = [&](SparseMlaArgs args) {
        args.q = reverse(args.q);
        args.indices = reverse(args.indices);
        args.valid_counts = reverse(args.valid_counts);
        args.out = reverse(args.out);
        args.lse = reverse(args.lse);
        args.max_logits = reverse(args.max_logits);
        if (broadcast) {
          args.q.strides[0] = 0;
          args.q.strides[1] = 0;
          args.indices.strides[0] = 0;
        }
        return args;
      };
      SparseMlaArgs args = change(problem.args(Side::kDevice));
      args.kernel = kernel.name;
      if (!explain(context(), args).status.ok()) {
        continue;
      }
      SparseMlaArgs host = change(problem.args(Side::kHost));
      if (broadcast) {
        // The last row's list for all: its count must not pass what has values.
        args.valid_counts.strides[0] = 0;
        host.valid_counts.strides[0] = 0;
      }
      problem.buffers.upload();
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      problem.buffers.download();
      EXPECT_EQ(problem.buffers.untouched_error(), "");
      EXPECT_EQ(compare_attention(reverse(problem.out.result()), reverse(problem.lse.result()),
                                  reverse(problem.max_logits.result()), reference::sparse_mla(host),
                                  576, false),
                "")
          << kernel.name << (broadcast ? ", broadcast" : ", reversed");
    }
  }
}

// A cache behind a page that may not be touched: reading row -1 would fault. The lists hold -1,
// the row before the cache and the rows after it; the last row ends at another such page.
TEST(SparseMlaContract, NothingOutsideTheCacheIsRead) {
  for (const KvLayout& layout :
       {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla(), KvLayout::latent_bf16(512, 0)}) {
    const SparseMlaCase test_case{
        .name = "guard", .rows = 4, .heads = 8, .width = 100, .layout = layout, .tokens = 64};
    for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
      if (kernel.where.device.kind != DeviceKind::kCpu) {
        continue;
      }
      SparseMlaProblem problem(test_case, kernel.where);
      for (int64_t i = 0; i < test_case.width; ++i) {
        problem.indices.set(-1, 1, i);
        problem.indices.set(i % 2 == 0 ? -1 : 64, 2, i);
      }
      const SparseMlaArgs host = problem.args(Side::kHost);
      const int64_t bytes = 64 * layout.record_bytes();
      for (bool at_end : {false, true}) {
        HostMap map(bytes);
        map.allow_all();
        char* data = at_end ? map.end_minus(bytes) : map.data();
        std::memcpy(data, host.kv.data, bytes);
        SparseMlaArgs args = problem.args(Side::kDevice);
        args.kv = flat_rows(data, layout, 64);
        args.kernel = kernel.name;
        problem.buffers.upload();
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        problem.buffers.download();
        EXPECT_EQ(problem.verify(), "") << kernel.name;
      }
    }
  }
}

// Rows whose byte and element offsets pass 2^31 and 2^32. Only the rows that the lists name exist.
TEST(SparseMlaContract, OffsetsBeyond32Bits) {
  for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
    const int64_t num_rows = (int64_t{5} << 30) / layout.record_bytes() * 64 / 64;
    for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
      if (kernel.where.device.kind != DeviceKind::kCpu) {
        continue;
      }
      HostMap map(num_rows * layout.record_bytes());
      const KvCacheView kv = flat_rows(map.data(), layout, num_rows);
      Random random(1);
      std::vector<int32_t> ids = {0, static_cast<int32_t>(num_rows - 1)};
      for (int i = 0; i < 30; ++i) {
        ids.push_back(static_cast<int32_t>(random.integer(0, num_rows - 1)));
      }
      std::vector<float> values(layout.d_qk());
      for (const int64_t id : ids) {
        map.allow(id * layout.record_bytes(), layout.record_bytes());
        for (float& value : values) {
          value = random.bell();
        }
        AppendKvArgs append{.latent = view_of<float>(values.data(), {1, 512}),
                            .rope = view_of<float>(values.data() + 512, {1, 64}),
                            .slot_mapping = view_of<int64_t>(&id, {1}),
                            .kv = kv};
        ASSERT_TRUE(call_with_workspace(context(), append, kernel.where).ok());
      }
      // Query, lists and outputs have row strides beyond 2^31 elements too.
      constexpr int64_t kStride = (int64_t{1} << 31) + 4096;
      constexpr int64_t kHeads = 4;
      HostMap q_map(2 * (kStride + 4096)), out_map(2 * (kStride + 4096)),
          list_map(4 * (kStride + 4096));
      SparseMlaArgs args;
      args.q = make_view<const void>(q_map.data(), DType::kBFloat16, {2, kHeads, 576});
      args.q.strides[0] = kStride;
      args.out = make_view<void>(out_map.data(), DType::kBFloat16, {2, kHeads, 512});
      args.out.strides[0] = kStride;
      args.indices = make_view<const void>(list_map.data(), DType::kInt32, {2, 32});
      args.indices.strides[0] = kStride;
      for (int64_t t = 0; t < 2; ++t) {
        q_map.allow(2 * t * kStride, 2 * kHeads * 576);
        out_map.allow(2 * t * kStride, 2 * kHeads * 512);
        list_map.allow(4 * t * kStride, 4 * 32);
        std::memcpy(list_map.data() + 4 * t * kStride, ids.data(), 4 * 32);
        for (int64_t i = 0; i < kHeads * 576; ++i) {
          const Bf16 bits = to_bf16(random.bell());
          std::memcpy(q_map.data() + 2 * (t * kStride + i), &bits, 2);
        }
      }
      std::vector<float> lse(2 * kHeads);
      args.lse = view_of(lse.data(), {2, kHeads});
      args.kv = kv;
      args.softmax_scale = 1.0 / 24;
      args.kernel = kernel.name;
      const Status status = call_with_workspace(context(), args, kernel.where);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(compare_attention(args.out, args.lse, {}, reference::sparse_mla(args), 576, false),
                "")
          << kernel.name << ", " << kv_format_name(layout.format);
    }
  }
}

// The blocks of three layers lie between each other; layer i's cache holds i everywhere. A layer
// offset that gets lost would mix them.
TEST(SparseMlaContract, LayersInterleavedInBlocksStayApart) {
  constexpr int64_t kLayers = 3, kBlocks = 4, kBlock = 16, kHeads = 8;
  for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
    for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
      BufferSet buffers(kernel.where);
      TestCache all = buffers.cache("all layers", Role::kInOut, layout,
                                    {.num_blocks = kBlocks * kLayers, .block_size = kBlock});
      TestTensor q = buffers.tensor("q", Role::kInput, DType::kBFloat16, {50, kHeads, 576});
      Random random(2);
      q.fill([&] { return random.bell(); });
      TestTensor indices = buffers.tensor("indices", Role::kInput, DType::kInt32, {50, 20});
      TestTensor latent[kLayers], out[kLayers];
      TestTensor rope = buffers.tensor("rope", Role::kInput, DType::kBFloat16, {64, 64});
      rope.fill([&] { return random.bell(); });
      TestTensor slots = buffers.tensor("slots", Role::kInput, DType::kInt64, {64});
      for (int64_t i = 0; i < 64; ++i) {
        slots.set(static_cast<double>(i), i);
      }
      for (int i = 0; i < kLayers; ++i) {
        latent[i] = buffers.tensor("latent", Role::kInput, DType::kBFloat16, {64, 512});
        latent[i].fill([&] { return i + 1.0; });
        out[i] = buffers.tensor("out", Role::kOutput, DType::kBFloat16, {50, kHeads, 512});
      }
      KvCacheView kv = all.view(Side::kDevice);
      kv.num_blocks = kBlocks;
      kv.block_stride_bytes *= kLayers;
      for (int64_t t = 0; t < 50; ++t) {
        for (int64_t c = 0; c < 20; ++c) {
          const int64_t slot = random.integer(0, 63);
          indices.set(static_cast<double>(slot / kBlock * kv.block_stride_rows() + slot % kBlock),
                      t, c);
        }
      }
      buffers.upload();
      const auto layer_cache = [&](int i) {
        KvCacheView layer = kv;
        layer.data = static_cast<char*>(kv.data) + i * kBlock * layout.record_bytes();
        return layer;
      };
      for (int i = 0; i < kLayers; ++i) {
        const AppendKvArgs append{.latent = latent[i].view(Side::kDevice),
                                  .rope = rope.view(Side::kDevice),
                                  .slot_mapping = slots.view(Side::kDevice),
                                  .kv = layer_cache(i)};
        ASSERT_TRUE(call_with_workspace(context(), append, kernel.where).ok());
      }
      for (int i = 0; i < kLayers; ++i) {
        SparseMlaArgs args;
        args.q = q.view(Side::kDevice);
        args.kv = layer_cache(i);
        args.indices = indices.view(Side::kDevice);
        args.softmax_scale = 0.04;
        args.out = out[i].view(Side::kDevice);
        args.kernel = kernel.name;
        if (!explain(context(), args).status.ok()) {
          continue;
        }
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        buffers.download();
        const std::vector<double> expected(50 * kHeads * 512, i + 1.0);
        EXPECT_EQ(compare("out", out[i].result(), expected, {}), "")
            << kernel.name << ", layer " << i;
      }
    }
  }
}

// ---------------------------------------------------------------------------- partial results

// Attention over parts of a list, merged: as good as the whole, whatever the number of parts.
TEST(PartialStates, ErrorDoesNotGrowWithTheNumberOfChunks) {
  constexpr int64_t kRows = 2, kHeads = 8, kWidth = 8192;
  const SparseMlaCase test_case{.name = "chunks",
                                .rows = kRows,
                                .heads = kHeads,
                                .width = kWidth,
                                .out_dtype = DType::kFloat32};
  for (const KernelOnDevice& kernel : kernels_for<SparseMlaProblem>(test_case)) {
    SparseMlaProblem problem(test_case, kernel.where);
    const reference::AttentionResult& expected = problem.expected();
    double first_error = 0;
    for (int chunks : {1, 2, 8, 64}) {
      std::vector<TestTensor> outs, lses;
      for (int n = 0; n < chunks; ++n) {
        outs.push_back(
            problem.buffers.tensor("part", Role::kOutput, DType::kFloat32, {kRows, kHeads, 512}));
        lses.push_back(
            problem.buffers.tensor("part lse", Role::kOutput, DType::kFloat32, {kRows, kHeads}));
      }
      problem.buffers.upload();
      std::vector<PartialState> states;
      for (int n = 0; n < chunks; ++n) {
        SparseMlaArgs args = problem.args(Side::kDevice);
        args.kernel = kernel.name;
        args.indices = args.indices.slice(1, n * kWidth / chunks, kWidth / chunks);
        args.out = outs[n].view(Side::kDevice);
        args.lse = lses[n].view(Side::kDevice);
        args.max_logits = {};
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        states.push_back({args.out, args.lse});
      }
      MergeStatesArgs merge;
      merge.states = states;
      merge.out = problem.out.view(Side::kDevice);
      merge.lse = problem.lse.view(Side::kDevice);
      ASSERT_TRUE(call_with_workspace(context(), merge, kernel.where).ok());
      problem.buffers.download();
      EXPECT_EQ(compare("out", problem.out.result(), expected.out, kOut16), "");
      EXPECT_EQ(compare("lse", problem.lse.result(), expected.lse, kLse), "");
      double squares = 0;
      for (int64_t i = 0; i < kRows * kHeads * 512; ++i) {
        const double difference = problem.out.result().as<float>()[i] - expected.out[i];
        squares += difference * difference;
      }
      const double error = std::sqrt(squares / static_cast<double>(expected.out.size()));
      first_error = chunks == 1 ? error : first_error;
      // Never below what rounding the result to float32 costs.
      EXPECT_LT(error, 2 * std::max(first_error, 0x1p-24)) << kernel.name << ", " << chunks;
    }
  }
}

// Merging with a row that has no keys returns the other operand bit for bit.
TEST(PartialStates, EmptyStateIsNeutral) {
  for (const KernelOnDevice& kernel : kernels_of<MergeStatesArgs>(context())) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (bool empty_first : {true, false}) {
        BufferSet buffers(kernel.where);
        Random random(4);
        TestTensor part = buffers.tensor("part", Role::kInput, dtype, {3, 5, 96});
        TestTensor part_lse = buffers.tensor("lse", Role::kInput, DType::kFloat32, {3, 5});
        TestTensor empty = buffers.tensor("empty", Role::kInput, dtype, {3, 5, 96});
        TestTensor empty_lse = buffers.tensor("empty lse", Role::kInput, DType::kFloat32, {3, 5});
        part.fill([&] { return random.bell(); });
        part_lse.fill([&] { return 20 * random.bell(); });
        empty.fill([] { return 0.0; });
        empty_lse.fill([] { return -kInfinity; });
        TestTensor out = buffers.tensor("out", Role::kOutput, dtype, {3, 5, 96});
        TestTensor lse = buffers.tensor("out lse", Role::kOutput, DType::kFloat32, {3, 5});
        buffers.upload();
        const PartialState states[] = {{part.view(Side::kDevice), part_lse.view(Side::kDevice)},
                                       {empty.view(Side::kDevice), empty_lse.view(Side::kDevice)}};
        const PartialState swapped[] = {states[1], states[0]};
        MergeStatesArgs args;
        args.states = empty_first ? std::span<const PartialState>(swapped) : states;
        args.out = out.view(Side::kDevice);
        args.lse = lse.view(Side::kDevice);
        args.kernel = kernel.name;
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        buffers.download();
        for (int64_t t = 0; t < 3; ++t) {
          EXPECT_EQ(row_bytes(out.result(), t), row_bytes(part.view(Side::kHost), t));
          EXPECT_EQ(row_bytes(lse.result(), t), row_bytes(part_lse.view(Side::kHost), t));
        }
      }
    }
  }
}

// Decode context parallelism: each rank attends to its own keys, scales by its share and adds up;
// or the states are merged. Both equal attention over everything.
TEST(PartialStates, ShardsAddUpToTheWhole) {
  constexpr int64_t kRows = 4, kHeads = 8, kWidth = 200, kTokens = 512, kBlock = 16;
  for (int size : {1, 2, 4}) {
    for (int interleave : {1, 2, 4}) {
      for (const KernelOnDevice& kernel : kernels_of<SparseMlaArgs>(context())) {
        BufferSet buffers(kernel.where);
        const KvLayout layout = KvLayout::latent_bf16(512, 64);
        Random random(size * 8 + interleave);
        // The whole cache, one request, blocks in order; and one cache a rank.
        TestCache whole = buffers.cache("whole", Role::kInput, layout,
                                        {.num_blocks = kTokens / kBlock, .block_size = kBlock});
        std::vector<TestCache> shards;
        for (int rank = 0; rank < size; ++rank) {
          shards.push_back(
              buffers.cache("shard", Role::kInput, layout,
                            {.num_blocks = kTokens / kBlock / size, .block_size = kBlock}));
        }
        std::vector<float> values(576);
        for (int64_t p = 0; p < kTokens; ++p) {
          for (float& value : values) {
            value = random.bell();
          }
          whole.set_record(p, values);
          shards[p / interleave % size].set_record(
              p / (size * interleave) * interleave + p % interleave, values);
        }
        TestTensor table =
            buffers.tensor("block_table", Role::kInput, DType::kInt32, {1, kTokens / kBlock});
        for (int64_t b = 0; b < kTokens / kBlock; ++b) {
          table.set(static_cast<double>(b), 0, b);
        }
        TestTensor requests = buffers.ints("request_ids", {0, 0, 0, 0});
        TestTensor q = buffers.tensor("q", Role::kInput, DType::kBFloat16, {kRows, kHeads, 576});
        q.fill([&] { return 2 * random.bell(); });
        TestTensor indices =
            buffers.tensor("indices", Role::kInput, DType::kInt32, {kRows, kWidth});
        for (int64_t t = 0; t < kRows; ++t) {
          for (int64_t c = 0; c < kWidth; ++c) {
            // Row 1: all keys on the last rank. Row 2: none.
            int64_t p = random.integer(0, kTokens - 1);
            if (t == 1) {
              p = p / (size * interleave) * (size * interleave) + (size - 1) * interleave;
            }
            indices.set(t == 2 ? -1 : static_cast<double>(p), t, c);
          }
        }
        TestTensor rows = buffers.tensor("rows", Role::kOutput, DType::kInt32, {kRows, kWidth});
        TestTensor counts = buffers.tensor("counts", Role::kOutput, DType::kInt32, {kRows});
        TestTensor all_lse =
            buffers.tensor("all lse", Role::kOutput, DType::kFloat32, {size, kRows, kHeads});
        std::vector<TestTensor> outs;
        for (int rank = 0; rank < size; ++rank) {
          outs.push_back(
              buffers.tensor("rank out", Role::kOutput, DType::kFloat32, {kRows, kHeads, 512}));
        }
        TestTensor merged =
            buffers.tensor("merged", Role::kOutput, DType::kFloat32, {kRows, kHeads, 512});
        TestTensor merged_lse =
            buffers.tensor("merged lse", Role::kOutput, DType::kFloat32, {kRows, kHeads});
        TestTensor rescaled_lse =
            buffers.tensor("rescaled lse", Role::kOutput, DType::kFloat32, {kRows, kHeads});
        buffers.upload();

        SparseMlaArgs args;
        args.softmax_scale = 1.0 / 24;
        args.kernel = kernel.name;
        std::vector<PartialState> states;
        for (int rank = 0; rank < size; ++rank) {
          TranslateIndicesArgs translate;
          translate.indices = indices.view(Side::kDevice);
          translate.request_ids = requests.view(Side::kDevice);
          translate.block_table = table.view(Side::kDevice);
          translate.num_blocks = kTokens / kBlock / size;
          translate.block_size = kBlock;
          translate.dcp = {.size = size, .rank = rank, .interleave = interleave};
          translate.compact = rank % 2 == 0;
          translate.rows = rows.view(Side::kDevice);
          translate.counts = counts.view(Side::kDevice);
          ASSERT_TRUE(call_with_workspace(context(), translate, kernel.where).ok());
          args.q = q.view(Side::kDevice);
          args.kv = shards[rank].view(Side::kDevice);
          args.indices = rows.view(Side::kDevice);
          args.valid_counts =
              translate.compact ? ConstTensorView(counts.view(Side::kDevice)) : ConstTensorView{};
          args.out = outs[rank].view(Side::kDevice);
          args.lse = all_lse.view(Side::kDevice).slice(0, rank, 1);
          // [1, T, H] -> [T, H]
          args.lse =
              make_view<void>(args.lse.data, DType::kFloat32, {kRows, kHeads}, kernel.where.device);
          if (!explain(context(), args).status.ok()) {
            break;
          }
          ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
          states.push_back({args.out, args.lse});
        }
        if (static_cast<int>(states.size()) < size) {
          continue;
        }
        MergeStatesArgs merge;
        merge.states = states;
        merge.out = merged.view(Side::kDevice);
        merge.lse = merged_lse.view(Side::kDevice);
        ASSERT_TRUE(call_with_workspace(context(), merge, kernel.where).ok());
        for (int rank = 0; rank < size; ++rank) {
          RescaleByLseArgs rescale;
          rescale.out = outs[rank].view(Side::kDevice);
          rescale.lse = all_lse.view(Side::kDevice);
          rescale.rank = rank;
          rescale.merged_lse = rescaled_lse.view(Side::kDevice);
          ASSERT_TRUE(call_with_workspace(context(), rescale, kernel.where).ok());
        }
        buffers.download();

        SparseMlaArgs host;
        host.q = q.view(Side::kHost);
        host.kv = whole.view(Side::kHost);
        host.indices = indices.view(Side::kHost);
        host.softmax_scale = args.softmax_scale;
        host.out = merged.view(Side::kHost);
        const reference::AttentionResult expected = reference::sparse_mla(host);
        EXPECT_EQ(compare_attention(merged.result(), merged_lse.result(), {}, expected, 576, false),
                  "")
            << size << " x " << interleave;
        std::vector<float> sum(kRows * kHeads * 512, 0.0f);
        for (int rank = 0; rank < size; ++rank) {
          for (size_t i = 0; i < sum.size(); ++i) {
            sum[i] += outs[rank].result().as<float>()[i];
          }
        }
        const ConstTensorView total =
            view_of(static_cast<const float*>(sum.data()), {kRows, kHeads, 512});
        EXPECT_EQ(compare_attention(total, rescaled_lse.result(), {}, expected, 576, false), "")
            << size << " x " << interleave;
      }
    }
  }
}

// A rank without keys may hold NaN: its share is exactly 0 and the other's LSE stands.
TEST(PartialStates, RankWithoutKeysContributesZeroWhateverItHolds) {
  for (const KernelOnDevice& kernel : kernels_of<RescaleByLseArgs>(context())) {
    for (double lse_value :
         {-kInfinity, kInfinity, std::numeric_limits<double>::quiet_NaN(), -1e30}) {
      BufferSet buffers(kernel.where);
      TestTensor out = buffers.tensor("out", Role::kInOut, DType::kFloat32, {1, 2, 32});
      out.fill([] { return std::numeric_limits<double>::quiet_NaN(); });
      TestTensor lse = buffers.tensor("lse", Role::kInput, DType::kFloat32, {2, 1, 2});
      for (int64_t h = 0; h < 2; ++h) {
        lse.set(lse_value, 0, 0, h);
        lse.set(1.25, 1, 0, h);
      }
      TestTensor merged = buffers.tensor("merged", Role::kOutput, DType::kFloat32, {1, 2});
      buffers.upload();
      RescaleByLseArgs args;
      args.out = out.view(Side::kDevice);
      args.lse = lse.view(Side::kDevice);
      args.merged_lse = merged.view(Side::kDevice);
      args.kernel = kernel.name;
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      buffers.download();
      EXPECT_EQ(compare("out", out.result(), std::vector<double>(64, 0.0), {}), "") << lse_value;
      EXPECT_EQ(compare("merged_lse", merged.result(), std::vector<double>(2, 1.25), {}), "");
    }
  }
}

TEST(PartialStates, NothingToDoSucceedsWithNullPointers) {
  for (const KernelOnDevice& kernel : kernels_of<MergeStatesArgs>(context())) {
    const Device device = kernel.where.device;
    const PartialState state{make_view<const void>(nullptr, DType::kFloat32, {0, 8, 64}, device),
                             make_view<const void>(nullptr, DType::kFloat32, {0, 8}, device)};
    MergeStatesArgs merge;
    merge.states = {&state, 1};
    merge.out = make_view<void>(nullptr, DType::kFloat32, {0, 8, 64}, device);
    EXPECT_TRUE(merge_states(context(), merge).ok());
    RescaleByLseArgs rescale;
    rescale.out = merge.out;
    rescale.lse = make_view<const void>(nullptr, DType::kFloat32, {2, 0, 8}, device);
    EXPECT_TRUE(rescale_by_lse(context(), rescale).ok());
  }
}

// ----------------------------------------------------------------------------------------- mha

// Each sequence alone gives what it gives in the batch.
TEST(MhaContract, RaggedBatchEqualsSingleSequences) {
  const MhaCase test_case{
      .name = "ragged", .q_lens = {0, 1, 129, 1, 70}, .k_lens = {0, 1, 129, 33, 100}, .heads = 3};
  for (const KernelOnDevice& kernel : kernels_for<MhaProblem>(test_case)) {
    MhaProblem batch(test_case, kernel.where);
    ASSERT_EQ(run(batch, kernel.name), "");
    MhaProblem alone(test_case, kernel.where);
    TestTensor ends = alone.buffers.tensor("ends", Role::kInput, DType::kInt32, {5, 2, 2});
    for (int64_t b = 0; b < 5; ++b) {
      ends.set(0, b, 0, 0);
      ends.set(test_case.q_lens[b], b, 0, 1);
      ends.set(0, b, 1, 0);
      ends.set(test_case.k_lens[b], b, 1, 1);
    }
    alone.buffers.upload();
    int64_t first_q = 0;
    int64_t first_k = 0;
    for (int64_t b = 0; b < 5; ++b) {
      MhaArgs args = alone.args(Side::kDevice);
      args.kernel = kernel.name;
      args.q = args.q.slice(0, first_q, test_case.q_lens[b]);
      args.out = args.out.slice(0, first_q, test_case.q_lens[b]);
      args.lse = args.lse.slice(0, first_q, test_case.q_lens[b]);
      args.k = args.k.slice(0, first_k, test_case.k_lens[b]);
      args.v = args.v.slice(0, first_k, test_case.k_lens[b]);
      const int32_t* pair = ends.view(Side::kDevice).as<int32_t>() + 4 * b;
      args.cu_seqlens_q = view_of(pair, {2}, kernel.where.device);
      args.cu_seqlens_k = view_of(pair + 2, {2}, kernel.where.device);
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      first_q += test_case.q_lens[b];
      first_k += test_case.k_lens[b];
    }
    alone.buffers.download();
    EXPECT_EQ(alone.verify(), "") << kernel.name;
    const double tolerance = 1e-5;  // the split of the work may differ
    for (int64_t i = 0; i < batch.out.extent(0); ++i) {
      for (int64_t h = 0; h < 3; ++h) {
        EXPECT_NEAR(reference::element(batch.lse.result(), i, h),
                    reference::element(alone.lse.result(), i, h), tolerance);
      }
    }
  }
}

// A context in chunks and the new tokens, each with its own mask window, merged: equal to one call.
TEST(MhaContract, ChunkedContextMergesToTheWhole) {
  constexpr int64_t kHeads = 2, kContext = 95, kNew = 40, kKeys = kContext + kNew;
  const MhaCase test_case{
      .name = "chunked", .q_lens = {kNew}, .k_lens = {kKeys}, .heads = kHeads, .mask_topk = 60};
  for (const KernelOnDevice& kernel : kernels_for<MhaProblem>(test_case)) {
    MhaProblem problem(test_case, kernel.where);
    struct Piece {
      int32_t start, length;
      bool causal;
    };
    const Piece pieces[] = {{0, 33, false}, {33, 31, false}, {64, 31, false}, {95, 40, true}};
    std::vector<TestTensor> outs, lses;
    for (size_t n = 0; n < 4; ++n) {
      outs.push_back(problem.buffers.tensor("part", Role::kOutput, DType::kFloat32,
                                            {kNew, kHeads, test_case.d_v}));
      lses.push_back(
          problem.buffers.tensor("part lse", Role::kOutput, DType::kFloat32, {kNew, kHeads}));
    }
    TestTensor numbers =
        problem.buffers.ints("numbers", {0, kNew, 0, 33, 0, 0, 31, 33, 0, 31, 64, 0, 40, 95});
    problem.buffers.upload();
    const int32_t* device_numbers = numbers.view(Side::kDevice).as<int32_t>();
    const Device device = kernel.where.device;
    std::vector<PartialState> states;
    for (size_t n = 0; n < 4; ++n) {
      MhaArgs args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      args.causal = pieces[n].causal;
      args.k = args.k.slice(0, pieces[n].start, pieces[n].length);
      args.v = args.v.slice(0, pieces[n].start, pieces[n].length);
      args.cu_seqlens_q = view_of(device_numbers, {2}, device);
      args.cu_seqlens_k = view_of(device_numbers + 2 + 3 * n, {2}, device);
      args.key_start = view_of(device_numbers + 4 + 3 * n, {1}, device);
      args.out = outs[n].view(Side::kDevice);
      args.lse = lses[n].view(Side::kDevice);
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      states.push_back({args.out, args.lse});
    }
    MergeStatesArgs merge;
    merge.states = states;
    merge.out = problem.out.view(Side::kDevice);
    merge.lse = problem.lse.view(Side::kDevice);
    ASSERT_TRUE(call_with_workspace(context(), merge, kernel.where).ok());
    problem.buffers.download();
    EXPECT_EQ(problem.verify(), "") << kernel.name;
  }
}

TEST(MhaContract, NothingToDoSucceedsWithNullPointers) {
  for (const KernelOnDevice& kernel : kernels_of<MhaArgs>(context())) {
    const Device device = kernel.where.device;
    MhaArgs args;
    args.q = make_view<const void>(nullptr, DType::kBFloat16, {0, 8, 192}, device);
    args.k = args.q;
    args.v = make_view<const void>(nullptr, DType::kBFloat16, {0, 8, 128}, device);
    args.seqlens_q = make_view<const void>(nullptr, DType::kInt32, {0}, device);
    args.seqlens_k = args.seqlens_q;
    args.softmax_scale = 1;
    args.out = make_view<void>(nullptr, DType::kBFloat16, {0, 8, 128}, device);
    args.kernel = kernel.name;
    const Status status = mha(context(), args);
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

TEST(MhaContract, HugeExtentsNeverGiveANegativeWorkspace) {
  int64_t nowhere = 0;
  for (const KernelOnDevice& kernel : kernels_of<MhaArgs>(context())) {
    const Device device = kernel.where.device;
    for (int64_t rows : {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 45}) {
      MhaArgs args;
      args.q = make_view<const void>(&nowhere, DType::kBFloat16, {rows, 128, 192}, device);
      args.k = args.q;
      args.v = make_view<const void>(&nowhere, DType::kBFloat16, {rows, 128, 128}, device);
      args.cu_seqlens_q = make_view<const void>(&nowhere, DType::kInt32, {2}, device);
      args.cu_seqlens_k = args.cu_seqlens_q;
      args.softmax_scale = 1;
      args.out = make_view<void>(&nowhere, DType::kBFloat16, {rows, 128, 128}, device);
      args.kernel = kernel.name;
      const Result<int64_t> needed = workspace_bytes(context(), args);
      EXPECT_TRUE(!needed.ok() || *needed >= 0) << *needed;
    }
  }
}

}  // namespace
}  // namespace lacuna::testing
