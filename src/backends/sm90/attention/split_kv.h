// How the rows of a sparse MLA call are cut for a GPU whose SMs run one block each: from what the
// host knows alone, so that a shape's bits are the same whatever its rows hold. No CUDA: tested on
// made-up devices.
#pragma once

#include <cstdint>

#include "backends/cuda/attention/plan_shape.h"
#include "ops/tuning.h"

namespace lacuna::sm90 {

inline constexpr int64_t kTileKeys = 64;

struct SplitKv {
  int64_t num_splits = 1;       // of every row
  int64_t keys_per_split = 0;   // a multiple of kTileKeys; the last split takes what remains
  int64_t rows_per_launch = 0;  // batch-invariant: as many as the workspace holds states of
  bool cluster = false;         // a row's splits are a cluster, which joins them
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
