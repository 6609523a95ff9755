// The cut of sparse_mla_small_head: a table if the device has one, else a model of the time.
#include "backends/sm90/attention/split_kv.h"

#include <algorithm>

#include "backends/cuda/extents.h"
#include "backends/sm90/tuning.h"

namespace lacuna::sm90 {

using cuda::ceil_div;
using cuda::kSplitsMax;
using cuda::PlanShape;
using cuda::product;

namespace {

constexpr int64_t kInvariantKeys = 256;  // a split, whatever the batch

// Cut rows never make more tasks than this: four waves.
int64_t tasks_max(const PlanShape& shape) {
  return std::max<int64_t>(4 * shape.sm_count, kSplitsMax);
}

int64_t tiles_min(int64_t tiles) { return std::max<int64_t>(1, ceil_div(tiles, kSplitsMax)); }

SplitKv cut(const PlanShape& shape, int64_t tiles, int64_t splits, const char* reason) {
  const int64_t tiles_per_split = std::max(tiles_min(tiles), ceil_div(tiles, splits));
  return {.num_splits = std::max<int64_t>(1, ceil_div(tiles, tiles_per_split)),
          .keys_per_split = tiles_per_split * kTileKeys,
          .rows_per_launch = shape.num_rows,
          .cluster = false,
          .reason = reason};
}

// Two blocks can join through each other's shared memory. With more, or when clusters wait for
// room, the joining kernel was faster.
bool pays_as_cluster(const PlanShape& shape, int64_t num_splits) {
  return num_splits == 2 && product(shape.num_rows, num_splits) <= shape.sm_count;
}

// Cycles that a call takes, cut like this.
int64_t cycles(const PlanShape& shape, const SplitKv& split) {
  const int64_t tasks = product(shape.num_rows, split.num_splits);
  const int64_t waves = ceil_div(tasks, shape.sm_count);
  const int64_t tiles = split.keys_per_split / kTileKeys;
  const int64_t compute =
      tiles == 1 ? kTileCycles : kTilePairCycles + (tiles - 2) * kNextTileCycles;
  const int64_t memory =
      product(tiles * kTileMemoryCycles, std::min(tasks, shape.sm_count)) / shape.sm_count;
  const int64_t total = product(waves, kTaskCycles + std::max(compute, memory));
  if (split.num_splits == 1) {
    return total;
  }
  if (split.cluster) {
    return total + kClusterJoinCycles;
  }
  const int64_t bytes = 2 * product(tasks, shape.num_heads * 512 * 4);  // written, read again
  return total + kJoinCycles + bytes / kJoinBytesPerCycle;
}

}  // namespace

int64_t split_states_max(const PlanShape& shape) {
  const int64_t splits = std::clamp<int64_t>(ceil_div(shape.list_width, kTileKeys), 1, kSplitsMax);
  return splits == 1 ? 0 : std::min(product(shape.num_rows, splits), tasks_max(shape));
}

bool prefers_small_head(const PlanShape& shape) {
  if (shape.batch_invariant) {
    return true;  // another number of rows may not change a row's kernel either
  }
  const int64_t list = std::min(shape.list_width, shape.count_max);
  for (const SmallHeadPays& pays : kSmallHeadPays) {
    if (shape.num_heads <= pays.heads_max && list <= pays.list_max) {
      const int64_t rows_min = pays.rows_min < 0 ? shape.sm_count / 2 + 1 : pays.rows_min;
      return shape.num_rows >= rows_min || product(shape.num_rows, list) >= pays.keys_min;
    }
  }
  return false;
}

SplitKv split_kv(const PlanShape& shape, const Tuning* tuning) {
  if (shape.batch_invariant) {
    const int64_t tiles = ceil_div(shape.list_width, kTileKeys);
    SplitKv split = cut(shape, tiles, std::max<int64_t>(1, shape.list_width / kInvariantKeys),
                        "batch_invariant: by the list width alone");
    if (split.num_splits > 1) {
      split.rows_per_launch = std::max<int64_t>(1, split_states_max(shape) / split.num_splits);
    }
    return split;
  }
  const int64_t keys =
      std::clamp<int64_t>(shape.count_max, 1, std::max<int64_t>(1, shape.list_width));
  const int64_t tiles = ceil_div(keys, kTileKeys);
  const int64_t tasks = tasks_max(shape);
  if (tuning != nullptr) {
    for (const SplitChoice& choice : tuning->sparse_mla_splits) {
      if (choice.heads == shape.num_heads && choice.rows == shape.num_rows && choice.keys == keys &&
          choice.splits >= 1 && product(choice.splits, shape.num_rows) <= tasks) {
        SplitKv split = cut(shape, tiles, choice.splits, "from the device's tuning table");
        split.cluster = pays_as_cluster(shape, split.num_splits);
        return split;
      }
    }
  }
  SplitKv best = cut(shape, tiles, 1,
                     shape.num_rows >= shape.sm_count ? "whole rows fill the SMs"
                     : tiles == 1                     ? "a list is one tile"
                                                      : "joining splits would cost more");
  int64_t best_cycles = cycles(shape, best);
  for (int64_t splits = 2; splits <= std::min(tiles, kSplitsMax); ++splits) {
    SplitKv split =
        cut(shape, tiles, splits,
            shape.num_rows < shape.sm_count ? "rows alone do not fill the SMs"
                                            : "whole rows leave a part of the last wave idle");
    if (product(shape.num_rows, split.num_splits) > tasks) {
      break;
    }
    split.cluster = pays_as_cluster(shape, split.num_splits);
    const int64_t time = cycles(shape, split);
    if (time < best_cycles) {
      best = split;
      best_cycles = time;
    }
  }
  return best;
}

}  // namespace lacuna::sm90
