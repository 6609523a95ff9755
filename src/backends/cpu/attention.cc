// Sparse MLA on the CPU. A row of queries is one task or is cut into splits of its list; a split
// walks its keys tile by tile through row pointers, keeps a running softmax, and leaves a partial
// state; states of one row are joined in fixed order. Who computes what is attention_plan.h;
// docs/kernels/cpu_sparse_mla.md has the budget and the numbers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

#include "backends/cpu/attention_plan.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

// The micro-kernels keep vectors in arrays, which types without a size (SVE) do not allow: NEON
// there.
#if defined(__aarch64__) && !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/attention.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/attention-inl.h"

#ifndef LACUNA_BACKENDS_CPU_ATTENTION_CC_
#define LACUNA_BACKENDS_CPU_ATTENTION_CC_
namespace lacuna::cpu {

// Workspaces are carved outside of the SIMD targets (attention-inl.h asserts that they agree).
constexpr int64_t kTileKeysMax = 128;

// Partial softmax states: sums of exp(s - max) c over some keys, not yet divided by the sum.
struct PartialSums {
  float* acc;  // [slots, H, width], columns in the pair order of the cache's type
  float* max;  // [slots, H]
  float* sum;  // [slots, H]
};

struct SparseMlaScratch {
  float* query;          // [H, depth], in pair order
  float* line;           // [depth]
  float* scores;         // [H, kTileKeysMax]
  float* factor;         // [H]
  const char** rows[2];  // [kTileKeysMax] each: the tile in work and the next one
  float* decoded;        // [kTileKeysMax, depth]
  int64_t prepared_row;  // whose query `query` holds; -1: none
};

// What all tasks of a call share.
struct SparseMlaCall {
  const SparseMlaArgs* args;
  int64_t num_heads;
  int64_t depth;  // latent + rope, padded
  int64_t width;  // latent, padded
  float latent_scale;
  float rope_scale;
  bool in_place;              // keys are read where they lie, not decoded into scratch
  const RowSplit* splits;     // [T]
  int64_t worker_slots;       // slots a worker has for whole rows
  PartialSums shared;         // states of split rows
  PartialSums own;            // [threads * worker_slots] states of whole rows
  SparseMlaScratch* scratch;  // [threads]
};

}  // namespace lacuna::cpu
#endif  // LACUNA_BACKENDS_CPU_ATTENTION_CC_

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

static_assert(kTileKeysMax == kTileKeys);

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Keys of a split's first tile. Nothing hides the latency of its rows but the preparation of the
// query, so it is short.
constexpr int kFirstTileKeys = 32;
// Rows longer than this (f32, or decoded) make tiles of half the keys, to keep two tiles in L2.
constexpr int64_t kLongRowBytes = 1536;

// e4m3 to float. The exponent is rebiased by adding 120 to the field; a subnormal m * 2^-9 is
// (1 + m/8) * 2^-6 - 2^-6.
HWY_INLINE FloatVec decode_e4m3(const uint8_t* from) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Rebind<uint8_t, FloatTag> d8;
  const auto byte = hn::PromoteTo(du, hn::LoadU(d8, from));
  const auto sign = hn::ShiftLeft<24>(hn::And(byte, hn::Set(du, 0x80u)));
  const auto magnitude = hn::And(byte, hn::Set(du, 0x7fu));
  const auto normal = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du, 120u << 23));
  const auto shifted = hn::Add(hn::ShiftLeft<20>(magnitude), hn::Set(du, 121u << 23));
  const FloatVec subnormal = hn::Sub(hn::BitCast(d, shifted), hn::Set(d, 0x1p-6f));
  const auto is_subnormal = hn::RebindMask(d, hn::Lt(magnitude, hn::Set(du, 8u)));
  const auto is_nan = hn::RebindMask(d, hn::Eq(magnitude, hn::Set(du, 0x7fu)));
  FloatVec value = hn::IfThenElse(is_subnormal, subnormal, hn::BitCast(d, normal));
  value = hn::IfThenElse(is_nan, hn::BitCast(d, hn::Set(du, 0x7fc00000u)), value);
  return hn::Or(value, hn::BitCast(d, sign));
}

// One record to `depth` floats, padded with zeros. Per-tensor scales are not applied here.
void decode_row(const KvLayout& layout, const char* record, int64_t depth, float* to) {
  const FloatTag d;
  const int64_t d_qk = layout.d_qk();
  if (layout.format == KvFormat::kLatentBf16) {
    widen(reinterpret_cast<const Bf16*>(record), d_qk, to);
  } else if (layout.format == KvFormat::kLatentF32) {
    widen(reinterpret_cast<const float*>(record), d_qk, to);
  } else {
    static_assert(kFp8DsMlaScaleBlock % kLanes == 0);
    for (int64_t block = 0; block < kFp8DsMlaLatent / kFp8DsMlaScaleBlock; ++block) {
      float scale;
      std::memcpy(&scale, record + kFp8DsMlaScaleOffset + block * 4, sizeof(scale));
      const FloatVec factor = hn::Set(d, scale);
      for (int64_t i = block * kFp8DsMlaScaleBlock; i < (block + 1) * kFp8DsMlaScaleBlock;
           i += kLanes) {
        const auto* from = reinterpret_cast<const uint8_t*>(record) + i;
        hn::StoreU(hn::Mul(decode_e4m3(from), factor), d, to + i);
      }
    }
    widen(reinterpret_cast<const Bf16*>(record + kFp8DsMlaRopeOffset), layout.rope,
          to + kFp8DsMlaLatent);
  }
  std::fill(to + d_qk, to + depth, 0.0f);
}

// Bytes of a record that attention reads.
int64_t used_bytes(const KvLayout& layout) {
  return layout.format == KvFormat::kFp8DsMla ? kFp8DsMlaRopeOffset + 2 * layout.rope
                                              : layout.record_bytes();
}

// Walks one row's list and turns entries into addresses.
class KeyWalk {
 public:
  KeyWalk(const SparseMlaArgs& args, int64_t row, int64_t begin, int64_t end)
      : kv_(args.kv),
        ids_(args.indices.as<int32_t>() + row * args.indices.strides[0]),
        next_(begin),
        end_(end) {
    if (args.index_kind == IndexKind::kPositions) {
      positions_ = true;
      const int64_t request = args.request_ids.as<int32_t>()[row * args.request_ids.strides[0]];
      if (request < 0 || request >= args.block_table.shape[0]) {
        end_ = begin;  // no keys
      } else {
        blocks_ = args.block_table.as<int32_t>() + request * args.block_table.strides[0];
        position_bound_ = args.block_table.shape[1] * kv_.block_size;
      }
    } else {
      row_bound_ = kv_.num_rows();
    }
  }

  // Writes the addresses of the next valid keys, at most `limit`; returns how many. The array is
  // padded to a multiple of kKeyBlock with its last address.
  int next(int limit, const char** rows) {
    const char* data = static_cast<const char*>(kv_.data);
    int count = 0;
    for (; next_ < end_ && count < limit; ++next_) {
      const int64_t id = ids_[next_];
      if (positions_) {
        if (id < 0 || id >= position_bound_) {
          continue;
        }
        // Both are below 2^31, where a 32-bit division is several times cheaper.
        const uint32_t block_size =
            static_cast<uint32_t>(std::min<int64_t>(kv_.block_size, int64_t{1} << 31));
        const uint32_t block_idx = static_cast<uint32_t>(id) / block_size;
        const int64_t offset = static_cast<uint32_t>(id) - block_idx * block_size;
        const int64_t block = blocks_[block_idx];
        if (block < 0 || block >= kv_.num_blocks) {
          continue;
        }
        rows[count++] = data + block * kv_.block_stride_bytes + offset * kv_.row_bytes;
      } else {
        if (id < 0 || id >= row_bound_) {
          continue;
        }
        rows[count++] = data + id * kv_.row_bytes;
      }
    }
    for (int k = count; k % kKeyBlock != 0; ++k) {
      rows[k] = rows[count - 1];
    }
    return count;
  }

 private:
  const KvCacheView& kv_;
  const int32_t* ids_;
  const int32_t* blocks_ = nullptr;
  bool positions_ = false;
  int64_t position_bound_ = 0;
  int64_t row_bound_ = 0;
  int64_t next_;
  int64_t end_;
};

template <class Q>
void widen_part(const ConstTensorView& q, int64_t row, int64_t head, int64_t begin, int64_t count,
                float* to) {
  widen(q.as<Q>() + row * q.strides[0] + head * q.strides[1] + begin, count, to);
}

void widen_part(const ConstTensorView& q, int64_t row, int64_t head, int64_t begin, int64_t count,
                float* to) {
  switch (q.dtype) {
    case DType::kBFloat16:
      return widen_part<Bf16>(q, row, head, begin, count, to);
    case DType::kFloat16:
      return widen_part<Fp16>(q, row, head, begin, count, to);
    default:
      return widen_part<float>(q, row, head, begin, count, to);
  }
}

void scale_line(float* line, int64_t count, float scale) {
  if (scale != 1.0f) {
    for (int64_t i = 0; i < count; ++i) {
      line[i] *= scale;
    }
  }
}

// n elements, a multiple of kPair, widened into pair order.
HWY_INLINE void widen_pairs(const Bf16* HWY_RESTRICT from, int64_t n, float* HWY_RESTRICT to) {
  for (int64_t i = 0; i < n; i += kPair) {
    FloatVec first, second;
    load_pair(from + i, first, second);
    store_pair<false>(first, second, to + i);
  }
}

// The row's query as floats in pair order, times the per-tensor scales of the keys.
template <class T>
void prepare_query(const SparseMlaCall& call, int64_t row, SparseMlaScratch& scratch) {
  const SparseMlaArgs& args = *call.args;
  const int64_t latent = args.kv.layout.latent;
  const int64_t rope = args.kv.layout.rope;
  const bool split = !args.q_nope.empty();
  // Two bf16 are in pair order as soon as they are widened.
  const bool direct = std::is_same_v<T, Bf16> && latent % kPair == 0 && rope % kPair == 0 &&
                      call.latent_scale == 1.0f && call.rope_scale == 1.0f &&
                      (split ? args.q_nope : args.q).dtype == DType::kBFloat16 &&
                      (!split || rope == 0 || args.q_rope.dtype == DType::kBFloat16);
  if (direct) {
    const ConstTensorView& nope = split ? args.q_nope : args.q;
    const ConstTensorView& rotated = split ? args.q_rope : args.q;
    for (int64_t h = 0; h < call.num_heads; ++h) {
      float* to = scratch.query + h * call.depth;
      widen_pairs(nope.as<Bf16>() + row * nope.strides[0] + h * nope.strides[1], latent, to);
      if (rope > 0) {
        widen_pairs(rotated.as<Bf16>() + row * rotated.strides[0] + h * rotated.strides[1] +
                        (split ? 0 : latent),
                    rope, to + latent);
      }
    }
    scratch.prepared_row = row;
    return;
  }
  for (int64_t h = 0; h < call.num_heads; ++h) {
    float* line = scratch.line;
    widen_part(split ? args.q_nope : args.q, row, h, 0, latent, line);
    if (rope > 0) {
      widen_part(split ? args.q_rope : args.q, row, h, split ? 0 : latent, rope, line + latent);
    }
    scale_line(line, latent, call.latent_scale);
    scale_line(line + latent, rope, call.rope_scale);
    std::fill(line + latent + rope, line + call.depth, 0.0f);
    to_pair_order<T>(line, call.depth, scratch.query + h * call.depth);
  }
  scratch.prepared_row = row;
}

// The state of list entries [begin, end) of one row. T is what rows are read as: the cache's own
// type, or float after decoding.
template <class T>
void run_split(const SparseMlaCall& call, int64_t row, int64_t begin, int64_t end,
               SparseMlaScratch& scratch, const PartialSums& state) {
  const SparseMlaArgs& args = *call.args;
  const KvLayout& layout = args.kv.layout;
  const int64_t heads = call.num_heads;
  const float scale = static_cast<float>(args.softmax_scale);
  std::fill_n(state.acc, heads * call.width, 0.0f);
  std::fill_n(state.max, heads, kMinusInfinity);
  std::fill_n(state.sum, heads, 0.0f);

  KeyWalk walk(args, row, begin, end);
  const int64_t tile_row_bytes = call.depth * static_cast<int64_t>(sizeof(T));
  const int tile_keys = tile_row_bytes > kLongRowBytes ? kTileKeys / 2 : kTileKeys;
  RowPrefetch prefetch(used_bytes(layout));
  const char** rows = scratch.rows[0];
  const char** next_rows = scratch.rows[1];
  int count = walk.next(kFirstTileKeys, rows);
  prefetch.start(rows, count, 1);
  prefetch.step();
  if (count > 0 && scratch.prepared_row != row) {
    prepare_query<T>(call, row, scratch);
  }
  const SoftmaxState softmax = {state.max, state.sum, scratch.factor};
  while (count > 0) {
    // Each tile at most doubles, so that the rows of the next arrive while this one is computed.
    const int next_count =
        walk.next(std::min(tile_keys, std::max(2 * count, kFirstTileKeys)), next_rows);
    prefetch.start(next_rows, next_count, prefetch_steps(heads, count, call.width));
    if (!call.in_place) {
      for (int k = 0; k < count; ++k) {
        float* to = scratch.decoded + k * call.depth;
        decode_row(layout, rows[k], call.depth, to);
        rows[k] = reinterpret_cast<const char*>(to);
      }
      for (int k = count; k % kKeyBlock != 0; ++k) {
        rows[k] = rows[count - 1];
      }
    }
    score_tile<T>(scratch.query, call.depth, heads, rows, count, call.depth, scale, scratch.scores,
                  prefetch);
    softmax_tile(heads, count, scratch.scores, softmax);
    weigh_tile<T>(rows, count, scratch.scores, scratch.factor, heads, call.width, state.acc,
                  call.width, prefetch);
    std::swap(rows, next_rows);
    count = next_count;
  }
}

PartialSums slot(const PartialSums& sums, int64_t index, const SparseMlaCall& call) {
  return {sums.acc + index * call.num_heads * call.width, sums.max + index * call.num_heads,
          sums.sum + index * call.num_heads};
}

void write_line(const TensorView& out, int64_t row, int64_t head, const float* line,
                int64_t count) {
  const int64_t at = row * out.strides[0] + head * out.strides[1];
  switch (out.dtype) {
    case DType::kBFloat16:
      return narrow(line, count, out.as<Bf16>() + at);
    case DType::kFloat16:
      return narrow(line, count, out.as<Fp16>() + at);
    default:
      return narrow(line, count, out.as<float>() + at);
  }
}

// acc = acc * factor + other * weight
void add_scaled(float* HWY_RESTRICT acc, float factor, const float* HWY_RESTRICT other,
                float weight, int64_t n) {
  const FloatTag d;
  for (int64_t i = 0; i < n; i += kLanes) {
    const FloatVec scaled = hn::Mul(hn::LoadU(d, acc + i), hn::Set(d, factor));
    hn::StoreU(hn::MulAdd(hn::LoadU(d, other + i), hn::Set(d, weight), scaled), d, acc + i);
  }
}

// to[i] = scale * from[i], from the pair order of bf16, rounded.
HWY_INLINE void narrow_pairs(const float* HWY_RESTRICT from, int64_t n, float scale,
                             Bf16* HWY_RESTRICT to) {
  const FloatTag d;
  const FloatVec factor = hn::Set(d, scale);
  for (int64_t i = 0; i < n; i += kPair) {
    store_pair<true>(hn::Mul(hn::LoadU(d, from + i), factor),
                     hn::Mul(hn::LoadU(d, from + i + kLanes), factor), to + i);
  }
}

// Joins the states of consecutive slots into the first one, divides, and writes the head's output.
template <class T>
void finish_head(const SparseMlaCall& call, int64_t row, int64_t h, const PartialSums& first,
                 int64_t num_states, float* line) {
  const SparseMlaArgs& args = *call.args;
  const int64_t latent = args.kv.layout.latent;
  float max = kMinusInfinity;
  for (int64_t n = 0; n < num_states; ++n) {
    max = std::max(max, slot(first, n, call).max[h]);
  }
  float* acc = first.acc + h * call.width;
  float sum = first.sum[h];
  if (num_states > 1) {
    const auto weight_of = [&](const PartialSums& state) {
      return state.max[h] == kMinusInfinity ? 0.0f : std::exp(state.max[h] - max);
    };
    float factor = weight_of(first);
    sum *= factor;
    for (int64_t n = 1; n < num_states; ++n) {
      const PartialSums state = slot(first, n, call);
      const float weight = weight_of(state);
      add_scaled(acc, factor, state.acc + h * call.width, weight, call.width);
      factor = 1.0f;
      sum += weight * state.sum[h];
    }
  }
  const bool empty = sum == 0.0f;
  const float lse = empty ? kMinusInfinity : max + std::log(sum);
  // bf16 out of the pair order of bf16: both halves of a pair go into one word.
  const bool direct = std::is_same_v<T, Bf16> && !empty && call.width == latent &&
                      args.out.dtype == DType::kBFloat16;
  if (empty) {
    std::fill_n(line, latent, 0.0f);
  } else {
    double scale = static_cast<double>(call.latent_scale) / sum;
    if (!args.sink.empty()) {
      // exp(lse) / (exp(lse) + exp(sink)); an infinite exponential gives the right limit.
      const double sink = args.sink.as<float>()[h * args.sink.strides[0]];
      scale /= 1.0 + std::exp(sink - static_cast<double>(lse));
    }
    if (direct) {
      narrow_pairs(acc, latent, static_cast<float>(scale),
                   args.out.as<Bf16>() + row * args.out.strides[0] + h * args.out.strides[1]);
    } else {
      from_pair_order<T>(acc, call.width, static_cast<float>(scale), line);
    }
  }
  if (!direct) {
    write_line(args.out, row, h, line, latent);
  }
  if (!args.lse.empty()) {
    args.lse.as<float>()[row * args.lse.strides[0] + h * args.lse.strides[1]] = lse;
  }
  if (!args.max_logits.empty()) {
    const TensorView& out = args.max_logits;
    out.as<float>()[row * out.strides[0] + h * out.strides[1]] = max;
  }
}

template <class T>
void run_task_typed(const SparseMlaCall& call, int64_t task, int worker) {
  const SparseMlaArgs& args = *call.args;
  const int64_t num_rows = args.out.shape[0];
  // The last row whose first task is not beyond this one; every row has a task.
  const RowSplit* entry =
      std::upper_bound(call.splits, call.splits + num_rows, task,
                       [](int64_t value, const RowSplit& row) { return value < row.first_task; }) -
      1;
  const int64_t row = entry - call.splits;
  const int64_t length = list_length(args.valid_counts, args.indices.shape[1], row);
  SparseMlaScratch& scratch = call.scratch[worker];
  const auto run = [&](int64_t split, const PartialSums& state) {
    const int64_t begin = std::min(length, split * entry->keys_per_split);
    const bool last = split + 1 == entry->num_splits;
    const int64_t end = last ? length : std::min(length, begin + entry->keys_per_split);
    run_split<T>(call, row, begin, end, scratch, state);
  };
  if (entry->first_slot >= 0) {
    const int64_t split = task - entry->first_task;
    run(split, slot(call.shared, entry->first_slot + split, call));
    return;
  }
  const PartialSums own = slot(call.own, worker * call.worker_slots, call);
  for (int64_t split = 0; split < entry->num_splits; ++split) {
    run(split, slot(own, split, call));
  }
  for (int64_t h = 0; h < call.num_heads; ++h) {
    finish_head<T>(call, row, h, own, entry->num_splits, scratch.line);
  }
}

// Merges heads [begin, end) of all rows' heads, counted through, where the row was split.
template <class T>
void merge_heads_typed(const SparseMlaCall& call, int64_t begin, int64_t end, int worker) {
  for (int64_t i = begin; i < end; ++i) {
    const RowSplit& entry = call.splits[i / call.num_heads];
    if (entry.first_slot >= 0) {
      finish_head<T>(call, i / call.num_heads, i % call.num_heads,
                     slot(call.shared, entry.first_slot, call), entry.num_splits,
                     call.scratch[worker].line);
    }
  }
}

// Widths are padded to a multiple of this. Rows whose width is one are read in place: every pair
// that is read lies within the row.
int64_t pair_elements() { return kPair; }

void run_task(const SparseMlaCall& call, int64_t task, int worker) {
  const bool bf16 = call.in_place && call.args->kv.layout.format == KvFormat::kLatentBf16;
  bf16 ? run_task_typed<Bf16>(call, task, worker) : run_task_typed<float>(call, task, worker);
}

void merge_heads(const SparseMlaCall& call, int64_t begin, int64_t end, int worker) {
  const bool bf16 = call.in_place && call.args->kv.layout.format == KvFormat::kLatentBf16;
  bf16 ? merge_heads_typed<Bf16>(call, begin, end, worker)
       : merge_heads_typed<float>(call, begin, end, worker);
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(pair_elements);
HWY_EXPORT(run_task);
HWY_EXPORT(merge_heads);

PlanShape plan_shape(const SparseMlaArgs& args, const DeviceInfo& device) {
  return {.num_rows = args.out.shape[0],
          .list_width = args.indices.shape[1],
          .num_threads = device.num_threads,
          .batch_invariant = args.batch_invariant};
}

PartialSums take_sums(Workspace& workspace, int64_t slots, const SparseMlaCall& call) {
  return {workspace.take<float>(slots * call.num_heads * call.width),
          workspace.take<float>(slots * call.num_heads),
          workspace.take<float>(slots * call.num_heads)};
}

// Carves the workspace; `schedule` receives room for a plan when the caller brought none.
SparseMlaCall carve(const SparseMlaArgs& args, const DeviceInfo& device, Workspace& workspace,
                    RowSplit** plan) {
  const KvLayout& layout = args.kv.layout;
  const PlanShape shape = plan_shape(args, device);
  SparseMlaCall call = {};
  call.args = &args;
  call.num_heads = args.out.shape[1];
  const int64_t pair = HWY_DYNAMIC_DISPATCH(pair_elements)();
  call.depth = round_up(layout.d_qk(), pair);
  call.width = round_up(layout.latent, pair);
  call.in_place = layout.format != KvFormat::kFp8DsMla && call.depth == layout.d_qk();
  *plan = workspace.take<RowSplit>(shape.num_rows + 1);
  // A schedule may cut rows where a plan without it would not; the bound holds for both.
  call.shared = take_sums(workspace, plan_slots_max(shape), call);
  call.worker_slots = whole_row_splits_max(shape);
  call.own = take_sums(workspace, call.worker_slots * device.num_threads, call);
  call.scratch = workspace.take<SparseMlaScratch>(device.num_threads);
  for (int worker = 0; worker < device.num_threads; ++worker) {
    SparseMlaScratch scratch = {};
    scratch.query = workspace.take<float>(call.num_heads * call.depth);
    scratch.line = workspace.take<float>(call.depth);
    scratch.scores = workspace.take<float>(call.num_heads * kTileKeysMax);
    scratch.factor = workspace.take<float>(call.num_heads);
    scratch.rows[0] = workspace.take<const char*>(kTileKeysMax);
    scratch.rows[1] = workspace.take<const char*>(kTileKeysMax);
    scratch.decoded = workspace.take<float>(call.in_place ? 0 : kTileKeysMax * call.depth);
    scratch.prepared_row = -1;
    if (!workspace.counting()) {
      call.scratch[worker] = scratch;
    }
  }
  return call;
}

int64_t sparse_mla_workspace_bytes(const SparseMlaArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  RowSplit* plan = nullptr;
  carve(args, device, workspace, &plan);
  return workspace.used_bytes();
}

Status run_sparse_mla(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& launch) {
  Workspace workspace(launch.workspace, launch.workspace_bytes);
  RowSplit* plan = nullptr;
  SparseMlaCall call = carve(args, device, workspace, &plan);
  const PlanShape shape = plan_shape(args, device);
  if (args.schedule.empty()) {
    plan_rows(shape, args.valid_counts, plan);
    call.splits = plan;
  } else {
    call.splits = args.schedule.as<RowSplit>();
    if (!is_plan(shape, call.splits, args.schedule.shape[0])) {
      return invalid_argument(
          "schedule: not from build_schedule of this context with T = " +
          std::to_string(shape.num_rows) + ", W = " + std::to_string(shape.list_width) +
          " and batch_invariant " + (shape.batch_invariant ? "set" : "not set"));
    }
  }
  call.latent_scale = args.kv.latent_scale == nullptr ? 1.0f : *args.kv.latent_scale;
  call.rope_scale = args.kv.rope_scale == nullptr ? 1.0f : *args.kv.rope_scale;
  ScheduleEnd end;
  std::memcpy(&end, &call.splits[shape.num_rows], sizeof(end));

  const auto task_fn = HWY_DYNAMIC_DISPATCH(run_task);
  device.thread_pool->parallel_for(end.num_tasks,
                                   [&](int64_t task, int worker) { task_fn(call, task, worker); });
  if (end.num_slots > 0) {
    const auto merge_fn = HWY_DYNAMIC_DISPATCH(merge_heads);
    // A head's states are some 10 KB.
    parallel_ranges(
        device, shape.num_rows * call.num_heads, 2,
        [&](int64_t first, int64_t last, int worker) { merge_fn(call, first, last, worker); });
  }
  return ok_status();
}

Status build_schedule_supports(const SparseMlaScheduleArgs& args, const DeviceInfo&) {
  if (args.schedule.shape[0] < args.num_rows + 1) {
    return unsupported("schedule has " + std::to_string(args.schedule.shape[0]) +
                       " entries, needs num_rows + 1 = " + std::to_string(args.num_rows + 1) +
                       " (schedule_entries() is always enough)");
  }
  return ok_status();
}

Status run_build_schedule(const SparseMlaScheduleArgs& args, const DeviceInfo& device,
                          const Launch&) {
  plan_rows({.num_rows = args.num_rows,
             .list_width = args.list_width,
             .num_threads = device.num_threads,
             .batch_invariant = args.batch_invariant},
            args.valid_counts, args.schedule.as<RowSplit>());
  return ok_status();
}

}  // namespace

const Kernel<SparseMlaArgs> kSparseMla = {
    .name = "cpu/sparse_mla",
    .supports = supports_all<SparseMlaArgs>,
    .workspace_bytes = sparse_mla_workspace_bytes,
    .run = run_sparse_mla,
};

const Kernel<SparseMlaScheduleArgs> kBuildSchedule = {
    .name = "cpu/build_schedule",
    .supports = build_schedule_supports,
    .run = run_build_schedule,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
