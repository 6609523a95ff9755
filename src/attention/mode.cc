// The routing rule; docs/attention.md has it as a table.
#include "attention/mode.h"

namespace lacuna {
namespace {

// All keys at once; or in pieces, of which the rows' own keys are one.
bool fits_mha_buffers(const PrefillShape& shape, const RoutingLimits& limits) {
  return shape.seq_len_sum <= limits.mha_keys_max ||
         (limits.chunked_rows_max > 0 && shape.num_rows <= limits.mha_keys_max &&
          shape.num_rows <= limits.chunked_rows_max);
}

bool wants_masked(const PrefillShape& shape, const RoutingLimits& limits) {
  switch (limits.masked) {
    case MaskedMha::kNever:
      return false;
    case MaskedMha::kAlways:
      return true;
    case MaskedMha::kAuto:
      return limits.masked_table != nullptr &&
             masked_mha_pays(*limits.masked_table, shape.query_len_max, shape.seq_len_max,
                             shape.has_context);
  }
  return false;
}

}  // namespace

Lane choose_prefill_lane(const PrefillShape& shape, const RoutingLimits& limits) {
  if (shape.num_requests == 0) {
    return Lane::kSparseMqa;
  }
  if (limits.force_dense) {
    return Lane::kDenseMha;
  }
  if (limits.force_mqa || !fits_mha_buffers(shape, limits)) {
    return Lane::kSparseMqa;
  }
  if (shape.seq_len_max <= limits.index_topk) {
    return Lane::kDenseMha;
  }
  const bool mask_fits =
      shape.num_rows * mask_row_words(shape.seq_len_max) <= limits.mask_words_max;
  return mask_fits && wants_masked(shape, limits) ? Lane::kMaskedMha : Lane::kSparseMqa;
}

}  // namespace lacuna
