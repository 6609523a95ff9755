// Multi-head attention over un-absorbed keys on the CPU, and the builder of its bit mask. A task is
// one head of one tile of query rows; it walks the sequence's keys tile by tile with a running
// softmax. Keys and values of a tile are widened to floats once and serve all its query rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

// The micro-kernels keep vectors in arrays, which types without a size (SVE) do not allow: NEON
// there.
#if defined(__aarch64__) && !defined(HWY_DISABLED_TARGETS)
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128)
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/mha.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/attention-inl.h"

#ifndef LACUNA_BACKENDS_CPU_MHA_CC_
#define LACUNA_BACKENDS_CPU_MHA_CC_
namespace lacuna::cpu {

// Query rows of a task: enough that widening a key (one pass over it) is little against scoring it.
constexpr int64_t kQueryTile = 64;
constexpr int64_t kMhaTileKeys = 128;
constexpr int64_t kMaskWordBits = 32;
constexpr int64_t kTileWords = kMhaTileKeys / kMaskWordBits;

struct MhaSequence {
  int64_t first_task;
  int64_t q_begin;
  int64_t q_count;
  int64_t k_begin;
  int64_t k_count;
  int64_t key_start;  // bit of the mask that stands for key 0
};

struct MhaScratch {
  float* query;             // [kQueryTile, depth]
  float* keys;              // [kMhaTileKeys, depth]
  float* values;            // [kMhaTileKeys, width]
  float* scores;            // [kQueryTile, kMhaTileKeys]
  float* acc;               // [kQueryTile, width]
  float* line;              // [width]
  float* max;               // [kQueryTile]
  float* sum;               // [kQueryTile]
  float* factor;            // [kQueryTile]
  uint32_t* kept;           // [kQueryTile, kTileWords] bits: which keys a query row keeps
  const char** key_rows;    // [kMhaTileKeys] into keys
  const char** value_rows;  // [kMhaTileKeys] into values
};

struct MhaCall {
  const MhaArgs* args;
  int64_t num_heads;
  int64_t depth;  // d_qk, padded
  int64_t width;  // d_v, padded
  int64_t num_sequences;
  MhaSequence* sequences;  // [B + 1], the last one closes the list of tasks
  MhaScratch* scratch;     // [threads]
};

}  // namespace lacuna::cpu
#endif  // LACUNA_BACKENDS_CPU_MHA_CC_

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

static_assert(kMhaTileKeys == kTileKeys);
static_assert(kMaskWordBits % kLanes == 0, "a vector of keys lies within one word of the mask");

int64_t mha_pair_elements() { return kPair; }

// to[0, padded) = elements [0, count) of row (row, head) of a [rows, heads, count] tensor, then
// zeros. A tensor without a head dimension passes head 0.
void widen_row(const ConstTensorView& tensor, int64_t row, int64_t head, int64_t count,
               int64_t padded, float* to) {
  const int64_t at = row * tensor.strides[0] + (tensor.rank == 3 ? head * tensor.strides[1] : 0);
  if (tensor.dtype == DType::kBFloat16) {
    widen(tensor.as<Bf16>() + at, count, to);
  } else {
    widen(tensor.as<float>() + at, count, to);
  }
  std::fill(to + count, to + padded, 0.0f);
}

// Asks for what widen_row will read.
void prefetch_row(const ConstTensorView& tensor, int64_t row, int64_t head, int64_t count) {
  const int64_t at = row * tensor.strides[0] + (tensor.rank == 3 ? head * tensor.strides[1] : 0);
  const char* begin = static_cast<const char*>(tensor.data) + at * size_bytes(tensor.dtype);
  for (int64_t offset = 0; offset < count * size_bytes(tensor.dtype); offset += 64) {
    __builtin_prefetch(begin + offset, 0, 3);
  }
}

// Rows that widening asks for ahead: the rows of one head lie far apart, where no hardware
// prefetcher looks, and eight of them take about as long to widen as one takes to arrive from L3.
constexpr int64_t kRowsAhead = 8;

// Bits [begin, begin + 32) of a mask row of `words` words; bits beyond its end are 0.
uint32_t mask_bits(const int32_t* mask, int64_t words, int64_t begin) {
  const int64_t word = begin / kMaskWordBits;
  const int64_t shift = begin % kMaskWordBits;
  const uint64_t low = word < words ? static_cast<uint32_t>(mask[word]) : 0;
  const uint64_t high = word + 1 < words ? static_cast<uint32_t>(mask[word + 1]) : 0;
  return static_cast<uint32_t>((low | high << kMaskWordBits) >> shift);
}

enum class Kept { kNone, kSome, kAll };

// Which of `num_keys` keys from `key` on the query rows [query, query + num_queries) of the
// sequence keep, by causality and by mask.
Kept find_kept(const MhaCall& call, const MhaSequence& sequence, int64_t query, int64_t num_queries,
               int64_t key, int64_t num_keys, uint32_t* kept) {
  const MhaArgs& args = *call.args;
  bool any = false;
  bool all = true;
  for (int64_t i = 0; i < num_queries; ++i) {
    int64_t visible = num_keys;
    if (args.causal) {
      const int64_t last = query + i + sequence.k_count - sequence.q_count;
      visible = std::clamp<int64_t>(last + 1 - key, 0, num_keys);
    }
    for (int64_t w = 0; w < kTileWords; ++w) {
      const int64_t in_word = std::clamp<int64_t>(visible - w * kMaskWordBits, 0, kMaskWordBits);
      const int64_t of_tile = std::clamp<int64_t>(num_keys - w * kMaskWordBits, 0, kMaskWordBits);
      uint32_t bits = static_cast<uint32_t>((uint64_t{1} << in_word) - 1);
      if (!args.mask.empty() && bits != 0) {
        const int64_t row = sequence.q_begin + query + i;
        bits &= mask_bits(args.mask.as<int32_t>() + row * args.mask.strides[0], args.mask.shape[1],
                          sequence.key_start + key + w * kMaskWordBits);
      }
      kept[i * kTileWords + w] = bits;
      any = any || bits != 0;
      all = all && bits == static_cast<uint32_t>((uint64_t{1} << of_tile) - 1);
    }
  }
  return !any ? Kept::kNone : all ? Kept::kAll : Kept::kSome;
}

// Scores of keys that are not kept become -inf.
void drop_scores(int64_t num_queries, int64_t num_keys, const uint32_t* kept, float* scores) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const FloatVec minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  const auto lane_bits = hn::Shl(hn::Set(du, 1u), hn::Iota(du, 0));
  for (int64_t i = 0; i < num_queries; ++i) {
    float* row = scores + i * kTileKeys;
    for (int64_t k = 0; k < num_keys; k += kLanes) {
      const uint32_t bits =
          kept[i * kTileWords + k / kMaskWordBits] >> static_cast<uint32_t>(k % kMaskWordBits);
      const auto keep = hn::RebindMask(d, hn::TestBit(hn::Set(du, bits), lane_bits));
      hn::StoreU(hn::IfThenElse(keep, hn::LoadU(d, row + k), minus_infinity), d, row + k);
    }
  }
}

void mha_task(const MhaCall& call, int64_t task, int worker) {
  const MhaArgs& args = *call.args;
  const MhaScratch& scratch = call.scratch[worker];
  const int64_t d_qk = args.q.shape[2];
  const int64_t d_v = args.v.shape[2];
  // The last sequence whose first task is not beyond this one: empty ones before it are passed.
  const MhaSequence& sequence =
      *(std::upper_bound(call.sequences, call.sequences + call.num_sequences, task,
                         [](int64_t value, const MhaSequence& s) { return value < s.first_task; }) -
        1);
  const int64_t tiles = div_up(sequence.q_count, kQueryTile);
  const int64_t in_sequence = task - sequence.first_task;
  const int64_t head = in_sequence / tiles;
  // The last queries see most keys: they go first, so that short tasks fill the end.
  const int64_t query = (tiles - 1 - in_sequence % tiles) * kQueryTile;
  const int64_t num_queries = std::min(kQueryTile, sequence.q_count - query);
  int64_t key_end = sequence.k_count;
  if (args.causal) {
    const int64_t last = query + num_queries - 1 + sequence.k_count - sequence.q_count;
    key_end = std::clamp<int64_t>(last + 1, 0, key_end);
  }

  for (int64_t i = 0; i < num_queries; ++i) {
    widen_row(args.q, sequence.q_begin + query + i, head, d_qk, call.depth,
              scratch.query + i * call.depth);
  }
  std::fill_n(scratch.acc, num_queries * call.width, 0.0f);
  std::fill_n(scratch.max, num_queries, -std::numeric_limits<float>::infinity());
  std::fill_n(scratch.sum, num_queries, 0.0f);
  const SoftmaxState state = {scratch.max, scratch.sum, scratch.factor};
  RowPrefetch no_prefetch(0);
  for (int64_t key = 0; key < key_end; key += kTileKeys) {
    const int num_keys = static_cast<int>(std::min<int64_t>(kTileKeys, key_end - key));
    const Kept kept = find_kept(call, sequence, query, num_queries, key, num_keys, scratch.kept);
    if (kept == Kept::kNone) {
      continue;
    }
    for (int k = 0; k < num_keys; ++k) {
      const int64_t row = sequence.k_begin + key + k;
      if (k + kRowsAhead < num_keys) {
        prefetch_row(args.k.empty() ? args.k_nope : args.k, row + kRowsAhead, head,
                     args.k.empty() ? args.k_nope.shape[2] : d_qk);
        prefetch_row(args.v, row + kRowsAhead, head, d_v);
      }
      float* to = scratch.keys + k * call.depth;
      if (!args.k.empty()) {
        widen_row(args.k, row, head, d_qk, call.depth, to);
      } else {
        const int64_t nope = args.k_nope.shape[2];
        widen_row(args.k_nope, row, head, nope, args.k_rope.empty() ? call.depth : nope, to);
        if (!args.k_rope.empty()) {
          widen_row(args.k_rope, row, 0, d_qk - nope, call.depth - nope, to + nope);
        }
      }
      widen_row(args.v, row, head, d_v, call.width, scratch.values + k * call.width);
    }
    // The padding of the last key block scores rows of an earlier tile, or of none: whatever they
    // hold, softmax_tile overwrites the scores.
    score_tile<float>(scratch.query, call.depth, num_queries, scratch.key_rows, num_keys,
                      call.depth, static_cast<float>(args.softmax_scale), scratch.scores,
                      no_prefetch);
    if (kept == Kept::kSome) {
      drop_scores(num_queries, num_keys, scratch.kept, scratch.scores);
    }
    softmax_tile(num_queries, num_keys, scratch.scores, state);
    weigh_tile<float>(scratch.value_rows, num_keys, scratch.scores, scratch.factor, num_queries,
                      call.width, scratch.acc, call.width, no_prefetch);
  }

  for (int64_t i = 0; i < num_queries; ++i) {
    const int64_t row = sequence.q_begin + query + i;
    const bool empty = scratch.sum[i] == 0.0f;
    const float scale = empty ? 0.0f : 1.0f / scratch.sum[i];
    from_pair_order<float>(scratch.acc + i * call.width, call.width, scale, scratch.line);
    const int64_t at = row * args.out.strides[0] + head * args.out.strides[1];
    if (args.out.dtype == DType::kBFloat16) {
      narrow(scratch.line, d_v, args.out.as<Bf16>() + at);
    } else {
      narrow(scratch.line, d_v, args.out.as<float>() + at);
    }
    if (!args.lse.empty()) {
      args.lse.as<float>()[row * args.lse.strides[0] + head * args.lse.strides[1]] =
          empty ? -std::numeric_limits<float>::infinity()
                : scratch.max[i] + std::log(scratch.sum[i]);
    }
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(mha_pair_elements);
HWY_EXPORT(mha_task);

int64_t num_sequences(const MhaArgs& args) {
  return args.cu_seqlens_q.empty() ? args.seqlens_q.shape[0] : args.cu_seqlens_q.shape[0] - 1;
}

MhaCall carve(const MhaArgs& args, const DeviceInfo& device, Workspace& workspace) {
  const int64_t pair = HWY_DYNAMIC_DISPATCH(mha_pair_elements)();
  MhaCall call = {};
  call.args = &args;
  call.num_heads = args.q.shape[1];
  call.depth = round_up(args.q.shape[2], pair);
  call.width = round_up(args.v.shape[2], pair);
  call.num_sequences = num_sequences(args);
  call.sequences = workspace.take<MhaSequence>(call.num_sequences + 1);
  call.scratch = workspace.take<MhaScratch>(device.num_threads);
  for (int worker = 0; worker < device.num_threads; ++worker) {
    MhaScratch scratch = {};
    scratch.query = workspace.take<float>(kQueryTile * call.depth);
    scratch.keys = workspace.take<float>(kMhaTileKeys * call.depth);
    scratch.values = workspace.take<float>(kMhaTileKeys * call.width);
    scratch.scores = workspace.take<float>(kQueryTile * kMhaTileKeys);
    scratch.acc = workspace.take<float>(kQueryTile * call.width);
    scratch.line = workspace.take<float>(call.width);
    scratch.max = workspace.take<float>(kQueryTile);
    scratch.sum = workspace.take<float>(kQueryTile);
    scratch.factor = workspace.take<float>(kQueryTile);
    scratch.kept = workspace.take<uint32_t>(kQueryTile * kTileWords);
    scratch.key_rows = workspace.take<const char*>(kMhaTileKeys);
    scratch.value_rows = workspace.take<const char*>(kMhaTileKeys);
    if (workspace.counting()) {
      continue;
    }
    for (int64_t k = 0; k < kMhaTileKeys; ++k) {
      scratch.key_rows[k] = reinterpret_cast<const char*>(scratch.keys + k * call.depth);
      scratch.value_rows[k] = reinterpret_cast<const char*>(scratch.values + k * call.width);
    }
    call.scratch[worker] = scratch;
  }
  return call;
}

// Lists the sequences and counts their tasks. Bounds that do not fit the tensors are cut, so that a
// bad length can not lead outside of them.
int64_t list_sequences(const MhaCall& call) {
  const MhaArgs& args = *call.args;
  const auto at = [](const ConstTensorView& tensor, int64_t i) {
    return static_cast<int64_t>(tensor.as<int32_t>()[i * tensor.strides[0]]);
  };
  int64_t num_tasks = 0;
  int64_t q_next = 0;
  int64_t k_next = 0;
  for (int64_t b = 0; b < call.num_sequences; ++b) {
    int64_t q_end = 0;
    int64_t k_end = 0;
    if (args.cu_seqlens_q.empty()) {
      q_end = q_next + std::max<int64_t>(0, at(args.seqlens_q, b));
      k_end = k_next + std::max<int64_t>(0, at(args.seqlens_k, b));
    } else {
      q_next = at(args.cu_seqlens_q, b);
      k_next = at(args.cu_seqlens_k, b);
      q_end = at(args.cu_seqlens_q, b + 1);
      k_end = at(args.cu_seqlens_k, b + 1);
    }
    const int64_t q_begin = std::clamp<int64_t>(q_next, 0, args.q.shape[0]);
    const int64_t k_begin = std::clamp<int64_t>(k_next, 0, args.v.shape[0]);
    MhaSequence& sequence = call.sequences[b];
    sequence.first_task = num_tasks;
    sequence.q_begin = q_begin;
    sequence.q_count = std::clamp<int64_t>(q_end, q_begin, args.q.shape[0]) - q_begin;
    sequence.k_begin = k_begin;
    sequence.k_count = std::clamp<int64_t>(k_end, k_begin, args.v.shape[0]) - k_begin;
    sequence.key_start = args.key_start.empty() ? 0 : std::max<int64_t>(0, at(args.key_start, b));
    num_tasks += div_up(sequence.q_count, kQueryTile) * call.num_heads;
    q_next = q_end;
    k_next = k_end;
  }
  call.sequences[call.num_sequences] = {.first_task = num_tasks};
  return num_tasks;
}

int64_t mha_workspace_bytes(const MhaArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  carve(args, device, workspace);
  return workspace.used_bytes();
}

Status run_mha(const MhaArgs& args, const DeviceInfo& device, const Launch& launch) {
  Workspace workspace(launch.workspace, launch.workspace_bytes);
  const MhaCall call = carve(args, device, workspace);
  const auto task_fn = HWY_DYNAMIC_DISPATCH(mha_task);
  device.thread_pool->parallel_for(list_sequences(call),
                                   [&](int64_t task, int worker) { task_fn(call, task, worker); });
  return ok_status();
}

void build_mask_row(const BuildMaskArgs& args, int64_t t) {
  const int64_t width = args.indices.shape[1];
  int32_t* row = args.mask.as<int32_t>() + t * args.mask.strides[0];
  const int64_t row_words = std::max(args.mask.strides[0], args.mask.shape[1]);
  std::memset(row, 0, static_cast<size_t>(row_words) * sizeof(int32_t));
  int64_t count = width;
  if (!args.valid_counts.empty()) {
    const int64_t given = args.valid_counts.as<int32_t>()[t * args.valid_counts.strides[0]];
    count = std::clamp<int64_t>(given, 0, width);
  }
  const int64_t begin =
      args.key_begin.empty() ? 0 : args.key_begin.as<int32_t>()[t * args.key_begin.strides[0]];
  const int32_t* ids = args.indices.as<int32_t>() + t * args.indices.strides[0];
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id = ids[i * args.indices.strides[1]];
    const int64_t bit = id - begin;
    if (id < 0 || bit < 0 || bit >= args.key_count) {
      continue;
    }
    int32_t& word = row[bit / kMaskWordBits];
    word = static_cast<int32_t>(static_cast<uint32_t>(word) | uint32_t{1} << (bit % kMaskWordBits));
  }
}

Status run_build_mask(const BuildMaskArgs& args, const DeviceInfo& device, const Launch&) {
  // A bit takes about a nanosecond.
  const int64_t bytes_per_row = 16 * args.indices.shape[1] + 4 * args.mask.shape[1];
  parallel_ranges(device, args.indices.shape[0], grain_rows(bytes_per_row),
                  [&](int64_t begin, int64_t end, int) {
                    for (int64_t t = begin; t < end; ++t) {
                      build_mask_row(args, t);
                    }
                  });
  return ok_status();
}

}  // namespace

const Kernel<MhaArgs> kMha = {
    .name = "cpu/mha",
    .supports = supports_all<MhaArgs>,
    .workspace_bytes = mha_workspace_bytes,
    .run = run_mha,
};

const Kernel<BuildMaskArgs> kBuildMask = {
    .name = "cpu/build_mask",
    .supports = supports_all<BuildMaskArgs>,
    .run = run_build_mask,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
