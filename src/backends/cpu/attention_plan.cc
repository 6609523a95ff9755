// Cuts rows into splits so that threads finish together.
#include "backends/cpu/attention_plan.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "backends/cpu/ranges.h"

namespace lacuna::cpu {
namespace {

// Below this a split costs more than it evens out: setting it up, writing its state and merging
// it take as long as some 30 keys.
constexpr int64_t kKeysPerSplitMin = 64;
constexpr int64_t kSplitCostKeys = 32;
constexpr int64_t kTaskCostKeys = 8;
// Batch-invariant splits: 512 keys are about 40 us with 16 heads, and a row of 2048 keys is four
// tasks.
constexpr int64_t kInvariantKeysPerSplit = 512;
// Splits are tried down to a quarter of a thread's share.
constexpr int64_t kSharesMax = 4;
// Rows a thread from which whole rows balance well enough.
constexpr int64_t kRowsPerThread = 4;
// Threads for which a plan is simulated; beyond, two shares a thread are taken.
constexpr int kSimulatedThreadsMax = 64;

int64_t invariant_splits(int64_t list_width) {
  return std::max<int64_t>(1, div_up(list_width, kInvariantKeysPerSplit));
}

// With many rows a task walks all splits of its row: the bits are those of splits run apart.
bool invariant_whole_rows(const PlanShape& shape) {
  return invariant_splits(shape.list_width) == 1 ||
         shape.num_rows >= kRowsPerThread * shape.num_threads;
}

struct Cut {
  int64_t num_splits;
  int64_t keys_per_split;
};

// Splits of at most about `share` keys.
Cut cut_row(int64_t length, int64_t share) {
  if (length <= share) {
    return {1, std::max<int64_t>(1, length)};
  }
  // Whole vectors of keys.
  const int64_t keys = round_up(div_up(length, div_up(length, share)), 16);
  return {div_up(length, keys), keys};
}

// Estimated time, in keys, until the last thread is done when tasks are handed out in order.
int64_t makespan(const PlanShape& shape, const ConstTensorView& valid_counts, int64_t share) {
  std::array<int64_t, kSimulatedThreadsMax> load = {};
  const auto end = load.begin() + shape.num_threads;
  int64_t longest_task = 0;
  int64_t merge_cost = 0;
  for (int64_t t = 0; t < shape.num_rows; ++t) {
    const int64_t length = list_length(valid_counts, shape.list_width, t);
    const Cut cut = cut_row(length, share);
    for (int64_t split = 0; split < cut.num_splits; ++split) {
      const int64_t keys = std::min(cut.keys_per_split, length - split * cut.keys_per_split);
      *std::min_element(load.begin(), end) += keys + kTaskCostKeys;
      longest_task = std::max(longest_task, keys);
    }
    merge_cost += cut.num_splits > 1 ? cut.num_splits * kSplitCostKeys : 0;
  }
  // A thread may start late or be interrupted: shorter tasks leave less to wait for.
  return *std::max_element(load.begin(), end) + merge_cost / shape.num_threads + longest_task / 8;
}

}  // namespace

int64_t list_length(const ConstTensorView& valid_counts, int64_t list_width, int64_t t) {
  if (valid_counts.empty()) {
    return list_width;
  }
  const int64_t count = valid_counts.as<int32_t>()[t * valid_counts.strides[0]];
  return std::clamp<int64_t>(count, 0, list_width);
}

int64_t plan_slots_max(const PlanShape& shape) {
  if (shape.batch_invariant) {
    const int64_t rows = std::min(shape.num_rows, kRowsPerThread * shape.num_threads);
    const int64_t splits = invariant_splits(shape.list_width);
    return splits == 1 ? 0 : rows * splits;
  }
  // A row longer than a share s makes at most 2 * length / s splits, and the lengths add up to at
  // most kSharesMax * threads shares.
  const int64_t splits_max = 2 * kSharesMax * shape.num_threads;
  int64_t splits = 0;
  return __builtin_mul_overflow(shape.num_rows, div_up(shape.list_width, kKeysPerSplitMin), &splits)
             ? splits_max
             : std::min(splits, splits_max);
}

int64_t whole_row_splits_max(const PlanShape& shape) {
  return shape.batch_invariant ? invariant_splits(shape.list_width) : 1;
}

void plan_rows(const PlanShape& shape, const ConstTensorView& valid_counts, RowSplit* splits) {
  int64_t num_tasks = 0;
  int64_t num_slots = 0;
  if (shape.batch_invariant) {
    const int64_t count = invariant_splits(shape.list_width);
    const int64_t keys = std::max<int64_t>(1, round_up(div_up(shape.list_width, count), 16));
    const bool whole_rows = invariant_whole_rows(shape);
    for (int64_t t = 0; t < shape.num_rows; ++t) {
      splits[t] = {static_cast<int32_t>(num_tasks), static_cast<int32_t>(count),
                   static_cast<int32_t>(keys), whole_rows ? -1 : static_cast<int32_t>(num_slots)};
      num_tasks += splits[t].num_tasks();
      num_slots += whole_rows ? 0 : count;
    }
  } else {
    int64_t total = 0;
    for (int64_t t = 0; t < shape.num_rows; ++t) {
      total += list_length(valid_counts, shape.list_width, t);
    }
    const auto share_of = [&](int64_t shares) {
      return std::max(kKeysPerSplitMin, div_up(total, shares * shape.num_threads));
    };
    int64_t share = share_of(shape.num_threads == 1 ? 1 : 2);
    if (shape.num_threads > 1 && shape.num_threads <= kSimulatedThreadsMax) {
      if (shape.num_rows >= 2 * kRowsPerThread * shape.num_threads) {
        share = share_of(kSharesMax);
      } else {
        int64_t best = std::numeric_limits<int64_t>::max();
        for (int64_t shares = 1; shares <= kSharesMax; ++shares) {
          const int64_t time = makespan(shape, valid_counts, share_of(shares));
          if (time < best) {
            best = time;
            share = share_of(shares);
          }
        }
      }
    }
    if (shape.num_threads == 1) {
      share = std::max<int64_t>(share, shape.list_width);  // nothing to balance
    }
    for (int64_t t = 0; t < shape.num_rows; ++t) {
      const Cut cut = cut_row(list_length(valid_counts, shape.list_width, t), share);
      const bool whole_row = cut.num_splits == 1;
      splits[t] = {static_cast<int32_t>(num_tasks), static_cast<int32_t>(cut.num_splits),
                   static_cast<int32_t>(cut.keys_per_split),
                   whole_row ? -1 : static_cast<int32_t>(num_slots)};
      num_tasks += splits[t].num_tasks();
      num_slots += whole_row ? 0 : cut.num_splits;
    }
  }
  const ScheduleEnd end = {static_cast<int32_t>(num_tasks), static_cast<int32_t>(num_slots),
                           static_cast<int32_t>(shape.list_width),
                           shape.batch_invariant ? kInvariant : kBalanced};
  std::memcpy(&splits[shape.num_rows], &end, sizeof(end));
}

bool is_plan(const PlanShape& shape, const RowSplit* splits, int64_t num_entries) {
  if (num_entries <= shape.num_rows) {
    return false;
  }
  ScheduleEnd end;
  std::memcpy(&end, &splits[shape.num_rows], sizeof(end));
  if (end.kind != (shape.batch_invariant ? kInvariant : kBalanced) ||
      end.list_width != static_cast<int32_t>(shape.list_width)) {
    return false;
  }
  const bool whole_rows = shape.batch_invariant && invariant_whole_rows(shape);
  const int64_t whole_row_splits = whole_rows ? invariant_splits(shape.list_width) : 1;
  int64_t num_tasks = 0;
  int64_t num_slots = 0;
  for (int64_t t = 0; t < shape.num_rows; ++t) {
    const RowSplit& row = splits[t];
    if (row.first_task != num_tasks || row.num_splits < 1 || row.keys_per_split < 1) {
      return false;
    }
    if (row.first_slot < 0) {
      if (row.num_splits != whole_row_splits) {
        return false;
      }
    } else if (whole_rows || row.first_slot != num_slots) {
      return false;
    } else {
      num_slots += row.num_splits;
    }
    num_tasks += row.num_tasks();
  }
  return end.num_tasks == num_tasks && end.num_slots == num_slots &&
         num_slots <= plan_slots_max(shape);
}

}  // namespace lacuna::cpu
