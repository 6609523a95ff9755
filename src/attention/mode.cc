// The routing rule; docs/attention.md has it as a table.
#include "attention/mode.h"

namespace lacuna {

Lane choose_prefill_lane(const PrefillShape& shape, const RoutingLimits& limits) {
  if (shape.num_requests == 0) {
    return Lane::kSparseMqa;
  }
  if (limits.force_dense) {
    return Lane::kDenseMha;
  }
  const bool dense = shape.seq_len_max <= limits.index_topk && !limits.force_mqa &&
                     shape.seq_len_sum <= limits.mha_keys_max;
  return dense ? Lane::kDenseMha : Lane::kSparseMqa;
}

}  // namespace lacuna
