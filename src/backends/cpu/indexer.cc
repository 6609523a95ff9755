// The lightning indexer: scores of cached keys (index_logits), exact top-k, translation of
// positions to cache rows, and select_keys, which chains them.
//
// Scoring works on vectors of heads: queries are transposed once a row to [dim][heads], a key's
// elements are broadcast, and the sum over heads stays in registers up to one vector a key. Every
// score is computed in one order, wherever its row and key fall in blocks and tasks, so that chunks
// of any size give the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "backends/cpu/score.h"
#include "backends/cpu/select.h"
#include "backends/cpu/targets.h"
#include "core/workspace.h"
#include "ops/select_keys_bounds.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/indexer.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Keys that a register tile scores together, times two vectors of heads: 24 accumulators of 32
// registers, or 12 of 16.
constexpr int kTileKeys = HWY_TARGET <= HWY_AVX3 ? 12 : 6;
static_assert(kScoreKeys % kTileKeys == 0);

// sums[i][lane] += sum over heads of this group of weight * relu(q . key i), for kTileKeys keys and
// kVectors vectors of heads. `q` is [dim][kVectors * lanes]; heads at or beyond num_heads count
// nothing, even if the key is not finite.
template <int kVectors>
HWY_INLINE void score_tile(const float* HWY_RESTRICT q, const float* HWY_RESTRICT keys, int64_t dim,
                           int64_t chunk_floats, const float* HWY_RESTRICT weights,
                           int64_t num_heads, bool first, float* HWY_RESTRICT sums) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> acc[kTileKeys][kVectors];
  for (int i = 0; i < kTileKeys; ++i) {
    for (int v = 0; v < kVectors; ++v) {
      acc[i][v] = hn::Zero(d);
    }
  }
  for (int64_t begin = 0; begin < dim; begin += kScoreDims) {
    const int64_t count = std::min(kScoreDims, dim - begin);
    for (int64_t p = 0; p < count; ++p) {
      hn::Vec<decltype(d)> qv[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        qv[v] = hn::Load(d, q + (p * kVectors + v) * lanes);
      }
      for (int i = 0; i < kTileKeys; ++i) {
        const auto kv = hn::Set(d, keys[i * kScoreDims + p]);
        for (int v = 0; v < kVectors; ++v) {
          acc[i][v] = hn::MulAdd(qv[v], kv, acc[i][v]);
        }
      }
    }
    q += count * kVectors * lanes;
    keys += chunk_floats;
  }
  const auto zero = hn::Zero(d);
  for (int i = 0; i < kTileKeys; ++i) {
    auto sum = first ? zero : hn::Load(d, sums + i * lanes);
    for (int v = 0; v < kVectors; ++v) {
      const auto real =
          hn::FirstN(d, static_cast<size_t>(std::clamp<int64_t>(num_heads - v * lanes, 0, lanes)));
      // Not Max: a NaN must stay one.
      const auto relu = hn::IfThenZeroElse(hn::Lt(acc[i][v], zero), acc[i][v]);
      sum = hn::MulAdd(hn::IfThenElseZero(real, relu), hn::Load(d, weights + v * lanes), sum);
    }
    hn::Store(sum, d, sums + i * lanes);
  }
}

// out[i] = sum of lanes of sums[i], by a tree over neighbours, for Lanes(d) keys at once.
HWY_INLINE void sum_lanes(const float* HWY_RESTRICT sums, float* HWY_RESTRICT out) {
  const hn::ScalableTag<float> d;
#if HWY_TARGET == HWY_SCALAR
  out[0] = sums[0];
  (void)d;
#else
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(d));
  hn::Vec<decltype(d)> v[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    v[i] = hn::Load(d, sums + i * kLanes);
  }
  for (int count = kLanes / 2; count >= 1; count /= 2) {
    for (int i = 0; i < count; ++i) {
      v[i] = hn::Add(hn::ConcatEven(d, v[2 * i + 1], v[2 * i]),
                     hn::ConcatOdd(d, v[2 * i + 1], v[2 * i]));
    }
  }
  hn::StoreU(v[0], d, out);
#endif
}

// q[t] as [group][dim][lanes of the group], groups of two vectors of heads and a last one of one or
// two; heads beyond the last are zero.
template <class T>
void pack_query(const T* q, int64_t head_stride, int64_t heads, int64_t heads_padded, int64_t dim,
                float* to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t begin = 0; begin < heads_padded; begin += 2 * lanes) {
    const int64_t width = std::min(2 * lanes, heads_padded - begin);
    for (int64_t h = 0; h < width; ++h) {
      float* at = to + h;
      if (begin + h < heads) {
        const T* from = q + (begin + h) * head_stride;
        for (int64_t p = 0; p < dim; ++p, at += width) {
          *at = to_float(from[p]);
        }
      } else {
        for (int64_t p = 0; p < dim; ++p, at += width) {
          *at = 0.0f;
        }
      }
    }
    to += width * dim;
  }
}

void pack_query_row(const IndexLogitsArgs& args, int64_t t, int64_t heads_padded, float* q,
                    float* weights) {
  const int64_t heads = args.q.shape[1];
  const int64_t dim = args.q.shape[2];
  const int64_t row = t * args.q.strides[0];
  const int64_t head_stride = args.q.strides[1];
  switch (args.q.dtype) {
    case DType::kBFloat16:
      pack_query(args.q.as<Bf16>() + row, head_stride, heads, heads_padded, dim, q);
      break;
    case DType::kFloat8E4M3:
      pack_query(args.q.as<Fp8E4M3>() + row, head_stride, heads, heads_padded, dim, q);
      break;
    default:
      pack_query(args.q.as<float>() + row, head_stride, heads, heads_padded, dim, q);
  }
  const float* from = args.head_weights.as<float>() + t * args.head_weights.strides[0];
  std::copy_n(from, heads, weights);
  std::fill(weights + heads, weights + heads_padded, 0.0f);
}

// One key into to[chunk][kScoreDims], widened and scaled.
template <class T>
HWY_INLINE void widen_key(const T* from, int64_t dim, int64_t chunk_floats, float scale,
                          float* to) {
  for (int64_t begin = 0; begin < dim; begin += kScoreDims, to += chunk_floats) {
    const int64_t count = std::min(kScoreDims, dim - begin);
    widen(from + begin, count, to);
    if (scale != 1.0f) {
      for (int64_t p = 0; p < count; ++p) {
        to[p] *= scale;
      }
    }
  }
}

// Keys [begin, begin + count) of a request, gathered: values, scales, and -inf or 0 to add.
// Positions without a key become zeros that score -inf.
void gather_keys(const IndexLogitsArgs& args, int64_t request, int64_t begin, int64_t count,
                 const ScoreScratch& scratch) {
  const KvCacheView& kv = args.keys;
  const int64_t dim = kv.layout.latent;
  const int64_t chunk_floats = kScoreKeys * kScoreDims;
  const bool paged = !args.block_table.empty();
  const int64_t requests = paged ? args.block_table.shape[0] : args.key_starts.shape[0];
  // An empty cache may have no block size to divide by.
  const bool known = request >= 0 && request < requests && kv.num_blocks > 0;
  const float stored_scale = kv.latent_scale == nullptr ? 1.0f : *kv.latent_scale;
  for (int64_t j = 0; j < count; ++j) {
    const int64_t position = begin + j;
    int64_t block = -1;
    int64_t offset = 0;
    if (known && paged) {
      const int64_t column = position / kv.block_size;
      offset = position % kv.block_size;
      if (column < args.block_table.shape[1]) {
        block = args.block_table.as<int32_t>()[request * args.block_table.strides[0] + column];
      }
    } else if (known) {
      const int64_t start = args.key_starts.as<int32_t>()[request * args.key_starts.strides[0]];
      offset = start + position;
      block = offset >= 0 && offset < kv.num_rows() ? 0 : -1;
    }
    float* to = scratch.keys + j * kScoreDims;
    scratch.valid[j] = block >= 0 && block < kv.num_blocks ? 1 : 0;
    scratch.scales[j] = 1.0f;
    if (scratch.valid[j] == 0) {
      for (int64_t p = 0; p < dim; p += kScoreDims, to += chunk_floats) {
        std::memset(to, 0, static_cast<size_t>(std::min(kScoreDims, dim - p)) * sizeof(float));
      }
      continue;
    }
    const char* base = static_cast<const char*>(kv.data) + block * kv.block_stride_bytes;
    switch (kv.layout.format) {
      case KvFormat::kIndexBf16:
        widen_key(reinterpret_cast<const Bf16*>(base + offset * kv.row_bytes), dim, chunk_floats,
                  stored_scale, to);
        break;
      case KvFormat::kIndexF32:
        widen_key(reinterpret_cast<const float*>(base + offset * kv.row_bytes), dim, chunk_floats,
                  stored_scale, to);
        break;
      default:
        widen_key(reinterpret_cast<const Fp8E4M3*>(base + offset * dim), dim, chunk_floats,
                  stored_scale, to);
        std::memcpy(&scratch.scales[j], base + kv.block_size * dim + 4 * offset, sizeof(float));
    }
  }
  // The last register tile reads whole; its surplus is thrown away.
  for (int64_t j = count; j < round_up(count, kTileKeys); ++j) {
    float* to = scratch.keys + j * kScoreDims;
    for (int64_t p = 0; p < dim; p += kScoreDims, to += chunk_floats) {
      std::memset(to, 0, static_cast<size_t>(std::min(kScoreDims, dim - p)) * sizeof(float));
    }
  }
}

// Scores of the first `count` gathered keys for one packed row.
template <class Out>
void score_row(const float* q, const float* weights, int64_t heads, int64_t heads_padded,
               int64_t dim, int64_t count, const ScoreScratch& scratch, Out* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t chunk_floats = kScoreKeys * kScoreDims;
  for (int64_t j = 0; j < count; j += kTileKeys) {
    const float* group = q;
    for (int64_t h = 0; h < heads_padded; h += 2 * lanes) {
      const float* keys = scratch.keys + j * kScoreDims;
      float* sums = scratch.sums + j * lanes;
      if (h + lanes < heads_padded) {
        score_tile<2>(group, keys, dim, chunk_floats, weights + h, heads - h, h == 0, sums);
        group += 2 * lanes * dim;
      } else {
        score_tile<1>(group, keys, dim, chunk_floats, weights + h, heads - h, h == 0, sums);
      }
    }
  }
  HWY_ALIGN float scores[hn::MaxLanes(d)];
  for (int64_t j = 0; j < count; j += lanes) {
    sum_lanes(scratch.sums + j * lanes, scores);
    const int64_t n = std::min(lanes, count - j);
    for (int64_t i = 0; i < n; ++i) {
      store_scalar(scratch.valid[j + i] != 0 ? scores[i] * scratch.scales[j + i] : kMinusInfinity,
                   out + j + i);
    }
  }
}

template <class Out>
void score_rows_typed(const IndexLogitsArgs& args, const ScoreBlock& block,
                      const ScoreScratch& scratch) {
  const int64_t heads = args.q.shape[1];
  const int64_t dim = args.q.shape[2];
  const int64_t heads_padded = padded_heads(heads);
  const auto request_of = [&](int64_t t) {
    return int64_t{args.request_ids.as<int32_t>()[t * args.request_ids.strides[0]]};
  };
  const auto visible_of = [&](int64_t t) {
    const int64_t visible = args.visible_lengths.as<int32_t>()[t * args.visible_lengths.strides[0]];
    return request_of(t) < 0 ? 0 : std::clamp(visible, int64_t{0}, args.logits.shape[1]);
  };
  const auto logits_of = [&](int64_t t) {
    return args.logits.as<Out>() + t * args.logits.strides[0];
  };
  int64_t run_begin = block.row_begin;
  while (run_begin < block.row_end) {
    // Rows of one request share the gathered keys.
    const int64_t request = request_of(run_begin);
    int64_t run_end = run_begin;
    int64_t longest = 0;
    for (; run_end < block.row_end && request_of(run_end) == request; ++run_end) {
      longest = std::max(longest, visible_of(run_end));
    }
    const int64_t key_end = std::min(block.key_end, longest);
    for (int64_t t = run_begin; t < run_end && block.key_begin < key_end; ++t) {
      if (visible_of(t) > block.key_begin) {
        const int64_t i = t - run_begin;
        pack_query_row(args, t, heads_padded, scratch.queries + i * heads_padded * dim,
                       scratch.weights + i * heads_padded);
      }
    }
    for (int64_t begin = block.key_begin; begin < key_end; begin += kScoreKeys) {
      const int64_t count = std::min(kScoreKeys, key_end - begin);
      gather_keys(args, request, begin, count, scratch);
      for (int64_t t = run_begin; t < run_end; ++t) {
        const int64_t i = t - run_begin;
        const int64_t seen = std::min(count, visible_of(t) - begin);
        if (seen > 0) {
          score_row(scratch.queries + i * heads_padded * dim, scratch.weights + i * heads_padded,
                    heads, heads_padded, dim, seen, scratch, logits_of(t) + begin);
        }
      }
    }
    for (int64_t t = run_begin; t < run_end && block.fill; ++t) {
      for (int64_t j = std::max(block.key_begin, visible_of(t)); j < block.key_end; ++j) {
        store_scalar(kMinusInfinity, logits_of(t) + j);
      }
    }
    run_begin = run_end;
  }
}

void score_rows(const IndexLogitsArgs& args, const ScoreBlock& block, const ScoreScratch& scratch) {
  args.logits.dtype == DType::kBFloat16 ? score_rows_typed<Bf16>(args, block, scratch)
                                        : score_rows_typed<float>(args, block, scratch);
}

// keys[i] = ordered_key(x[i]).
template <class T>
void order_keys_typed(const T* x, int64_t n, uint32_t* keys) {
  const hn::ScalableTag<float> d;
  const hn::RebindToUnsigned<decltype(d)> du;
  const hn::RebindToSigned<decltype(d)> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = load_float(d, x + i);
    const auto bits = hn::BitCast(du, hn::Add(v, hn::Zero(d)));  // -0 + 0 is +0
    const auto negative = hn::BitCast(du, hn::ShiftRight<31>(hn::BitCast(di, bits)));
    const auto flipped = hn::Xor(bits, hn::Or(negative, hn::Set(du, 0x80000000u)));
    hn::StoreU(hn::IfThenZeroElse(hn::RebindMask(du, hn::IsNaN(v)), flipped), du, keys + i);
  }
  for (; i < n; ++i) {
    keys[i] = ordered_key(to_float(x[i]));
  }
}

void order_keys(const ConstTensorView& logits, int64_t row, int64_t begin, int64_t n,
                uint32_t* keys) {
  const int64_t at = row * logits.strides[0] + begin;
  if (logits.dtype == DType::kBFloat16) {
    order_keys_typed(logits.as<Bf16>() + at, n, keys);
  } else {
    order_keys_typed(logits.as<float>() + at, n, keys);
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(score_rows);
HWY_EXPORT(order_keys);

int64_t int_at(const ConstTensorView& ints, int64_t t) {
  return ints.as<int32_t>()[t * ints.strides[0]];
}

// ---- Positions to rows ----

// Where positions of one cache lie.
struct Addressing {
  ConstTensorView block_table;
  int64_t num_blocks;
  int64_t block_size;
  int64_t block_stride_rows;

  int32_t row_of(int64_t request, int64_t position) const {
    if (request < 0 || request >= block_table.shape[0] || position < 0) {
      return -1;
    }
    const int64_t column = position / block_size;
    if (column >= block_table.shape[1]) {
      return -1;
    }
    const int64_t block = block_table.as<int32_t>()[request * block_table.strides[0] + column];
    if (block < 0 || block >= num_blocks) {
      return -1;
    }
    return static_cast<int32_t>(block * block_stride_rows + position % block_size);
  }
};

template <class Args>
Addressing addressing_of(const Args& args) {
  return {args.block_table, args.num_blocks, args.block_size,
          args.block_stride_rows == 0 ? args.block_size : args.block_stride_rows};
}

void translate_row(const TranslateIndicesArgs& args, const Addressing& addressing, int64_t t) {
  const int64_t width = args.indices.shape[1];
  const int32_t* from = args.indices.as<int32_t>() + t * args.indices.strides[0];
  int32_t* to = args.rows.as<int32_t>() + t * args.rows.strides[0];
  const int64_t count = args.valid_counts.empty()
                            ? width
                            : std::clamp<int64_t>(int_at(args.valid_counts, t), 0, width);
  const int64_t request = int_at(args.request_ids, t);
  const int64_t workspace_id = args.workspace_ids.empty() ? -1 : int_at(args.workspace_ids, t);
  const bool in_workspace = workspace_id >= 0;
  const bool known = !in_workspace || workspace_id < args.workspace_starts.shape[0];
  const int64_t workspace_start =
      in_workspace && known ? int_at(args.workspace_starts, workspace_id) : 0;
  const DcpShard& dcp = args.dcp;
  const int64_t stripe = int64_t{dcp.size} * dcp.interleave;
  int64_t valid = 0;
  // `rows` may be `indices`: an entry is read before its place, or one before it, is written.
  for (int64_t c = 0; c < width; ++c) {
    int64_t position = c < count ? from[c] : -1;
    int32_t row = -1;
    if (position < 0 || !known) {
      row = -1;
    } else if (in_workspace) {
      row = static_cast<int32_t>(workspace_start + position);
    } else if (dcp.size == 1) {
      row = addressing.row_of(request, position);
    } else if (position / dcp.interleave % dcp.size == dcp.rank) {
      row = addressing.row_of(request,
                              position / stripe * dcp.interleave + position % dcp.interleave);
    }
    if (!args.compact) {
      to[c] = row;
    } else if (row >= 0) {
      to[valid] = row;
    }
    valid += row >= 0 ? 1 : 0;
  }
  if (args.compact) {
    std::fill(to + valid, to + width, -1);
  }
  if (!args.counts.empty()) {
    args.counts.as<int32_t>()[t * args.counts.strides[0]] = static_cast<int32_t>(valid);
  }
}

Status translate_indices(const TranslateIndicesArgs& args, const DeviceInfo& device,
                         const Launch&) {
  const Addressing addressing = addressing_of(args);
  parallel_ranges(device, args.indices.shape[0], grain_rows(16 * args.indices.shape[1]),
                  [&](int64_t begin, int64_t end, int) {
                    for (int64_t t = begin; t < end; ++t) {
                      translate_row(args, addressing, t);
                    }
                  });
  return ok_status();
}

// ---- Scores ----

// Rows that share gathered keys in one task: their packed queries should fit half of L2.
constexpr int64_t kScoreRows = 16;
constexpr int64_t kMaxLanes = 16;

int64_t score_row_floats(const IndexLogitsArgs& args) {
  return padded_heads(args.q.shape[1]) * (args.q.shape[2] + 1);
}

int64_t score_fixed_floats(const IndexLogitsArgs& args) {
  return kScoreKeys * (kScoreDims * div_up(args.q.shape[2], kScoreDims) + kMaxLanes + 2);
}

// Rows a task, at most kScoreRows and as many as the cap allows, at least one.
int64_t score_rows_per_task(const IndexLogitsArgs& args, const DeviceInfo& device) {
  const int64_t rows = std::min(kScoreRows, args.q.shape[0]);
  if (args.scratch_bytes_max == 0) {
    return rows;
  }
  const int64_t floats = args.scratch_bytes_max / 4 / device.num_threads;
  return std::clamp<int64_t>((floats - score_fixed_floats(args)) / score_row_floats(args), 1, rows);
}

// Rows in a row of one request, on average over [row_begin, row_end), rounded up. Rows of different
// requests have no keys in common: a task gains nothing from more than one of them.
int64_t rows_per_request(const IndexLogitsArgs& args, int64_t row_begin, int64_t row_end) {
  int64_t runs = 1;
  for (int64_t t = row_begin + 1; t < row_end; ++t) {
    runs += int_at(args.request_ids, t) != int_at(args.request_ids, t - 1) ? 1 : 0;
  }
  return std::max<int64_t>(1, div_up(row_end - row_begin, runs));
}

ScoreScratch take_score_scratch(Workspace& workspace, const IndexLogitsArgs& args, int64_t rows) {
  const int64_t heads = padded_heads(args.q.shape[1]);
  ScoreScratch scratch;
  scratch.queries = workspace.take<float>(rows * heads * args.q.shape[2]);
  scratch.weights = workspace.take<float>(rows * heads);
  scratch.keys =
      workspace.take<float>(kScoreKeys * kScoreDims * div_up(args.q.shape[2], kScoreDims));
  scratch.sums = workspace.take<float>(kScoreKeys * kMaxLanes);
  scratch.scales = workspace.take<float>(kScoreKeys);
  scratch.valid = workspace.take<int32_t>(kScoreKeys);
  return scratch;
}

int64_t score_scratch_bytes(const IndexLogitsArgs& args, int64_t rows) {
  Workspace workspace;
  take_score_scratch(workspace, args, rows);
  return workspace.used_bytes();
}

int64_t index_logits_workspace(const IndexLogitsArgs& args, const DeviceInfo& device) {
  return score_scratch_bytes(args, score_rows_per_task(args, device)) * device.num_threads;
}

// Scores rows [row_begin, row_end) with `scratch` of score_scratch_bytes a worker.
void score_all(const IndexLogitsArgs& args, const DeviceInfo& device, int64_t row_begin,
               int64_t row_end, bool fill, char* scratch) {
  const int64_t rows =
      std::min(score_rows_per_task(args, device), rows_per_request(args, row_begin, row_end));
  const int64_t scratch_bytes = score_scratch_bytes(args, rows);
  const int64_t columns = args.logits.shape[1];
  const int64_t row_tasks = div_up(row_end - row_begin, rows);
  // Few rows: tasks split the keys too, in whole blocks.
  const int64_t key_tasks_wanted = div_up(int64_t{4} * device.num_threads, row_tasks);
  const int64_t key_blocks = div_up(columns, kScoreKeys);
  const int64_t blocks_per_task =
      std::max(div_up(key_blocks, key_tasks_wanted), std::min<int64_t>(key_blocks, 4));
  const int64_t key_step = blocks_per_task * kScoreKeys;
  const int64_t key_tasks = div_up(columns, std::max<int64_t>(key_step, 1));
  const auto score = HWY_DYNAMIC_DISPATCH(score_rows);
  device.thread_pool->parallel_for(row_tasks * key_tasks, [&](int64_t task, int worker) {
    Workspace workspace(scratch + worker * scratch_bytes, scratch_bytes);
    // Later rows usually see more keys: they start first, so that no long task comes last.
    const int64_t row = row_begin + (row_tasks - 1 - task / key_tasks) * rows;
    const int64_t key = task % key_tasks * key_step;
    score(args,
          {.row_begin = row,
           .row_end = std::min(row + rows, row_end),
           .key_begin = key,
           .key_end = std::min(key + key_step, columns),
           .fill = fill},
          take_score_scratch(workspace, args, rows));
  });
}

Status index_logits(const IndexLogitsArgs& args, const DeviceInfo& device, const Launch& launch) {
  score_all(args, device, 0, args.logits.shape[0], true, static_cast<char*>(launch.workspace));
  return ok_status();
}

// ---- Selection ----

struct SelectScratch {
  uint32_t* keys;        // [C]
  uint32_t* candidates;  // [C]
  int32_t* columns;      // [C]
  uint32_t* histogram;   // [kCountHistogram]
};

SelectScratch take_select_scratch(Workspace& workspace, int64_t columns) {
  SelectScratch scratch;
  scratch.keys = workspace.take<uint32_t>(columns);
  scratch.candidates = workspace.take<uint32_t>(columns);
  scratch.columns = workspace.take<int32_t>(columns);
  scratch.histogram = workspace.take<uint32_t>(kCountHistogram);
  return scratch;
}

int64_t select_scratch_bytes(int64_t columns) {
  Workspace workspace;
  take_select_scratch(workspace, columns);
  return workspace.used_bytes();
}

// One row of logits to select from; lengths count columns (pools).
struct SelectRow {
  ConstTensorView logits;
  int64_t row = 0;
  int64_t begin = 0;             // first column
  int64_t count = 0;             // columns that may be chosen
  int64_t length = 0;            // visible tokens: what `k` compares with
  const int32_t* ids = nullptr;  // of the columns, or null
};

// Chosen columns (relative to begin) into scratch.columns, ascending by id; returns how many.
int64_t select_columns(const SelectRow& row, int64_t k, int kpool, const SelectScratch& scratch) {
  const bool all = row.length <= k;
  int32_t* columns = scratch.columns;
  int64_t chosen = 0;
  if (row.ids == nullptr) {
    if (all) {
      for (; chosen < row.count; ++chosen) {
        columns[chosen] = static_cast<int32_t>(chosen);
      }
      return chosen;
    }
    HWY_DYNAMIC_DISPATCH(order_keys)(row.logits, row.row, row.begin, row.count, scratch.keys);
    const Threshold threshold =
        kth_largest(scratch.keys, row.count, k / kpool, scratch.candidates, scratch.histogram);
    return keep_places(scratch.keys, row.count, threshold, columns);
  }
  const auto by_id = [&](int32_t a, int32_t b) { return row.ids[a] < row.ids[b]; };
  if (all) {
    for (int64_t j = 0; j < row.count; ++j) {
      if (row.ids[j] >= 0) {
        columns[chosen++] = static_cast<int32_t>(j);
      }
    }
  } else {
    HWY_DYNAMIC_DISPATCH(order_keys)(row.logits, row.row, row.begin, row.count, scratch.keys);
    for (int64_t j = 0; j < row.count; ++j) {
      scratch.keys[j] = row.ids[j] < 0 ? 0 : scratch.keys[j];
    }
    const Threshold threshold =
        kth_largest(scratch.keys, row.count, k, scratch.candidates, scratch.histogram);
    for (int64_t j = 0; j < row.count; ++j) {
      if (scratch.keys[j] > threshold.key) {
        columns[chosen++] = static_cast<int32_t>(j);
      }
    }
    // Ties by lowest id, which need not be the lowest column.
    int32_t* ties = columns + chosen;
    int64_t num_ties = 0;
    for (int64_t j = 0; threshold.ties > 0 && j < row.count; ++j) {
      if (scratch.keys[j] == threshold.key) {
        ties[num_ties++] = static_cast<int32_t>(j);
      }
    }
    if (threshold.ties < num_ties) {
      std::nth_element(ties, ties + threshold.ties, ties + num_ties, by_id);
    }
    chosen += threshold.ties;
  }
  std::sort(columns, columns + chosen, by_id);
  return chosen;
}

// Calls visit(place in the list, position, column or -1 for the incomplete pool) over the list.
template <class Visit>
void for_each_position(const SelectRow& row, int kpool, const int32_t* columns, int64_t chosen,
                       const Visit& visit) {
  int64_t place = 0;
  for (int64_t i = 0; i < chosen; ++i) {
    const int64_t first =
        row.ids == nullptr ? int64_t{columns[i]} * kpool : int64_t{row.ids[columns[i]]};
    for (int j = 0; j < kpool; ++j) {
      visit(place++, first + j, columns[i]);
    }
  }
  if (kpool > 1) {
    for (int64_t p = row.length / kpool * kpool; p < row.length; ++p) {
      visit(place++, p, int32_t{-1});
    }
  }
}

void write_selection(const SelectionOutputs& outputs, const SelectRow& row, int64_t t, int kpool,
                     const int32_t* columns, int64_t chosen) {
  const auto row_of = [t](const TensorView& tensor) {
    return tensor.empty() ? nullptr : tensor.as<int32_t>() + t * tensor.strides[0];
  };
  int32_t* indices = row_of(outputs.indices);
  int32_t* rows = row_of(outputs.rows);
  int32_t* mask = row_of(outputs.mask);
  float* scores =
      outputs.scores.empty() ? nullptr : outputs.scores.as<float>() + t * outputs.scores.strides[0];
  const Addressing addressing = addressing_of(outputs);
  const int64_t request = rows == nullptr ? -1 : int_at(outputs.request_ids, t);
  const int64_t at = row.row * row.logits.strides[0] + row.begin;
  const int64_t mask_bits = mask == nullptr ? 0 : 32 * outputs.mask.shape[1];
  if (mask != nullptr) {
    // The whole row stride, as build_mask does: readers take masks in vectors.
    std::fill_n(mask, std::max(outputs.mask.strides[0], outputs.mask.shape[1]), 0);
  }
  int64_t count = 0;
  for_each_position(row, kpool, columns, chosen,
                    [&](int64_t place, int64_t position, int32_t column) {
                      count = place + 1;
                      if (indices != nullptr) {
                        indices[place] = static_cast<int32_t>(position);
                      }
                      if (rows != nullptr) {
                        rows[place] = addressing.row_of(request, position);
                      }
                      if (position < mask_bits) {
                        mask[position >> 5] |= static_cast<int32_t>(1u << (position & 31));
                      }
                      if (scores != nullptr) {
                        // The incomplete pool is always chosen, so it has the best score.
                        scores[place] = column < 0 ? std::numeric_limits<float>::infinity()
                                        : row.logits.dtype == DType::kBFloat16
                                            ? to_float(row.logits.as<Bf16>()[at + column])
                                            : row.logits.as<float>()[at + column];
                      }
                    });
  if (indices != nullptr) {
    std::fill(indices + count, indices + outputs.indices.shape[1], -1);
  }
  if (rows != nullptr) {
    std::fill(rows + count, rows + outputs.rows.shape[1], -1);
  }
  if (scores != nullptr) {
    std::fill(scores + count, scores + outputs.scores.shape[1],
              -std::numeric_limits<float>::infinity());
  }
  if (!outputs.counts.empty()) {
    outputs.counts.as<int32_t>()[t * outputs.counts.strides[0]] = static_cast<int32_t>(count);
  }
}

int64_t top_k_workspace(const TopKArgs& args, const DeviceInfo& device) {
  return select_scratch_bytes(args.logits.shape[1]) * device.num_threads;
}

Status top_k(const TopKArgs& args, const DeviceInfo& device, const Launch& launch) {
  const int64_t columns = args.logits.shape[1];
  const int64_t scratch_bytes = select_scratch_bytes(columns);
  const int kpool = args.kpool;
  parallel_ranges(
      device, args.logits.shape[0], grain_rows(4 * columns),
      [&](int64_t begin, int64_t end, int worker) {
        Workspace workspace(static_cast<char*>(launch.workspace) + worker * scratch_bytes,
                            scratch_bytes);
        const SelectScratch scratch = take_select_scratch(workspace, columns);
        for (int64_t t = begin; t < end; ++t) {
          SelectRow row = {.logits = args.logits, .row = t};
          row.begin = args.row_starts.empty()
                          ? 0
                          : std::clamp<int64_t>(int_at(args.row_starts, t), 0, columns);
          const int64_t pools = columns - row.begin;
          // The incomplete pool at the end has no column.
          row.length = args.lengths.empty() ? pools * kpool
                                            : std::clamp<int64_t>(int_at(args.lengths, t), 0,
                                                                  pools * kpool + kpool - 1);
          row.count = row.length / kpool;
          if (!args.candidate_ids.empty()) {
            row.ids =
                args.candidate_ids.as<int32_t>() + t * args.candidate_ids.strides[0] + row.begin;
          }
          const int64_t chosen = select_columns(row, args.k, kpool, scratch);
          write_selection(args.outputs, row, t, kpool, scratch.columns, chosen);
        }
      });
  return ok_status();
}

// ---- select_keys ----

struct SelectKeysScratch {
  int32_t* visible;  // [rows of a chunk]: pools to score
  float* logits;     // [rows of a chunk, C]
  char* per_worker;  // of scoring, then of selection
  int64_t chunk;     // rows
  int64_t used_bytes;
};

IndexLogitsArgs scoring_args(const SelectKeysArgs& args) {
  IndexLogitsArgs scoring;
  scoring.q = args.q;
  scoring.head_weights = args.head_weights;
  scoring.keys = args.keys;
  scoring.request_ids = args.request_ids;
  scoring.block_table = args.block_table;
  scoring.key_starts = args.key_starts;
  return scoring;
}

SelectKeysScratch carve_select_keys(const SelectKeysArgs& args, const DeviceInfo& device,
                                    Workspace workspace) {
  const int64_t rows = args.q.shape[0];
  const int64_t columns = std::max<int64_t>(select_columns_max(args), 1);
  const int64_t cap = select_logits_bytes_max(args);
  SelectKeysScratch scratch;
  scratch.chunk = std::clamp<int64_t>(cap / (4 * columns), 1, rows);
  if (scratch.chunk > kScoreRows) {
    scratch.chunk = scratch.chunk / kScoreRows * kScoreRows;  // whole tasks
  }
  scratch.visible = workspace.take<int32_t>(rows);
  scratch.logits = workspace.take<float>(select_logits_floats(args, columns));
  const IndexLogitsArgs scoring = scoring_args(args);
  const int64_t worker_bytes =
      std::max(score_scratch_bytes(scoring, score_rows_per_task(scoring, device)),
               select_scratch_bytes(columns));
  scratch.per_worker = workspace.take<char>(worker_bytes * device.num_threads);
  scratch.used_bytes = workspace.used_bytes();
  return scratch;
}

int64_t select_keys_workspace(const SelectKeysArgs& args, const DeviceInfo& device) {
  return carve_select_keys(args, device, Workspace()).used_bytes;
}

Status select_keys(const SelectKeysArgs& args, const DeviceInfo& device, const Launch& launch) {
  const int64_t rows = args.q.shape[0];
  const int64_t columns = select_columns_max(args);
  const int kpool = args.kpool;
  const SelectKeysScratch scratch =
      carve_select_keys(args, device, {launch.workspace, launch.workspace_bytes});
  SelectionOutputs outputs = args.outputs;
  if (outputs.request_ids.empty()) {
    outputs.request_ids = args.request_ids;
  }
  const auto length_of = [&](int64_t t) {
    if (int_at(args.request_ids, t) < 0) {
      return int64_t{0};
    }
    const int64_t length_max =
        args.visible_length_max >= 0 ? args.visible_length_max : columns * kpool + kpool - 1;
    return std::clamp<int64_t>(int_at(args.visible_lengths, t), 0, length_max);
  };
  // Short rows select everything; their scores matter only to a caller who asks for scores.
  for (int64_t t = 0; t < rows; ++t) {
    const bool scored = length_of(t) > args.k || !outputs.scores.empty();
    scratch.visible[t] = scored ? static_cast<int32_t>(length_of(t) / kpool) : 0;
  }
  const int64_t select_bytes = select_scratch_bytes(std::max<int64_t>(columns, 1));
  for (int64_t begin = 0; begin < rows; begin += scratch.chunk) {
    const int64_t count = std::min(scratch.chunk, rows - begin);
    IndexLogitsArgs scoring = scoring_args(args);
    scoring.q = args.q.slice(0, begin, count);
    scoring.head_weights = args.head_weights.slice(0, begin, count);
    scoring.request_ids = args.request_ids.slice(0, begin, count);
    scoring.visible_lengths =
        view_of(static_cast<const int32_t*>(scratch.visible) + begin, {count});
    scoring.logits = view_of(scratch.logits, {count, columns});
    score_all(scoring, device, 0, count, false, scratch.per_worker);
    parallel_ranges(
        device, count, grain_rows(8 * columns), [&](int64_t first, int64_t last, int worker) {
          Workspace workspace(scratch.per_worker + worker * select_bytes, select_bytes);
          const SelectScratch mine = take_select_scratch(workspace, std::max<int64_t>(columns, 1));
          for (int64_t i = first; i < last; ++i) {
            const int64_t length = length_of(begin + i);
            const SelectRow row = {
                .logits = scoring.logits, .row = i, .count = length / kpool, .length = length};
            const int64_t chosen = select_columns(row, args.k, kpool, mine);
            write_selection(outputs, row, begin + i, kpool, mine.columns, chosen);
          }
        });
  }
  return ok_status();
}

}  // namespace

const Kernel<TranslateIndicesArgs> kTranslateIndices = {
    .name = "cpu/translate_indices",
    .supports = supports_all<TranslateIndicesArgs>,
    .run = translate_indices,
};

const Kernel<IndexLogitsArgs> kIndexLogits = {
    .name = "cpu/index_logits",
    .supports = supports_all<IndexLogitsArgs>,
    .workspace_bytes = index_logits_workspace,
    .run = index_logits,
};

const Kernel<TopKArgs> kTopK = {
    .name = "cpu/top_k",
    .supports = supports_all<TopKArgs>,
    .workspace_bytes = top_k_workspace,
    .run = top_k,
};

const Kernel<SelectKeysArgs> kSelectKeys = {
    .name = "cpu/select_keys",
    .supports = supports_all<SelectKeysArgs>,
    .workspace_bytes = select_keys_workspace,
    .run = select_keys,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
