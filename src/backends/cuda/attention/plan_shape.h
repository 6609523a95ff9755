// What the plans of sparse MLA on a GPU depend on. No CUDA: plans are tested on made-up devices.
#pragma once

#include <cstdint>

namespace lacuna::cuda {

// A split is a run of a row's list; a row has at most this many.
inline constexpr int64_t kSplitsMax = 64;

struct PlanShape {
  int64_t num_rows;
  int64_t list_width;
  int64_t count_max;  // the bound of valid_counts that the host knows; list_width without one
  int64_t num_heads;
  int64_t sm_count;
  bool batch_invariant;
};

}  // namespace lacuna::cuda
