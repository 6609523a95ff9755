// How large the scores of select_keys may be, by what the host knows: what every backend's kernel
// sizes its scratch with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "lacuna/indexer.h"

namespace lacuna {

// Bytes of scores that are kept at a time.
inline int64_t select_logits_bytes_max(const SelectKeysArgs& args) {
  constexpr int64_t kDefault = int64_t{256} << 20;
  return args.logits_bytes_max == 0 ? kDefault : args.logits_bytes_max;
}

// Key columns (pools) that rows may see. Lengths are int32, so there are never more than that.
inline int64_t select_columns_max(const SelectKeysArgs& args) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (args.visible_length_max >= 0) {
    return std::min(args.visible_length_max, kMost) / args.kpool;
  }
  if (args.block_table.empty()) {
    return std::min(args.keys.num_rows(), kMost);
  }
  const int64_t blocks = args.block_table.shape[1];
  return args.keys.block_size > kMost / std::max<int64_t>(blocks, 1)
             ? kMost
             : blocks * args.keys.block_size;
}

// Scores to make room for, when a row takes `row_floats`. Bounds a chunk of rows and, unlike it,
// grows with every extent.
inline int64_t select_logits_floats(const SelectKeysArgs& args, int64_t row_floats) {
  const int64_t floats = std::max(select_logits_bytes_max(args) / 4, row_floats);
  int64_t all = 0;
  return __builtin_mul_overflow(args.q.shape[0], row_floats, &all) ? floats : std::min(floats, all);
}

}  // namespace lacuna
