// Oracle of sparse_mla: gathers the listed keys of a row and does plain softmax attention.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double query_element(const SparseMlaArgs& args, int64_t t, int64_t h, int64_t i) {
  if (!args.q.empty()) {
    return element(args.q, t, h, i);
  }
  const int64_t latent = args.kv.layout.latent;
  return i < latent ? element(args.q_nope, t, h, i) : element(args.q_rope, t, h, i - latent);
}

// The keys of row t, decoded one after another: [n, d_qk].
std::vector<double> listed_keys(const SparseMlaArgs& args, int64_t t) {
  const int64_t width = args.indices.shape[1];
  const int64_t count = std::clamp<int64_t>(integer_or(args.valid_counts, t, width), 0, width);
  std::vector<double> keys;
  std::vector<double> key;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t id = integer(args.indices, t, c);
    CachedPlace place;
    const bool found =
        args.index_kind == IndexKind::kRows
            ? find_row(args.kv, id, &place)
            : find_position(args.kv, args.block_table, integer(args.request_ids, t), id, &place);
    if (found) {
      read_cached_row(args.kv, place.block, place.offset, &key);
      keys.insert(keys.end(), key.begin(), key.end());
    }
  }
  return keys;
}

}  // namespace

AttentionResult sparse_mla(const SparseMlaArgs& args) {
  const int64_t num_rows = args.out.shape[0];
  const int64_t num_heads = args.out.shape[1];
  const int64_t d_qk = args.kv.layout.d_qk();
  const int64_t d_v = args.kv.layout.latent;
  // Every implementation narrows the scale to float first.
  const double softmax_scale = static_cast<float>(args.softmax_scale);
  AttentionResult result;
  result.out.assign(num_rows * num_heads * d_v, 0.0);
  result.lse.assign(num_rows * num_heads, -kInfinity);
  result.max_logits.assign(num_rows * num_heads, -kInfinity);
  result.weight_scale.assign(result.out.size(), 0.0);
  result.score_scale.assign(num_rows * num_heads, 0.0);
  std::vector<double> query(d_qk);
  std::vector<double> scores;
  for (int64_t t = 0; t < num_rows; ++t) {
    const std::vector<double> keys = listed_keys(args, t);
    const int64_t num_keys = static_cast<int64_t>(keys.size()) / d_qk;
    if (num_keys == 0) {
      continue;
    }
    for (int64_t h = 0; h < num_heads; ++h) {
      const int64_t at = t * num_heads + h;
      for (int64_t i = 0; i < d_qk; ++i) {
        query[i] = query_element(args, t, h, i);
      }
      scores.resize(num_keys);
      for (int64_t j = 0; j < num_keys; ++j) {
        const double* key = &keys[j * d_qk];
        scores[j] = softmax_scale * dot(query.data(), key, d_qk);
        // Cauchy-Schwarz bounds the sum of magnitudes at a fraction of its cost.
        result.score_scale[at] = std::max(
            result.score_scale[at], std::fabs(softmax_scale) * std::sqrt(dot(key, key, d_qk)));
      }
      result.score_scale[at] *= std::sqrt(dot(query.data(), query.data(), d_qk));
      const double max = *std::max_element(scores.begin(), scores.end());
      double sum = 0;
      double* out = &result.out[at * d_v];
      double* weight_scale = &result.weight_scale[at * d_v];
      for (int64_t j = 0; j < num_keys; ++j) {
        const double weight = std::exp(scores[j] - max);
        const double* key = &keys[j * d_qk];
        sum += weight;
        for (int64_t i = 0; i < d_v; ++i) {
          const double part = weight * key[i];
          out[i] += part;
          weight_scale[i] += part * part;
        }
      }
      const double lse = max + std::log(sum);
      double factor = 1 / sum;
      if (!args.sink.empty()) {
        factor /= 1 + std::exp(element(args.sink, h) - lse);
      }
      for (int64_t i = 0; i < d_v; ++i) {
        out[i] *= factor;
        weight_scale[i] = std::sqrt(weight_scale[i]) * factor;
      }
      result.lse[at] = lse;
      result.max_logits[at] = max;
    }
  }
  return result;
}

}  // namespace lacuna::reference
