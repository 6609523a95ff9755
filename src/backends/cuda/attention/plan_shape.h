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
  // Clusters of 4 and of 8 blocks that run at once where each block fills an SM; 0: not to be used.
  int64_t clusters_of_4 = 0;
  int64_t clusters_of_8 = 0;
  bool fp8 = false;  // fp8_ds_mla, whose tiles are widened first
};

}  // namespace lacuna::cuda
