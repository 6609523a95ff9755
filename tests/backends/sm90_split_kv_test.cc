// The cut of sm90/sparse_mla_small_head: what holds for every shape on every device, whatever the
// model of its time says.
#include "backends/sm90/attention/split_kv.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ops/tuning.h"

namespace lacuna::sm90 {
namespace {

using cuda::kSplitsMax;
using cuda::PlanShape;

// Slices of a GPU, an H20, an unknown Hopper, H100 and H200.
const std::vector<int64_t> kSmCounts = {16, 32, 60, 78, 100, 132};
const std::vector<int64_t> kHeads = {1, 5, 8, 16, 32};
const std::vector<int64_t> kWidths = {0, 1, 63, 64, 65, 128, 640, 2048, 2176, 4097, 8320, 100000};

std::vector<int64_t> rows_around(int64_t sm_count) {
  return {0,
          1,
          2,
          3,
          8,
          sm_count - 1,
          sm_count,
          sm_count + 1,
          sm_count + 7,
          sm_count * 3 / 2,
          2 * sm_count - 1,
          2 * sm_count,
          2 * sm_count + 1,
          2119};
}

std::string text(const PlanShape& shape) {
  return std::to_string(shape.num_rows) + " rows of " + std::to_string(shape.num_heads) +
         " heads, width " + std::to_string(shape.list_width) + ", counts to " +
         std::to_string(shape.count_max) + ", " + std::to_string(shape.sm_count) + " SMs" +
         (shape.batch_invariant ? ", invariant" : "");
}

template <class Visit>
void for_each_shape(Visit&& visit) {
  for (const int64_t sm_count : kSmCounts) {
    for (const int64_t rows : rows_around(sm_count)) {
      for (const int64_t heads : kHeads) {
        for (const int64_t width : kWidths) {
          for (const int64_t count_max : {width, width / 3, int64_t{0}}) {
            for (const bool invariant : {false, true}) {
              const PlanShape shape = {rows, width, count_max, heads, sm_count, invariant};
              SCOPED_TRACE(text(shape));
              visit(shape);
              if (testing::Test::HasFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

TEST(SplitKv, CoversEachKeyOnce) {
  for_each_shape([](const PlanShape& shape) {
    const SplitKv split = split_kv(shape, nullptr);
    const int64_t keys = shape.batch_invariant ? shape.list_width : shape.count_max;
    ASSERT_GE(split.num_splits, 1);
    ASSERT_LE(split.num_splits, kSplitsMax);
    ASSERT_GT(split.keys_per_split, 0);
    EXPECT_EQ(split.keys_per_split % kTileKeys, 0);
    // The last split takes the rest of the list, and has some keys.
    EXPECT_GE(split.num_splits * split.keys_per_split, keys);
    EXPECT_TRUE(split.num_splits == 1 || (split.num_splits - 1) * split.keys_per_split < keys);
    EXPECT_STRNE(split.reason, "");
  });
}

TEST(SplitKv, RunsCoverTheLastRowsOnce) {
  int64_t shapes = 0;
  for_each_shape([&](const PlanShape& shape) {
    const SplitKv split = split_kv(shape, nullptr);
    const RowRuns& runs = split.runs;
    if (runs.num_runs == 0) {
      return;
    }
    ++shapes;
    EXPECT_FALSE(shape.batch_invariant);
    EXPECT_FALSE(split.cluster);
    EXPECT_EQ(split.num_splits, 1);
    EXPECT_EQ(split.rows_per_launch, shape.num_rows);
    EXPECT_EQ((shape.num_rows - runs.num_rows) % shape.sm_count, 0);
    EXPECT_LT(runs.num_rows, shape.num_rows);
    EXPECT_LE(runs.num_runs, shape.sm_count);
    EXPECT_EQ(runs.tiles_per_row, split.keys_per_split / kTileKeys);
    std::vector<int32_t> covered(runs.num_rows);  // tiles of a row so far
    std::vector<int32_t> first_slot(runs.num_rows, -1);
    std::vector<int32_t> num_parts(runs.num_rows);
    for (int32_t run = 0; run < runs.num_runs; ++run) {
      for (int32_t number = 0; number < 2; ++number) {
        const RowRuns::Part part = runs.part(run, number);
        if (part.begin == part.end) {
          EXPECT_EQ(number, 1);
          continue;
        }
        EXPECT_LT(number, runs.run_parts());
        ASSERT_LT(part.row, runs.num_rows);
        EXPECT_EQ(part.begin, covered[part.row]);
        EXPECT_LT(part.begin, part.end);
        covered[part.row] = part.end;
        if (num_parts[part.row]++ == 0) {
          first_slot[part.row] = run + part.row;
        }
        EXPECT_EQ(run + part.row, first_slot[part.row] + num_parts[part.row] - 1);
        EXPECT_LT(run + part.row, runs.num_states());
      }
    }
    for (int32_t row = 0; row < runs.num_rows; ++row) {
      EXPECT_EQ(covered[row], runs.tiles_per_row);
      EXPECT_EQ(first_slot[row], runs.first_run(row) + row);
      EXPECT_EQ(num_parts[row], runs.last_run(row) - runs.first_run(row) + 1);
      EXPECT_LE(num_parts[row], runs.row_parts_max());
    }
    EXPECT_LE(runs.row_parts_max(), kSplitsMax);
    EXPECT_LE(runs.num_states(), split_states_max(shape));
  });
  EXPECT_GT(shapes, 100);
}

TEST(SplitKv, StatesFitTheWorkspace) {
  for_each_shape([](const PlanShape& shape) {
    const SplitKv split = split_kv(shape, nullptr);
    if (split.num_splits == 1) {
      return;
    }
    if (shape.num_rows > 0) {
      ASSERT_GE(split.rows_per_launch, 1);
    }
    EXPECT_LE(std::min(shape.num_rows, split.rows_per_launch) * split.num_splits,
              split_states_max(shape));
    if (!shape.batch_invariant) {
      EXPECT_EQ(split.rows_per_launch, shape.num_rows);
    }
  });
}

TEST(SplitKv, ClustersRunAtOnce) {
  for_each_shape([](const PlanShape& shape) {
    const SplitKv split = split_kv(shape, nullptr);
    if (split.cluster) {
      EXPECT_GE(split.num_splits, 2);
      EXPECT_LE(split.num_splits, kClusterMax);
      EXPECT_LE(shape.num_rows * split.num_splits, shape.sm_count);
      EXPECT_FALSE(shape.batch_invariant);
    }
  });
  // Two, three and four splits a row.
  for (const auto& [rows, splits] : {std::pair{64, 2}, {36, 3}, {28, 4}}) {
    const SplitKv split = split_kv({rows, 2048, 2048, 16, 132, false}, nullptr);
    EXPECT_TRUE(split.cluster) << rows;
    EXPECT_EQ(split.num_splits, splits) << rows;
  }
}

TEST(SplitKv, StatesGrowWithEveryExtent) {
  for_each_shape([](const PlanShape& shape) {
    const int64_t states = split_states_max(shape);
    for (int64_t PlanShape::*extent :
         {&PlanShape::num_rows, &PlanShape::list_width, &PlanShape::count_max,
          &PlanShape::num_heads, &PlanShape::sm_count}) {
      for (const int64_t more : {1, 64, 1000}) {
        PlanShape larger = shape;
        larger.*extent += more;
        EXPECT_GE(split_states_max(larger), states) << text(larger);
      }
    }
  });
}

TEST(SplitKv, BatchInvariantCutsByTheListWidthAlone) {
  for (const int64_t width : kWidths) {
    const SplitKv expected = split_kv({1, width, width, 16, 132, true}, nullptr);
    const Tuning table = {.sparse_mla_splits = {{16, 8, width, 3}}};
    for (const int64_t sm_count : kSmCounts) {
      for (const int64_t rows : rows_around(sm_count)) {
        for (const int64_t heads : kHeads) {
          for (const int64_t count_max : {width, width / 2}) {
            const SplitKv split = split_kv({rows, width, count_max, heads, sm_count, true}, &table);
            ASSERT_EQ(split.num_splits, expected.num_splits) << rows << " rows, width " << width;
            ASSERT_EQ(split.keys_per_split, expected.keys_per_split) << rows << ", " << width;
          }
        }
      }
    }
  }
  EXPECT_GT(split_kv({1, 2048, 2048, 16, 132, true}, nullptr).num_splits, 1);
}

TEST(SplitKv, PlansForTheSmsOfASlice) {
  for (const int64_t sm_count : kSmCounts) {
    // One row of many keys is cut, as many rows as SMs are not.
    EXPECT_GT(split_kv({1, 2048, 2048, 16, sm_count, false}, nullptr).num_splits, 1) << sm_count;
    EXPECT_EQ(split_kv({sm_count, 2048, 2048, 16, sm_count, false}, nullptr).num_splits, 1)
        << sm_count;
  }
  // The rows that fill a slice leave a whole GPU idle.
  EXPECT_GT(split_kv({16, 2048, 2048, 16, 132, false}, nullptr).num_splits, 1);
}

TEST(SplitKv, CutsTheRowsBeyondFullWaves) {
  for (const int64_t sm_count : kSmCounts) {
    for (const int64_t waves : {1, 2, 16}) {
      for (const int64_t more : {1, 7}) {
        const SplitKv split =
            split_kv({waves * sm_count + more, 2048, 2048, 16, sm_count, false}, nullptr);
        EXPECT_EQ(split.runs.num_rows, more) << waves << " waves, " << sm_count << " SMs";
      }
      // A last wave that is nearly full takes as long whole.
      const SplitKv full =
          split_kv({(waves + 1) * sm_count - 1, 2048, 2048, 16, sm_count, false}, nullptr);
      EXPECT_EQ(full.runs.num_runs, 0) << waves << " waves, " << sm_count << " SMs";
      EXPECT_EQ(full.num_splits, 1);
    }
  }
  // A tile cannot be cut.
  EXPECT_EQ(split_kv({133, 64, 64, 16, 132, false}, nullptr).runs.num_runs, 0);
}

TEST(SplitKv, TakesTheSplitsOfATable) {
  const Tuning table = {.sparse_mla_splits = {{16, 4, 2048, 7}, {16, 5, 2048, 1}}};
  const PlanShape shape = {4, 2048, 2048, 16, 132, false};
  const SplitKv split = split_kv(shape, &table);
  // 32 tiles in 7 parts: 5 tiles each.
  EXPECT_EQ(split.num_splits, 7);
  EXPECT_EQ(split.keys_per_split, 5 * kTileKeys);
  EXPECT_STREQ(split.reason, "from the device's tuning table");
  PlanShape five = shape;
  five.num_rows = 5;
  EXPECT_EQ(split_kv(five, &table).num_splits, 1);
  // The last wave, and whole rows though the model would cut it.
  const Tuning waves = {
      .sparse_mla_splits = {{16, 200, 2048, kLastWaveSplits}, {16, 133, 2048, 1}}};
  PlanShape many = shape;
  many.num_rows = 200;
  EXPECT_EQ(split_kv(many, &waves).runs.num_rows, 68);
  EXPECT_STREQ(split_kv(many, &waves).reason, "from the device's tuning table");
  many.num_rows = 133;
  EXPECT_EQ(split_kv(many, nullptr).runs.num_rows, 1);
  EXPECT_EQ(split_kv(many, &waves).runs.num_runs, 0);
  // The bound of the counts is what is cut, not the width.
  PlanShape wider = shape;
  wider.list_width = 2176;
  EXPECT_EQ(split_kv(wider, &table).num_splits, 7);
}

TEST(SplitKv, KeepsItsOwnWhereATableDoesNotFit) {
  const PlanShape shape = {64, 2048, 2048, 16, 132, false};
  const SplitKv own = split_kv(shape, nullptr);
  // More splits than the workspace holds states of.
  const int64_t too_many = split_states_max(shape) / shape.num_rows + 1;
  for (const SplitChoice& choice :
       {SplitChoice{8, 64, 2048, 3}, SplitChoice{16, 63, 2048, 3}, SplitChoice{16, 64, 2047, 3},
        SplitChoice{16, 64, 2048, too_many}, SplitChoice{16, 64, 2048, kLastWaveSplits},
        SplitChoice{16, 64, 2048, -1}, SplitChoice{16, 64, 2048, int64_t{1} << 62}}) {
    const Tuning table = {.sparse_mla_splits = {choice}};
    const SplitKv split = split_kv(shape, &table);
    EXPECT_EQ(split.num_splits, own.num_splits);
    EXPECT_EQ(split.keys_per_split, own.keys_per_split);
    EXPECT_STREQ(split.reason, own.reason);
  }
  const Tuning table = {.sparse_mla_splits = {{16, 64, 2048, too_many - 1}}};
  EXPECT_STREQ(split_kv(shape, &table).reason, "from the device's tuning table");
}

TEST(PrefersSmallHead, NeverChangesOfABatchInvariantRow) {
  for_each_shape([](const PlanShape& shape) {
    if (shape.batch_invariant) {
      EXPECT_TRUE(prefers_small_head(shape));
    }
  });
}

TEST(PrefersSmallHead, StaysOnceItPays) {
  for (const int64_t sm_count : kSmCounts) {
    for (const int64_t heads : kHeads) {
      bool pays = false;
      for (int64_t rows = 0; rows <= 2 * sm_count + 1; ++rows) {
        const bool prefers = prefers_small_head({rows, 2048, 2048, heads, sm_count, false});
        EXPECT_TRUE(prefers || !pays) << rows << " rows of " << heads << " heads";
        pays = prefers;
      }
      EXPECT_TRUE(pays) << heads << " heads, " << sm_count << " SMs";
    }
  }
}

}  // namespace
}  // namespace lacuna::sm90
