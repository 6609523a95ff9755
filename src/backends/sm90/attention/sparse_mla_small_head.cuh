// Sparse MLA for at most 32 heads on Hopper, at the speed of the gather: keys are the rows of the
// tensor core tile and heads its columns, so that few heads waste little.
//
// A block walks rows (or splits of rows). One or two warpgroups gather: tiles of 64 keys by 16-byte
// cp.async, in groups of 128 columns, into a ring of slots. Two warpgroups consume, each every
// other tile, with sums of its own; they meet once a row:
//   scores   S^T [64 keys x N heads] = K Q^T          36 wgmma, both operands K-major
//   weights  P^T = exp2(S^T - reference), as bf16 to shared memory
//   output   O^T [512 x N] += V^T P^T                 32 wgmma, both operands transposed: V is what
//            the scores were taken of
// Within a slot, key k of slab s lies at s * 8192 + k * 128, its 16-byte chunk c at c ^ (k & 7):
// the 128-byte swizzle of wgmma. The reference of a head is a maximum seen earlier; it is raised
// only when a score is 256 times above it, which after the first tile is rare, so that a tile
// usually costs one barrier of its warpgroup and no rescaling.
#pragma once

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/cluster.cuh"
#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/sm90/attention/small_head_cut.cuh"
#include "backends/sm90/attention/small_head_output.cuh"
#include "backends/sm90/attention/sparse_mla_small_head.h"
#include "backends/sm90/ptx/mbarrier.cuh"
#include "backends/sm90/ptx/warpgroup.cuh"
#include "backends/sm90/ptx/wgmma.cuh"

namespace lacuna::sm90 {

using cuda::kMinusInfinity;
using cuda::kWarp;
using cuda::smem_address;
using cuda::SplitTask;

// Scores may exceed the reference by this much (log2) before it is raised.
constexpr float kReferenceSlack = 8.0f;
constexpr int kRowBarrier = 1;       // both consumers
constexpr int kConsumerBarrier = 2;  // and 3: one consumer

// Registers a thread: what a block is launched with, and what setmaxnreg makes of them.
template <int kHeads>
struct Registers;
template <>
struct Registers<8> {
  // So few that blocks of the joining kernel find room beside this one, and start before it ends.
  static constexpr int kLaunch = 96;
};
template <>
struct Registers<16> {
  static constexpr int kLaunch = 96;
  static constexpr int kGather = 40;
  static constexpr int kConsumer = 152;
};
template <>
struct Registers<32> {
  static constexpr int kLaunch = 168;
  static constexpr int kGather = 56;
  static constexpr int kConsumer = 224;
};

// What items are: tasks that cuda::find_task() knows, or rows and runs. Kernels of their own, as
// those of clusters are: calls of few rows wait for each instruction.
enum class Items { kTasks, kRuns };

// The block's shared memory; a constant, so that no register holds it.
__device__ inline char* block_smem() {
  extern __shared__ __align__(1024) char smem[];
  return smem;
}

// Barriers of a block, in pairs: something is full, something is empty.
template <int kHeads>
struct Barriers {
  using Smem = SmallHeadSmem<kHeads>;
  uint32_t at;

  static constexpr int kRopeFrom = Smem::kSlots;
  static constexpr int kQueryFrom = kRopeFrom + Smem::kRopeSlots;

  // Gathered: all threads of the gatherers, and their warps for the keys' validity. Used: the warps
  // of a consumer.
  __device__ uint32_t full(int slot) const { return at + 16 * slot; }
  __device__ uint32_t rope_full(int slot) const { return full(kRopeFrom + slot); }
  // Gathered; used by the warps of both consumers.
  __device__ uint32_t query_full() const { return full(kQueryFrom); }
  static __device__ uint32_t empty_of(uint32_t full) { return full + 8; }

  // By a warp.
  __device__ void init(int lane) const {
    constexpr int kWarps = Smem::kWarps;
    static_assert(kQueryFrom < kWarp);
    if (lane <= kQueryFrom) {
      const bool query = lane == kQueryFrom;
      mbarrier_init(full(lane), Smem::kGatherThreads + (query ? 0 : Smem::kGatherThreads / kWarp));
      mbarrier_init(empty_of(full(lane)), query ? kConsumers * kWarps : kWarps);
    }
    mbarrier_init_fence();
  }
};

// A place in a ring of kSlots, whose uses are numbered through all rows of the block.
template <int kSlots>
struct RingPlace {
  int slot;
  uint32_t parity;

  __device__ explicit RingPlace(uint32_t number)
      : slot(static_cast<int>(number % kSlots)), parity(number / kSlots & 1) {}
};

__device__ inline int num_tiles(const SplitTask& task) {
  constexpr int kTile = static_cast<int>(kTileKeys);
  return task.end > task.begin ? (task.end - task.begin + kTile - 1) / kTile : 0;
}

// False: this item has nothing to do.
template <Items kItems>
__device__ bool find_item(const SmallHeadParams& params, int32_t item, SplitTask& task) {
  if constexpr (kItems == Items::kRuns) {
    if (!run_task(params, item, task)) {
      return false;
    }
    cuda::limit_task(params.call, task);
    return true;
  } else {
    return cuda::find_task(params.call, item, task);
  }
}

// What a warpgroup does for each of the block's tasks: `work`(task, its number).
template <Items kItems, class Work>
__device__ void for_each_task(const SmallHeadParams& params, Work work) {
  uint32_t number = 0;
  for (int32_t item = static_cast<int32_t>(blockIdx.x); item < params.num_items;
       item += static_cast<int32_t>(gridDim.x)) {
    SplitTask task;
    if (find_item<kItems>(params, item, task)) {
      work(task, number);
      ++number;
    }
  }
}

// One arrival a warp, of whose threads each has done its part.
__device__ inline void arrive_warp(uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    mbarrier_arrive(barrier);
  }
}

// ----------------------------------------------------------------------------------------- gather

// The query of a row: 8 threads a head, missing heads as zeros.
template <int kHeads, bool kHasRope>
__device__ void load_query(const cuda::SparseMlaParams& p, int64_t row, uint32_t query_at,
                           int thread) {
  constexpr int kPassHeads = SmallHeadSmem<kHeads>::kGatherThreads / 8;
  const int chunk = thread % 8;
#pragma unroll
  for (int pass = 0; pass < (kHeads + kPassHeads - 1) / kPassHeads; ++pass) {
    const int head = pass * kPassHeads + thread / 8;
    if (head >= kHeads) {
      continue;
    }
    const bool exists = head < p.num_heads;
    const auto* latent = static_cast<const Bf16*>(p.q_nope) + row * p.q_nope_strides[0] +
                         (exists ? head : 0) * p.q_nope_strides[1] + chunk * 8;
    const uint32_t to = query_at + head * 128 + ((chunk ^ (head & 7)) << 4);
#pragma unroll
    for (int slab = 0; slab < kLatentSlabs; ++slab) {
      cuda::cp_async_16(to + slab * kHeads * 128, latent + slab * 64, exists);
    }
    if constexpr (kHasRope) {
      const auto* rope = static_cast<const Bf16*>(p.q_rope) + row * p.q_rope_strides[0] +
                         (exists ? head : 0) * p.q_rope_strides[1] + chunk * 8;
      cuda::cp_async_16(to + kLatentSlabs * kHeads * 128, rope, exists);
    }
  }
}

// What a task reads first, asked of L2: its list and its query.
__device__ inline void prefetch_task(const cuda::SparseMlaParams& p, const SplitTask& task,
                                     int thread, int threads) {
  constexpr int kLineBytes = 128;
  const auto* list = reinterpret_cast<const char*>(p.indices.row(task.row) + task.begin);
  const int list_bytes = (min(task.end, static_cast<int32_t>(p.list_width)) - task.begin) * 4;
  for (int at = thread * kLineBytes; at < list_bytes; at += threads * kLineBytes) {
    cuda::prefetch_line(list + at);
  }
  constexpr int kHeadLines = kLatentSlabs + 1;
  for (int i = thread; i < p.num_heads * kHeadLines; i += threads) {
    const int head = i / kHeadLines;
    const int slab = i % kHeadLines;
    if (slab < kLatentSlabs) {
      cuda::prefetch_line(static_cast<const Bf16*>(p.q_nope) + task.row * p.q_nope_strides[0] +
                          head * p.q_nope_strides[1] + slab * 64);
    } else if (p.rope > 0) {
      cuda::prefetch_line(static_cast<const Bf16*>(p.q_rope) + task.row * p.q_rope_strides[0] +
                          head * p.q_rope_strides[1]);
    }
  }
}

template <int kHeads, bool kHasRope, Items kItems>
__device__ void gather(const SmallHeadParams& params, const Barriers<kHeads>& barriers,
                       uint32_t smem) {
  using Smem = SmallHeadSmem<kHeads>;
  const cuda::SparseMlaParams& p = params.call;
  constexpr int kPassKeys = Smem::kGatherThreads / 8;  // 8 threads a key
  constexpr int kPasses = static_cast<int>(kTileKeys) / kPassKeys;
  constexpr int kPassBytes = kPassKeys * 128;
  const int thread = static_cast<int>(threadIdx.x) - kConsumers * kWarpgroup;
  const int chunk = thread % 8;
  const int key = thread / 8;
  const uint32_t to = smem + key * 128 + ((chunk ^ (key & 7)) << 4);
  auto* valid = reinterpret_cast<uint8_t*>(block_smem() + Smem::kValidAt);
  uint32_t tile_number = 0;
  uint32_t row_number = 0;
  // The first task, as far as parameters tell, so that its list is asked for right after the wait.
  const bool is_scheduled = kItems != Items::kRuns && p.schedule != nullptr;
  SplitTask task = {};
  bool is_known = false;
  if (kItems == Items::kRuns) {
    is_known = run_task(params, static_cast<int32_t>(blockIdx.x), task);
  } else if (!is_scheduled) {
    task = cuda::cut_task(p, static_cast<int32_t>(blockIdx.x));
    is_known = true;
  }
  if (is_known) {
    prefetch_task(p, task, thread, Smem::kGatherThreads);
  }
  cuda::pdl_wait();
  for (int32_t item = static_cast<int32_t>(blockIdx.x); item < params.num_items;
       item += static_cast<int32_t>(gridDim.x)) {
    if (kItems == Items::kRuns) {
      if (!run_task(params, item, task)) {
        continue;
      }
    } else if (is_scheduled) {
      if (!cuda::scheduled_task(p, item, task)) {
        continue;
      }
    } else if (item != static_cast<int32_t>(blockIdx.x)) {
      task = cuda::cut_task(p, item);
    }
    cuda::limit_task(p, task);
    const int tiles = num_tiles(task);
    if (tiles == 0) {
      continue;
    }
    const int32_t* list = p.indices.row(task.row);
    const int32_t request = cuda::request_of(p, task.row);
    int32_t entries[kPasses];
    const auto read_entries = [&](int tile) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int at = task.begin + tile * static_cast<int>(kTileKeys) + pass * kPassKeys + key;
        entries[pass] = at < task.end ? __ldcg(list + at) : -1;
      }
    };
    read_entries(0);
    if (row_number == 0) {
      // Nothing is waited for yet: the query comes while the list does.
      load_query<kHeads, kHasRope>(p, task.row, smem + Smem::kQueryAt, thread);
      mbarrier_arrive_after_copies(barriers.query_full());
    }
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, ++tile_number) {
      const char* from[kPasses];
      bool exists[kPasses];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int32_t cached = cuda::cached_row(p, request, entries[pass]);
        exists[pass] = cached >= 0;
        // Nothing is read through the address of a key that is none.
        from[pass] =
            (exists[pass] ? p.kv + cached * p.row_bytes : static_cast<const char*>(p.q_nope)) +
            chunk * 16;
      }
      const auto arrive = [&](uint32_t barrier) {
        mbarrier_arrive_after_copies(barrier);
        __syncwarp();
        if (thread % kWarp == 0) {
          mbarrier_arrive(barrier);
        }
      };
      if constexpr (kHasRope) {
        const RingPlace<Smem::kRopeSlots> place(tile_number);
        mbarrier_wait(Barriers<kHeads>::empty_of(barriers.rope_full(place.slot)), place.parity ^ 1);
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          cuda::cp_async_16(to + Smem::kRopeAt + place.slot * kSlabBytes + pass * kPassBytes,
                            from[pass] + kLatentSlabs * 128, exists[pass]);
        }
        arrive(barriers.rope_full(place.slot));
      }
#pragma unroll
      for (int group = 0; group < kGroupsOfTile; ++group) {
        const RingPlace<Smem::kSlots> place(tile_number * kGroupsOfTile + group);
        mbarrier_wait(Barriers<kHeads>::empty_of(barriers.full(place.slot)), place.parity ^ 1);
        if (group == 0 && chunk == 0) {
#pragma unroll
          for (int pass = 0; pass < kPasses; ++pass) {
            valid[tile_number % Smem::kValidTiles * kTileKeys + pass * kPassKeys + key] =
                exists[pass];
          }
        }
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
          for (int slab = 0; slab < kGroupSlabs; ++slab) {
            cuda::cp_async_16(to + place.slot * kSlotBytes + slab * kSlabBytes + pass * kPassBytes,
                              from[pass] + (group * kGroupSlabs + slab) * 128, exists[pass]);
          }
        }
        arrive(barriers.full(place.slot));
        if (group == 0) {
          read_entries(tile + 1);
        }
      }
      if (tile == 0 && row_number > 0) {
        mbarrier_wait(Barriers<kHeads>::empty_of(barriers.query_full()), (row_number - 1) & 1);
        load_query<kHeads, kHasRope>(p, task.row, smem + Smem::kQueryAt, thread);
        mbarrier_arrive_after_copies(barriers.query_full());
      }
    }
    ++row_number;
  }
}

// ----------------------------------------------------------------------------------------- consume

// Where the weights of a tile lie: [64 keys][N heads] bf16, an operand whose columns run along
// memory. Atoms of 8 keys, permuted within when a key's heads are more than 16 bytes.
template <int kHeads>
struct WeightTile {
  static constexpr int kRowBytes = kHeads * 2;
  static constexpr Swizzle kSwizzle = kHeads == 8    ? Swizzle::kNone
                                      : kHeads == 16 ? Swizzle::k32
                                                     : Swizzle::k64;
  static constexpr uint64_t kBits = kHeads == 8
                                        ? descriptor_bits(128, 128, kSwizzle)
                                        : descriptor_bits(16 * kRowBytes, 8 * kRowBytes, kSwizzle);

  // 8 heads of a key.
  static __device__ uint32_t chunk_at(int key, int chunk) {
    const uint32_t at = key * kRowBytes + chunk * 16;
    return kHeads == 8 ? at : at ^ ((at >> 7 & (kHeads / 8 - 1)) << 4);
  }
};

// A thread sees heads 8 i + 2 c and + 1 for i < kPairs, c = lane % 4: of scores, those of keys r
// and r + 8 of its warp's 16, r = lane / 4; of the output, columns r and r + 8 of the warp's 16 of
// each slab.
template <int kHeads, bool kHasRope, Items kItems, int kCluster>
class Consumer {
 public:
  using Smem = SmallHeadSmem<kHeads>;
  using Weights = WeightTile<kHeads>;
  static constexpr int kPairs = kHeads / 8;
  // Groups of keys that are awaited together, so that their products are one run between which few
  // of the other consumer's come: prefill with 16 heads 640 us instead of 660.
  static constexpr int kGroupsAtOnce = kHeads == 32 ? 1 : 2;

  __device__ Consumer(const SmallHeadParams& params, const Barriers<kHeads>& barriers,
                      uint32_t smem)
      : params_(params),
        barriers_(barriers),
        smem_(smem),
        idx_(static_cast<int>(threadIdx.x) / kWarpgroup),
        thread_(static_cast<int>(threadIdx.x) % kWarpgroup),
        warp_(thread_ / kWarp),
        lane_(thread_ % kWarp) {}

  __device__ void run() {
    cuda::pdl_wait();
    uint32_t tile_number = 0;
    uint32_t row_number = 0;  // of rows that have keys
    for_each_task<kItems>(params_, [&](const SplitTask& task, uint32_t task_number) {
      const int tiles = num_tiles(task);
      clear();
      if (tiles > 0) {
        mbarrier_wait(barriers_.query_full(), row_number & 1);
        ++row_number;
      }
#pragma unroll 1
      for (int tile = idx_; tile < tiles; tile += kConsumers) {
        attend(tile_number + tile, tile == idx_, tile + kConsumers >= tiles, task_number & 1);
      }
      if (tiles <= idx_) {
        if (tiles > 0) {
          arrive_warp(Barriers<kHeads>::empty_of(barriers_.query_full()));
        }
        write_stats(task_number & 1);
      }
      finish(task, tiles, tile_number, task_number & 1);
      tile_number += tiles;
    });
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int slab = 0; slab < kLatentSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) {
        out_[slab][i] = 0.0f;
      }
    }
#pragma unroll
    for (int h = 0; h < 2 * kPairs; ++h) {
      reference_[h] = kMinusInfinity;
      sum_[h] = 0.0f;
      max_[h] = kMinusInfinity;
    }
  }

  __device__ void sync() const { barrier_sync(kConsumerBarrier + idx_, kWarpgroup); }

  __device__ static int slot(uint32_t tile_number, int group) {
    return RingPlace<Smem::kSlots>(tile_number * kGroupsOfTile + group).slot;
  }
  __device__ void release(uint32_t tile_number, int group) const {
    arrive_warp(Barriers<kHeads>::empty_of(barriers_.full(slot(tile_number, group))));
  }

  // One tile. The first two groups of a row's last stay the consumer's, for hand_over().
  __device__ void attend(uint32_t tile_number, bool first, bool last, int task_parity) {
    float scores[kHeads / 2];
    multiply_keys(tile_number, scores);
    if (last) {
      arrive_warp(Barriers<kHeads>::empty_of(barriers_.query_full()));
    }
    const auto* valid = reinterpret_cast<const uint8_t*>(block_smem() + Smem::kValidAt) +
                        tile_number % Smem::kValidTiles * kTileKeys + warp_ * 16 + lane_ / 4;
    const bool exists[2] = {valid[0] != 0, valid[8] != 0};
    float max[2 * kPairs];
    bool above = false;
#pragma unroll
    for (int h = 0; h < 2 * kPairs; ++h) {
      const int i = h / 2 * 4 + h % 2;
      scores[i] = exists[0] ? scores[i] * params_.scale_log2 : kMinusInfinity;
      scores[i + 2] = exists[1] ? scores[i + 2] * params_.scale_log2 : kMinusInfinity;
      max[h] = fmaxf(scores[i], scores[i + 2]);
      max_[h] = fmaxf(max_[h], max[h]);
      above |= max[h] > reference_[h] + kReferenceSlack;
    }
    const uint32_t weights_at =
        smem_ + Smem::kWeightsAt +
        (idx_ * 2 + static_cast<int>(tile_number / kConsumers & 1)) * Smem::kWeightBytes;
    float sums[2 * kPairs];
    if (!first) {
      store_weights(scores, sums, weights_at);
    }
    if (first || barrier_any(kConsumerBarrier + idx_, kWarpgroup, above)) {
      raise_references(max, first);
      store_weights(scores, sums, weights_at);
      sync();
    }
#pragma unroll
    for (int h = 0; h < 2 * kPairs; ++h) {
      sum_[h] += sums[h];
    }
    multiply_values(tile_number, weights_at);
    if (last) {
      write_stats(task_parity);
    }
    static_assert(kGroupsOfTile == 4);
    wgmma_wait<3>();
    if (!last) {
      release(tile_number, 0);
    }
    wgmma_wait<2>();
    if (!last) {
      release(tile_number, 1);
    }
    wgmma_wait<1>();
    release(tile_number, 2);
    wgmma_wait<0>();
    release(tile_number, 3);
  }

  __device__ void multiply_keys(uint32_t tile_number, float (&scores)[kHeads / 2]) const {
    constexpr uint64_t kKMajor = descriptor_bits(16, 1024, Swizzle::k128);
#pragma unroll
    for (int i = 0; i < kHeads / 2; ++i) {
      scores[i] = 0.0f;
    }
    pin_registers(scores);
    const auto multiply = [&](uint32_t keys_at, int query_slab, int slabs) {
      const uint64_t keys = descriptor(kKMajor, keys_at);
      const uint64_t query =
          descriptor(kKMajor, smem_ + Smem::kQueryAt + query_slab * kHeads * 128);
#pragma unroll
      for (int step = 0; step < slabs * 4; ++step) {
        const int at = step % 4 * 32;  // of 16 columns, in a row of 128 bytes
        wgmma<false, false>(scores, keys + (step / 4 * kSlabBytes + at) / 16,
                            query + (step / 4 * kHeads * 128 + at) / 16);
      }
      wgmma_commit();
    };
    const RingPlace<Smem::kRopeSlots> rope_place(tile_number);
    if constexpr (kHasRope) {
      mbarrier_wait(barriers_.rope_full(rope_place.slot), rope_place.parity);
    }
#pragma unroll
    for (int first = 0; first < kGroupsOfTile; first += kGroupsAtOnce) {
#pragma unroll
      for (int group = first; group < first + kGroupsAtOnce; ++group) {
        const RingPlace<Smem::kSlots> place(tile_number * kGroupsOfTile + group);
        mbarrier_wait(barriers_.full(place.slot), place.parity);
      }
      fence_proxy_async();
      wgmma_fence();
      if (kHasRope && first == 0) {
        multiply(smem_ + Smem::kRopeAt + rope_place.slot * kSlabBytes, kLatentSlabs, 1);
      }
#pragma unroll
      for (int group = first; group < first + kGroupsAtOnce; ++group) {
        multiply(smem_ + slot(tile_number, group) * kSlotBytes, group * kGroupSlabs, kGroupSlabs);
      }
    }
    wgmma_wait<0>();
    if constexpr (kHasRope) {
      arrive_warp(Barriers<kHeads>::empty_of(barriers_.rope_full(rope_place.slot)));
    }
  }

  // exp2(score - reference): as bf16 to shared memory, and summed over the thread's keys.
  __device__ void store_weights(const float (&scores)[kHeads / 2], float (&sums)[2 * kPairs],
                                uint32_t weights_at) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float reference = reference_[2 * pair + i % 2];
        weights[i] =
            exp2_fast(scores[4 * pair + i] - (reference == kMinusInfinity ? 0.0f : reference));
      }
      sums[2 * pair] = weights[0] + weights[2];
      sums[2 * pair + 1] = weights[1] + weights[3];
      stmatrix_x2(weights_at + Weights::chunk_at(warp_ * 16 + lane_ % 16, pair),
                  cuda::pack_bf16(weights[0], weights[1]), cuda::pack_bf16(weights[2], weights[3]));
    }
    fence_proxy_async();
  }

  // New references: the largest scores so far. What was summed up follows.
  __device__ void raise_references(const float (&max)[2 * kPairs], bool first) {
    auto* maxima =
        reinterpret_cast<float*>(block_smem() + Smem::kMaximaAt) + idx_ * Smem::kWarps * kHeads;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 largest = {max[2 * pair], max[2 * pair + 1]};
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        largest.x = fmaxf(largest.x, __shfl_xor_sync(0xffffffffu, largest.x, offset));
        largest.y = fmaxf(largest.y, __shfl_xor_sync(0xffffffffu, largest.y, offset));
      }
      if (lane_ < 4) {
        *reinterpret_cast<float2*>(maxima + warp_ * kHeads + pair * 8 + lane_ * 2) = largest;
      }
    }
    sync();
    float rescale[2 * kPairs];
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      float2 largest = {reference_[2 * pair], reference_[2 * pair + 1]};
#pragma unroll
      for (int warp = 0; warp < Smem::kWarps; ++warp) {
        const float2 other =
            *reinterpret_cast<const float2*>(maxima + warp * kHeads + pair * 8 + lane_ % 4 * 2);
        largest.x = fmaxf(largest.x, other.x);
        largest.y = fmaxf(largest.y, other.y);
      }
      const float next[2] = {largest.x, largest.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = 2 * pair + i;
        rescale[h] = exp2_fast(reference_[h] - (next[i] == kMinusInfinity ? 0.0f : next[i]));
        reference_[h] = next[i];
        sum_[h] *= rescale[h];
      }
    }
    if (first) {
      return;  // nothing yet
    }
#pragma unroll
    for (int slab = 0; slab < kLatentSlabs; ++slab) {
#pragma unroll
      for (int i = 0; i < kHeads / 2; ++i) {
        out_[slab][i] *= rescale[i / 4 * 2 + i % 2];
      }
    }
  }

  // Starts adding a tile to the output, one group of wgmma a group of columns.
  __device__ void multiply_values(uint32_t tile_number, uint32_t weights_at) {
    constexpr uint64_t kTransposed = descriptor_bits(1024, 1024, Swizzle::k128);
    const uint64_t weights = descriptor(Weights::kBits, weights_at);
#pragma unroll
    for (int slab = 0; slab < kLatentSlabs; ++slab) {
      pin_registers(out_[slab]);
    }
    wgmma_fence();
#pragma unroll
    for (int group = 0; group < kGroupsOfTile; ++group) {
      const uint64_t values =
          descriptor(kTransposed, smem_ + slot(tile_number, group) * kSlotBytes);
#pragma unroll
      for (int slab = 0; slab < kGroupSlabs; ++slab) {
#pragma unroll
        for (int step = 0; step < static_cast<int>(kTileKeys) / 16; ++step) {
          wgmma<true, true>(out_[group * kGroupSlabs + slab],
                            values + (slab * kSlabBytes + step * 16 * 128) / 16,
                            weights + step * 16 * Weights::kRowBytes / 16);
        }
      }
      wgmma_commit();
    }
  }

  __device__ float2* stats(int task_parity) const {
    return reinterpret_cast<float2*>(block_smem() + Smem::kStatsAt) +
           task_parity * kConsumers * Smem::kWarps * kHeads;
  }
  __device__ float* references(int task_parity) const {
    return reinterpret_cast<float*>(block_smem() + Smem::kReferencesAt) +
           task_parity * kConsumers * kHeads;
  }

  // The consumer's sums of weights and maxima of a row. Where nobody asks for maxima the references
  // do, near them as they are: this is a row's end, which waits for each instruction.
  __device__ void write_stats(int task_parity) const {
    float sums[2 * kPairs];
    float max[2 * kPairs];
#pragma unroll
    for (int h = 0; h < 2 * kPairs; ++h) {
      sums[h] = sum_[h];
      max[h] = reference_[h];
    }
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
#pragma unroll
      for (int h = 0; h < 2 * kPairs; ++h) {
        sums[h] += __shfl_xor_sync(0xffffffffu, sums[h], offset);
      }
    }
    if (params_.call.max_logits) {
#pragma unroll
      for (int h = 0; h < 2 * kPairs; ++h) {
        max[h] = max_[h];
#pragma unroll
        for (int offset = 4; offset < kWarp; offset *= 2) {
          max[h] = fmaxf(max[h], __shfl_xor_sync(0xffffffffu, max[h], offset));
        }
      }
    }
    if (lane_ < 4) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int head = pair * 8 + lane_ * 2;
        *reinterpret_cast<float4*>(stats(task_parity) + (idx_ * Smem::kWarps + warp_) * kHeads +
                                   head) = {sums[2 * pair], max[2 * pair], sums[2 * pair + 1],
                                            max[2 * pair + 1]};
        if (warp_ == 0) {
          *reinterpret_cast<float2*>(references(task_parity) + idx_ * kHeads + head) = {
              reference_[2 * pair], reference_[2 * pair + 1]};
        }
      }
    }
  }

  // Slab `i` (0..3) of what a consumer hands to the other, in the first slots of its last tile.
  __device__ char* exchanged_slab(uint32_t tile_number, int i) const {
    return block_smem() + slot(tile_number, i / 2) * kSlotBytes + i % 2 * kSlabBytes;
  }

  template <int kFirst>
  __device__ void hand_over(uint32_t tile_number, int thread) const {
#pragma unroll
    for (int i = 0; i < kLatentSlabs / 2; ++i) {
      auto* to = reinterpret_cast<float4*>(exchanged_slab(tile_number, i)) + thread;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const float* from = out_[kFirst + i] + 4 * pair;
        to[pair * kWarpgroup] = {from[0], from[1], from[2], from[3]};
      }
    }
  }

  // Ends a row: the two consumers' states become one, of which each writes half.
  __device__ void finish(const SplitTask& task, int tiles, uint32_t tile_number, int task_parity) {
    // Not known to be what it was before: registers are for the tiles, so that nothing that only
    // the end of a row needs is worked out ahead.
    int thread = thread_;
    asm volatile("" : "+r"(thread));
    const int other_idx = idx_ ^ 1;
    // Each consumer's last tile, if it had one.
    const uint32_t last = tile_number + tiles - 1;
    const bool last_is_own = (tiles - 1) % kConsumers == idx_;
    const uint32_t own_last = last - (last_is_own ? 0 : 1);
    const uint32_t other_last = last - (last_is_own ? 1 : 0);
    const bool other_has_keys = tiles > other_idx;
    if (tiles > idx_) {
      if (idx_ == 0) {
        hand_over<kLatentSlabs / 2>(own_last, thread);
      } else {
        hand_over<0>(own_last, thread);
      }
    }
    barrier_sync(kRowBarrier, kConsumers * kWarpgroup);
    auto* factors = reinterpret_cast<float2*>(block_smem() + Smem::kFactorsAt) + idx_ * kHeads;
    if (thread < kHeads) {
      const int head = thread;
      const float2* own_stats = stats(task_parity) + idx_ * Smem::kWarps * kHeads + head;
      const float2* other_stats = stats(task_parity) + other_idx * Smem::kWarps * kHeads + head;
      float own_sum = 0.0f;
      float other_sum = 0.0f;
      float max = kMinusInfinity;
#pragma unroll
      for (int warp = 0; warp < Smem::kWarps; ++warp) {
        const float2 own = own_stats[warp * kHeads];
        const float2 other = other_stats[warp * kHeads];
        own_sum += own.x;
        other_sum += other.x;
        max = fmaxf(max, fmaxf(own.y, other.y));
      }
      // Relative to the largest score, not to the references.
      const float shift = max == kMinusInfinity ? 0.0f : max;
      const float own_rescale = exp2_fast(references(task_parity)[idx_ * kHeads + head] - shift);
      const float other_rescale =
          exp2_fast(references(task_parity)[other_idx * kHeads + head] - shift);
      const float sum = own_sum * own_rescale + other_sum * other_rescale;
      float factor = 1.0f;
      if constexpr (kCluster > 1) {
        if (idx_ == 0) {
          reinterpret_cast<float2*>(block_smem() + kStateAt)[head] = {max, sum};
        }
      } else if (task.slot >= 0) {
        if (idx_ == 0) {
          params_.call.partial_sums[int64_t{task.slot} * kHeads + head] = {max, sum};
        }
      } else if (head < params_.call.num_heads) {
        factor = finish_head_log2(params_.call, task.row, head, max, sum, idx_ == 0);
      }
      factors[head] = {own_rescale * factor, other_rescale * factor};
    }
    sync();
    const auto handed = [&](int i, int pair) {
      return other_has_keys ? reinterpret_cast<const float4*>(
                                  exchanged_slab(other_last, i))[pair * kWarpgroup + thread]
                            : float4{0.0f, 0.0f, 0.0f, 0.0f};
    };
    if (idx_ == 0) {
      join<0>(factors, thread, handed);
    } else {
      join<kLatentSlabs / 2>(factors, thread, handed);
    }
    if (other_has_keys) {
      release(other_last, 0);
      release(other_last, 1);
    }
    if constexpr (kCluster > 1) {
      if (idx_ == 0) {
        give<0>(thread);
      } else {
        give<kLatentSlabs / 2>(thread);
      }
      finish_cluster(task.row, thread);
    } else if (task.slot >= 0) {
      if (tiles > 0) {  // else never read: the largest score says that there was no key
        if (idx_ == 0) {
          write_state<0>(task.slot, thread);
        } else {
          write_state<kLatentSlabs / 2>(task.slot, thread);
        }
      }
    } else if (idx_ == 0) {
      write<0>(task.row, thread);
    } else {
      write<kLatentSlabs / 2>(task.row, thread);
    }
  }

  // Four slabs from kFirst on, of two states: this consumer's, and `theirs`(slab - kFirst, pair).
  template <int kFirst, class Theirs>
  __device__ void join(const float2* factors, int thread, Theirs theirs) {
    const int lane = thread % kWarp;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const float4 by = *reinterpret_cast<const float4*>(factors + pair * 8 + lane % 4 * 2);
      // A factor of 0 is the answer whatever was summed up.
      const bool even_exists = by.x != 0.0f || by.y != 0.0f;
      const bool odd_exists = by.z != 0.0f || by.w != 0.0f;
#pragma unroll
      for (int i = 0; i < kLatentSlabs / 2; ++i) {
        float* own = out_[kFirst + i] + 4 * pair;
        const float4 other = theirs(i, pair);
        own[0] = even_exists ? own[0] * by.x + other.x * by.y : 0.0f;
        own[1] = odd_exists ? own[1] * by.z + other.y * by.w : 0.0f;
        own[2] = even_exists ? own[2] * by.x + other.z * by.y : 0.0f;
        own[3] = odd_exists ? own[3] * by.z + other.w * by.w : 0.0f;
      }
    }
  }

  __device__ float4 value(int slab, int pair) const {
    const float* sums = out_[slab] + 4 * pair;
    return {sums[0], sums[1], sums[2], sums[3]};
  }

  template <int kFirst>
  __device__ void write_state(int32_t slot, int thread) const {
    auto* to = reinterpret_cast<float4*>(params_.call.partial_out) +
               (int64_t{slot} * kLatentSlabs + kFirst) * kPairs * kWarpgroup + thread;
#pragma unroll
    for (int i = 0; i < kLatentSlabs / 2; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        __stcg(to + (i * kPairs + pair) * kWarpgroup, value(kFirst + i, pair));
      }
    }
  }

  // Four slabs to the caller's output, two at a time by way of the weights' place, so that lanes
  // write whole lines: head h's chunk c of 8 columns lies at h * 256 + (c ^ (h & 7)) * 16.
  template <int kFirst>
  __device__ void write(int32_t row, int thread) const {
    constexpr int kRowBytes = 2 * 128;
    static_assert(kHeads * kRowBytes == 2 * Smem::kWeightBytes);
    constexpr int kChunks = kRowBytes / 16;
    const int warp = thread / kWarp;
    const int lane = thread % kWarp;
    const int weights_at = Smem::kWeightsAt + idx_ * 2 * Smem::kWeightBytes;
    auto* out = static_cast<Bf16*>(params_.call.out) + row * params_.call.out_strides[0];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int slab = 0; slab < 2; ++slab) {
#pragma unroll
        for (int pair = 0; pair < kPairs; ++pair) {
          const float4 sums = value(kFirst + half * 2 + slab, pair);
          const int chunk = slab * 8 + warp * 2 + lane / 8 % 2;
          stmatrix_x2_trans(
              smem_ + weights_at + (pair * 8 + lane % 8) * kRowBytes + ((chunk ^ (lane % 8)) << 4),
              cuda::pack_bf16(sums.x, sums.y), cuda::pack_bf16(sums.z, sums.w));
        }
      }
      sync();
#pragma unroll
      for (int i = 0; i < kHeads * kChunks / kWarpgroup; ++i) {
        const int head = (i * kWarpgroup + thread) / kChunks;
        const int chunk = (i * kWarpgroup + thread) % kChunks;
        if (head < params_.call.num_heads) {
          *reinterpret_cast<uint4*>(out + head * params_.call.out_strides[1] +
                                    (kFirst + half * 2) * 64 + chunk * 8) =
              *reinterpret_cast<const uint4*>(block_smem() + weights_at + head * kRowBytes +
                                              ((chunk ^ (head & 7)) << 4));
        }
      }
      sync();
    }
  }

  // A row's splits are a cluster. Each block leaves its state where keys were, as partial states
  // lie, and its heads' largest scores and sums of weights where a second task's statistics would
  // be. Then each warp of the cluster's consumers joins some units of 16 columns by 8 heads.
  static constexpr int kUnits = kLatentSlabs * kPairs * Smem::kWarps;
  static constexpr int kStateAt =
      Smem::kStatsAt + kConsumers * Smem::kWarps * kHeads * static_cast<int>(sizeof(float2));
  static_assert(kUnits * kWarp * static_cast<int>(sizeof(float4)) <= Smem::kRopeAt);

  template <int kFirst>
  __device__ void give(int thread) const {
    barrier_sync(kRowBarrier, kConsumers * kWarpgroup);  // nothing is read from there any more
#pragma unroll
    for (int i = 0; i < kLatentSlabs / 2; ++i) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        reinterpret_cast<float4*>(
            block_smem())[((kFirst + i) * kPairs + pair) * kWarpgroup + thread] =
            value(kFirst + i, pair);
      }
    }
  }

  __device__ void finish_cluster(int32_t row, int thread) const {
    constexpr int kClusterWarps = kCluster * kConsumers * Smem::kWarps;
    constexpr int kRounds = (kUnits + kClusterWarps - 1) / kClusterWarps;
    const int warp = thread / kWarp;
    const int lane = thread % kWarp;
    const int rank = static_cast<int>(blockIdx.x) % kCluster;
    const int first_unit = (rank * kConsumers + idx_) * Smem::kWarps + warp;
    cuda::cluster_sync();
    // Of this block, then of those after it.
    float2 states[kCluster];
    float4 values[kRounds][kCluster];
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      cuda::cluster_load(
          cuda::cluster_address(smem_ + kStateAt + lane % kHeads * 8, (rank + i) % kCluster),
          states[i]);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      // Beyond the last unit, one that is thrown away.
      const int at = min(first_unit + round * kClusterWarps, kUnits - 1) * kWarp + lane;
      values[round][0] = reinterpret_cast<const float4*>(block_smem())[at];
#pragma unroll
      for (int i = 1; i < kCluster; ++i) {
        cuda::cluster_load(cuda::cluster_address(smem_ + at * 16, (rank + i) % kCluster),
                           values[round][i]);
      }
    }
    // A lane a head.
    float max = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      max = fmaxf(max, states[i].x);
    }
    const float shift = max == kMinusInfinity ? 0.0f : max;
    float weights[kCluster];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      weights[i] = exp2_fast(states[i].x - shift);
      sum += weights[i] * states[i].y;
    }
    const int head = lane % kHeads;
    const bool exists = head < params_.call.num_heads;
    const float factor = finish_head_log2(params_.call, row, exists ? head : 0, max, sum,
                                          exists && first_unit == 0 && lane < kHeads);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) {
      weights[i] *= factor;
    }
    cuda::cluster_arrive();  // what others gave has been read
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int unit = first_unit + round * kClusterWarps;
      const int pair = unit / Smem::kWarps % kPairs;
      float4 total = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        const float even = __shfl_sync(0xffffffffu, weights[i], pair * 8 + lane % 4 * 2);
        const float odd = __shfl_sync(0xffffffffu, weights[i], pair * 8 + lane % 4 * 2 + 1);
        // A weight of 0 is the answer whatever was summed up.
        if (even != 0.0f) {
          total.x += even * values[round][i].x;
          total.z += even * values[round][i].z;
        }
        if (odd != 0.0f) {
          total.y += odd * values[round][i].y;
          total.w += odd * values[round][i].w;
        }
      }
      if (unit < kUnits) {
        const int column = unit / (Smem::kWarps * kPairs) * 64 + unit % Smem::kWarps * 16;
        write_output(output_at(params_.call, row, pair, column, lane),
                     pair * 8 + lane / 4 < params_.call.num_heads, total);
      }
    }
    cuda::cluster_wait();
  }

  const SmallHeadParams& params_;
  const Barriers<kHeads> barriers_;
  const uint32_t smem_;
  const int idx_;
  const int thread_;
  const int warp_;
  const int lane_;

  // Of the consumer's tiles of a row, relative to its references.
  float out_[kLatentSlabs][kHeads / 2];
  float reference_[2 * kPairs];  // log2; the same in all threads of a lane % 4
  float sum_[2 * kPairs];        // of the thread's keys
  float max_[2 * kPairs];        // of the thread's keys, as it is
};

template <int kHeads, bool kHasRope, Items kItems, int kCluster>
__global__ __maxnreg__(Registers<kHeads>::kLaunch) void sparse_mla_small_head_kernel(
    const __grid_constant__ SmallHeadParams params) {
  using Smem = SmallHeadSmem<kHeads>;
  if constexpr (kHeads > 8) {
    static_assert(gatherers(kHeads) * Registers<kHeads>::kGather +
                      kConsumers * Registers<kHeads>::kConsumer <=
                  Smem::kThreads / kWarpgroup * Registers<kHeads>::kLaunch);
  }
  const uint32_t smem = smem_address(block_smem());
  const Barriers<kHeads> barriers = {.at = smem + Smem::kBarriersAt};
  if (threadIdx.x < kWarp) {
    barriers.init(static_cast<int>(threadIdx.x));
  }
  __syncthreads();
  cuda::prefetch_params(params);
  cuda::pdl_launch_dependents();
  if (threadIdx.x >= kConsumers * kWarpgroup) {
    if constexpr (kHeads > 8) {
      release_registers<Registers<kHeads>::kGather>();
    }
    gather<kHeads, kHasRope, kItems>(params, barriers, smem);
    if constexpr (kCluster > 1) {
      __syncwarp();
      cuda::cluster_sync();
      cuda::cluster_sync();
    }
  } else {
    if constexpr (kHeads > 8) {
      claim_registers<Registers<kHeads>::kConsumer>();
    }
    Consumer<kHeads, kHasRope, kItems, kCluster>(params, barriers, smem).run();
  }
}

template <int kHeads, Items kItems, int kCluster>
Status launch_items(const SmallHeadParams& params, const DeviceInfo& device, const Launch& where) {
  const auto kernel = params.call.rope > 0
                          ? sparse_mla_small_head_kernel<kHeads, true, kItems, kCluster>
                          : sparse_mla_small_head_kernel<kHeads, false, kItems, kCluster>;
  // In a cluster a block has one task.
  const int64_t blocks =
      kCluster > 1 ? params.num_items : std::min<int64_t>(params.num_items, device.sm_count);
  return cuda::launch("sm90/sparse_mla_small_head", kernel, device, where,
                      {.grid = dim3(static_cast<unsigned>(blocks)),
                       .block = dim3(SmallHeadSmem<kHeads>::kThreads),
                       .smem_bytes = SmallHeadSmem<kHeads>::kBytes,
                       .cluster = kCluster,
                       .pdl = true},
                      params);
}

template <int kHeads>
Status launch_small_head(const SmallHeadParams& params, const DeviceInfo& device,
                         const Launch& where) {
  if (params.runs.num_runs > 0) {
    return launch_items<kHeads, Items::kRuns, 1>(params, device, where);
  }
  static_assert(kClusterMax == 4);
  switch (params.cluster ? params.call.num_splits : 1) {
    case 2:
      return launch_items<kHeads, Items::kTasks, 2>(params, device, where);
    case 3:
      return launch_items<kHeads, Items::kTasks, 3>(params, device, where);
    case 4:
      return launch_items<kHeads, Items::kTasks, 4>(params, device, where);
    default:
      return launch_items<kHeads, Items::kTasks, 1>(params, device, where);
  }
}

}  // namespace lacuna::sm90
