// Measured choices of one device, from a table that `lacuna tune` wrote; without one, kernels
// choose by the models and thresholds in their tuning.h.
#pragma once

#include <cstdint>
#include <vector>

namespace lacuna {

// Into how many splits sparse_mla cuts lists of `keys` for `rows` rows of `heads` heads.
struct SplitChoice {
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t keys = 0;
  int64_t splits = 0;
};

struct Tuning {
  std::vector<SplitChoice> sparse_mla_splits;
};

}  // namespace lacuna
