// Oracle of mha: one query row at a time, one head at a time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Sequence {
  int64_t first_q, num_q, first_k, num_k;
};

std::vector<Sequence> sequences(const MhaArgs& args) {
  std::vector<Sequence> list;
  if (!args.cu_seqlens_q.empty()) {
    for (int64_t b = 0; b + 1 < args.cu_seqlens_q.shape[0]; ++b) {
      const int64_t q = integer(args.cu_seqlens_q, b);
      const int64_t k = integer(args.cu_seqlens_k, b);
      list.push_back(
          {q, integer(args.cu_seqlens_q, b + 1) - q, k, integer(args.cu_seqlens_k, b + 1) - k});
    }
    return list;
  }
  int64_t q = 0;
  int64_t k = 0;
  for (int64_t b = 0; b < args.seqlens_q.shape[0]; ++b) {
    list.push_back({q, integer(args.seqlens_q, b), k, integer(args.seqlens_k, b)});
    q += list.back().num_q;
    k += list.back().num_k;
  }
  return list;
}

bool bit_set(const ConstTensorView& mask, int64_t row, int64_t bit) {
  return ((static_cast<uint32_t>(integer(mask, row, bit >> 5)) >> (bit & 31)) & 1u) != 0;
}

double key_element(const MhaArgs& args, int64_t row, int64_t h, int64_t i) {
  if (!args.k.empty()) {
    return element(args.k, row, h, i);
  }
  const int64_t nope = args.k_nope.shape[2];
  return i < nope ? element(args.k_nope, row, h, i) : element(args.k_rope, row, i - nope);
}

}  // namespace

AttentionResult mha(const MhaArgs& args) {
  const int64_t num_rows = args.q.shape[0];
  const int64_t num_heads = args.q.shape[1];
  const int64_t d_qk = args.q.shape[2];
  const int64_t d_v = args.v.shape[2];
  const double softmax_scale = static_cast<float>(args.softmax_scale);
  AttentionResult result;
  result.out.assign(num_rows * num_heads * d_v, 0.0);
  result.lse.assign(num_rows * num_heads, -kInfinity);
  result.score_scale.assign(num_rows * num_heads, 0.0);
  result.weight_scale.assign(result.out.size(), 0.0);
  int64_t b = 0;
  for (const Sequence& seq : sequences(args)) {
    const int64_t key_start = integer_or(args.key_start, b++, 0);
    for (int64_t h = 0; h < num_heads; ++h) {
      std::vector<double> keys(seq.num_k * d_qk);
      std::vector<double> values(seq.num_k * d_v);
      for (int64_t j = 0; j < seq.num_k; ++j) {
        for (int64_t i = 0; i < d_qk; ++i) {
          keys[j * d_qk + i] = key_element(args, seq.first_k + j, h, i);
        }
        for (int64_t i = 0; i < d_v; ++i) {
          values[j * d_v + i] = element(args.v, seq.first_k + j, h, i);
        }
      }
      std::vector<double> query(d_qk);
      std::vector<double> scores(seq.num_k);
      for (int64_t row = 0; row < seq.num_q; ++row) {
        const int64_t t = seq.first_q + row;
        const int64_t at = t * num_heads + h;
        for (int64_t i = 0; i < d_qk; ++i) {
          query[i] = element(args.q, t, h, i);
        }
        double max = -kInfinity;
        double key_norm_max = 0;
        for (int64_t j = 0; j < seq.num_k; ++j) {
          const bool kept = (!args.causal || j <= row + (seq.num_k - seq.num_q)) &&
                            (args.mask.empty() || bit_set(args.mask, t, key_start + j));
          const double* key = &keys[j * d_qk];
          scores[j] = kept ? softmax_scale * dot(query.data(), key, d_qk) : -kInfinity;
          max = std::max(max, scores[j]);
          if (kept) {
            key_norm_max = std::max(key_norm_max, dot(key, key, d_qk));
          }
        }
        result.score_scale[at] = std::fabs(softmax_scale) *
                                 std::sqrt(key_norm_max * dot(query.data(), query.data(), d_qk));
        if (max == -kInfinity) {
          continue;
        }
        double sum = 0;
        double* out = &result.out[at * d_v];
        double* weight_scale = &result.weight_scale[at * d_v];
        for (int64_t j = 0; j < seq.num_k; ++j) {
          if (scores[j] == -kInfinity) {
            continue;
          }
          const double weight = std::exp(scores[j] - max);
          sum += weight;
          for (int64_t i = 0; i < d_v; ++i) {
            const double part = weight * values[j * d_v + i];
            out[i] += part;
            weight_scale[i] += part * part;
          }
        }
        for (int64_t i = 0; i < d_v; ++i) {
          out[i] /= sum;
          weight_scale[i] = std::sqrt(weight_scale[i]) / sum;
        }
        result.lse[at] = max + std::log(sum);
      }
    }
  }
  return result;
}

}  // namespace lacuna::reference
