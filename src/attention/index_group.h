// An index group: a leader layer, whose indexer chooses the keys and whose list is translated to
// cache rows once, and the follower layers that reuse both.
#pragma once

#include "lacuna/tensor.h"

namespace lacuna {

struct IndexGroup {
  int leader = -1;       // layer that filled the lists; -1: none yet in this step
  TensorView positions;  // [num_mqa_rows, W] int32, ascending, -1 tail
  TensorView rows;       // [num_mqa_rows, W] int32: the same as rows of the latent caches
  TensorView counts;     // [num_mqa_rows] int32
};

}  // namespace lacuna
