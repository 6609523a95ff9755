// Device code of exact selection: a row's scores as ordered keys, the k-th largest by radix, and
// lists in ascending order. One block of kSelectThreads threads works on a row, or a segment of it.
#pragma once

#include <cstdint>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/indexer/even_range.cuh"
#include "backends/cuda/indexer/select.h"

namespace lacuna::cuda {

inline constexpr int kSelectThreads = 512;
inline constexpr int kSelectWarps = kSelectThreads / kWarp;
// Keys are narrowed by eleven, eleven and ten bits, from the top.
inline constexpr int kSelectPasses = 3;
inline constexpr int kSelectBins = 2048;

struct RadixPass {
  int shift;
  int bits;
};
__device__ constexpr RadixPass radix_pass(int pass) {
  return pass == 0 ? RadixPass{21, 11} : pass == 1 ? RadixPass{10, 11} : RadixPass{0, 10};
}
__device__ constexpr bool in_prefix(uint32_t key, uint32_t prefix, RadixPass pass) {
  return pass.shift + pass.bits == 32 || (key ^ prefix) >> (pass.shift + pass.bits) == 0;
}

// Unsigned keys in the order of floats: -0 equals +0; NaN is 0, below every number.
__device__ inline uint32_t ordered_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 + 0 is +0
  const uint32_t ordered =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? 0 : ordered;
}

// ---- A row ----

struct SelectRow {
  int64_t t;
  int64_t begin;   // first column
  int64_t length;  // tokens
  int64_t count;   // columns (pools) that may be chosen
  bool all;        // all of them are, whatever their scores
};

__device__ inline SelectRow select_row(const SelectParams& p, int64_t t) {
  SelectRow row;
  row.t = t;
  const int64_t start = p.row_starts ? p.row_starts(t) : 0;
  row.begin = start < 0 ? 0 : start < p.num_columns ? start : p.num_columns;
  const int64_t pools = p.num_columns - row.begin;
  int64_t length = p.lengths ? p.lengths(t) : pools * p.kpool;
  length = p.padding_ids && p.padding_ids(t) < 0 ? 0 : length;
  // The incomplete pool at the end has no column.
  int64_t most = p.lengths ? pools * p.kpool + p.kpool - 1 : pools * p.kpool;
  most = most < INT32_MAX ? most : INT32_MAX;  // positions are int32
  length = length < most ? length : most;
  length = length < p.length_max ? length : p.length_max;
  row.length = length < 0 ? 0 : length;
  row.count = static_cast<uint32_t>(row.length) / static_cast<uint32_t>(p.kpool);
  row.all = row.length <= p.k;
  return row;
}

// A row's scores in vectors of 16 bytes, from the aligned address at or before its first.
template <class T>
struct RowVectors {
  static constexpr int kWidth = 16 / sizeof(T);
  // Vectors that a thread reads before it looks at the first: as many bytes as a core needs in
  // flight.
  static constexpr int kBatch = 4;

  const T* x;
  int64_t n;
  int misaligned;  // elements before the first

  __device__ RowVectors(const SelectParams& p, const SelectRow& row)
      : x(static_cast<const T*>(p.logits) + row.t * p.logits_row_stride + row.begin),
        n(row.count),
        misaligned(static_cast<int>(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T))) {}

  __device__ int64_t num_vectors() const { return (n + misaligned + kWidth - 1) / kWidth; }
  // Column of a vector's first element; negative before the row.
  __device__ int64_t column(int64_t vector) const { return vector * kWidth - misaligned; }

  // What lies outside the row is NaN.
  __device__ uint4 load(int64_t vector) const {
    const int64_t first = column(vector);
    if (first >= 0 && first + kWidth <= n) {
      return *reinterpret_cast<const uint4*>(x + first);
    }
    uint4 raw = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
    uint32_t* words = &raw.x;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (first + i >= 0 && first + i < n) {
        if constexpr (sizeof(T) == 4) {
          words[i] = __float_as_uint(x[first + i]);
        } else {
          const uint32_t bits = x[first + i].bits;
          words[i / 2] = i % 2 == 0 ? (words[i / 2] & 0xffff0000u) | bits
                                    : (words[i / 2] & 0xffffu) | bits << 16;
        }
      }
    }
    return raw;
  }
  __device__ static void keys(const uint4& raw, uint32_t (&keys)[kWidth]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        keys[i] = ordered_key(__uint_as_float(words[i]));
      } else {
        const float2 pair = unpack_bf16(words[i]);
        keys[2 * i] = ordered_key(pair.x);
        keys[2 * i + 1] = ordered_key(pair.y);
      }
    }
  }

  // Calls visit(key) for the part of vectors [begin, end) that is thread `idx`'s of kThreads, in no
  // order; keys outside the row are 0.
  template <int kThreads, class Visit>
  __device__ void visit(int64_t begin, int64_t end, int idx, const Visit& visit) const {
    for (int64_t v = begin + idx; v < end; v += kBatch * kThreads) {
      uint4 raw[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int64_t at = v + i * kThreads;
        raw[i] = at < end ? load(at) : uint4{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (v + i * kThreads < end) {
          uint32_t key[kWidth];
          keys(raw[i], key);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            visit(key[j]);
          }
        }
      }
    }
  }
};

// ---- Block-wide sums ----

struct ScanScratch {
  uint32_t totals[2][kSelectWarps];
};

// Exclusive sum of `value` over the block's threads; `*total` gets all of it. `turn` alternates
// between calls, so that one barrier a call is enough.
__device__ inline uint32_t scan_block(uint32_t value, int turn, ScanScratch& scratch,
                                      uint32_t* total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  uint32_t sum = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
    sum += lane >= offset ? other : 0;
  }
  if (lane == kWarp - 1) {
    scratch.totals[turn][warp] = sum;
  }
  __syncthreads();
  uint32_t before = 0;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < kSelectWarps; ++w) {
    const uint32_t of_warp = scratch.totals[turn][w];
    before += w < warp ? of_warp : 0;
    all += of_warp;
  }
  *total = all;
  return before + sum - value;
}

// ---- The k-th largest ----

// What is known of the k-th largest key: its upper bits, how many keys of those bits are wanted,
// and how many there are.
struct RadixState {
  uint32_t prefix;
  uint32_t wanted;
  uint32_t count;
};

// Every key above `key` is chosen, and the first `ties` that equal it.
struct Threshold {
  uint32_t key;
  uint32_t ties;
  uint32_t above;  // how many keys are above

  __device__ uint32_t chosen() const { return above + ties; }
};

__device__ inline Threshold threshold_of(const RadixState& state, uint32_t wanted_first) {
  // Key 0 is no number: fewer than k are.
  return {state.prefix, state.prefix == 0 ? 0 : state.wanted, wanted_first - state.wanted};
}

struct HistogramScratch {
  uint32_t bins[kSelectBins];
  ScanScratch scan;
  RadixState found;
};

__device__ inline void clear_bins(HistogramScratch& scratch) {
  for (int i = static_cast<int>(threadIdx.x); i < kSelectBins; i += kSelectThreads) {
    scratch.bins[i] = 0;
  }
  __syncthreads();
}

// The bin in which the wanted-th largest key of the counted ones lies; `bins` are shared or global
// and complete. All threads get the result.
__device__ inline RadixState find_bin(const uint32_t* bins, RadixPass pass, const RadixState& state,
                                      HistogramScratch& scratch) {
  constexpr int kEach = kSelectBins / kSelectThreads;
  const int num_bins = 1 << pass.bits;
  uint32_t counts[kEach];
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int bin = num_bins - 1 - static_cast<int>(threadIdx.x) * kEach - i;
    counts[i] = bin >= 0 ? bins[bin] : 0;
    sum += counts[i];
  }
  uint32_t total = 0;
  uint32_t before = scan_block(sum, 0, scratch.scan, &total);
  if (before < state.wanted && state.wanted <= before + sum) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (before < state.wanted && state.wanted <= before + counts[i]) {
        const uint32_t bin = num_bins - 1 - threadIdx.x * kEach - i;
        scratch.found = {state.prefix | bin << pass.shift, state.wanted - before, counts[i]};
      }
      before += counts[i];
    }
  }
  __syncthreads();
  const RadixState found = scratch.found;
  __syncthreads();
  return found;
}

// ---- Output ----

struct ListScratch {
  uint32_t above[kSelectWarps];
  uint32_t equal[kSelectWarps];
};

// Where positions are collected until they are translated, or null: then only the mask is wanted.
__device__ inline int32_t* position_list(const SelectOutputs& out, int64_t t) {
  return out.indices  ? out.indices.row(t)
         : out.rows   ? out.rows.row(t)
         : out.scores ? reinterpret_cast<int32_t*>(out.scores.row(t))
                      : nullptr;
}

__device__ inline void set_mask_bit(const SelectOutputs& out, int64_t t, int64_t position) {
  if (position >> 5 < out.mask_words) {
    atomicOr(reinterpret_cast<unsigned*>(out.mask.row(t)) + (position >> 5), 1u << (position & 31));
  }
}

// Zeroes part `part` of `parts` of a row's mask.
__device__ inline void clear_mask(const SelectOutputs& out, int64_t t, uint32_t part,
                                  uint32_t parts) {
  if (out.mask) {
    int32_t* mask = out.mask.row(t);
    const Range range = even_range(static_cast<uint32_t>(out.mask_stride), part, parts);
    for (int64_t i = range.begin + threadIdx.x; i < range.end; i += kSelectThreads) {
      mask[i] = 0;
    }
  }
}

__device__ inline float score_at(const SelectParams& p, const SelectRow& row, int64_t column) {
  const int64_t at = row.t * p.logits_row_stride + row.begin + column;
  return p.dtype == DType::kBFloat16 ? load_float(static_cast<const Bf16*>(p.logits)[at])
                                     : static_cast<const float*>(p.logits)[at];
}

// One entry of a list; position -1: nothing, where the list is that wide. `column` is where its
// score lies.
__device__ inline void write_entry(const SelectParams& p, const SelectRow& row, int32_t request,
                                   int64_t entry, int64_t position, int64_t column) {
  const SelectOutputs& out = p.outputs;
  if (out.indices && entry < out.indices_width) {
    out.indices.row(row.t)[entry] = static_cast<int32_t>(position);
  }
  if (out.rows && entry < out.rows_width) {
    out.rows.row(row.t)[entry] = out.positions_to_rows(request, static_cast<int32_t>(position));
  }
  if (out.scores && entry < out.scores_width) {
    // The incomplete pool is always chosen, so it has the best score.
    out.scores.row(row.t)[entry] = position < 0         ? -INFINITY
                                   : column < row.count ? score_at(p, row, column)
                                                        : INFINITY;
  }
  if (out.mask && position >= 0) {
    set_mask_bit(out, row.t, position);
  }
}

__device__ inline int64_t widest_list(const SelectOutputs& out) {
  int64_t width = out.indices ? out.indices_width : 0;
  width = out.rows && out.rows_width > width ? out.rows_width : width;
  return out.scores && out.scores_width > width ? out.scores_width : width;
}

// Turns the positions of entries [begin, end) in position_list() into all the outputs. With `last`
// the block also writes what follows the chosen columns: the incomplete pool and the empty tail.
// `chosen` counts entries of whole pools. A row of which all is chosen needs no list.
__device__ inline void finish_entries(const SelectParams& p, const SelectRow& row, int64_t begin,
                                      int64_t end, int64_t chosen, bool last) {
  const SelectOutputs& out = p.outputs;
  const int64_t t = row.t;
  const int32_t request = out.rows ? out.request_ids(t) : -1;
  const int32_t* list = row.all ? nullptr : position_list(out, t);
  const int64_t count = chosen + row.length - row.count * p.kpool;
  const int64_t width = widest_list(out);
  const int64_t stop = !last ? end : width > count ? width : count;
  for (int64_t e = begin + threadIdx.x; e < stop; e += kSelectThreads) {
    int64_t position = -1;
    if (e >= chosen) {
      position = e < count ? row.count * p.kpool + e - chosen : -1;
    } else if (row.all) {
      position = e;
    } else if (list != nullptr) {
      position = list[e];
    } else {
      continue;  // its mask bit is set
    }
    write_entry(
        p, row, request, e, position,
        position < 0 ? 0 : static_cast<uint32_t>(position) / static_cast<uint32_t>(p.kpool));
  }
  if (last && out.counts && threadIdx.x == 0) {
    out.counts(t) = static_cast<int32_t>(count);
  }
}

// Puts the chosen columns of vectors [begin, end) into the row's list, in ascending order. `above`
// and `equal` count what earlier vectors hold; both are advanced. Every warp counts a part of its
// own first, and then lists it without waiting for others. All threads call it.
template <class T>
__device__ inline void list_chosen(const SelectParams& p, const SelectRow& row,
                                   const RowVectors<T>& vectors, int64_t begin, int64_t end,
                                   const Threshold& threshold, uint32_t* above, uint32_t* equal,
                                   ListScratch& scratch) {
  constexpr int kWidth = RowVectors<T>::kWidth;
  constexpr uint4 kNothing = {0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu};
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const Range range =
      even_range(static_cast<uint32_t>(end - begin), static_cast<uint32_t>(warp), kSelectWarps);
  const int64_t first = begin + range.begin;
  const int64_t last = begin + range.end;
  uint32_t warp_above = 0;
  uint32_t warp_equal = 0;
  vectors.template visit<kWarp>(first, last, lane, [&](uint32_t key) {
    warp_above += key > threshold.key ? 1 : 0;
    warp_equal += key == threshold.key ? 1 : 0;
  });
  warp_above = reduce_warp(warp_above, Sum{});
  warp_equal = reduce_warp(warp_equal, Sum{});
  if (lane == 0) {
    scratch.above[warp] = warp_above;
    scratch.equal[warp] = warp_equal;
  }
  __syncthreads();
  uint32_t above_before = *above;
  uint32_t equal_before = *equal;
#pragma unroll
  for (int w = 0; w < kSelectWarps; ++w) {
    *above += scratch.above[w];
    *equal += scratch.equal[w];
    above_before += w < warp ? scratch.above[w] : 0;
    equal_before += w < warp ? scratch.equal[w] : 0;
  }
  const uint32_t above_after = above_before + warp_above;
  const uint32_t equal_after = equal_before + warp_equal;
  int32_t* list = position_list(p.outputs, row.t);
  int64_t v = first + lane;
  // Two vectors ahead: a round is shorter than a read.
  uint4 next[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    next[i] = v + i * kWarp < last ? vectors.load(v + i * kWarp) : kNothing;
  }
  for (int64_t round = first; round < last; round += kWarp, v += kWarp) {
    if (above_before == above_after &&
        (equal_before == equal_after || equal_before >= threshold.ties)) {
      break;  // nothing is left; the same for all lanes
    }
    const uint4 raw = next[0];
    next[0] = next[1];
    next[1] = v + 2 * kWarp < last ? vectors.load(v + 2 * kWarp) : kNothing;
    uint32_t keys[kWidth];
    RowVectors<T>::keys(raw, keys);
    uint32_t counts = 0;  // above in the low half, equal in the high half
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      counts += keys[i] > threshold.key ? 1u : 0u;
      counts += keys[i] == threshold.key ? 1u << 16 : 0u;
    }
    if (__ballot_sync(0xffffffffu, counts != 0) == 0) {
      continue;
    }
    uint32_t sum = counts;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, offset);
      sum += lane >= offset ? other : 0;
    }
    const uint32_t total = __shfl_sync(0xffffffffu, sum, kWarp - 1);
    uint32_t a = above_before + ((sum - counts) & 0xffffu);
    uint32_t e = equal_before + ((sum - counts) >> 16);
    if (counts != 0) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        const bool is_above = keys[i] > threshold.key;
        const bool is_equal = keys[i] == threshold.key;
        if (is_above || (is_equal && e < threshold.ties)) {
          const int64_t place = int64_t{a + (e < threshold.ties ? e : threshold.ties)} * p.kpool;
          const int64_t position = (vectors.column(v) + i) * p.kpool;
          for (int j = 0; j < p.kpool; ++j) {
            if (list != nullptr) {
              list[place + j] = static_cast<int32_t>(position + j);
            } else {
              set_mask_bit(p.outputs, row.t, position + j);
            }
          }
        }
        a += is_above ? 1 : 0;
        e += is_equal ? 1 : 0;
      }
    }
    above_before += total & 0xffffu;
    equal_before += total >> 16;
  }
}

}  // namespace lacuna::cuda
