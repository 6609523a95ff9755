// Promises of the indexer's operations that one call cannot show.
#include <cmath>
#include <limits>
#include <numeric>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/compare.h"
#include "tests/support/host_map.h"
#include "tests/support/indexer_cases.h"

namespace lacuna::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const Context& context() { return conformance_context(); }

template <class Problem, class Args>
std::vector<std::vector<uint8_t>> bits_of(Problem& problem, const Args& args,
                                          const Context& on = context()) {
  problem.buffers.upload();
  const Status status = call_with_workspace(on, args, problem.buffers.where());
  EXPECT_TRUE(status.ok()) << status.message();
  problem.buffers.download();
  EXPECT_EQ(problem.buffers.untouched_error(), "");
  return problem.buffers.output_bytes();
}

// ---------------------------------------------------------------------------- chunked scratch

TEST(IndexLogitsContract, ScratchCapDoesNotChangeABit) {
  IndexLogitsCase test_case{.name = "cap",
                            .scoring = {.lengths = {3000, 1200, 5},
                                        .rows_per_request = 3,
                                        .heads = 16,
                                        .layout = KvLayout::index_fp8(),
                                        .q_dtype = DType::kFloat32}};
  for (const KernelOnDevice& kernel : kernels_of<IndexLogitsArgs>(context())) {
    IndexLogitsProblem problem(test_case, kernel.where);
    IndexLogitsArgs args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    if (!explain(context(), args).status.ok()) {
      continue;
    }
    const auto uncapped = bits_of(problem, args);
    for (int64_t cap :
         {int64_t{1}, int64_t{64}, int64_t{1000}, int64_t{1} << 16, int64_t{1} << 40}) {
      args.scratch_bytes_max = cap;
      EXPECT_EQ(uncapped, bits_of(problem, args)) << kernel.name << ", cap " << cap;
    }
  }
}

TEST(IndexLogitsContract, BitsDoNotDependOnTheBlockSize) {
  for (const KvLayout& layout : {KvLayout::index_fp8(), KvLayout::index_bf16(128)}) {
    for (const KernelOnDevice& kernel : kernels_of<IndexLogitsArgs>(context())) {
      std::vector<std::vector<uint8_t>> first;
      for (int64_t block : {1, 2, 16, 32, 61, 64, 128, 256, 576, 640}) {
        IndexLogitsProblem problem(
            {.name = "blocks",
             .scoring = {.lengths = {700, 33}, .layout = layout, .block_size = block}},
            kernel.where);
        IndexLogitsArgs args = problem.args(Side::kDevice);
        args.kernel = kernel.name;
        if (!explain(context(), args).status.ok()) {
          continue;
        }
        const auto bits = bits_of(problem, args);
        EXPECT_EQ(problem.verify(), "") << kernel.name << ", block size " << block;
        first = first.empty() ? bits : first;
        EXPECT_EQ(first, bits) << kernel.name << ", block size " << block;
      }
    }
  }
}

TEST(SelectKeysContract, LogitsCapDoesNotChangeABitAndBoundsTheWorkspace) {
  SelectKeysCase test_case{.name = "cap",
                           .scoring = {.lengths = {3000, 1200, 5, 900},
                                       .rows_per_request = 4,
                                       .heads = 4,
                                       .layout = KvLayout::index_fp8()},
                           .k = 64};
  for (const KernelOnDevice& kernel : kernels_of<SelectKeysArgs>(context())) {
    SelectKeysProblem problem(test_case, kernel.where);
    SelectKeysArgs args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    if (!explain(context(), args).status.ok()) {
      continue;
    }
    const auto uncapped = bits_of(problem, args);
    for (int64_t cap : {int64_t{1}, int64_t{5000}, int64_t{24001}, int64_t{1} << 20}) {
      args.logits_bytes_max = cap;
      EXPECT_EQ(uncapped, bits_of(problem, args)) << kernel.name << ", cap " << cap;
    }
    // 8192 rows of a million keys: the scratch follows the cap, not the product.
    int64_t nowhere = 0;
    const Device device = kernel.where.device;
    args.q = make_view<const void>(&nowhere, DType::kBFloat16, {8192, 4, 128}, device);
    args.head_weights = make_view<const void>(&nowhere, DType::kFloat32, {8192, 4}, device);
    args.request_ids = make_view<const void>(&nowhere, DType::kInt32, {8192}, device);
    args.visible_lengths = args.request_ids;
    args.block_table = make_view<const void>(&nowhere, DType::kInt32, {1, 16384}, device);
    args.keys.num_blocks = 16384;
    args.keys.block_size = 64;
    args.visible_length_max = 1 << 20;
    args.outputs = {};
    args.outputs.indices = make_view<void>(&nowhere, DType::kInt32, {8192, 64}, device);
    args.outputs.counts = make_view<void>(&nowhere, DType::kInt32, {8192}, device);
    args.logits_bytes_max = int64_t{256} << 20;
    const Result<int64_t> capped = workspace_bytes(context(), args);
    ASSERT_TRUE(capped.ok()) << capped.status().message();
    EXPECT_LT(*capped, int64_t{512} << 20);
    args.logits_bytes_max = 0;
    const Result<int64_t> by_default = workspace_bytes(context(), args);
    ASSERT_TRUE(by_default.ok());
    EXPECT_LT(*by_default, int64_t{512} << 20);
  }
}

TEST(SelectKeysContract, HugeExtentsNeverGiveANegativeWorkspace) {
  int64_t nowhere = 0;
  for (const KernelOnDevice& kernel : kernels_of<SelectKeysArgs>(context())) {
    const Device device = kernel.where.device;
    for (int64_t rows : {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 45}) {
      SelectKeysArgs args;
      args.q = make_view<const void>(&nowhere, DType::kBFloat16, {rows, 64, 128}, device);
      args.head_weights = make_view<const void>(&nowhere, DType::kFloat32, {rows, 64}, device);
      args.keys = paged_rows(&nowhere, KvLayout::index_fp8(), int64_t{1} << 30, 64, device);
      args.request_ids = make_view<const void>(&nowhere, DType::kInt32, {rows}, device);
      args.visible_lengths = args.request_ids;
      args.block_table =
          make_view<const void>(&nowhere, DType::kInt32, {1, int64_t{1} << 30}, device);
      args.k = 2048;
      args.outputs.indices = make_view<void>(&nowhere, DType::kInt32, {rows, 2048}, device);
      args.kernel = kernel.name;
      const Result<int64_t> needed = workspace_bytes(context(), args);
      EXPECT_TRUE(!needed.ok() || *needed >= 0) << *needed;
    }
  }
}

// ------------------------------------------------------------------------------- determinism

// Tensor-parallel ranks must choose the same keys in the same order, whatever their thread count.
TEST(TopKContract, TiesAreChosenAlikeByEveryNumberOfThreads) {
  const TopKCase test_case{.name = "ties",
                           .lengths = {5000, 4999, 4000, 3000, 100},
                           .k = 2048,
                           .family = ScoreFamily::kHalfTied,
                           .mask = true};
  for (const KernelOnDevice& kernel : kernels_of<TopKArgs>(context())) {
    TopKProblem problem(test_case, kernel.where);
    TopKArgs args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    if (!explain(context(), args).status.ok()) {
      continue;
    }
    const auto first = bits_of(problem, args);
    for (int threads : {1, 3, 7}) {
      Result<Context> other = Context::create({.num_threads = threads});
      ASSERT_TRUE(other.ok());
      EXPECT_EQ(first, bits_of(problem, args, *other)) << kernel.name << ", " << threads;
    }
  }
}

TEST(SelectKeysContract, RowsDoNotDependOnTheOtherRowsOrThreads) {
  const SelectKeysCase test_case{.name = "alone",
                                 .scoring = {.lengths = {900, 700, 31},
                                             .rows_per_request = 2,
                                             .heads = 8,
                                             .layout = KvLayout::index_fp8()},
                                 .k = 64};
  for (const KernelOnDevice& kernel : kernels_of<SelectKeysArgs>(context())) {
    SelectKeysProblem problem(test_case, kernel.where);
    SelectKeysArgs args = problem.args(Side::kDevice);
    args.kernel = kernel.name;
    if (!explain(context(), args).status.ok()) {
      continue;
    }
    const auto first = bits_of(problem, args);
    for (int threads : {1, 3}) {
      Result<Context> other = Context::create({.num_threads = threads});
      ASSERT_TRUE(other.ok());
      EXPECT_EQ(first, bits_of(problem, args, *other)) << kernel.name << ", " << threads;
    }
    problem.buffers.upload();
    for (int64_t t = 0; t < problem.tensors.num_rows; ++t) {
      SelectKeysArgs one = args;
      one.next_n = 1;
      for (ConstTensorView* tensor :
           {&one.q, &one.head_weights, &one.request_ids, &one.visible_lengths}) {
        *tensor = tensor->slice(0, t, 1);
      }
      for (TensorView* tensor :
           {&one.outputs.indices, &one.outputs.counts, &one.outputs.rows, &one.outputs.mask}) {
        *tensor = tensor->slice(0, t, 1);
      }
      ASSERT_TRUE(call_with_workspace(context(), one, kernel.where).ok());
    }
    problem.buffers.download();
    EXPECT_EQ(first, problem.buffers.output_bytes()) << kernel.name;
  }
}

// The composite gives what its three parts give.
TEST(SelectKeysContract, EqualsLogitsThenTopK) {
  for (int64_t kpool : {1, 4}) {
    SelectKeysCase test_case{.name = "parts",
                             .scoring = {.lengths = {900, 70, 33, 500},
                                         .rows_per_request = 2,
                                         .heads = 8,
                                         .layout = KvLayout::index_fp8(),
                                         .kpool = kpool},
                             .k = 64,
                             .rows = kpool == 1};
    for (const KernelOnDevice& kernel : kernels_of<SelectKeysArgs>(context())) {
      SelectKeysProblem problem(test_case, kernel.where);
      SelectKeysArgs args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      if (!explain(context(), args).status.ok()) {
        continue;
      }
      const int64_t rows = problem.tensors.num_rows;
      const int64_t columns = 900 / kpool;
      TestTensor logits =
          problem.buffers.tensor("logits", Role::kInOut, DType::kFloat32, {rows, columns});
      TestTensor pools = problem.buffers.tensor("pools", Role::kInput, DType::kInt32, {rows});
      for (int64_t t = 0; t < rows; ++t) {
        pools.set(std::floor(problem.tensors.visible_lengths.get(t) / static_cast<double>(kpool)),
                  t);
      }
      const auto composite = bits_of(problem, args);
      problem.buffers.upload();
      IndexLogitsArgs scoring;
      scoring.q = args.q;
      scoring.head_weights = args.head_weights;
      scoring.keys = args.keys;
      scoring.request_ids = args.request_ids;
      scoring.visible_lengths = pools.view(Side::kDevice);
      scoring.block_table = args.block_table;
      scoring.next_n = args.next_n;
      scoring.logits = logits.view(Side::kDevice);
      ASSERT_TRUE(call_with_workspace(context(), scoring, kernel.where).ok());
      TopKArgs top;
      top.logits = scoring.logits;
      top.lengths = args.visible_lengths;
      top.k = args.k;
      top.kpool = args.kpool;
      top.outputs = args.outputs;
      top.outputs.request_ids = args.request_ids;
      ASSERT_TRUE(call_with_workspace(context(), top, kernel.where).ok());
      problem.buffers.download();
      const auto parts = problem.buffers.output_bytes();
      // The logits are the last output; the composite has none.
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        EXPECT_EQ(composite[i], parts[i]) << kernel.name << ", output " << i;
      }
    }
  }
}

// Decode context parallelism: each rank's local winners, merged by (score, global position), are
// the global winners.
TEST(TopKContract, LocalWinnersMergeToTheGlobalOnes) {
  constexpr int64_t kTokens = 1000, kK = 64;
  for (int size : {2, 4}) {
    for (ScoreFamily family : {ScoreFamily::kRandom, ScoreFamily::kManyTies}) {
      for (const KernelOnDevice& kernel : kernels_of<TopKArgs>(context())) {
        const TopKCase test_case{.name = "global", .lengths = {kTokens}, .k = kK, .family = family};
        TopKProblem problem(test_case, kernel.where);
        BufferSet& buffers = problem.buffers;
        const int64_t local = kTokens / size;
        TestTensor shard = buffers.tensor("shard", Role::kInput, DType::kFloat32, {size, local});
        for (int64_t p = 0; p < kTokens; ++p) {
          shard.set(problem.logits.get(0, p), p % size, p / size);
        }
        TestTensor ids = buffers.tensor("ids", Role::kInput, DType::kInt32, {size, local});
        for (int64_t p = 0; p < kTokens; ++p) {
          ids.set(static_cast<double>(p), p % size, p / size);
        }
        TestTensor local_ids =
            buffers.tensor("local ids", Role::kOutput, DType::kInt32, {size, kK});
        TestTensor local_scores =
            buffers.tensor("local scores", Role::kOutput, DType::kFloat32, {size, kK});
        TestTensor merged = buffers.tensor("merged", Role::kOutput, DType::kInt32, {1, kK});
        buffers.upload();
        TopKArgs args;
        args.logits = shard.view(Side::kDevice);
        args.candidate_ids = ids.view(Side::kDevice);
        args.k = kK;
        args.outputs.indices = local_ids.view(Side::kDevice);
        args.outputs.scores = local_scores.view(Side::kDevice);
        args.kernel = kernel.name;
        if (!explain(context(), args).status.ok()) {
          continue;
        }
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        // All ranks' candidates side by side.
        args.logits = make_view<const void>(args.outputs.scores.data, DType::kFloat32,
                                            {1, size * kK}, kernel.where.device);
        args.candidate_ids = make_view<const void>(args.outputs.indices.data, DType::kInt32,
                                                   {1, size * kK}, kernel.where.device);
        args.outputs = {};
        args.outputs.indices = merged.view(Side::kDevice);
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        buffers.download();
        EXPECT_EQ(
            compare("merged", merged.result(), reference::top_k(problem.args(Side::kHost)).indices),
            "")
            << kernel.name;
      }
    }
  }
}

// ------------------------------------------------------------------------------- long tables

// A context of up to a million tokens whose only valid block is the last one of its table: the
// last position is found, at lengths on both sides of a block's edge.
TEST(LongTables, TheLastPositionIsFound) {
  constexpr int64_t kBlock = 64;
  for (int64_t length : {int64_t{327681}, int64_t{327680}, int64_t{327679}, int64_t{1048576}}) {
    const int64_t columns = (length + kBlock - 1) / kBlock;
    for (const TestDevice& where : devices_of(context())) {
      BufferSet buffers(where);
      const KvLayout layout = KvLayout::index_bf16(16);
      TestCache keys =
          buffers.cache("keys", Role::kInput, layout, {.num_blocks = 3, .block_size = kBlock});
      for (int64_t o = 0; o <= (length - 1) % kBlock; ++o) {
        keys.set_record(2 * kBlock + o, std::vector<float>(16, 1.0f + static_cast<float>(o)));
      }
      TestTensor table = buffers.tensor("block_table", Role::kInput, DType::kInt32, {1, columns});
      table.fill([] { return -1; });
      table.set(2, 0, columns - 1);
      TestTensor q = buffers.tensor("q", Role::kInput, DType::kBFloat16, {1, 1, 16});
      q.fill([] { return 1; });
      TestTensor weights = buffers.tensor("head_weights", Role::kInput, DType::kFloat32, {1, 1});
      weights.fill([] { return 1; });
      TestTensor request = buffers.ints("request_ids", {0});
      TestTensor visible = buffers.ints("visible_lengths", {static_cast<int32_t>(length)});
      TestTensor indices = buffers.tensor("indices", Role::kOutput, DType::kInt32, {1, 1});
      TestTensor rows = buffers.tensor("rows", Role::kOutput, DType::kInt32, {1, 1});
      TestTensor logits = buffers.tensor("logits", Role::kOutput, DType::kFloat32, {1, length});
      TestTensor last = buffers.tensor("last", Role::kInput, DType::kInt32, {1, 2});
      last.set(static_cast<double>(length - 1), 0, 0);
      last.set(static_cast<double>(columns * kBlock), 0, 1);  // one past the table
      TestTensor last_row = buffers.tensor("last row", Role::kOutput, DType::kInt32, {1, 2});
      buffers.upload();

      SelectKeysArgs select;
      select.q = q.view(Side::kDevice);
      select.head_weights = weights.view(Side::kDevice);
      select.keys = keys.view(Side::kDevice);
      select.request_ids = request.view(Side::kDevice);
      select.visible_lengths = visible.view(Side::kDevice);
      select.block_table = table.view(Side::kDevice);
      select.k = 1;
      select.outputs.indices = indices.view(Side::kDevice);
      select.outputs.rows = rows.view(Side::kDevice);
      select.outputs.block_table = select.block_table;
      select.outputs.num_blocks = 3;
      select.outputs.block_size = kBlock;
      const Status selected = call_with_workspace(context(), select, where);
      ASSERT_TRUE(selected.ok()) << selected.message();

      IndexLogitsArgs score;
      score.q = select.q;
      score.head_weights = select.head_weights;
      score.keys = select.keys;
      score.request_ids = select.request_ids;
      score.visible_lengths = select.visible_lengths;
      score.block_table = select.block_table;
      score.logits = logits.view(Side::kDevice);
      ASSERT_TRUE(call_with_workspace(context(), score, where).ok());

      TranslateIndicesArgs translate;
      translate.indices = last.view(Side::kDevice);
      translate.request_ids = select.request_ids;
      translate.block_table = select.block_table;
      translate.num_blocks = 3;
      translate.block_size = kBlock;
      translate.rows = last_row.view(Side::kDevice);
      ASSERT_TRUE(call_with_workspace(context(), translate, where).ok());
      buffers.download();

      const int32_t row = static_cast<int32_t>(2 * kBlock + (length - 1) % kBlock);
      const std::vector<int32_t> found = {static_cast<int32_t>(length - 1)};
      EXPECT_EQ(compare("indices", indices.result(), found), "");
      EXPECT_EQ(compare("rows", rows.result(), std::vector<int32_t>{row}), "");
      EXPECT_EQ(compare("last row", last_row.result(), std::vector<int32_t>{row, -1}), "");
      std::vector<double> expected(length, -kInfinity);
      for (int64_t p = (columns - 1) * kBlock; p < length; ++p) {
        expected[p] = 16.0 * static_cast<double>(1 + p % kBlock);
      }
      EXPECT_EQ(compare("logits", logits.result(), expected, {}), "");
    }
  }
}

// ------------------------------------------------------------------------------ large offsets

// Index keys, logits and lists whose offsets pass 2^31 and 2^32; only what is named exists.
TEST(IndexerOffsets, BeyondTwoToThe31) {
  for (const KernelOnDevice& kernel : kernels_of<IndexLogitsArgs>(context())) {
    if (kernel.where.device.kind != DeviceKind::kCpu) {
      continue;
    }
    for (const KvLayout& layout : {KvLayout::index_fp8(), KvLayout::index_bf16(128)}) {
      constexpr int64_t kBlock = 64;
      const int64_t block_bytes = kBlock * layout.record_bytes();
      const int64_t num_blocks = (int64_t{5} << 30) / block_bytes;
      HostMap map(num_blocks * block_bytes);
      const KvCacheView keys = paged_rows(map.data(), layout, num_blocks, kBlock);
      const std::vector<int32_t> blocks = {0, static_cast<int32_t>(num_blocks - 1),
                                           static_cast<int32_t>(num_blocks / 2)};
      Random random(9);
      std::vector<float> key(128);
      for (int32_t block : blocks) {
        map.allow(block * block_bytes, block_bytes);
        for (int64_t o = 0; o < kBlock; ++o) {
          for (float& value : key) {
            value = random.bell();
          }
          const int64_t slot = block * kBlock + o;
          const AppendIndexKeysArgs append{.keys = view_of<float>(key.data(), {1, 128}),
                                           .slot_mapping = view_of<int64_t>(&slot, {1}),
                                           .kv = keys};
          const Status stored = call_with_workspace(context(), append, kernel.where);
          ASSERT_TRUE(stored.ok()) << stored.message();
        }
      }
      const int64_t columns = 3 * kBlock;
      constexpr int64_t kStride = (int64_t{1} << 31) + 4096;
      HostMap logits_map(4 * (kStride + 4096));
      IndexLogitsArgs args;
      args.logits = make_view<void>(logits_map.data(), DType::kFloat32, {2, columns});
      args.logits.strides[0] = kStride;
      for (int64_t t = 0; t < 2; ++t) {
        logits_map.allow(4 * t * kStride, 4 * columns);
      }
      std::vector<float> q(2 * 4 * 128), weights(2 * 4);
      for (float& value : q) {
        value = random.bell();
      }
      for (float& value : weights) {
        value = random.bell();
      }
      const std::vector<int32_t> zeros = {0, 0};
      const std::vector<int32_t> visible(2, static_cast<int32_t>(columns));
      args.q = view_of<float>(q.data(), {2, 4, 128});
      args.head_weights = view_of<float>(weights.data(), {2, 4});
      args.keys = keys;
      args.request_ids = view_of<int32_t>(zeros.data(), {2});
      args.visible_lengths = view_of<int32_t>(visible.data(), {2});
      args.block_table = view_of<int32_t>(blocks.data(), {1, 3});
      args.kernel = kernel.name;
      const Status status = call_with_workspace(context(), args, kernel.where);
      ASSERT_TRUE(status.ok()) << status.message();
      const reference::IndexLogits expected = reference::index_logits(args);
      std::vector<double> slack = expected.scale;
      for (double& value : slack) {
        value *= 32 * 0x1p-24;
      }
      EXPECT_EQ(compare("logits", args.logits, expected.logits, {}, slack), "")
          << kernel.name << ", " << kv_format_name(layout.format);

      // The same logits through top_k, with lists as far apart.
      HostMap list_map(4 * (kStride + 4096));
      TopKArgs top;
      top.logits = args.logits;
      top.k = 50;
      top.outputs.indices = make_view<void>(list_map.data(), DType::kInt32, {2, 50});
      top.outputs.indices.strides[0] = kStride;
      list_map.allow(0, 200);
      list_map.allow(4 * kStride, 200);
      ASSERT_TRUE(call_with_workspace(context(), top, kernel.where).ok());
      EXPECT_EQ(compare("indices", top.outputs.indices, reference::top_k(top).indices), "");
    }
  }
}

// ---------------------------------------------------------------------------- nothing to do

TEST(IndexerContract, NothingToDoSucceedsWithNullPointers) {
  for (const TestDevice& where : devices_of(context())) {
    const Device device = where.device;
    const auto ints = [&](std::initializer_list<int64_t> shape) {
      return make_view<void>(nullptr, DType::kInt32, shape, device);
    };
    TranslateIndicesArgs translate;
    translate.indices = ints({0, 64});
    translate.request_ids = ints({0});
    translate.block_table = ints({0, 0});
    translate.block_size = 64;
    translate.rows = ints({0, 64});
    EXPECT_TRUE(translate_indices(context(), translate).ok());

    IndexLogitsArgs score;
    score.q = make_view<void>(nullptr, DType::kBFloat16, {0, 8, 128}, device);
    score.head_weights = make_view<void>(nullptr, DType::kFloat32, {0, 8}, device);
    score.keys = paged_rows(nullptr, KvLayout::index_fp8(), 0, 64, device);
    score.request_ids = ints({0});
    score.visible_lengths = ints({0});
    score.block_table = ints({0, 0});
    score.logits = make_view<void>(nullptr, DType::kFloat32, {0, 100}, device);
    EXPECT_TRUE(index_logits(context(), score).ok());

    TopKArgs top;
    top.logits = score.logits;
    top.k = 8;
    top.outputs.indices = ints({0, 8});
    EXPECT_TRUE(top_k(context(), top).ok());

    SelectKeysArgs select;
    select.q = score.q;
    select.head_weights = score.head_weights;
    select.keys = score.keys;
    select.request_ids = score.request_ids;
    select.visible_lengths = score.visible_lengths;
    select.block_table = score.block_table;
    select.k = 8;
    select.outputs.indices = ints({0, 8});
    EXPECT_TRUE(select_keys(context(), select).ok());
  }
}

// Rows exist but see nothing, and there is no cache: every list is empty.
TEST(IndexerContract, RowsThatSeeNothingHaveEmptyLists) {
  for (const TestDevice& where : devices_of(context())) {
    BufferSet buffers(where);
    TestTensor q = buffers.tensor("q", Role::kInput, DType::kBFloat16, {3, 8, 128});
    TestTensor weights = buffers.tensor("weights", Role::kInput, DType::kFloat32, {3, 8});
    TestTensor requests = buffers.ints("requests", {0, -1, 0});
    TestTensor visible = buffers.ints("visible", {0, 5, -7});
    TestTensor table = buffers.tensor("table", Role::kInput, DType::kInt32, {1, 0});
    TestTensor indices = buffers.tensor("indices", Role::kOutput, DType::kInt32, {3, 8});
    TestTensor counts = buffers.tensor("counts", Role::kOutput, DType::kInt32, {3});
    buffers.upload();
    SelectKeysArgs args;
    args.q = q.view(Side::kDevice);
    args.head_weights = weights.view(Side::kDevice);
    args.keys = paged_rows(nullptr, KvLayout::index_fp8(), 0, 64, where.device);
    args.request_ids = requests.view(Side::kDevice);
    args.visible_lengths = visible.view(Side::kDevice);
    args.block_table = table.view(Side::kDevice);
    args.k = 8;
    args.outputs.indices = indices.view(Side::kDevice);
    args.outputs.counts = counts.view(Side::kDevice);
    const Status status = call_with_workspace(context(), args, where);
    ASSERT_TRUE(status.ok()) << status.message();
    buffers.download();
    EXPECT_EQ(compare("indices", indices.result(), std::vector<int32_t>(24, -1)), "");
    EXPECT_EQ(compare("counts", counts.result(), std::vector<int32_t>(3, 0)), "");
  }
}

}  // namespace
}  // namespace lacuna::testing
