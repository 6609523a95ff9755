// How the rows of a sparse MLA call are cut for a GPU whose SMs run one block each: from what the
// host knows alone, so that a shape's bits are the same whatever its rows hold. No CUDA: tested on
// made-up devices.
#pragma once

#include <cstdint>

#include "backends/cuda/attention/plan_shape.h"
#include "lacuna/dtype.h"
#include "ops/tuning.h"

namespace lacuna::sm90 {

inline constexpr int64_t kTileKeys = 64;
inline constexpr int64_t kClusterMax = 4;  // splits of a row that are a cluster

// Rows in a line, cut into runs of tiles as long as each other, one for each SM. No run is longer
// than a row, so that it is the end of one row and the beginning of the next at most: its parts 0
// and 1. Parts are numbered by run + row, where their partial states lie: those of a row follow
// each other, and a number between two rows may be no part's.
struct RowRuns {
  int32_t num_rows = 0;
  int32_t num_runs = 0;  // 0: no row is cut like this
  int32_t tiles_per_row = 0;
  int32_t tiles_per_run = 0;
  int32_t stride = 0;  // SMs: a run's part 1 is so many items behind its part 0, on the same SM

  struct Part {
    int32_t row;         // of those in the line
    int32_t begin, end;  // tiles of the row; nothing: no such part
  };
  LACUNA_HOST_DEVICE Part part(int32_t run, int32_t number) const {
    const int32_t first = run * tiles_per_run;
    const int32_t row = first / tiles_per_row;
    const int32_t begin = first - row * tiles_per_row;
    const int32_t beyond = begin + tiles_per_run - tiles_per_row;  // tiles of the next row
    if (number == 0) {
      return {row, begin, beyond > 0 ? tiles_per_row : begin + tiles_per_run};
    }
    return {row + 1, 0, row + 1 < num_rows && beyond > 0 ? beyond : 0};
  }
  // Of a run: 1 where no run goes on in another row.
  int32_t run_parts() const { return tiles_per_row % tiles_per_run == 0 ? 1 : 2; }
  // Of a row, at most.
  int32_t row_parts_max() const {
    return run_parts() == 1 ? tiles_per_row / tiles_per_run
                            : (tiles_per_row - 2) / tiles_per_run + 2;
  }
  LACUNA_HOST_DEVICE int32_t first_run(int32_t row) const {
    return row * tiles_per_row / tiles_per_run;
  }
  LACUNA_HOST_DEVICE int32_t last_run(int32_t row) const {
    return ((row + 1) * tiles_per_row - 1) / tiles_per_run;
  }
  int64_t num_items() const { return (run_parts() - 1) * int64_t{stride} + num_runs; }
  // Numbers of parts, used or not.
  int64_t num_states() const { return int64_t{num_runs} + num_rows - 1; }
};

struct SplitKv {
  int64_t num_splits = 1;       // of every row; 1 with runs
  int64_t keys_per_split = 0;   // a multiple of kTileKeys; the last split takes what remains
  int64_t rows_per_launch = 0;  // batch-invariant: as many as the workspace holds states of
  bool cluster = false;         // a row's splits are a cluster, which joins them
  RowRuns runs;                 // of the last rows: the others stay whole
  const char* reason = "";      // why this cut, in words
};

// False: so few rows that a portable kernel, whose blocks start sooner, is faster. A
// batch-invariant row keeps its bits, and so its kernel, whatever the number of rows.
bool prefers_small_head(const cuda::PlanShape& shape);

SplitKv split_kv(const cuda::PlanShape& shape, const Tuning* tuning);

// Partial states (each of one row's split, all heads) that any cut of this shape needs: grows with
// every extent. 0: never cut.
int64_t split_states_max(const cuda::PlanShape& shape);

}  // namespace lacuna::sm90
