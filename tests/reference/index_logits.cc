// Oracle of index_logits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {
namespace {

bool find_index_key(const IndexLogitsArgs& args, int64_t request, int64_t position,
                    CachedPlace* place) {
  if (!args.block_table.empty()) {
    return find_position(args.keys, args.block_table, request, position, place);
  }
  return request >= 0 && request < args.key_starts.shape[0] &&
         find_row(args.keys, integer(args.key_starts, request) + position, place);
}

}  // namespace

IndexLogits index_logits(const IndexLogitsArgs& args) {
  const int64_t num_rows = args.q.shape[0];
  const int64_t num_heads = args.q.shape[1];
  const int64_t dim = args.q.shape[2];
  const int64_t num_columns = args.logits.shape[1];
  IndexLogits result;
  result.logits.assign(num_rows * num_columns, -std::numeric_limits<double>::infinity());
  result.scale.assign(num_rows * num_columns, 0.0);
  std::vector<double> queries(num_heads * dim);
  std::vector<double> key;
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t h = 0; h < num_heads; ++h) {
      for (int64_t i = 0; i < dim; ++i) {
        queries[h * dim + i] = element(args.q, t, h, i);
      }
    }
    const int64_t request = integer(args.request_ids, t);
    const int64_t visible = std::clamp<int64_t>(integer(args.visible_lengths, t), 0, num_columns);
    for (int64_t j = 0; j < visible; ++j) {
      CachedPlace place;
      if (!find_index_key(args, request, j, &place)) {
        continue;
      }
      read_cached_row(args.keys, place.block, place.offset, &key);
      const double key_norm = std::sqrt(dot(key.data(), key.data(), dim));
      double logit = 0;
      double scale = 0;
      for (int64_t h = 0; h < num_heads; ++h) {
        const double* query = &queries[h * dim];
        const double weight = element(args.head_weights, t, h);
        logit += weight * std::max(dot(query, key.data(), dim), 0.0);
        scale += std::fabs(weight) * key_norm * std::sqrt(dot(query, query, dim));
      }
      result.logits[t * num_columns + j] = logit;
      result.scale[t * num_columns + j] = scale;
    }
  }
  return result;
}

}  // namespace lacuna::reference
