// Micro-kernels of attention on the CPU: scores of a tile of keys, online softmax, weighted sum of
// values. Keys and values are given as pointers to rows, so a tile may be gathered or contiguous.
// Included once per SIMD target from within foreach_target (no #pragma once: the guard toggles).
#if defined(LACUNA_BACKENDS_CPU_ATTENTION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LACUNA_BACKENDS_CPU_ATTENTION_INL_H_
#undef LACUNA_BACKENDS_CPU_ATTENTION_INL_H_
#else
#define LACUNA_BACKENDS_CPU_ATTENTION_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <limits>

#include "backends/cpu/pairs-inl.h"
#include "backends/cpu/simd-inl.h"
#include "hwy/highway.h"
#include "lacuna/dtype.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// Keys of a tile: enough to make the traffic of the accumulators small (they are read and written
// once a tile), few enough that a tile of rows and the next one stay in a 1 MiB L2.
constexpr int kTileKeys = 128;
// Keys scored at once; row arrays are padded to a multiple of this by repeating a valid row.
constexpr int kKeyBlock = 4;
// Heads scored at once against kKeyBlock keys: heads * keys accumulators, 2 * heads query vectors
// and a pair of key vectors must fit the registers (26 of 32, or 14 of 16).
constexpr bool kManyRegisters =
    HWY_TARGET != HWY_AVX2 && HWY_TARGET != HWY_SSE4 && HWY_TARGET != HWY_SSSE3;
constexpr int kScoreHeads = kManyRegisters ? 4 : 2;
// Heads that one pass over the tile's rows serves: 16 queries of 576 floats nearly fill L1.
constexpr int64_t kScoreGroup = 16;
// Heads weighed at once, and pairs of value vectors: heads * 2 * pairs accumulators.
constexpr int kWeighHeads = 4;
constexpr int kWeighPairs = kManyRegisters ? 2 : 1;
// Keys between two prefetch steps: with them a step of weigh_tile lasts as long as one of
// score_tile.
constexpr int kWeighStepKeys = 32;

// Asks for rows ahead of their use, a few lines at a time, so that the requests spread over the
// arithmetic of the tile before. Into L2: a tile is larger than L1.
class RowPrefetch {
 public:
  explicit RowPrefetch(int64_t row_bytes) : row_bytes_(row_bytes) {}

  // Starts over with `num_rows` rows that are to be asked for in `num_steps` calls of step().
  void start(const char* const* rows, int num_rows, int64_t num_steps) {
    rows_ = rows;
    rows_end_ = rows + num_rows;
    const int64_t lines = num_rows * (row_bytes_ / kLineBytes + 1);
    lines_per_step_ = static_cast<int>((lines + num_steps - 1) / num_steps);
    begin_row();
  }

  HWY_INLINE void step() {
    for (int i = 0; i < lines_per_step_; ++i) {
      __builtin_prefetch(line_, 0, 2);
      line_ += kLineBytes;
      if (line_ > last_) {
        begin_row();
      }
    }
  }

 private:
  static constexpr int64_t kLineBytes = 64;

  void begin_row() {
    if (rows_ == rows_end_) {
      lines_per_step_ = 0;
      return;
    }
    const char* row = *rows_++;
    last_ = row + row_bytes_ - 1;
    line_ = row - reinterpret_cast<uintptr_t>(row) % kLineBytes;
  }

  int64_t row_bytes_;
  const char* const* rows_ = nullptr;
  const char* const* rows_end_ = nullptr;
  const char* line_ = nullptr;
  const char* last_ = nullptr;  // last byte of the row
  int lines_per_step_ = 0;
};

// exp(x) for x <= 0 or NaN, 0 below -87 (exp(-87) is 1.6e-38, nothing against the 1 that every
// softmax contains). With r = x - n ln 2, |r| <= ln 2 / 2, the Taylor polynomial of degree 7 leaves
// r^8 / 8! < 5.2e-9 relative, below the 6e-8 of a float.
HWY_INLINE FloatVec exp_nonpositive(FloatVec x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> di;
  const FloatVec lowest = hn::Set(d, -87.0f);
  const FloatVec clamped = hn::Max(lowest, x);  // this order keeps a NaN of x
  const FloatVec n = hn::Round(hn::Mul(clamped, hn::Set(d, 1.44269504088896341f)));
  // ln 2 in two parts: the first has 15 significant bits, so n times it is exact.
  FloatVec r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), clamped);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860682030941723e-6f), r);
  FloatVec p = hn::Set(d, 1.0f / 5040);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // n >= -126 here, so adding it to the exponent field stays normal.
  const auto exponent = hn::ShiftLeft<23>(hn::ConvertTo(di, n));
  const FloatVec result = hn::BitCast(d, hn::Add(hn::BitCast(di, p), exponent));
  // A NaN compares false and stays: clamped carried it through.
  return hn::IfThenElse(hn::Lt(x, lowest), hn::Zero(d), result);
}

// Calls body.operator()<n>() for the n heads that whole blocks leave over, 1 <= n <= kMax.
template <int kMax, class Body>
HWY_INLINE void with_heads(int64_t n, Body&& body) {
  if constexpr (kMax > 1) {
    if (n < kMax) {
      return with_heads<kMax - 1>(n, body);
    }
  }
  body.template operator()<kMax>();
}

// scores[h][0..4) = scale * q[h] . rows[0..4) for kHeads heads.
template <int kHeads, class T>
HWY_INLINE void score_block(const float* HWY_RESTRICT q, int64_t q_stride, const char* const* rows,
                            int64_t depth, float scale, float* HWY_RESTRICT scores) {
  const FloatTag d;
  static_assert(kKeyBlock == 4);
  FloatVec acc[kHeads][kKeyBlock];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int k = 0; k < kKeyBlock; ++k) {
      acc[h][k] = hn::Zero(d);
    }
  }
  const T* row0 = reinterpret_cast<const T*>(rows[0]);
  const T* row1 = reinterpret_cast<const T*>(rows[1]);
  const T* row2 = reinterpret_cast<const T*>(rows[2]);
  const T* row3 = reinterpret_cast<const T*>(rows[3]);
  for (int64_t i = 0; i < depth; i += kPair) {
    FloatVec q_first[kHeads], q_second[kHeads];
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) {
      q_first[h] = hn::LoadU(d, q + h * q_stride + i);
      q_second[h] = hn::LoadU(d, q + h * q_stride + i + kLanes);
    }
#pragma GCC unroll 4
    for (int k = 0; k < kKeyBlock; ++k) {
      const T* row = k == 0 ? row0 : k == 1 ? row1 : k == 2 ? row2 : row3;
      FloatVec first, second;
      load_pair(row + i, first, second);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        acc[h][k] = hn::MulAdd(q_first[h], first, acc[h][k]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        acc[h][k] = hn::MulAdd(q_second[h], second, acc[h][k]);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
    store_sums(acc[h][0], acc[h][1], acc[h][2], acc[h][3], scale, scores + h * kTileKeys);
  }
}

// scores[h][k] = scale * q[h] . rows[k] for num_heads heads and num_keys keys (rounded up to
// kKeyBlock: the padding repeats a valid row and its scores are overwritten by softmax_tile). depth
// is a multiple of kPair; q is in the pair order of T.
template <class T>
void score_tile(const float* q, int64_t q_stride, int64_t num_heads, const char* const* rows,
                int num_keys, int64_t depth, float scale, float* scores, RowPrefetch& prefetch) {
  for (int64_t group = 0; group < num_heads; group += kScoreGroup) {
    const int64_t group_end = group + kScoreGroup < num_heads ? group + kScoreGroup : num_heads;
    for (int k = 0; k < num_keys; k += kKeyBlock) {
      int64_t h = group;
      for (; h + kScoreHeads <= group_end; h += kScoreHeads) {
        prefetch.step();
        score_block<kScoreHeads, T>(q + h * q_stride, q_stride, rows + k, depth, scale,
                                    scores + h * kTileKeys + k);
      }
      if (h < group_end) {
        prefetch.step();
        with_heads<kScoreHeads - 1>(group_end - h, [&]<int kHeads>() {
          score_block<kHeads, T>(q + h * q_stride, q_stride, rows + k, depth, scale,
                                 scores + h * kTileKeys + k);
        });
      }
    }
  }
}

// Running softmax state of num_heads heads (or query rows).
struct SoftmaxState {
  float* max;     // [heads], -inf at first
  float* sum;     // [heads], 0 at first
  float* factor;  // [heads], set by softmax_tile: what earlier sums are to be multiplied by
};

// Turns a tile of scores into exp(score - max), and brings the state up to date.
inline void softmax_tile(int64_t num_heads, int num_keys, float* scores,
                         const SoftmaxState& state) {
  const FloatTag d;
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  const int padded = (num_keys + kLanes - 1) / kLanes * kLanes;
  for (int64_t h = 0; h < num_heads; ++h) {
    float* row = scores + h * kTileKeys;
    for (int k = num_keys; k < padded; ++k) {
      row[k] = kMinusInfinity;
    }
    FloatVec tile_max = hn::LoadU(d, row);
    for (int k = kLanes; k < padded; k += kLanes) {
      tile_max = hn::Max(tile_max, hn::LoadU(d, row + k));
    }
    const float old_max = state.max[h];
    const float largest = hn::GetLane(hn::MaxOfLanes(d, tile_max));
    const float new_max = largest > old_max ? largest : old_max;
    // While no key has a finite score, exponents are taken against 0: exp(-inf) is 0, and
    // exp(-inf - -inf) would be NaN.
    const float reference = new_max == kMinusInfinity ? 0.0f : new_max;
    const FloatVec shift = hn::Set(d, reference);
    FloatVec sum = hn::Zero(d);
    for (int k = 0; k < padded; k += kLanes) {
      const FloatVec p = exp_nonpositive(hn::Sub(hn::LoadU(d, row + k), shift));
      hn::StoreU(p, d, row + k);
      sum = hn::Add(sum, p);
    }
    // old_max is -inf at first, which gives 0.
    const float factor =
        old_max == new_max ? 1.0f : hn::GetLane(exp_nonpositive(hn::Set(d, old_max - reference)));
    state.max[h] = new_max;
    state.factor[h] = factor;
    state.sum[h] = state.sum[h] * factor + hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

// acc[h] = acc[h] * factor[h] + sum_k weights[h][k] * rows[k] over kPairs pairs of elements. The
// tile is summed apart and added once, which keeps rounding errors those of a tile.
template <int kHeads, int kPairs, class T>
HWY_INLINE void weigh_block(const char* const* rows, int64_t offset, int num_keys,
                            const float* HWY_RESTRICT weights, const float* HWY_RESTRICT factor,
                            float* HWY_RESTRICT acc, int64_t acc_stride, RowPrefetch& prefetch) {
  const FloatTag d;
  constexpr int kVectors = 2 * kPairs;
  FloatVec sum[kHeads][kVectors];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sum[h][v] = hn::Zero(d);
    }
  }
  for (int begin = 0; begin < num_keys; begin += kWeighStepKeys) {
    prefetch.step();
    const int end = begin + kWeighStepKeys < num_keys ? begin + kWeighStepKeys : num_keys;
    for (int k = begin; k < end; ++k) {
      const T* row = reinterpret_cast<const T*>(rows[k]) + offset;
      FloatVec value[kVectors];
#pragma GCC unroll 2
      for (int p = 0; p < kPairs; ++p) {
        load_pair(row + p * kPair, value[2 * p], value[2 * p + 1]);
      }
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) {
        const FloatVec weight = hn::Set(d, weights[h * kTileKeys + k]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sum[h][v] = hn::MulAdd(weight, value[v], sum[h][v]);
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
    const FloatVec scale = hn::Set(d, factor[h]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      float* at = acc + h * acc_stride + v * kLanes;
      hn::StoreU(hn::MulAdd(hn::LoadU(d, at), scale, sum[h][v]), d, at);
    }
  }
}

template <int kPairs, class T>
HWY_INLINE void weigh_heads(const char* const* rows, int64_t offset, int num_keys,
                            const float* weights, const float* factor, int64_t num_heads,
                            float* acc, int64_t acc_stride, RowPrefetch& prefetch) {
  int64_t h = 0;
  for (; h + kWeighHeads <= num_heads; h += kWeighHeads) {
    weigh_block<kWeighHeads, kPairs, T>(rows, offset, num_keys, weights + h * kTileKeys, factor + h,
                                        acc + h * acc_stride + offset, acc_stride, prefetch);
  }
  if (h < num_heads) {
    with_heads<kWeighHeads - 1>(num_heads - h, [&]<int kHeads>() {
      weigh_block<kHeads, kPairs, T>(rows, offset, num_keys, weights + h * kTileKeys, factor + h,
                                     acc + h * acc_stride + offset, acc_stride, prefetch);
    });
  }
}

// acc[h] = acc[h] * factor[h] + sum_k weights[h][k] * rows[k] over `width` elements, a multiple of
// kPair; acc is in the pair order of T. Columns outside, heads inside: a strip of the rows stays in
// L1 for all heads.
template <class T>
void weigh_tile(const char* const* rows, int num_keys, const float* weights, const float* factor,
                int64_t num_heads, int64_t width, float* acc, int64_t acc_stride,
                RowPrefetch& prefetch) {
  int64_t offset = 0;
  for (; offset + kWeighPairs * kPair <= width; offset += kWeighPairs * kPair) {
    weigh_heads<kWeighPairs, T>(rows, offset, num_keys, weights, factor, num_heads, acc, acc_stride,
                                prefetch);
  }
  for (; offset < width; offset += kPair) {
    weigh_heads<1, T>(rows, offset, num_keys, weights, factor, num_heads, acc, acc_stride,
                      prefetch);
  }
}

// Calls of prefetch.step() that score_tile and weigh_tile make for one tile.
inline int64_t prefetch_steps(int64_t num_heads, int num_keys, int64_t width) {
  const auto blocks = [](int64_t n, int64_t block) { return (n + block - 1) / block; };
  int64_t score_heads = num_heads / kScoreGroup * (kScoreGroup / kScoreHeads);
  score_heads += blocks(num_heads % kScoreGroup, kScoreHeads);
  const int64_t key_blocks = (num_keys + kKeyBlock - 1) / kKeyBlock;
  const int64_t pairs = width / kPair;
  const int64_t strips = pairs / kWeighPairs + pairs % kWeighPairs;
  const int64_t weigh_steps = (num_keys + kWeighStepKeys - 1) / kWeighStepKeys;
  return score_heads * key_blocks + blocks(num_heads, kWeighHeads) * strips * weigh_steps;
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // toggle
