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

// A cluster's blocks join through each other's shared memory, where all run at once: clusters of
// two on all SMs, as SMs come in pairs. Of those of three and four a GPC of 14 SMs holds what fits
// 12; an H200 holds 39 and 30. Fewer blocks gather slower, for longer than a joining kernel takes,
// whose time grows with the heads.
bool pays_as_cluster(const PlanShape& shape, int64_t num_splits) {
  const int64_t blocks = product(shape.num_rows, num_splits);
  if (num_splits <= 2) {
    return num_splits == 2 && blocks <= shape.sm_count;
  }
  const int64_t fewest = shape.num_heads <= 16 ? shape.sm_count * 2 / 3 : shape.sm_count * 4 / 9;
  return num_splits <= kClusterMax && blocks > fewest && blocks <= shape.sm_count * 6 / 7;
}

// The rows of full waves whole, the tiles of the others in runs of so many.
SplitKv cut_last_wave(const PlanShape& shape, int64_t tiles, int64_t tiles_per_run,
                      const char* reason) {
  const int64_t rows = shape.num_rows % shape.sm_count;
  SplitKv split = cut(shape, tiles, 1, reason);
  split.runs = {.num_rows = static_cast<int32_t>(rows),
                .num_runs = static_cast<int32_t>(ceil_div(rows * tiles, tiles_per_run)),
                .tiles_per_row = static_cast<int32_t>(tiles),
                .tiles_per_run = static_cast<int32_t>(tiles_per_run),
                .stride = static_cast<int32_t>(shape.sm_count)};
  return split;
}

// A block's time with so many tiles, when so many blocks run.
int64_t task_cycles(const PlanShape& shape, int64_t tiles, int64_t blocks) {
  const int64_t compute =
      tiles == 1 ? kTileCycles : kTilePairCycles + (tiles - 2) * kNextTileCycles;
  const int64_t memory =
      product(tiles * kTileMemoryCycles, std::min(blocks, shape.sm_count)) / shape.sm_count;
  return kTaskCycles + std::max(compute, memory);
}

// The joining kernel's. States are written and read again.
int64_t join_cycles(const PlanShape& shape, int64_t states) {
  return kJoinCycles + 2 * product(states, shape.num_heads * 512 * 4) / kJoinBytesPerCycle;
}

// Cycles that a call takes, cut like this.
int64_t cycles(const PlanShape& shape, const SplitKv& split) {
  const int64_t tiles = split.keys_per_split / kTileKeys;
  const RowRuns& runs = split.runs;
  if (runs.num_runs > 0) {
    const int64_t waves = shape.num_rows / shape.sm_count;
    return product(waves, task_cycles(shape, tiles, shape.sm_count)) +
           task_cycles(shape, runs.tiles_per_run, runs.num_runs) +
           (runs.run_parts() - 1) * kTaskCycles + join_cycles(shape, runs.num_states());
  }
  const int64_t tasks = product(shape.num_rows, split.num_splits);
  const int64_t last_wave = tasks % shape.sm_count;
  const int64_t total = product(tasks / shape.sm_count, task_cycles(shape, tiles, shape.sm_count)) +
                        (last_wave > 0 ? task_cycles(shape, tiles, last_wave) : 0);
  if (split.num_splits == 1) {
    return total;
  }
  if (!split.cluster) {
    return total + join_cycles(shape, tasks);
  }
  int64_t tile_cycles = 0;
  if (split.num_splits > 2) {
    tile_cycles = kFewBlocksTileCycles;
  } else if (2 * tasks > shape.sm_count && tiles > 3) {
    tile_cycles = kNeighbourTileCycles;
  }
  return std::max(total, kTaskCycles + tiles * tile_cycles) + kClusterJoinCycles;
}

// The fastest cut with runs; without any where there can be none. The shortest runs, one for each
// SM, are not always the best: fewer parts are joined sooner.
SplitKv best_runs(const PlanShape& shape, int64_t tiles, const char* reason) {
  SplitKv best;
  const int64_t rows = shape.num_rows % shape.sm_count;
  // Tiles are counted in 32 bits.
  if (shape.num_rows < shape.sm_count || rows == 0 || product(rows + 1, tiles) > INT32_MAX) {
    return best;
  }
  // A row has at most kSplitsMax parts, of which two are ends of runs.
  const int64_t shortest =
      std::max(ceil_div(rows * tiles, shape.sm_count), ceil_div(tiles, kSplitsMax - 1));
  for (int64_t length = shortest; length < tiles; length *= 2) {
    // And the next longer, if a row is a multiple of it: then no run has two parts.
    for (const int64_t tried : {length, ceil_div(tiles, tiles / length)}) {
      if (tried != length && (tried == tiles || tiles % tried != 0)) {
        continue;
      }
      const SplitKv split = cut_last_wave(shape, tiles, tried, reason);
      if (best.runs.num_runs == 0 || cycles(shape, split) < cycles(shape, best)) {
        best = split;
      }
    }
  }
  return best;
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
    if (shape.num_heads <= pays.heads_max) {
      const auto of_device = [&](int64_t rows) {
        return ceil_div(rows * shape.sm_count, kSmallHeadPaysSms);
      };
      return shape.num_rows >= of_device(pays.rows_min) ||
             (shape.num_rows >= of_device(pays.few_rows_min) &&
              product(shape.num_rows, list) >= pays.keys_min);
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
      if (choice.heads != shape.num_heads || choice.rows != shape.num_rows || choice.keys != keys) {
        continue;
      }
      if (choice.splits == kLastWaveSplits) {
        const SplitKv split = best_runs(shape, tiles, "from the device's tuning table");
        if (split.runs.num_runs > 0) {
          return split;
        }
      } else if (choice.splits >= 1 && product(choice.splits, shape.num_rows) <= tasks) {
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
  const SplitKv runs = best_runs(shape, tiles, "whole rows leave a part of the last wave idle");
  return runs.runs.num_runs > 0 && cycles(shape, runs) < best_cycles ? runs : best;
}

}  // namespace lacuna::sm90
