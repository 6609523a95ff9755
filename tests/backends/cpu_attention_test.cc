// White-box tests of the CPU's attention: what single calls against the oracle can not see. Bits
// must not depend on schedules, threads, old workspace or neighbours; memory that no list names is
// not touched; every SIMD target that this machine has computes the same thing.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "core/check.h"
#include "ops/dispatch.h"
#include "tests/backends/each_target.h"
#include "tests/reference/reference.h"
#include "tests/support/random.h"

namespace lacuna {
namespace {

using testing::for_each_target;
using testing::Random;

const Context& context_of(int num_threads) {
  static const std::vector<Context> contexts = [] {
    std::vector<Context> made;
    for (int threads = 1; threads <= 4; ++threads) {
      made.push_back(*Context::create({.num_threads = threads}));
    }
    return made;
  }();
  return contexts.at(num_threads - 1);
}

// A workspace of exactly `bytes`, filled with `garbage`.
class Scratch {
 public:
  Scratch(int64_t bytes, uint8_t garbage)
      : bytes_(bytes), data_(std::aligned_alloc(64, (bytes + 64) / 64 * 64)) {
    std::memset(data_, garbage, static_cast<size_t>(bytes));
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Launch launch() const { return {.workspace = data_, .workspace_bytes = bytes_}; }

 private:
  int64_t bytes_;
  void* data_;
};

template <class Args, class Run>
Status run_with_garbage(const Context& context, const Args& args, uint8_t garbage, Run&& run) {
  LACUNA_ASSIGN_OR_RETURN(const int64_t bytes, workspace_bytes(context, args));
  const Scratch scratch(bytes, garbage);
  return run(context, args, scratch.launch());
}

struct Outcome {
  std::vector<float> out;
  std::vector<float> lse;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

struct SparseShape {
  int64_t rows = 3;
  int64_t heads = 5;
  int64_t width = 700;
  int64_t tokens = 900;
  KvLayout layout = KvLayout::latent_bf16(64, 32);
};

// A sparse MLA call over random data, ragged counts and lists with holes.
class SparseProblem {
 public:
  explicit SparseProblem(const SparseShape& shape) : shape_(shape) {
    Random random(17);
    const int64_t d_qk = shape.layout.d_qk();
    std::vector<float> values(shape.tokens * d_qk);
    for (float& value : values) {
      value = random.bell();
    }
    std::vector<int64_t> slots(shape.tokens);
    std::iota(slots.begin(), slots.end(), 0);
    cache_.resize(shape.tokens * shape.layout.record_bytes());
    AppendKvArgs append = {
        .latent =
            view_of(static_cast<const float*>(values.data()), {shape.tokens, shape.layout.latent}),
        .slot_mapping = view_of(static_cast<const int64_t*>(slots.data()), {shape.tokens}),
        .kv = kv()};
    if (shape.layout.rope > 0) {
      append.rope = view_of(values.data() + shape.tokens * shape.layout.latent,
                            {shape.tokens, shape.layout.rope});
    }
    LACUNA_CHECK(append_kv(context_of(1), append).ok());
    query_.resize(shape.rows * shape.heads * d_qk);
    for (float& value : query_) {
      value = 0.5f * random.bell();
    }
    indices_.resize(shape.rows * shape.width);
    for (int32_t& id : indices_) {
      id = random.chance(0.2) ? -1 : static_cast<int32_t>(random.integer(0, shape.tokens - 1));
    }
    counts_.resize(shape.rows);
    for (int32_t& count : counts_) {
      count = random.chance(0.3) ? static_cast<int32_t>(shape.width)
                                 : static_cast<int32_t>(random.integer(0, shape.width));
    }
  }

  KvCacheView kv() { return flat_rows(cache_.data(), shape_.layout, shape_.tokens); }

  // Rows [first, first + count) of the batch, writing to `outcome`.
  SparseMlaArgs args(Outcome& outcome, int64_t first, int64_t count) {
    const auto& [rows, heads, width, tokens, layout] = shape_;
    outcome.out.assign(count * heads * layout.latent, -77.0f);
    outcome.lse.assign(count * heads, -77.0f);
    return {.q = view_of(static_cast<const float*>(query_.data()), {rows, heads, layout.d_qk()})
                     .slice(0, first, count),
            .kv = kv(),
            .indices = view_of(static_cast<const int32_t*>(indices_.data()), {rows, width})
                           .slice(0, first, count),
            .valid_counts =
                view_of(static_cast<const int32_t*>(counts_.data()), {rows}).slice(0, first, count),
            .softmax_scale = 0.1,
            .out = view_of(outcome.out.data(), {count, heads, layout.latent}),
            .lse = view_of(outcome.lse.data(), {count, heads})};
  }
  SparseMlaArgs args(Outcome& outcome) { return args(outcome, 0, shape_.rows); }

  Outcome run(const Context& context, bool batch_invariant, bool schedule, uint8_t garbage) {
    Outcome outcome;
    SparseMlaArgs call = args(outcome);
    call.batch_invariant = batch_invariant;
    std::vector<int32_t> entries;
    if (schedule) {
      entries.assign(4 * schedule_entries(context, shape_.rows, shape_.width), -1);
      const int64_t count = static_cast<int64_t>(entries.size()) / 4;
      const SparseMlaScheduleArgs build = {.num_rows = shape_.rows,
                                           .list_width = shape_.width,
                                           .num_heads = shape_.heads,
                                           .d_qk = shape_.layout.d_qk(),
                                           .valid_counts = call.valid_counts,
                                           .batch_invariant = batch_invariant,
                                           .schedule = view_of(entries.data(), {count, 4})};
      const Status built = build_schedule(context, build);
      EXPECT_TRUE(built.ok()) << built.message();
      call.schedule = view_of(static_cast<const int32_t*>(entries.data()), {count, 4});
    }
    const Status status = run_with_garbage(context, call, garbage, sparse_mla);
    EXPECT_TRUE(status.ok()) << status.message();
    return outcome;
  }

  const SparseShape& shape() const { return shape_; }

 private:
  SparseShape shape_;
  std::vector<uint8_t> cache_;
  std::vector<float> query_;
  std::vector<int32_t> indices_;
  std::vector<int32_t> counts_;
};

TEST(CpuSparseMla, BitsDoNotDependOnScheduleWorkspaceOrRun) {
  for (const int64_t rows : {1, 2, 3, 5, 9, 40}) {
    SparseProblem problem({.rows = rows});
    for (const int threads : {1, 2, 3}) {
      const Context& context = context_of(threads);
      const Outcome first = problem.run(context, false, false, 0xFF);
      for (int repeat = 0; repeat < 5; ++repeat) {
        EXPECT_EQ(problem.run(context, false, repeat % 2 == 0, repeat < 3 ? 0x01 : 0xFF), first)
            << rows << " rows, " << threads << " threads, repeat " << repeat;
      }
    }
  }
}

TEST(CpuSparseMla, BatchInvariantBitsDoNotDependOnThreads) {
  // Around the numbers of rows at which a task becomes a whole row, and with rows of one split.
  for (const int64_t width : {300, 1300}) {
    for (const int64_t rows : {1, 3, 4, 8, 11, 12, 17}) {
      SparseProblem problem({.rows = rows, .width = width});
      const Outcome first = problem.run(context_of(1), true, false, 0xFF);
      for (const int threads : {1, 2, 3, 4}) {
        for (const bool schedule : {false, true}) {
          EXPECT_EQ(problem.run(context_of(threads), true, schedule, 0x01), first)
              << rows << " rows of " << width << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(CpuSparseMla, BatchInvariantRowsDoNotSeeEachOther) {
  SparseProblem problem({.rows = 13, .width = 1500});
  const int64_t heads = problem.shape().heads;
  const int64_t latent = problem.shape().layout.latent;
  const Outcome batch = problem.run(context_of(2), true, false, 0xFF);
  for (int64_t row = 0; row < problem.shape().rows; ++row) {
    Outcome alone;
    SparseMlaArgs args = problem.args(alone, row, 1);
    args.batch_invariant = true;
    const Status status = run_with_garbage(context_of(2), args, 0xFF, sparse_mla);
    ASSERT_TRUE(status.ok()) << status.message();
    const auto out = batch.out.begin() + row * heads * latent;
    const auto lse = batch.lse.begin() + row * heads;
    EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), out)) << "row " << row;
    EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(), lse)) << "row " << row;
  }
}

TEST(CpuSparseMla, WorkspaceGrowsWithEveryExtent) {
  for (const bool batch_invariant : {false, true}) {
    for (const int threads : {1, 4}) {
      const auto bytes_of = [&](int64_t rows, int64_t heads, int64_t width) {
        SparseProblem problem({.rows = rows, .heads = heads, .width = width, .tokens = 10});
        Outcome outcome;
        SparseMlaArgs args = problem.args(outcome);
        args.batch_invariant = batch_invariant;
        return *workspace_bytes(context_of(threads), args);
      };
      for (const int64_t width : {1, 63, 64, 65, 511, 512, 513, 2048, 2049}) {
        for (const int64_t rows : {1, 2, 7, 8, 15, 16, 17, 40}) {
          const int64_t bytes = bytes_of(rows, 2, width);
          EXPECT_LE(bytes, bytes_of(rows + 1, 2, width)) << rows << " x " << width;
          EXPECT_LE(bytes, bytes_of(rows, 3, width)) << rows << " x " << width;
          EXPECT_LE(bytes, bytes_of(rows, 2, width + 1)) << rows << " x " << width;
        }
      }
    }
  }
}

TEST(CpuSparseMla, RefusesWhatIsNotItsSchedule) {
  SparseProblem problem({.rows = 6, .width = 2000});
  const Context& context = context_of(2);
  const int64_t count = schedule_entries(context, 6, 2000);
  std::vector<int32_t> entries(4 * count);
  const SparseMlaScheduleArgs build = {.num_rows = 6,
                                       .list_width = 2000,
                                       .num_heads = 5,
                                       .d_qk = 96,
                                       .schedule = view_of(entries.data(), {count, 4})};
  ASSERT_TRUE(build_schedule(context, build).ok());
  Outcome outcome;
  SparseMlaArgs args = problem.args(outcome);
  const auto code_with = [&](const std::vector<int32_t>& schedule) {
    args.schedule = view_of(schedule.data(), {static_cast<int64_t>(schedule.size()) / 4, 4});
    return run_with_garbage(context, args, 0xFF, sparse_mla).code();
  };
  EXPECT_EQ(code_with(entries), StatusCode::kOk);
  for (size_t i = 0; i < 4 * 7; ++i) {
    if (i % 4 == 2 && i < 4 * 6) {
      continue;  // a length: any value gives the right result
    }
    std::vector<int32_t> changed = entries;
    changed[i] += 1;
    EXPECT_EQ(code_with(changed), StatusCode::kInvalidArgument) << "word " << i;
    changed[i] = -1000000;
    EXPECT_NE(code_with(changed), StatusCode::kInternal) << "word " << i;
  }
  EXPECT_EQ(code_with(std::vector<int32_t>(4 * count)), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_with({entries.begin(), entries.begin() + 4 * 6}), StatusCode::kInvalidArgument);
  args.batch_invariant = true;
  EXPECT_EQ(code_with(entries), StatusCode::kInvalidArgument);
}

// Every second row of the cache starts a page that may not be touched, and the last listed row ends
// where such a page begins.
TEST(CpuSparseMla, TouchesOnlyListedRows) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  for (const KvLayout& layout :
       {KvLayout::latent_bf16(512, 64), KvLayout::latent_bf16(48, 0), KvLayout::latent_bf16(33, 7),
        KvLayout::latent_f32(64, 0), KvLayout::latent_f32(40, 8), KvLayout::fp8_ds_mla(),
        KvLayout::fp8_ds_mla(0)}) {
    constexpr int64_t kPages = 8;
    void* mapped =
        mmap(nullptr, kPages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(mapped, MAP_FAILED);
    // Row r ends where page r + 1 begins. Rows of odd numbers, the rows before them included, are
    // not mapped.
    char* first_row = static_cast<char*>(mapped) + page - layout.record_bytes();
    for (int64_t i = 1; i < kPages; i += 2) {
      ASSERT_EQ(mprotect(static_cast<char*>(mapped) + i * page, page, PROT_NONE), 0);
    }
    const std::vector<int32_t> indices = {0, 2, 4, 6, 2};
    const int64_t width = static_cast<int64_t>(indices.size());
    const std::vector<float> query(3 * layout.d_qk(), 0.25f);
    std::vector<float> out(3 * layout.latent, -1.0f);
    const SparseMlaArgs args = {.q = view_of(query.data(), {1, 3, layout.d_qk()}),
                                .kv = {.data = first_row,
                                       .layout = layout,
                                       .num_blocks = 1,
                                       .block_size = kPages - 1,
                                       .block_stride_bytes = (kPages - 1) * page,
                                       .row_bytes = page},
                                .indices = view_of(indices.data(), {1, width}),
                                .softmax_scale = 1,
                                .out = view_of(out.data(), {1, 3, layout.latent})};
    const Status status = run_with_garbage(context_of(2), args, 0xFF, sparse_mla);
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_EQ(std::count(out.begin(), out.end(), 0.0f), static_cast<int64_t>(out.size()))
        << "the rows are zeros";
    munmap(mapped, kPages * page);
  }
}

// f32 in and out: what remains is the order of summation. 700 keys of weights that add up to 1 and
// values of about 1, dot products of 96: 100 roundings of 6e-8 each.
constexpr double kF32Tolerance = 6e-6;

TEST(CpuSparseMla, EverySimdTargetAgreesWithTheOracle) {
  for (const KvLayout& layout :
       {KvLayout::latent_bf16(64, 32), KvLayout::latent_bf16(33, 7), KvLayout::latent_bf16(48, 0),
        KvLayout::latent_f32(64, 16), KvLayout::latent_f32(20, 3), KvLayout::fp8_ds_mla()}) {
    SparseProblem problem({.rows = 3, .heads = 7, .layout = layout});
    Outcome unused;
    const reference::AttentionResult expected = reference::sparse_mla(problem.args(unused));
    for_each_target([&](const char* target) {
      const Outcome outcome = problem.run(context_of(2), false, false, 0xFF);
      double worst = 0;
      for (size_t i = 0; i < outcome.out.size(); ++i) {
        worst = std::max(worst, std::abs(outcome.out[i] - expected.out[i]));
      }
      for (size_t i = 0; i < outcome.lse.size(); ++i) {
        if (outcome.lse[i] != expected.lse[i]) {  // -inf equals -inf
          worst = std::max(worst, std::abs(outcome.lse[i] - expected.lse[i]));
        }
      }
      EXPECT_LT(worst, kF32Tolerance) << target << ", " << layout.latent << " + " << layout.rope;
    });
  }
}

struct MhaProblem {
  int64_t heads = 3;
  int64_t d_nope = 40;
  int64_t d_rope = 8;
  int64_t d_v = 36;
  std::vector<int32_t> cu_q = {0, 70, 70, 71, 135};
  std::vector<int32_t> cu_k = {0, 200, 230, 231, 331};
  std::vector<int32_t> key_start = {1, 31, 33, 95};
  std::vector<float> q, k_nope, k_rope, v;
  std::vector<int32_t> mask;
  static constexpr int64_t kWords = 16;

  MhaProblem() {
    Random random(23);
    const auto fill = [&](std::vector<float>& values, int64_t count) {
      values.resize(count);
      for (float& value : values) {
        value = 0.5f * random.bell();
      }
    };
    fill(q, cu_q.back() * heads * (d_nope + d_rope));
    fill(k_nope, cu_k.back() * heads * d_nope);
    fill(k_rope, cu_k.back() * d_rope);
    fill(v, cu_k.back() * heads * d_v);
    mask.resize(cu_q.back() * kWords);
    for (int32_t& word : mask) {
      word = static_cast<int32_t>(random.bits() & random.bits());
    }
  }

  MhaArgs args(Outcome& outcome) const {
    const int64_t rows = cu_q.back();
    const int64_t keys = cu_k.back();
    const int64_t num_sequences = static_cast<int64_t>(key_start.size());
    outcome.out.assign(rows * heads * d_v, -77.0f);
    outcome.lse.assign(rows * heads, -77.0f);
    return {.q = view_of(q.data(), {rows, heads, d_nope + d_rope}),
            .k_nope = view_of(k_nope.data(), {keys, heads, d_nope}),
            .k_rope = view_of(k_rope.data(), {keys, d_rope}),
            .v = view_of(v.data(), {keys, heads, d_v}),
            .cu_seqlens_q = view_of(cu_q.data(), {num_sequences + 1}),
            .cu_seqlens_k = view_of(cu_k.data(), {num_sequences + 1}),
            .softmax_scale = 0.2,
            .mask = view_of(mask.data(), {rows, kWords}),
            .key_start = view_of(key_start.data(), {num_sequences}),
            .out = view_of(outcome.out.data(), {rows, heads, d_v}),
            .lse = view_of(outcome.lse.data(), {rows, heads})};
  }
};

TEST(CpuMha, EverySimdTargetAgreesWithTheOracle) {
  const MhaProblem problem;
  Outcome unused;
  const reference::AttentionResult expected = reference::mha(problem.args(unused));
  for_each_target([&](const char* target) {
    Outcome first;
    for (const int threads : {1, 3}) {
      for (const uint8_t garbage : {0xFF, 0x01}) {
        Outcome outcome;
        const Status status =
            run_with_garbage(context_of(threads), problem.args(outcome), garbage, mha);
        ASSERT_TRUE(status.ok()) << status.message();
        double worst = 0;
        for (size_t i = 0; i < outcome.out.size(); ++i) {
          worst = std::max(worst, std::abs(outcome.out[i] - expected.out[i]));
        }
        for (size_t i = 0; i < outcome.lse.size(); ++i) {
          if (outcome.lse[i] != expected.lse[i]) {
            worst = std::max(worst, std::abs(outcome.lse[i] - expected.lse[i]));
          }
        }
        EXPECT_LT(worst, kF32Tolerance) << target;
        if (first.out.empty()) {
          first = outcome;
        }
        EXPECT_EQ(outcome, first) << target << ": bits depend on threads or old workspace";
      }
    }
  });
}

}  // namespace
}  // namespace lacuna
