// Device side of what the sparse MLA kernels share: which keys a block of threads attends to, where
// a listed key lies, and how a head's output is finished.
#pragma once

#include <cfloat>
#include <cstdint>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/exp2.cuh"

namespace lacuna::cuda {

constexpr float kMinusInfinity = -INFINITY;

// Entries [begin, end) of the list of `row`. Slot -1: the whole row, whose output is final.
struct SplitTask {
  int32_t row;
  int32_t begin;
  int32_t end;
  int32_t slot;
};

// What the plan gives an item, by parameters alone. Not with a schedule.
__device__ inline SplitTask cut_task(const SparseMlaParams& p, int32_t item) {
  const int32_t keys_per_split = static_cast<int32_t>(p.keys_per_split);
  const int32_t row = item / p.num_splits;
  const int32_t split = item - row * p.num_splits;
  return {.row = static_cast<int32_t>(p.first_row) + row,
          .begin = split * keys_per_split,
          .end = split + 1 == p.num_splits ? static_cast<int32_t>(p.list_width)
                                           : (split + 1) * keys_per_split,
          .slot = p.num_splits > 1 ? item : -1};
}

// What the schedule gives an item. False: nothing.
__device__ inline bool scheduled_task(const SparseMlaParams& p, int32_t item, SplitTask& task) {
  const int4 header = __ldcg(p.schedule);
  if (header.x != kBalanced || item >= header.y || header.z != p.num_rows ||
      header.w != static_cast<int32_t>(p.list_width)) {
    return false;
  }
  const int4 entry = __ldcg(p.schedule + 1 + item);
  task = {.row = entry.x, .begin = entry.y, .end = entry.z, .slot = entry.w > 1 ? item : -1};
  // A schedule comes through the caller's hands.
  return task.row >= 0 && task.row < p.num_rows && task.begin >= 0 && task.slot < p.num_slots;
}

// A task ends where its list does.
__device__ inline void limit_task(const SparseMlaParams& p, SplitTask& task) {
  int32_t length = static_cast<int32_t>(p.list_width);
  if (p.valid_counts) {
    length = min(length, p.valid_counts(task.row));
  }
  task.end = min(task.end, length);
}

// False: this item has nothing to do. Rows, entries and slots fit 32 bits: check_sparse_mla_plan().
__device__ inline bool find_task(const SparseMlaParams& p, int32_t item, SplitTask& task) {
  if (p.schedule == nullptr) {
    task = cut_task(p, item);
  } else if (!scheduled_task(p, item, task)) {
    return false;
  }
  limit_task(p, task);
  return true;
}

// Of what joins states: row, first slot and number of states of an item; 0: nothing to do.
__device__ inline int num_states(const SparseMlaParams& p, int64_t item, int64_t& row,
                                 int64_t& slot) {
  if (p.schedule == nullptr) {
    row = p.first_row + item;
    slot = item * p.num_splits;
    return p.num_splits;
  }
  const int4 header = __ldcg(p.schedule);
  if (header.x != kBalanced || item >= header.y || header.z != p.num_rows ||
      header.w != p.list_width) {
    return 0;
  }
  const int4 entry = __ldcg(p.schedule + 1 + item);
  row = entry.x;
  slot = item;
  const bool first = entry.y == 0 && entry.w > 1 && entry.w <= kSplitsMax;
  return first && row >= 0 && row < p.num_rows && item + entry.w <= p.num_slots ? entry.w : 0;
}

// The request of a row of queries; -1: lists hold rows of the cache, or the row has no keys.
__device__ inline int32_t request_of(const SparseMlaParams& p, int32_t row) {
  return p.request_ids ? p.request_ids(row) : -1;
}

// The cached row that an entry of a list names; -1: none.
__device__ inline int32_t cached_row(const SparseMlaParams& p, int32_t request, int32_t entry) {
  if (p.request_ids) {
    return p.positions_to_rows(request, entry);
  }
  return entry >= 0 && entry < p.row_bound ? entry : -1;
}

// What a head's weighted sum is multiplied by, once all its keys are in. With lse and max_logits it
// is what remains of the softmax. Approximate to 2^-22: a row's end is code that runs once, and
// short code comes sooner.
__device__ inline float finish_head(const SparseMlaParams& p, int64_t row, int head, float max,
                                    float sum, bool write) {
  const bool empty = max == kMinusInfinity;
  const float lse = empty ? kMinusInfinity : max + log2_fast(sum) * kLn2;
  if (write) {
    if (p.lse) {
      p.lse(row, head) = lse;
    }
    if (p.max_logits) {
      p.max_logits(row, head) = max;
    }
  }
  if (empty) {
    return 0.0f;
  }
  float factor = __fdividef(p.latent_scale == nullptr ? 1.0f : *p.latent_scale, sum);
  if (p.sink) {
    // exp(lse) / (exp(lse) + exp(sink)); an infinite exponential gives the right limit.
    factor = __fdividef(factor, 1.0f + exp2_fast((p.sink(head) - lse) * kLog2E));
  }
  return factor;
}

__device__ inline void store_out(const SparseMlaParams& p, int64_t at, float value) {
  switch (p.out_dtype) {
    case DType::kBFloat16:
      static_cast<Bf16*>(p.out)[at] = from_float<Bf16>(value);
      break;
    case DType::kFloat16:
      static_cast<Fp16*>(p.out)[at] = from_float<Fp16>(value);
      break;
    default:
      static_cast<float*>(p.out)[at] = value;
  }
}

// Two neighbouring columns of sums times `factor`, from element `at` on.
__device__ inline void store_two(const SparseMlaParams& p, int64_t at, float x, float y,
                                 float factor) {
  const float outs[2] = {factor == 0.0f ? 0.0f : x * factor, factor == 0.0f ? 0.0f : y * factor};
  if (p.out_dtype == DType::kBFloat16 && is_aligned(static_cast<const Bf16*>(p.out) + at, 4)) {
    *reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + at) = pack_bf16(outs[0], outs[1]);
    return;
  }
  store_out(p, at, outs[0]);
  store_out(p, at + 1, outs[1]);
}

// Four neighbouring columns of `sums` times `factor`, from element `at` on.
__device__ inline void store_four(const SparseMlaParams& p, int64_t at, float4 sums, float factor) {
  const float outs[4] = {
      factor == 0.0f ? 0.0f : sums.x * factor, factor == 0.0f ? 0.0f : sums.y * factor,
      factor == 0.0f ? 0.0f : sums.z * factor, factor == 0.0f ? 0.0f : sums.w * factor};
  if (p.out_dtype == DType::kBFloat16 && is_aligned(static_cast<const Bf16*>(p.out) + at, 8)) {
    *reinterpret_cast<uint2*>(static_cast<Bf16*>(p.out) + at) = {pack_bf16(outs[0], outs[1]),
                                                                 pack_bf16(outs[2], outs[3])};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store_out(p, at + i, outs[i]);
  }
}

}  // namespace lacuna::cuda
