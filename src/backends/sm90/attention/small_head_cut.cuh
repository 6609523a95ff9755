// What the blocks of the small-head kernels are given of a call whose last rows are cut into runs.
#pragma once

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/sm90/attention/sparse_mla_small_head.h"

namespace lacuna::sm90 {

// What an item is, by parameters alone. False: nothing.
__device__ inline bool run_task(const SmallHeadParams& params, int32_t item,
                                cuda::SplitTask& task) {
  const RowRuns& runs = params.runs;
  const auto list_width = static_cast<int32_t>(params.call.list_width);
  int32_t run = item - params.num_whole_rows;
  if (run < 0) {
    task = {.row = item, .begin = 0, .end = list_width, .slot = -1};
    return true;
  }
  const int number = run >= runs.stride ? 1 : 0;
  run -= number * runs.stride;
  const RowRuns::Part part = runs.part(run, number);
  constexpr auto kTile = static_cast<int32_t>(kTileKeys);
  task = {.row = params.num_whole_rows + part.row,
          .begin = part.begin * kTile,
          .end = part.end == runs.tiles_per_row ? list_width : part.end * kTile,
          .slot = run + part.row};
  return run < runs.num_runs && part.begin < part.end;
}

// Of what joins states: row, first slot and number of states of a row of those in runs.
__device__ inline int run_states(const SmallHeadParams& params, int64_t item, int64_t& row,
                                 int64_t& slot) {
  const auto line_row = static_cast<int32_t>(item);
  const int32_t first = params.runs.first_run(line_row);
  row = params.num_whole_rows + line_row;
  slot = first + line_row;
  return params.runs.last_run(line_row) - first + 1;
}

}  // namespace lacuna::sm90
