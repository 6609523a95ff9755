// Oracle of translate_indices.
#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {
namespace {

int64_t translate(const TranslateIndicesArgs& args, int64_t t, int64_t c) {
  int64_t position = integer(args.indices, t, c);
  if (position < 0 || c >= integer_or(args.valid_counts, t, args.indices.shape[1])) {
    return -1;
  }
  const int64_t workspace_id = integer_or(args.workspace_ids, t, -1);
  if (workspace_id >= 0) {
    return integer(args.workspace_starts, workspace_id) + position;
  }
  const DcpShard& dcp = args.dcp;
  if ((position / dcp.interleave) % dcp.size != dcp.rank) {
    return -1;
  }
  position = position / (dcp.size * static_cast<int64_t>(dcp.interleave)) * dcp.interleave +
             position % dcp.interleave;
  const int64_t request = integer(args.request_ids, t);
  const int64_t column = position / args.block_size;
  if (request < 0 || request >= args.block_table.shape[0] || column >= args.block_table.shape[1]) {
    return -1;
  }
  const int64_t block = integer(args.block_table, request, column);
  if (block < 0 || block >= args.num_blocks) {
    return -1;
  }
  const int64_t stride = args.block_stride_rows == 0 ? args.block_size : args.block_stride_rows;
  return block * stride + position % args.block_size;
}

}  // namespace

TranslatedRows translate_indices(const TranslateIndicesArgs& args) {
  const int64_t num_rows = args.indices.shape[0];
  const int64_t width = args.indices.shape[1];
  TranslatedRows result;
  result.rows.assign(num_rows * width, -1);
  result.counts.assign(num_rows, 0);
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t c = 0; c < width; ++c) {
      const int64_t row = translate(args, t, c);
      if (row >= 0) {
        const int64_t at = args.compact ? result.counts[t] : c;
        result.rows[t * width + at] = static_cast<int32_t>(row);
        ++result.counts[t];
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
