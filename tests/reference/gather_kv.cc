// Oracle of gather_kv.
#include <algorithm>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

GatheredRows gather_kv(const GatherKvArgs& args) {
  const int64_t num_out_rows = args.out.shape[0];
  const int64_t width = args.kv.layout.d_qk();
  GatheredRows result;
  result.rows.assign(num_out_rows * width, 0.0);
  result.written.assign(num_out_rows, false);
  std::vector<double> row;
  for (int64_t n = 0; n < args.request_ids.shape[0]; ++n) {
    const int64_t request = integer(args.request_ids, n);
    if (request < 0 || request >= args.block_table.shape[0]) {
      continue;
    }
    for (int64_t j = 0; j < integer(args.lengths, n); ++j) {
      const int64_t out_row = integer(args.out_starts, n) + j;
      if (out_row < 0 || out_row >= num_out_rows) {
        continue;
      }
      CachedPlace place;
      if (find_position(args.kv, args.block_table, request, integer(args.starts, n) + j, &place)) {
        read_cached_row(args.kv, place.block, place.offset, &row);
        std::copy(row.begin(), row.end(), result.rows.begin() + out_row * width);
      }
      result.written[out_row] = true;
    }
  }
  return result;
}

}  // namespace lacuna::reference
