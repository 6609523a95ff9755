// Operations over rows of logits: drawing tokens, and the log-probabilities of given ones.
//
// A first kernel cuts each row into chunks, a block of threads each, and leaves every chunk's
// largest logit, its place, and the sum of exponentials. That is all that greedy rows and
// log-probabilities need. Rows that are drawn go on in the second kernel, one block a row.
//
// Masses are fixed-point integers, so that sums do not depend on their order. Nothing is sorted:
// top-k and top-p are both thresholds (a key, and how many that equal it stay, by lowest id), found
// bit by bit. Before that a histogram over the distance from the largest logit finds the few bins
// in which a threshold lies, and their tokens are listed; with those of all higher bins when they
// are few, and then the rest of the row is not looked at again.
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <string>

#include "backends/cuda/device/exp2.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/rows.cuh"
#include "core/workspace.h"

namespace lacuna::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// ---- Chunks of a row ----

constexpr int kChunkThreads = 256;
constexpr int kChunkFours = 4;  // a thread's
constexpr int kChunk = kChunkThreads * 4 * kChunkFours;

struct ChunkSummary {
  uint64_t best;  // see pack_best
  double sum;     // of exp(x - largest) over the chunk
};

// Keys in the order of floats: -0 equals +0, NaN is 0, below every number.
__device__ uint32_t ordered_key(float x) {
  if (x != x) {
    return 0;
  }
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float value_of_key(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// The larger of two is the one with the larger logit; of equal ones, the one with the lower id.
__device__ uint64_t pack_best(float x, int64_t id) {
  return (static_cast<uint64_t>(ordered_key(x)) << 32) | ~static_cast<uint32_t>(id);
}
__device__ int64_t id_of_best(uint64_t best) { return ~static_cast<uint32_t>(best); }
// -inf when there are only NaN.
__device__ float largest_of_best(uint64_t best) {
  const uint32_t key = static_cast<uint32_t>(best >> 32);
  return key == 0 ? -INFINITY : value_of_key(key);
}

struct ChunkParams {
  Strided2<const float> logits;
  int64_t vocabulary;
  int64_t chunks;  // of a row
  ChunkSummary* summaries;
  bool with_sums;
  bool nan_counts;  // in the sum; else it is as -inf
  bool aligned;
};

__global__ __launch_bounds__(kChunkThreads) void summarise_chunks_kernel(const ChunkParams p) {
  __shared__ uint64_t best_scratch[kChunkThreads / kWarp];
  __shared__ double sum_scratch[kChunkThreads / kWarp];
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x / p.chunks;
  const int64_t begin = (blockIdx.x - t * p.chunks) * kChunk;
  const float* logits = p.logits.row(t);
  float x[kChunkFours][4];
  uint64_t best = 0;
#pragma unroll
  for (int v = 0; v < kChunkFours; ++v) {
    const int64_t i = begin + 4 * (v * kChunkThreads + static_cast<int64_t>(threadIdx.x));
    load_four(logits + i, four_of(i, p.vocabulary), p.aligned, x[v]);
  }
#pragma unroll
  for (int v = 0; v < kChunkFours; ++v) {
    const int64_t i = begin + 4 * (v * kChunkThreads + static_cast<int64_t>(threadIdx.x));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (i + j < p.vocabulary) {
        const uint64_t candidate = pack_best(x[v][j], i + j);
        best = candidate > best ? candidate : best;
      }
    }
  }
  best = reduce_block<kChunkThreads>(best, Max(), best_scratch);
  double sum = 0;
  if (p.with_sums) {
    const float largest = largest_of_best(best);
    float mine = 0;
#pragma unroll
    for (int v = 0; v < kChunkFours; ++v) {
      const int64_t i = begin + 4 * (v * kChunkThreads + static_cast<int64_t>(threadIdx.x));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // Equal infinities have no difference.
        const float term = x[v][j] == largest ? 1.0f : expf(x[v][j] - largest);
        if (i + j < p.vocabulary && (term == term || p.nan_counts)) {
          mine += term;
        }
      }
    }
    sum = reduce_block<kChunkThreads>(static_cast<double>(mine), Sum(), sum_scratch);
  }
  if (threadIdx.x == 0) {
    p.summaries[blockIdx.x] = {best, sum};
  }
}

// The sum of exp(x - largest) over a row; kThreads threads take part, and all get it.
template <int kThreads>
__device__ double sum_of_row(const ChunkSummary* summaries, int64_t chunks, float largest,
                             double* scratch) {
  double sum = 0;
  for (int64_t c = threadIdx.x; c < chunks; c += kThreads) {
    const float chunk_largest = largest_of_best(summaries[c].best);
    sum += chunk_largest == largest
               ? summaries[c].sum
               : summaries[c].sum * exp(static_cast<double>(chunk_largest) - largest);
  }
  return reduce_block<kThreads>(sum, Sum(), scratch);
}

int64_t chunks_of(const ConstTensorView& logits) { return ceil_div(logits.shape[1], kChunk); }

Status summarise(const char* name, const ConstTensorView& logits, bool with_sums, bool nan_counts,
                 const DeviceInfo& device, const Launch& where, ChunkSummary* summaries) {
  const ChunkParams params = {.logits = strided2<const float>(logits),
                              .vocabulary = logits.shape[1],
                              .chunks = chunks_of(logits),
                              .summaries = summaries,
                              .with_sums = with_sums,
                              .nan_counts = nan_counts,
                              .aligned = rows_of_fours(logits)};
  return launch(name, summarise_chunks_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(logits.shape[0] * params.chunks)),
                 .block = dim3(kChunkThreads),
                 .pdl = true},
                params);
}

ChunkSummary* take_summaries(Workspace& workspace, const ConstTensorView& logits) {
  return workspace.take<ChunkSummary>(logits.shape[0] * chunks_of(logits));
}

// ---- token_logprobs ----

struct LogprobsParams {
  Strided2<const float> logits;
  int64_t vocabulary;
  int64_t chunks;
  const ChunkSummary* summaries;
  Strided1<const int32_t> ids;
  Strided1<float> out;
};

__global__ __launch_bounds__(kWarp) void token_logprobs_kernel(const LogprobsParams p) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x;
  const ChunkSummary* summaries = p.summaries + t * p.chunks;
  uint64_t best = 0;
  for (int64_t c = threadIdx.x; c < p.chunks; c += kWarp) {
    best = summaries[c].best > best ? summaries[c].best : best;
  }
  const float largest = largest_of_best(reduce_warp(best, Max()));
  const double sum = sum_of_row<kWarp>(summaries, p.chunks, largest, nullptr);
  if (threadIdx.x == 0) {
    const int32_t id = p.ids(t);
    p.out(t) =
        id < 0 || id >= p.vocabulary
            ? -INFINITY
            : static_cast<float>(static_cast<double>(p.logits.row(t)[id]) - largest - log(sum));
  }
}

Status run_token_logprobs(const TokenLogprobsArgs& args, const DeviceInfo& device,
                          const Launch& where) {
  Workspace workspace(where.workspace, where.workspace_bytes);
  ChunkSummary* summaries = take_summaries(workspace, args.logits);
  LACUNA_RETURN_IF_ERROR(summarise("cuda/token_logprobs", args.logits, true, /*nan_counts=*/true,
                                   device, where, summaries));
  const LogprobsParams params = {.logits = strided2<const float>(args.logits),
                                 .vocabulary = args.logits.shape[1],
                                 .chunks = chunks_of(args.logits),
                                 .summaries = summaries,
                                 .ids = strided1<const int32_t>(args.ids),
                                 .out = strided1<float>(args.out)};
  return launch(
      "cuda/token_logprobs", token_logprobs_kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(args.out.shape[0])), .block = dim3(kWarp), .pdl = true},
      params);
}

// ---- sample ----

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

// The largest mass of a row is 2^40, for exp(0). Smaller ones are multiples of 2^-40 of it, rounded
// down.
constexpr int kMassBits = 40;
// A row's masses then fit 63 bits.
constexpr int64_t kVocabularyMax = int64_t{1} << 22;

// Distances are logarithms of base 2; those from 41 on have no mass.
constexpr int kBins = 2048;
constexpr float kBinsPerUnit = 49;

// Candidates that fit into the list. A thread keeps its share of them in registers.
constexpr int kListShare = 8;
constexpr int kListMax = kListShare * kThreads;
// Pieces of the row whose masses are summed to find the one in which a draw ends.
constexpr int kTiles = 2048;
constexpr int kTileMin = 1024;

struct Threshold {
  // Every key above it stays, and the first `ties` that equal it. 0: all but NaN.
  uint32_t key = 0;
  int64_t ties = 0;
};

struct Shared {
  alignas(16) float list_x[kListMax];
  int32_t list_ids[kListMax];
  union {
    uint32_t bin_counts[kBins];
    struct {
      unsigned long long mass[kTiles];
      uint32_t ties[kTiles];
    } tiles;
  };
  unsigned long long warp_totals[kWarps];
  double sum_scratch[kWarps];
  // What one thread found for all.
  unsigned long long found_before;
  int found;
};

struct SampleParams {
  Strided2<const float> logits;
  int64_t vocabulary;
  int64_t chunks;
  const ChunkSummary* summaries;
  Strided1<const float> temperature;
  Strided1<const int32_t> top_k;
  Strided1<const float> top_p;
  Strided1<const float> min_p;
  Strided1<const float> uniform;
  Strided1<int32_t> ids;
  Strided1<float> logprobs;
  bool aligned;
};

// Of the relative masses, which are at most 1.
__device__ uint64_t fixed_point(float mass) {
  const uint32_t bits = __float_as_uint(mass);
  // The significand, at its place below 2^kMassBits. A conversion to 64 bits is slow.
  const int shift = static_cast<int>(bits >> 23) - (127 + 23 - kMassBits);
  const uint64_t significand = (bits & 0x7fffffu) | 0x800000u;
  return shift >= 0 ? significand << shift : shift > -24 ? significand >> -shift : 0;
}

// Softmax numerators of a row. Infinite logits share all of the mass.
struct Masses {
  float largest;
  float inverse;  // log2(e) / temperature

  __device__ Masses(float largest, float temperature)
      : largest(largest), inverse(kLog2E / fminf(temperature, FLT_MAX)) {}

  // From 0 on; not looked at where there is no mass.
  __device__ float distance(float x) const { return x == largest ? 0.0f : (largest - x) * inverse; }
  __device__ float relative(float x) const {
    return x > -INFINITY && (largest < INFINITY || x == largest) ? exp2f(-distance(x)) : 0.0f;
  }
  __device__ uint64_t operator()(float x) const { return fixed_point(relative(x)); }
  __device__ int bin(float x) const {
    return min(static_cast<int>(distance(x) * kBinsPerUnit), kBins - 1);
  }
  // What every token of a bin has at least, and at most.
  __device__ static uint64_t least_of_bin(int bin) {
    return fixed_point(0.9999f * exp2f(static_cast<float>(bin + 1) / -kBinsPerUnit));
  }
  __device__ static uint64_t most_of_bin(int bin) {
    return fixed_point(1.0001f * exp2f(static_cast<float>(bin) / -kBinsPerUnit)) + 1;
  }
};

// What selection and the draw walk over: the row, or the list of candidates in order of id.
struct Items {
  const float* x;
  int64_t count;
  bool aligned;
};

// use(i, x) for every item, in no order.
template <class Use>
__device__ void for_each_item(const Items& items, Use&& use) {
  constexpr int kAhead = 4;  // loads in flight
  for (int64_t begin = 0; begin < items.count; begin += kAhead * 4 * kThreads) {
    float x[kAhead][4];
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int64_t i = begin + 4 * (v * kThreads + static_cast<int64_t>(threadIdx.x));
      load_four(items.x + i, four_of(i, items.count), items.aligned, x[v]);
    }
#pragma unroll
    for (int v = 0; v < kAhead; ++v) {
      const int64_t i = begin + 4 * (v * kThreads + static_cast<int64_t>(threadIdx.x));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (i + j < items.count) {
          use(i + j, x[v][j]);
        }
      }
    }
  }
}

// Exclusive sum over the block's threads in order; `total` is everyone's.
__device__ uint64_t scan_block(uint64_t value, Shared& s, uint64_t* total) {
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  uint64_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kAll, inclusive, offset);
    inclusive += lane_idx >= offset ? below : 0;
  }
  __syncthreads();
  if (lane_idx == kWarp - 1) {
    s.warp_totals[warp_idx] = inclusive;
  }
  __syncthreads();
  uint64_t before = 0;
  *total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp_idx ? s.warp_totals[w] : 0;
    *total += s.warp_totals[w];
  }
  return before + inclusive - value;
}

// The first of `count` values (kPerThread a thread, in order of threads) at which the running sum
// reaches `target`, or -1; `before` is the sum of those before it. value(i) is asked for i < count.
template <int kPerThread, class Value>
__device__ int first_reaching(int count, uint64_t target, Shared& s, uint64_t* before,
                              Value&& value) {
  uint64_t mine = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int i = static_cast<int>(threadIdx.x) * kPerThread + j;
    mine += i < count ? value(i) : 0;
  }
  if (threadIdx.x == 0) {
    s.found = -1;
    s.found_before = 0;
  }
  uint64_t total = 0;
  uint64_t running = scan_block(mine, s, &total);
  if (running < target && target <= running + mine) {  // one thread's at most
    for (int j = 0; j < kPerThread; ++j) {
      const int i = static_cast<int>(threadIdx.x) * kPerThread + j;
      const uint64_t more = i < count ? value(i) : 0;
      if (running + more >= target) {
        s.found = i;
        s.found_before = running;
        break;
      }
      running += more;
    }
  }
  __syncthreads();
  *before = s.found_before;
  return s.found;
}

// Sums of the block, exact.
__device__ uint64_t sum_block(uint64_t value, Shared& s) {
  uint64_t total = 0;
  scan_block(value, s, &total);
  return total;
}

// The largest key such that the weights of the keys from it on reach `target` (at least 1, at most
// the sum of all), found bit by bit: from_key_on(key) is this thread's part of that sum. `rest` is
// what of the target is left for those that equal the key.
template <class Sum>
__device__ uint32_t select_key(uint64_t target, Shared& s, uint64_t* rest, Sum&& from_key_on) {
  uint32_t key = 0;
  uint64_t above = 0;  // from key + 1 on
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    const uint64_t sum = sum_block(from_key_on(key | bit), s);
    if (sum >= target) {
      key |= bit;
    } else {
      above = sum;
    }
  }
  *rest = target - above;
  return key;
}

// Copies the tokens of bins [first, last] into the list, in order of id; there must be at most
// kListMax. Returns the mass of the bins before.
__device__ uint64_t list_bins(const Items& row, const Masses& masses, int first, int last,
                              Shared& s) {
  constexpr int kFours = 4;  // neighbours of a thread, between one scan and the next
  int64_t listed = 0;
  uint64_t before = 0;
  for (int64_t begin = 0; begin < row.count; begin += 4 * kFours * kThreads) {
    const int64_t mine = begin + 4 * kFours * static_cast<int64_t>(threadIdx.x);
    float x[kFours][4];
#pragma unroll
    for (int v = 0; v < kFours; ++v) {
      const int64_t i = mine + 4 * v;
      load_four(row.x + i, four_of(i, row.count), row.aligned, x[v]);
    }
    uint32_t wanted = 0;  // a bit an item
#pragma unroll
    for (int j = 0; j < 4 * kFours; ++j) {
      const uint64_t mass = mine + j < row.count ? masses(x[j / 4][j % 4]) : 0;
      const int bin = mass > 0 ? masses.bin(x[j / 4][j % 4]) : kBins;
      wanted |= bin >= first && bin <= last ? 1u << j : 0u;
      before += bin < first ? mass : 0;
    }
    uint64_t total = 0;
    int64_t at = listed + static_cast<int64_t>(scan_block(__popc(wanted), s, &total));
#pragma unroll
    for (int j = 0; j < 4 * kFours; ++j) {
      if ((wanted >> j & 1u) != 0) {
        s.list_x[at] = x[j / 4][j % 4];
        s.list_ids[at] = static_cast<int32_t>(mine + j);
        ++at;
      }
    }
    listed += static_cast<int64_t>(total);
  }
  return sum_block(before, s);  // after it the list can be read
}

// The place among `items` at which the running sum of the masses that the threshold and min_p leave
// passes `uniform` of their total; -1 when none is left.
__device__ int64_t draw(const Items& items, const Masses& masses, const Threshold& threshold,
                        float min_p, float uniform, Shared& s) {
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  // The largest mass is 1, and always stays.
  const auto mass_of = [&](float x) -> uint64_t {
    const float mass = masses.relative(x);
    return mass < min_p ? 0 : fixed_point(mass);
  };
  const uint64_t tie_mass = threshold.key == 0 ? 0 : mass_of(value_of_key(threshold.key));
  const int64_t tile_items =
      max(static_cast<int64_t>(kTileMin), (items.count + kTiles - 1) / kTiles);
  // Whole warps of fours.
  const int64_t tile_size = (tile_items + 4 * kWarp - 1) / (4 * kWarp) * (4 * kWarp);
  const int num_tiles = static_cast<int>((items.count + tile_size - 1) / tile_size);
  for (int tile = warp_idx; tile < num_tiles; tile += kWarps) {
    const int64_t begin = tile * tile_size;
    const int64_t end = min(begin + tile_size, items.count);
    uint64_t mass = 0;
    uint32_t ties = 0;
#pragma unroll 4
    for (int64_t i = begin + 4 * lane_idx; i < end; i += 4 * kWarp) {
      float x[4];
      const int count = four_of(i, end);
      load_four(items.x + i, count, items.aligned, x);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t key = ordered_key(x[j]);
        mass += j < count && key > threshold.key ? mass_of(x[j]) : 0;
        ties += j < count && key == threshold.key ? 1 : 0;
      }
    }
    mass = reduce_warp(mass, Sum());
    ties = reduce_warp(ties, Sum());
    if (lane_idx == 0) {
      s.tiles.mass[tile] = mass;
      s.tiles.ties[tile] = ties;
    }
  }
  __syncthreads();
  // The ties of a tile that stay become part of its mass, and its number of ties the number of
  // those before it that stay.
  constexpr int kPerThread = kTiles / kThreads;
  uint64_t mine = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int tile = static_cast<int>(threadIdx.x) * kPerThread + j;
    mine += tile < num_tiles ? s.tiles.ties[tile] : 0;
  }
  uint64_t total = 0;
  int64_t ties_before = static_cast<int64_t>(scan_block(mine, s, &total));
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int tile = static_cast<int>(threadIdx.x) * kPerThread + j;
    if (tile < num_tiles) {
      const int64_t ties = s.tiles.ties[tile];
      const int64_t kept_before = min(ties_before, threshold.ties);
      const int64_t kept = min(ties_before + ties, threshold.ties) - kept_before;
      s.tiles.mass[tile] += kept * tie_mass;
      s.tiles.ties[tile] = static_cast<uint32_t>(kept_before);
      ties_before += ties;
    }
  }
  __syncthreads();
  mine = 0;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    const int tile = static_cast<int>(threadIdx.x) * kPerThread + j;
    mine += tile < num_tiles ? s.tiles.mass[tile] : 0;
  }
  total = sum_block(mine, s);
  if (total == 0) {
    return -1;
  }
  // A running sum passes a number when it reaches the next integer.
  const uint64_t floor_of = static_cast<uint64_t>(fmax(0.0, uniform * static_cast<double>(total)));
  const uint64_t target = min(floor_of, total - 1) + 1;
  uint64_t before = 0;
  const int tile = first_reaching<kPerThread>(num_tiles, target, s, &before,
                                              [&](int i) -> uint64_t { return s.tiles.mass[i]; });
  int64_t ties_left = threshold.ties - s.tiles.ties[tile];
  __syncthreads();  // all have read which tile it is
  if (warp_idx == 0) {
    const int64_t end = min((tile + 1) * tile_size, items.count);
    for (int64_t begin = tile * tile_size; begin < end; begin += kWarp) {
      const int64_t i = begin + lane_idx;
      const float x = i < end ? items.x[i] : -INFINITY;
      const uint32_t key = i < end ? ordered_key(x) : 0;
      const bool tied = i < end && key == threshold.key;
      const unsigned tied_lanes = __ballot_sync(kAll, tied);
      const bool kept =
          key > threshold.key || (tied && __popc(tied_lanes & ((1u << lane_idx) - 1)) < ties_left);
      ties_left -= __popc(tied_lanes);
      uint64_t inclusive = kept ? mass_of(x) : 0;
#pragma unroll
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const uint64_t below = __shfl_up_sync(kAll, inclusive, offset);
        inclusive += lane_idx >= offset ? below : 0;
      }
      const unsigned reached = __ballot_sync(kAll, before + inclusive >= target);
      if (reached != 0) {
        if (lane_idx == 0) {
          s.found = static_cast<int>(begin - tile * tile_size) + __ffs(reached) - 1;
        }
        break;
      }
      before += __shfl_sync(kAll, inclusive, kWarp - 1);
    }
  }
  __syncthreads();
  return tile * tile_size + s.found;
}

// The smallest integer that a sum must reach to be at least `share` of `total`; at least 1.
__device__ uint64_t share_of(float share, uint64_t total) {
  const double target = ceil(fmax(0.0, static_cast<double>(share) * static_cast<double>(total)));
  return min(max(static_cast<uint64_t>(target), static_cast<uint64_t>(1)), total);
}

// What a threshold is searched in: the list of some bins, of which each thread keeps its share in
// registers, or the whole row.
struct Candidates {
  Items items;
  bool listed = false;
  bool all = false;  // the list begins with the first bin
  // Of the bins before the list's.
  uint64_t count_before = 0;
  uint64_t mass_before = 0;
  uint32_t keys[kListShare];
  uint64_t masses[kListShare];

  __device__ explicit Candidates(const Items& row) : items(row) {
#pragma unroll
    for (int j = 0; j < kListShare; ++j) {
      keys[j] = 0;
      masses[j] = 0;
    }
  }

  // For a threshold in bins [first, last].
  __device__ void narrow(const Items& row, const Masses& mass_of, int first, int last, Shared& s) {
    if (all) {
      return;  // an earlier threshold, below this one, has listed them
    }
    constexpr int kPerThread = kBins / kThreads;
    uint64_t before = 0;
    uint64_t until = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      const int b = static_cast<int>(threadIdx.x) * kPerThread + j;
      before += b < first ? s.bin_counts[b] : 0;
      until += b <= last ? s.bin_counts[b] : 0;
    }
    before = sum_block(before, s);
    until = sum_block(until, s);
    all = until <= kListMax;
    listed = all || until - before <= kListMax;
    if (!listed) {
      items = row;
      count_before = 0;
      mass_before = 0;
      return;
    }
    count_before = all ? 0 : before;
    mass_before = list_bins(row, mass_of, all ? 0 : first, last, s);
    items = {s.list_x, static_cast<int64_t>(until - count_before), true};
#pragma unroll
    for (int j = 0; j < kListShare; ++j) {
      const int64_t i = static_cast<int64_t>(threadIdx.x) + j * kThreads;
      keys[j] = i < items.count ? ordered_key(items.x[i]) : 0;
      masses[j] = i < items.count ? mass_of(items.x[i]) : 0;
    }
  }

  // Keys from `key` on that are not NaN.
  __device__ uint64_t count_from(uint32_t key) const {
    uint64_t sum = 0;
    if (listed) {
#pragma unroll
      for (int j = 0; j < kListShare; ++j) {
        sum += keys[j] >= key && keys[j] > 0 ? 1 : 0;
      }
    } else {
      for_each_item(items, [&](int64_t, float x) {
        const uint32_t mine = ordered_key(x);
        sum += mine >= key && mine > 0 ? 1 : 0;
      });
    }
    return sum;
  }

  // Masses of the keys from `key` on that are above `floor`.
  __device__ uint64_t mass_from(uint32_t key, uint32_t floor, const Masses& mass_of) const {
    uint64_t sum = 0;
    if (listed) {
#pragma unroll
      for (int j = 0; j < kListShare; ++j) {
        sum += keys[j] >= key && keys[j] > floor ? masses[j] : 0;
      }
    } else {
      for_each_item(items, [&](int64_t, float x) {
        const uint32_t mine = ordered_key(x);
        sum += mine >= key && mine > floor ? mass_of(x) : 0;
      });
    }
    return sum;
  }
};

// The threshold of top_k and top_p. `items` becomes the list when that holds all that stays.
__device__ Threshold filter_row(const Masses& masses, int64_t top_k, float top_p, Items* items,
                                Shared& s) {
  const Items row = *items;
  const bool by_count = top_k > 0 && top_k < row.count;
  for (int b = static_cast<int>(threadIdx.x); b < kBins; b += kThreads) {
    s.bin_counts[b] = 0;
  }
  __syncthreads();
  uint64_t mine = 0;
  for_each_item(row, [&](int64_t, float x) {
    const uint64_t mass = masses(x);
    if (mass > 0) {
      atomicAdd(&s.bin_counts[masses.bin(x)], 1u);
      mine += by_count ? 1 : mass;
    }
  });
  uint64_t total = sum_block(mine, s);
  constexpr int kPerThread = kBins / kThreads;
  uint64_t unused = 0;
  Candidates candidates(row);
  Threshold threshold;
  int last_bin = kBins - 1;
  // Tokens without mass have no bin: with fewer others than top_k, all of those stay.
  if (by_count && static_cast<int64_t>(total) > top_k) {
    const uint64_t target = static_cast<uint64_t>(top_k);
    last_bin = first_reaching<kPerThread>(kBins, target, s, &unused,
                                          [&](int b) -> uint64_t { return s.bin_counts[b]; });
    candidates.narrow(row, masses, last_bin, last_bin, s);
    uint64_t ties = 0;
    threshold.key = select_key(target - candidates.count_before, s, &ties,
                               [&](uint32_t key) { return candidates.count_from(key); });
    threshold.ties = static_cast<int64_t>(ties);
  }
  if (top_p < 1.0f) {
    const uint32_t floor = threshold.key;
    // One thread adds what the ties that top_k keeps weigh together.
    const uint64_t tied =
        floor == 0 || threadIdx.x > 0 ? 0 : threshold.ties * masses(value_of_key(floor));
    if (by_count) {
      mine = candidates.all ? candidates.mass_from(0, floor, masses)
                            : Candidates(row).mass_from(0, floor, masses);
      total = sum_block(mine + tied, s);
    }
    const uint64_t target = share_of(top_p, total);
    // Bins count tokens. What the masses of a bin are at least and at most tells which bins the
    // threshold may lie in; of the last one top_k may have cut tokens off.
    int last = first_reaching<kPerThread>(last_bin, target, s, &unused, [&](int b) -> uint64_t {
      return s.bin_counts[b] * Masses::least_of_bin(b);
    });
    last = last < 0 ? last_bin : last;
    __syncthreads();
    int first = first_reaching<kPerThread>(last + 1, target, s, &unused, [&](int b) -> uint64_t {
      return s.bin_counts[b] * Masses::most_of_bin(b);
    });
    first = first < 0 ? last : first;
    candidates.narrow(row, masses, first, last, s);
    uint64_t rest = 0;
    threshold.key = select_key(target - candidates.mass_before, s, &rest, [&](uint32_t key) {
      return candidates.mass_from(key, floor, masses) + (floor >= key ? tied : 0);
    });
    const uint64_t each = max(masses(value_of_key(threshold.key)), static_cast<uint64_t>(1));
    threshold.ties = static_cast<int64_t>((rest + each - 1) / each);
  }
  if (candidates.all) {
    *items = candidates.items;
  }
  __syncthreads();  // the counts of the bins make room
  return threshold;
}

// The token of a row whose temperature is above 0 and whose largest logit is above -inf.
__device__ int64_t draw_row(const SampleParams& p, int64_t t, float largest, Shared& s) {
  const Masses masses(largest, p.temperature(t));
  const float top_p = p.top_p(t);
  const int64_t top_k = p.top_k(t);
  Items items = {p.logits.row(t), p.vocabulary, p.aligned};
  Threshold threshold;
  if ((top_k > 0 && top_k < p.vocabulary) || top_p < 1.0f) {
    threshold = filter_row(masses, top_k, top_p, &items, s);
  }
  const int64_t place = draw(items, masses, threshold, p.min_p(t), p.uniform(t), s);
  return place < 0 ? 0 : items.x == s.list_x ? s.list_ids[place] : place;
}

__global__ __launch_bounds__(kThreads, 1) void sample_kernel(const SampleParams p) {
  extern __shared__ char smem[];
  Shared& s = *reinterpret_cast<Shared*>(smem);
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x;
  const ChunkSummary* summaries = p.summaries + t * p.chunks;
  uint64_t best = 0;
  for (int64_t c = threadIdx.x; c < p.chunks; c += kThreads) {
    best = summaries[c].best > best ? summaries[c].best : best;
  }
  best = reduce_block<kThreads>(best, Max(), reinterpret_cast<uint64_t*>(s.warp_totals));
  const float largest = largest_of_best(best);
  int64_t id = 0;
  if (largest > -INFINITY) {
    // Also greedy for a temperature that is NaN.
    id = p.temperature(t) > 0 ? draw_row(p, t, largest, s) : id_of_best(best);
  }
  if (threadIdx.x == 0) {
    p.ids(t) = static_cast<int32_t>(id);
  }
  if (p.logprobs) {
    const double sum = sum_of_row<kThreads>(summaries, p.chunks, largest, s.sum_scratch);
    if (threadIdx.x == 0) {
      const double above =
          largest < INFINITY ? static_cast<double>(p.logits.row(t)[id]) - largest : 0.0;
      p.logprobs(t) = largest > -INFINITY ? static_cast<float>(above - log(sum)) : -INFINITY;
    }
  }
}

Status supports_sample(const SampleArgs& args, const DeviceInfo& device) {
  if (args.logits.shape[1] > kVocabularyMax) {
    return unsupported("logits: a vocabulary of " + std::to_string(args.logits.shape[1]) +
                       ", this kernel's sums hold at most " + std::to_string(kVocabularyMax));
  }
  if (static_cast<int64_t>(sizeof(Shared)) > device.smem_optin_bytes) {
    return unsupported("needs " + std::to_string(sizeof(Shared)) +
                       " bytes of shared memory a block, the device has " +
                       std::to_string(device.smem_optin_bytes));
  }
  return ok_status();
}

Status run_sample(const SampleArgs& args, const DeviceInfo& device, const Launch& where) {
  Workspace workspace(where.workspace, where.workspace_bytes);
  ChunkSummary* summaries = take_summaries(workspace, args.logits);
  LACUNA_RETURN_IF_ERROR(summarise("cuda/sample", args.logits, !args.logprobs.empty(),
                                   /*nan_counts=*/false, device, where, summaries));
  const SampleParams params = {.logits = strided2<const float>(args.logits),
                               .vocabulary = args.logits.shape[1],
                               .chunks = chunks_of(args.logits),
                               .summaries = summaries,
                               .temperature = strided1<const float>(args.temperature),
                               .top_k = strided1<const int32_t>(args.top_k),
                               .top_p = strided1<const float>(args.top_p),
                               .min_p = strided1<const float>(args.min_p),
                               .uniform = strided1<const float>(args.uniform),
                               .ids = strided1<int32_t>(args.ids),
                               .logprobs = strided1<float>(args.logprobs),
                               .aligned = rows_of_fours(args.logits)};
  return launch("cuda/sample", sample_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(args.ids.shape[0])),
                 .block = dim3(kThreads),
                 .smem_bytes = sizeof(Shared),
                 .pdl = true},
                params);
}

}  // namespace

const Kernel<SampleArgs> kSample = {
    .name = "cuda/sample",
    .supports = supports_sample,
    .workspace_bytes =
        [](const SampleArgs& args, const DeviceInfo&) {
          Workspace workspace;
          take_summaries(workspace, args.logits);
          return workspace.used_bytes();
        },
    .run = run_sample,
};
const Kernel<TokenLogprobsArgs> kTokenLogprobs = {
    .name = "cuda/token_logprobs",
    .supports = supports_all<TokenLogprobsArgs>,
    .workspace_bytes =
        [](const TokenLogprobsArgs& args, const DeviceInfo&) {
          Workspace workspace;
          take_summaries(workspace, args.logits);
          return workspace.used_bytes();
        },
    .run = run_token_logprobs,
};

}  // namespace lacuna::cuda
