// Sparse MLA on tensor cores by mma.sync, for the widths of the released models: latent 512, rope
// 64 or none, bf16 queries, caches of bf16 or fp8_ds_mla. Memory-bound: what counts is that the
// gather never stops.
//
// A block takes 16 heads, or 8 where that ends sooner, and a split of one row's list. It is two
// teams of 8 warps where its shared memory has room for them, else one; the teams take turns at the
// tiles of 32 keys, each with its own softmax, and join at the end. The two splits of a row may be
// a cluster, whose blocks join each half of the heads; four or eight short ones may be a cluster of
// blocks of one team, which send each other what each of them ends. Tiles come by 16-byte
// asynchronous copies, two ahead, into slabs of 64 columns: key k of slab s lies at s * 4096 + k *
// 128, its 16-byte chunk c at place c ^ (k & 7), so that neither the copies nor ldmatrix meet a
// bank twice. Of a tile
//   copies: warp w of the team brings slab w, which it alone reads for the output, and a part of
//     the rope for its pair. So a slab is refilled without a barrier, and tiles are awaited by
//     pairs of warps.
//   scores: the pair g of warps 2 g and 2 g + 1 multiplies columns [128 g, 128 g + 128) of the
//     latent and 16 of the rope, a warp by 16 keys, with its query fragments in registers; the four
//     column groups meet in shared memory. A group is one scale block of fp8_ds_mla, so the scales
//     multiply float32 sums and every e4m3 value goes through bf16 exactly.
//   softmax: a warp two heads, a lane a key; running maximum and sum stay in registers.
//   output: warp w owns columns [64 w, 64 w + 64), which is slab w, for all 16 heads. A weight is
//     two bf16 numbers, what it rounds to and what is then left: one alone would be off by 2^-9,
//     which shows where large values cancel. With fp8_ds_mla the scale of (key, column group) goes
//     into the weight first.
#include <atomic>
#include <string>

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/cluster.cuh"
#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/exp2.cuh"
#include "backends/cuda/device/mma.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kTeamThreads = 256;
constexpr int kHeads = static_cast<int>(kPlanHeads);
constexpr int kTileKeys = kWarp;  // softmax: a lane a key
constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kSlabBytes = kTileKeys * 128;
constexpr int kLatentSlabs = kLatent / 64;  // one a warp
constexpr int kQuerySlabBytes = kHeads * 128;
constexpr int kStages = 2;
constexpr int kScaleStages = 4;
// Blocks of more tiles begin with their teams half a tile apart.
constexpr int kStaggerTiles = 8;
// Floats from one head's sums to the next: pairs of columns of four heads meet no bank twice.
constexpr int kSumPitch = kLatent + 8;
constexpr int kColumnGroups = 4;                            // one a pair of warps
constexpr int kLatentSteps = kLatent / kColumnGroups / 16;  // of 16 columns
// Floats from one head's scores to the next: the 8 x 8 corners that a warp stores at once then fall
// into different banks.
constexpr int kScorePitch = kTileKeys + 8;
// Bytes from one head's bf16 weights to the next, for ldmatrix without conflicts.
constexpr int kWeightPitch = 2 * kTileKeys + 16;
static_assert(kSplitKeys % kTileKeys == 0);

#if defined(__CUDA_ARCH__)
constexpr int kTeamsMax = has_two_teams(__CUDA_ARCH__ / 10) ? 2 : 1;
#else
constexpr int kTeamsMax = 2;
#endif

// What a block keeps for later where registers are short.
struct Kept {
  int32_t slot;  // of the task
  int32_t first_head;
  bool is_shared;  // between teams: each had tiles
};

// A team's shared memory.
template <bool kFp8, bool kHasRope, int kTeams>
struct Layout {
  static constexpr int kRopeBytes = kHasRope ? kSlabBytes : 0;
  static constexpr int kTileBytes = kLatentSlabs * kSlabBytes + kRopeBytes;
  // What the copies fill: tiles as they are; or slabs of e4m3 values, of which the slabs of one
  // tile are made, ropes and scales.
  static constexpr int kStageBytes = kFp8 ? kLatentSlabs * kSlabBytes / 2 : kTileBytes;
  static constexpr int kTileAt = kFp8 ? kStages * kStageBytes : 0;
  static constexpr int kRopeAt = kTileAt + kLatentSlabs * kSlabBytes;
  static constexpr int kScalesAt = kFp8 ? kRopeAt + kStages * kRopeBytes : kStages * kStageBytes;
  static constexpr int kScoresAt =
      kScalesAt + (kFp8 ? 4 * kScaleStages * kColumnGroups * kTileKeys : 0);
  static constexpr int kWeightsAt = kScoresAt + 4 * kColumnGroups * kHeads * kScorePitch;
  static constexpr int kRescalesAt =
      kWeightsAt + (kFp8 ? 4 * kHeads * kScorePitch : 2 * kHeads * kWeightPitch);
  static constexpr int kStatesAt = kRescalesAt + 4 * kHeads;
  // Fragments of the query, 16 bytes a thread, for which there are no registers: the last latent
  // steps, then the rope.
  static constexpr int kParkedSteps = kFp8 ? kTeams + 1 : 1;
  static constexpr int kQueryAt = kStatesAt + 8 * kHeads;
  static constexpr int kKeptAt = kQueryAt + 16 * kTeamThreads * (kParkedSteps + (kHasRope ? 1 : 0));
  static constexpr int kBytes = (kKeptAt + static_cast<int>(sizeof(Kept)) + 127) / 128 * 128;
  static_assert(4 * kHeads * kSumPitch <= kScoresAt);
  static_assert(kQueryAt % 16 == 0 && kScoresAt % 128 == 0);
  // The query comes through where scores and weights are later.
  static_assert(kScoresAt + kTileBytes / kTileKeys * kHeads <= kKeptAt);
};
static_assert(Layout<true, true, 1>::kBytes <= 99 * 1024,
              "GPUs of sm_86, sm_89 and sm_120 run this");

// The largest of a warp's values, of which NaN is none.
__device__ float max_of_warp(float x) {
  // Signed integers in the order of the floats.
  const auto mirror = [](int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); };
  const int bits = mirror(__float_as_int(fmaxf(x, kMinusInfinity)));
  return __int_as_float(mirror(__reduce_max_sync(0xffffffffu, bits)));
}

// An entry of a list, where the program says: asked for before the copies that follow.
__device__ int32_t load_entry(const int32_t* at) {
  int32_t entry;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(entry) : "l"(at) : "memory");
  return entry;
}

// The threads of the calling one's group of kThreads meet. The barrier's number is worked out each
// time: registers are what is short. Barrier 0 is __syncthreads().
template <int kThreads, int kFirstBarrier>
__device__ void sync_group() {
  asm volatile(
      "{\n\t.reg .u32 id;\n\tmov.u32 id, %%tid.x;\n\tshr.u32 id, id, %0;\n\t"
      "add.u32 id, id, %1;\n\tbar.sync id, %2;\n\t}" ::"n"(kThreads == 64 ? 6 : 8),
      "n"(kFirstBarrier), "n"(kThreads)
      : "memory");
}

// Where 16-byte chunk `chunk` (of 8 columns) of a key lies in a slab. Chunk 2 i + chunk is then at
// chunk_at(key, chunk) ^ (i << 5).
__device__ uint32_t chunk_at(int key, int chunk) { return key * 128 + ((chunk ^ (key & 7)) << 4); }

// A warp's part of the gather. A lane knows where key `lane` of a tile lies; entries are read two
// tiles before their copies and translated one before, so that no copy waits for its address. The
// first are read by start().
template <bool kFp8, bool kHasRope, int kTeams>
class Gather {
 public:
  using Smem = Layout<kFp8, kHasRope, kTeams>;

  __device__ Gather(const SparseMlaParams& p, const SplitTask& task, int team, uint32_t smem)
      : p_(p),
        queries_(task.row),
        warp_(static_cast<int>(threadIdx.x) / kWarp % kLatentSlabs),
        lane_(static_cast<int>(threadIdx.x) % kWarp),
        at_(task.begin + team * kTileKeys + lane_),
        end_(task.end),
        smem_(smem) {}

  // Reads the entries of the first three tiles, which lie `entries` on. Returns the third.
  __device__ int32_t start(const int32_t* entries) {
    int32_t first[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const int ahead = i * kTeams * kTileKeys;
      first[i] = at_ + ahead < end_ ? load_entry(entries + ahead) : -1;
    }
    at_ += 3 * kTeams * kTileKeys;
    row_ = first[0];
    entry_ = first[1];
    return first[2];
  }

  // The first entry, once.
  __device__ void translate() { row_ = cached_row(p_, request_of(p_, queries_), row_); }

  // Whether the key of this lane, of the tile that is copied next, is to be attended to.
  __device__ bool is_valid() const { return row_ >= 0; }

  // Starts the copies of the warp's slab of the next tile.
  __device__ void copy_slab(int stage) {
    if constexpr (kFp8) {
      // The 64 bytes of a key by four lanes, which widen what they brought.
      const uint32_t to = smem_ + stage * Smem::kStageBytes + warp_ * (kSlabBytes / 2) + lane_ * 16;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {
        copy_16(to + i * 512, __shfl_sync(0xffffffffu, row_, lane_ / 4 + 8 * i),
                warp_ * 64 + lane_ % 4 * 16);
      }
    } else {
      // The 128 bytes of a key by eight lanes: chunk_at(8 (lane / 8) + i, lane % 8).
      const uint32_t to = smem_ + stage * Smem::kStageBytes + warp_ * kSlabBytes +
                          lane_ / 8 * 1024 + lane_ % 8 * 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        copy_16((to ^ (i << 4)) + i * 128, __shfl_sync(0xffffffffu, row_, i, 8),
                warp_ * 128 + lane_ % 8 * 16);
      }
    }
  }

  // And of what the pair shares: 32 bytes of each key's rope, a warp those of 16 keys; the scales
  // of its column group.
  __device__ void copy_shared(int stage, int scale_stage) {
    if constexpr (kHasRope) {
      const int key = warp_ % 2 * 16 + lane_ / 2;
      const int chunk = warp_ / 2 * 2 + lane_ % 2;
      constexpr int kOffset = kFp8 ? static_cast<int>(kFp8DsMlaRopeOffset) : 2 * kLatent;
      copy_16(smem_ + Smem::kRopeAt + stage * (kFp8 ? kSlabBytes : Smem::kStageBytes) +
                  chunk_at(key, chunk),
              __shfl_sync(0xffffffffu, row_, key), kOffset + chunk * 16);
    }
    if constexpr (kFp8) {
      if (warp_ % 2 == 0) {
        const int group = warp_ / 2;
        cp_async_4(smem_ + Smem::kScalesAt +
                       4 * ((scale_stage * kColumnGroups + group) * kTileKeys + lane_),
                   address(row_, static_cast<int>(kFp8DsMlaScaleOffset) + 4 * group), row_ >= 0);
      }
    }
  }

  // To the next tile; `entry` is that of the one after it.
  __device__ void advance(int32_t entry) {
    row_ = cached_row(p_, request_of(p_, queries_), entry_);
    entry_ = entry;
  }

  // The list's address and its request are worked out again each time: registers are what is short.
  __device__ int32_t read_entry() {
    const int32_t entry = at_ < end_ ? __ldcg(p_.indices.row(queries_) + at_) : -1;
    at_ += kTeams * kTileKeys;
    return entry;
  }

 private:
  __device__ const char* address(int32_t row, uint32_t offset) const {
    // Of the first row for an invalid key: nothing is read through it.
    const auto valid_row = static_cast<uint32_t>(max(row, 0));
    return p_.kv + offset + uint64_t{valid_row} * static_cast<uint32_t>(p_.row_bytes);
  }
  // The place of an invalid key is filled with zeros.
  __device__ void copy_16(uint32_t to, int32_t row, uint32_t offset) const {
    cp_async_16(to, address(row, offset), row >= 0);
  }

  const SparseMlaParams& p_;
  const int32_t queries_;
  const int warp_;  // of the team
  const int lane_;
  int32_t at_;  // lists are shorter than 2^31
  const int32_t end_;
  const uint32_t smem_;
  int32_t row_;    // of the tile that is copied next
  int32_t entry_;  // of the tile after it
};

// A warp's slab of e4m3 values to one of bf16, exactly and without the scales. A lane widens what
// it copied.
__device__ inline void widen_slab(const char* raw, char* slab) {
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  // Not unrolled: the registers hold the query and the output.
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const int key = lane_idx / 4 + 8 * i;
    const int chunk = lane_idx % 4 * 2;
    const uint4 values = *reinterpret_cast<const uint4*>(raw + i * 512 + lane_idx * 16);
    const uint32_t words[4] = {values.x, values.y, values.z, values.w};
    uint32_t pairs[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 four = unpack_fp8(words[w]);
      pairs[2 * w] = pack_bf16(four.x, four.y);
      pairs[2 * w + 1] = pack_bf16(four.z, four.w);
    }
    *reinterpret_cast<uint4*>(slab + chunk_at(key, chunk)) = {pairs[0], pairs[1], pairs[2],
                                                              pairs[3]};
    *reinterpret_cast<uint4*>(slab + chunk_at(key, chunk + 1)) = {pairs[4], pairs[5], pairs[6],
                                                                  pairs[7]};
  }
}

__device__ void unpark(const uint4* from, uint32_t (&fragment)[4]) {
  const uint4 words = *from;
  fragment[0] = words.x;
  fragment[1] = words.y;
  fragment[2] = words.z;
  fragment[3] = words.w;
}

__device__ void park(const uint32_t (&fragment)[4], uint4* to) {
  *to = {fragment[0], fragment[1], fragment[2], fragment[3]};
}

// A thread's part of the query of 16 heads, which a team copies into slabs of 64 columns, the rope
// last; chunks lie as those of keys do.
template <bool kHasRope>
class Query {
 public:
  __device__ Query(const SparseMlaParams& p, int32_t row, int first_head, uint32_t smem) {
    const int thread = static_cast<int>(threadIdx.x) % kTeamThreads;
    const int chunk = thread % 8;
    const int head = thread / 8 % kHeads;
    const int slab = thread / (8 * kHeads);  // and two on
    exists_ = head < p.block_heads && first_head + head < p.num_heads;
    const int64_t at = exists_ ? first_head + head : 0;
    to_ = smem + slab * kQuerySlabBytes + chunk_at(head, chunk);
    latent_ = static_cast<const Bf16*>(p.q_nope) + row * p.q_nope_strides[0] +
              at * p.q_nope_strides[1] + slab * 64 + chunk * 8;
    if constexpr (kHasRope) {
      rope_ = static_cast<const Bf16*>(p.q_rope) + row * p.q_rope_strides[0] +
              at * p.q_rope_strides[1] + chunk * 8;
    }
  }

  // Asks L2 for it.
  __device__ void prefetch() const {
    const int thread = static_cast<int>(threadIdx.x);
    if (thread >= kTeamThreads || thread % 8 != 0 || !exists_) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kLatentSlabs; i += 2) {
      prefetch_line(latent_ + i * 64);
    }
    if (kHasRope && thread < 8 * kHeads) {
      prefetch_line(rope_);
    }
  }

  __device__ void copy() const {
#pragma unroll
    for (int i = 0; i < kLatentSlabs; i += 2) {
      cp_async_16(to_ + i * kQuerySlabBytes, latent_ + i * 64, exists_);
    }
    if (kHasRope && threadIdx.x % kTeamThreads < 8 * kHeads) {
      cp_async_16(to_ + kLatentSlabs * kQuerySlabBytes, rope_, exists_);
    }
  }

 private:
  const Bf16* latent_;
  const Bf16* rope_;
  uint32_t to_;
  bool exists_;
};

// The sum of a head's parts.
template <int kParts>
__device__ void join_parts(const float4 (&values)[kParts], const float2 (&states)[kParts],
                           float4& value, float2& state) {
  float max = states[0].x;
#pragma unroll
  for (int part = 1; part < kParts; ++part) {
    max = fmaxf(max, states[part].x);
  }
  const float shift = max == kMinusInfinity ? 0.0f : max;
  value = {0.0f, 0.0f, 0.0f, 0.0f};
  state = {max, 0.0f};
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const float weight = exp2_fast((states[part].x - shift) * kLog2E);
    state.y += states[part].y * weight;
    value.x += values[part].x * weight;
    value.y += values[part].y * weight;
    value.z += values[part].z * weight;
    value.w += values[part].w * weight;
  }
}

// Clusters of blocks of one team send their sums; the pairs of two teams read each other's.
constexpr bool sends_sums(int teams, int cluster) { return teams == 1 && cluster > 1; }

// Heads of an mma fragment's half.
constexpr int kOctet = 8;

// The memory that the blocks of a cluster fill for each other, behind that of the team. Of a warp's
// columns a row's end has 8 pieces: piece q is octet q % 2 of the heads and columns 16 (q / 2) to
// 16 (q / 2) + 15, a float4 a thread as registers hold it. A block ends kPieces of them, which the
// others send it, and of each block the states.
template <class Smem, int kCluster>
struct Inbox {
  static constexpr int kPieces = 8 / kCluster;
  static constexpr int kPieceBytes = kTeamThreads * 16;
  static constexpr int kPartBytes = kPieces * kPieceBytes;  // of a sender
  static constexpr int kBarrierAt = Smem::kBytes;
  static constexpr int kStatesAt = kBarrierAt + 128;
  static constexpr int kSumsAt = kStatesAt + kCluster * kHeads * 8;
  static constexpr int kBytes = kSumsAt + (kCluster - 1) * kPartBytes;

  // Where thread `thread` finds its float4 of a piece: its own is in the warp's slab, those of the
  // others are here in their order.
  __device__ static int sums_at(int part, int rank, int piece, int thread) {
    return part == rank
               ? Smem::kTileAt + thread / kWarp * kSlabBytes + (piece * kWarp + thread % kWarp) * 16
               : kSumsAt + (part < rank ? part : part - 1) * kPartBytes + piece * kPieceBytes +
                     thread * 16;
  }
  __device__ static int state_at(int part, int head) {
    return kStatesAt + (part * kHeads + head) * 8;
  }
};

// What a block of a cluster that sends its sums is to end. All splits of a row are one cluster.
struct ClusterPlace {
  int rank;
  int32_t row;
  int first_head;
  int octets;  // of heads that the block serves

  __device__ ClusterPlace(const SparseMlaParams& p, int cluster) {
    const int head_blocks = (p.num_heads + p.block_heads - 1) / p.block_heads;
    const int index = static_cast<int>(blockIdx.x) / cluster;
    rank = static_cast<int>(blockIdx.x) - index * cluster;
    row = index / head_blocks;
    first_head = (index - row * head_blocks) * p.block_heads;
    row += static_cast<int32_t>(p.first_row);
    octets = min(p.num_heads - first_head, p.block_heads) > kOctet ? 2 : 1;
  }
};

template <class Smem, int kCluster>
__device__ void open_inbox(const ClusterPlace& place, uint32_t smem) {
  using Box = Inbox<Smem, kCluster>;
  if (threadIdx.x == 0) {
    int bytes = kCluster * kHeads * 8;
#pragma unroll
    for (int piece = 0; piece < Box::kPieces; ++piece) {
      if ((place.rank * Box::kPieces + piece) % 2 < place.octets) {
        bytes += (kCluster - 1) * Box::kPieceBytes;
      }
    }
    expect_bytes(smem + Box::kBarrierAt, bytes);
  }
}

template <class Smem, int kCluster>
__device__ void send_sums(const ClusterPlace& place, char* smem, const float (&out)[8][4],
                          const float (&max)[2], const float (&sum)[2]) {
  using Box = Inbox<Smem, kCluster>;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane_idx = thread % kWarp;
  const uint32_t box = smem_address(smem);
  const float total[2] = {reduce_warp(sum[0], Sum()), reduce_warp(sum[1], Sum())};
  cluster_wait();  // every inbox is open
  if (lane_idx < kCluster) {
    const int head = thread / kWarp * 2;
    cluster_send(cluster_address(box + Box::state_at(place.rank, head), lane_idx),
                 {max[0], total[0], max[1], total[1]},
                 cluster_address(box + Box::kBarrierAt, lane_idx));
  }
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    if (q % 2 >= place.octets) {
      continue;
    }
    const int to = q / Box::kPieces;
    const int from = Box::sums_at(place.rank, to, q % Box::kPieces, thread);
    const float(&a)[4] = out[q / 2 * 2];
    const float(&b)[4] = out[q / 2 * 2 + 1];
    const float4 values =
        q % 2 == 0 ? make_float4(a[0], a[1], b[0], b[1]) : make_float4(a[2], a[3], b[2], b[3]);
    if (to == place.rank) {
      *reinterpret_cast<float4*>(smem + from) = values;
    } else {
      cluster_send(cluster_address(box + from, to), values,
                   cluster_address(box + Box::kBarrierAt, to));
    }
  }
}

// A thread ends its float4 of each of the block's pieces, once all is there. It may leave then:
// what it sent came from registers.
template <class Smem, int kCluster>
__device__ void end_row(const SparseMlaParams& p, const ClusterPlace& place, const char* smem) {
  using Box = Inbox<Smem, kCluster>;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane_idx = thread % kWarp;
  await_bytes(smem_address(smem) + Box::kBarrierAt);
#pragma unroll
  for (int piece = 0; piece < Box::kPieces; ++piece) {
    const int q = place.rank * Box::kPieces + piece;
    const int head_idx = q % 2 * kOctet + lane_idx / 4;
    const int head = place.first_head + head_idx;
    if (q % 2 >= place.octets || head >= p.num_heads) {
      continue;
    }
    float2 states[kCluster];
    float4 values[kCluster];
#pragma unroll
    for (int part = 0; part < kCluster; ++part) {
      states[part] = *reinterpret_cast<const float2*>(smem + Box::state_at(part, head_idx));
      values[part] =
          *reinterpret_cast<const float4*>(smem + Box::sums_at(part, place.rank, piece, thread));
    }
    float4 value;
    float2 state;
    join_parts(values, states, value, state);
    const int column = thread / kWarp * 64 + q / 2 * 16 + lane_idx % 4 * 2;
    const float factor = finish_head(p, place.row, head, state.x, state.y, column == 0);
    const int64_t at = place.row * p.out_strides[0] + head * p.out_strides[1] + column;
    store_two(p, at, value.x, value.y, factor);
    store_two(p, at + 8, value.z, value.w, factor);
  }
}

// A block's split of a row. Where clusters send their sums, their end is left to end_row().
template <bool kFp8, bool kHasRope, int kTeams, int kCluster>
__device__ __forceinline__ void attend_split(const SparseMlaParams& p, char* block_smem) {
  constexpr bool kPairs = kCluster > 1 && !sends_sums(kTeams, kCluster);
  using Smem = Layout<kFp8, kHasRope, kTeams>;
  const int team = kTeams == 1 ? 0 : static_cast<int>(threadIdx.x) / kTeamThreads;
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp % kLatentSlabs;  // of the team
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  const int group_row = lane_idx / 4;  // of mma fragments
  const int group_column = lane_idx % 4;
  const int matrix = lane_idx / 8;  // of ldmatrix
  const int matrix_row = lane_idx % 8;
  const int column_group = warp_idx / 2;
  const int key_half = warp_idx % 2;
  char* const smem = block_smem + team * Smem::kBytes;
  const uint32_t smem_at = smem_address(smem);

  prefetch_params(p);
  const int head_blocks = (p.num_heads + p.block_heads - 1) / p.block_heads;
  // The blocks of a cluster are neighbours: the splits of a row, for the same heads.
  const int index = static_cast<int>(blockIdx.x) / kCluster;
  const int unit = index / head_blocks;
  const int item = unit * kCluster + static_cast<int>(blockIdx.x) % kCluster;
  const int first_head = (index - unit * head_blocks) * p.block_heads;
  const uint32_t query_at = smem_at + Smem::kScoresAt;
  // What parameters alone say is worked out, and asked of L2, before the predecessor ends.
  const bool is_planned = kCluster > 1 || p.schedule == nullptr;
  SplitTask task = {};
  if (is_planned) {
    task = cut_task(p, item);
  }
  const auto first_entries = [&] {
    return p.indices.row(task.row) + task.begin + team * kTileKeys + lane_idx;
  };
  const int32_t* entries = first_entries();
  Query<kHasRope> query_copy(p, task.row, first_head, query_at);
  if (is_planned) {
    // A line is a tile's entries: those of the team's first 16 tiles.
    constexpr int kTileStride = kTeams * kTileKeys;
#pragma unroll
    for (int tile = warp_idx; tile < 2 * kLatentSlabs; tile += kLatentSlabs) {
      if (lane_idx == 0 && task.begin + (tile * kTeams + team) * kTileKeys < task.end) {
        prefetch_line(entries + tile * kTileStride);
      }
    }
    query_copy.prefetch();
  }
  pdl_wait();
  pdl_launch_dependents();
  if (!is_planned) {
    if (!scheduled_task(p, item, task)) {
      return;
    }
    entries = first_entries();
    query_copy = Query<kHasRope>(p, task.row, first_head, query_at);
  }
  limit_task(p, task);
  Gather<kFp8, kHasRope, kTeams> gather(p, task, team, smem_at);
  const int32_t third_entry = gather.start(entries);
  query_copy.copy();
  cp_async_commit();
  const int block_tiles =
      task.end > task.begin ? (task.end - task.begin + kTileKeys - 1) / kTileKeys : 0;
  const int num_tiles = (block_tiles + kTeams - 1 - team) / kTeams;  // of the team
  auto* const kept = reinterpret_cast<Kept*>(block_smem + Smem::kKeptAt);
  if (threadIdx.x == 0) {
    *kept = {.slot = task.slot, .first_head = first_head, .is_shared = block_tiles > 1};
  }
  // Teams that wait for memory at the same time leave it idle at the same time. So one of them
  // begins when it has its query, and each asks for its second tile while it is at the first.
  const bool is_staggered = !kFp8 && kTeams == 2 && block_tiles > kStaggerTiles;
  const bool is_late = is_staggered && team == 1;
  gather.translate();
  uint32_t valid_keys = gather.is_valid() ? 1 : 0;  // a bit a tile, the last copied one lowest
  const auto copy_first_tile = [&] {
    gather.copy_slab(0);
    gather.copy_shared(0, 0);
    gather.advance(third_entry);
  };
  if (num_tiles > 0 && !is_late) {
    copy_first_tile();
  }
  cp_async_commit();

  // Query fragments of the warp's columns: a[0..3] of each step of 16.
  constexpr int kHeldSteps = kLatentSteps - Smem::kParkedSteps;
  uint32_t query[kLatentSteps][4];
  uint32_t rope_fragment[4];
  cp_async_wait<1>();
  sync_group<kTeamThreads, 1>();
  {
    const uint32_t from = query_at + chunk_at(matrix % 2 * 8 + matrix_row, matrix / 2);
#pragma unroll
    for (int step = 0; step < kLatentSteps; ++step) {
      ldmatrix_x4(query[step],
                  (from ^ (step % 4 << 5)) + (2 * column_group + step / 4) * kQuerySlabBytes);
    }
    if constexpr (kHasRope) {
      ldmatrix_x4(rope_fragment, (from ^ (column_group << 5)) + kLatentSlabs * kQuerySlabBytes);
    }
  }
  sync_group<kTeamThreads, 1>();  // scores come where the query was
  uint4* parked_query =
      reinterpret_cast<uint4*>(smem + Smem::kQueryAt) + threadIdx.x % kTeamThreads;
#pragma unroll
  for (int step = kHeldSteps; step < kLatentSteps; ++step) {
    park(query[step], parked_query + (step - kHeldSteps) * kTeamThreads);
  }
  if constexpr (kHasRope) {
    park(rope_fragment, parked_query + Smem::kParkedSteps * kTeamThreads);
  }
  // Only now, so that the query does not wait behind these.
  if (is_late) {
    copy_first_tile();
  }
  if (!is_staggered) {
    valid_keys = valid_keys << 1 | (gather.is_valid() ? 1 : 0);
    if (num_tiles > 1) {
      gather.copy_slab(1);
      gather.copy_shared(1, 1);
      gather.advance(gather.read_entry());
    }
  }
  cp_async_commit();

  // Where ldmatrix reads: keys for the scores, values (the warp's slab) for the output.
  const uint32_t key_at = chunk_at(key_half * 16 + matrix / 2 * 8 + matrix_row, matrix % 2);
  const uint32_t keys_at = smem_at + Smem::kTileAt + 2 * column_group * kSlabBytes + key_at;
  const uint32_t rope_at = smem_at + Smem::kRopeAt + (key_at ^ (column_group << 5));
  const uint32_t values_at = smem_at + Smem::kTileAt + warp_idx * kSlabBytes +
                             chunk_at(matrix % 2 * 8 + matrix_row, matrix / 2);

  float out[8][4] = {};  // heads group_row and + 8, columns 64 w + 8 n + 2 group_column and + 1
  float max[2] = {kMinusInfinity, kMinusInfinity};  // heads 2 w and 2 w + 1; the same in every lane
  float sum[2] = {};                                // a lane's share
  float* scores = reinterpret_cast<float*>(smem + Smem::kScoresAt);
  float* rescales = reinterpret_cast<float*>(smem + Smem::kRescalesAt);
#pragma unroll 1
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kStages;
    const uint32_t tile_at = kFp8 ? 0 : stage * Smem::kStageBytes;
    const float* scales = reinterpret_cast<const float*>(smem + Smem::kScalesAt) +
                          (tile % kScaleStages * kColumnGroups + column_group) * kTileKeys;
    // The next tile may still be on its way where it was asked for.
    if (kFp8 || kTeams == 1 || (tile == 0 && !is_staggered)) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    if constexpr (kFp8) {
      __syncwarp();  // the other lanes have read the last tile
      widen_slab(smem + stage * Smem::kStageBytes + warp_idx * (kSlabBytes / 2),
                 smem + Smem::kTileAt + warp_idx * kSlabBytes);
      if (tile + kStages < num_tiles) {
        gather.copy_slab(stage);
      }
    }
    sync_group<2 * kWarp, 1 + kTeams>();  // the pair's part of the tile has come

    // Scores of 16 heads by 16 keys over the warp's columns.
    {
      float latent_part[2][4] = {};
#pragma unroll
      for (int step = 0; step < kLatentSteps; ++step) {
        uint32_t keys[4];
        ldmatrix_x4(keys, ((tile_at + keys_at) ^ (step % 4 << 5)) + step / 4 * kSlabBytes);
        uint32_t parked[4];
        if (step >= kHeldSteps) {
          unpark(parked_query + (step - kHeldSteps) * kTeamThreads, parked);
        }
        mma_16816(latent_part[0], step < kHeldSteps ? query[step] : parked, keys[0], keys[1]);
        mma_16816(latent_part[1], step < kHeldSteps ? query[step] : parked, keys[2], keys[3]);
      }
      // Read again for each tile: registers are what is short.
      const float latent_scale = p.latent_scale == nullptr ? 1.0f : __ldcg(p.latent_scale);
      const float rope_scale = p.rope_scale == nullptr ? 1.0f : __ldcg(p.rope_scale);
      uint32_t rope_keys[4];
      uint32_t rope_query[4];
      if constexpr (kHasRope) {
        unpark(parked_query + Smem::kParkedSteps * kTeamThreads, rope_query);
        ldmatrix_x4(rope_keys, rope_at + stage * (kFp8 ? kSlabBytes : Smem::kStageBytes));
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int column = key_half * 16 + n * 8 + 2 * group_column;
        float scale[2] = {latent_scale, latent_scale};
        if constexpr (kFp8) {
          const float2 pair = *reinterpret_cast<const float2*>(scales + column);
          scale[0] *= pair.x;
          scale[1] *= pair.y;
        }
        float rope_part[4] = {};
        if constexpr (kHasRope) {
          mma_16816(rope_part, rope_query, rope_keys[2 * n], rope_keys[2 * n + 1]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float2 value = {
              latent_part[n][2 * i] * scale[0] + rope_part[2 * i] * rope_scale,
              latent_part[n][2 * i + 1] * scale[1] + rope_part[2 * i + 1] * rope_scale};
          *reinterpret_cast<float2*>(
              scores + (column_group * kHeads + group_row + 8 * i) * kScorePitch + column) = value;
        }
      }
    }
    sync_group<kTeamThreads, 1>();
    if constexpr (kFp8) {
      valid_keys = valid_keys << 1 | (gather.is_valid() ? 1 : 0);
      if (tile + kStages < num_tiles) {
        gather.copy_shared(stage, (tile + kStages) % kScaleStages);
        gather.advance(gather.read_entry());
      }
      cp_async_commit();
    }

    if (!kFp8 && kTeams == 2 && (tile > 0 || is_staggered)) {
      valid_keys = valid_keys << 1 | (gather.is_valid() ? 1 : 0);
    }

    // Weights of two heads.
    {
      const bool valid = (valid_keys >> (kFp8 ? kStages : kStages - 1) & 1) != 0;
      float score[2] = {};
      float weight[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int g = 0; g < kColumnGroups; ++g) {
          score[i] += scores[(g * kHeads + 2 * warp_idx + i) * kScorePitch + lane_idx];
        }
        score[i] = valid ? score[i] * p.softmax_scale : kMinusInfinity;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int head = 2 * warp_idx + i;
        const float new_max = fmaxf(max[i], max_of_warp(score[i]));
        const float shift = new_max == kMinusInfinity ? 0.0f : new_max;
        weight[i] = exp2_fast((score[i] - shift) * kLog2E);
        const float rescale = exp2_fast((max[i] - shift) * kLog2E);
        sum[i] = sum[i] * rescale + weight[i];
        max[i] = new_max;
        if constexpr (kFp8) {
          reinterpret_cast<float*>(smem + Smem::kWeightsAt)[head * kScorePitch + lane_idx] =
              weight[i];
        }
        if (lane_idx == 0) {
          rescales[head] = rescale;
        }
      }
      if constexpr (!kFp8) {
        const uint32_t high = pack_bf16(weight[0], weight[1]);
        const float2 rounded = unpack_bf16(high);
        const uint32_t low = pack_bf16(weight[0] - rounded.x, weight[1] - rounded.y);
        char* at = smem + Smem::kWeightsAt + 2 * warp_idx * kWeightPitch + 2 * lane_idx;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint16_t*>(at + i * kWeightPitch) =
              static_cast<uint16_t>(high >> 16 * i);
          *reinterpret_cast<uint16_t*>(at + (kHeads + i) * kWeightPitch) =
              static_cast<uint16_t>(low >> 16 * i);
        }
      }
    }
    if constexpr (!kFp8 && kTeams == 2) {
      // The slab of the last tile has been free since its output. Copies that start right then keep
      // more bytes in flight than an SM's share, and blocks end further apart; those that start
      // before the weights hold the weights up.
      if (tile > 0 || is_staggered) {
        if (tile + 1 < num_tiles) {
          gather.copy_slab(stage ^ 1);
          gather.copy_shared(stage ^ 1, 0);
          gather.advance(gather.read_entry());
        }
        cp_async_commit();
      }
    }
    sync_group<kTeamThreads, 1>();

    // Weighted latents: the warp's slab.
    const float rescale[2] = {rescales[group_row], rescales[group_row + 8]};
    if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        out[n][0] *= rescale[0];
        out[n][1] *= rescale[0];
        out[n][2] *= rescale[1];
        out[n][3] *= rescale[1];
      }
    }
#pragma unroll kFp8 ? 1 : 2
    for (int step = 0; step < kTileKeys / 16; ++step) {
      uint32_t high[4];  // the weights, and
      uint32_t low[4];   // what they lost
      if constexpr (kFp8) {
        const float* of_heads = reinterpret_cast<const float*>(smem + Smem::kWeightsAt);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int key = step * 16 + half * 8 + 2 * group_column;
          const float2 scale = *reinterpret_cast<const float2*>(scales + key);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 pair = *reinterpret_cast<const float2*>(
                of_heads + (group_row + 8 * i) * kScorePitch + key);
            const float weight[2] = {pair.x * scale.x, pair.y * scale.y};
            high[2 * half + i] = pack_bf16(weight[0], weight[1]);
            const float2 rounded = unpack_bf16(high[2 * half + i]);
            low[2 * half + i] = pack_bf16(weight[0] - rounded.x, weight[1] - rounded.y);
          }
        }
      } else {
        const uint32_t at = smem_at + Smem::kWeightsAt +
                            (matrix % 2 * 8 + matrix_row) * kWeightPitch +
                            (step * 2 + matrix / 2) * 16;
        ldmatrix_x4(high, at);
        ldmatrix_x4(low, at + kHeads * kWeightPitch);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint32_t values[4];
        ldmatrix_x4_trans(values, ((tile_at + values_at) ^ (n << 5)) + step * 16 * 128);
        mma_16816(out[2 * n], high, values[0], values[1]);
        mma_16816(out[2 * n + 1], high, values[2], values[3]);
        mma_16816(out[2 * n], low, values[0], values[1]);
        mma_16816(out[2 * n + 1], low, values[2], values[3]);
      }
    }
    // The warp's slab is used, and its part of the rope was before the team last met. Two blocks of
    // one team on an SM are best refilled right away.
    if constexpr (!kFp8 && kTeams == 1) {
      __syncwarp();  // every lane has read
      valid_keys = valid_keys << 1 | (gather.is_valid() ? 1 : 0);
      if (tile + kStages < num_tiles) {
        gather.copy_slab(stage);
        gather.copy_shared(stage, 0);
        gather.advance(gather.read_entry());
      }
      cp_async_commit();
    }
  }

  if constexpr (sends_sums(kTeams, kCluster)) {
    send_sums<Smem, kCluster>(ClusterPlace(p, kCluster), block_smem, out, max, sum);
    return;
  }

  // A team leaves its sums in shared memory, where tiles were. One without tiles does so only in a
  // pair, which reads the parts of all teams.
  if (kPairs || team == 0 || num_tiles > 0) {
    sync_group<kTeamThreads, 1>();
    float* const sums = reinterpret_cast<float*>(smem);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<float2*>(sums + (group_row + 8 * i) * kSumPitch + warp_idx * 64 + n * 8 +
                                   2 * group_column) = {out[n][2 * i], out[n][2 * i + 1]};
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float total = reduce_warp(sum[i], Sum());
      if (lane_idx == 0) {
        reinterpret_cast<float2*>(smem + Smem::kStatesAt)[2 * warp_idx + i] =
            make_float2(max[i], total);
      }
    }
  }
  if constexpr (kPairs) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  // Four warps join the parts of a head and write whole lines. A pair's blocks join half the heads
  // each.
  constexpr int kBlockHeads = kPairs ? kHeads / 2 : kHeads;
  constexpr int kHeadsAtOnce = kTeams * kTeamThreads / (kLatent / 4);
  constexpr int kParts = kPairs ? 2 * kTeams : kTeams;
  const int rank = kPairs ? static_cast<int>(blockIdx.x) % 2 : 0;
  const int column = static_cast<int>(threadIdx.x) % (kLatent / 4) * 4;
  const int32_t slot = kept->slot;
#pragma unroll kTeams == 1 ? 2 : kBlockHeads / kHeadsAtOnce
  for (int i = 0; i < kBlockHeads; i += kHeadsAtOnce) {
    const int head_idx = rank * kBlockHeads + i + static_cast<int>(threadIdx.x) / (kLatent / 4);
    const int head = kept->first_head + head_idx;
    if (head_idx >= p.block_heads || head >= p.num_heads) {
      continue;
    }
    const char* const own_sums = block_smem + (head_idx * kSumPitch + column) * 4;
    const char* const own_state = block_smem + Smem::kStatesAt + head_idx * 8;
    float4 value = *reinterpret_cast<const float4*>(own_sums);
    float2 state = *reinterpret_cast<const float2*>(own_state);
    if (kPairs || (kTeams == 2 && kept->is_shared)) {
      float4 values[kParts] = {value};
      float2 states[kParts] = {state};
#pragma unroll
      for (int part = 1; part < kParts; ++part) {
        const int team_at = part % kTeams * Smem::kBytes;
        if (part < kTeams) {
          values[part] = *reinterpret_cast<const float4*>(own_sums + team_at);
          states[part] = *reinterpret_cast<const float2*>(own_state + team_at);
        } else {
          cluster_load(cluster_address(smem_address(own_sums) + team_at, rank ^ 1), values[part]);
          cluster_load(cluster_address(smem_address(own_state) + team_at, rank ^ 1), states[part]);
        }
      }
      join_parts(values, states, value, state);
    }
    if (!kPairs && slot >= 0) {
      const int64_t slot_head = int64_t{slot} * p.num_heads + head;
      if (column == 0) {
        p.partial_sums[slot_head] = state;
      }
      *reinterpret_cast<float4*>(p.partial_out + slot_head * kLatent + column) = value;
      continue;
    }
    const float factor = finish_head(p, task.row, head, state.x, state.y, column == 0);
    store_four(p, task.row * p.out_strides[0] + head * p.out_strides[1] + column, value, factor);
  }
  if constexpr (kPairs) {
    cluster_sync();  // the other block has read
  }
}

template <bool kFp8, bool kHasRope, int kTeams, int kCluster>
__global__ __launch_bounds__(
    kTeams* kTeamThreads,
    kTeams == 1 ? kTeamsMax
                : 1) void sparse_mla_mma_kernel(const __grid_constant__ SparseMlaParams p) {
  if constexpr (kTeams > kTeamsMax || (kCluster > 1 && kTeamsMax == 1)) {
    return;  // never launched
  }
  extern __shared__ __align__(128) char block_smem[];
  if constexpr (sends_sums(kTeams, kCluster)) {
    using Smem = Layout<kFp8, kHasRope, kTeams>;
    const ClusterPlace place(p, kCluster);
    open_inbox<Smem, kCluster>(place, smem_address(block_smem));
    cluster_arrive();
    attend_split<kFp8, kHasRope, kTeams, kCluster>(p, block_smem);
    end_row<Smem, kCluster>(p, place, block_smem);
  } else {
    attend_split<kFp8, kHasRope, kTeams, kCluster>(p, block_smem);
  }
}

template <bool kFp8, bool kHasRope, int kTeams, int kCluster>
Status launch_mma(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                  int64_t blocks) {
  using Smem = Layout<kFp8, kHasRope, kTeams>;
  int64_t bytes = kTeams * Smem::kBytes;
  if constexpr (sends_sums(kTeams, kCluster)) {
    bytes = Inbox<Smem, kCluster>::kBytes;
  }
  return launch("cuda/sparse_mla_mma", sparse_mla_mma_kernel<kFp8, kHasRope, kTeams, kCluster>,
                device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)),
                 .block = dim3(kTeams * kTeamThreads),
                 .smem_bytes = bytes,
                 .cluster = kCluster,
                 .pdl = true},
                params);
}

// Two teams a block where one wave serves all rows; for more, blocks of one team, two an SM where
// they have room, so that one's start and end are beside the other's tiles. Blocks of clusters of
// four and eight are one team each, and fill an SM: such calls have few tiles a block.
template <bool kFp8, bool kHasRope>
Status launch_teams(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                    int64_t blocks) {
  const int64_t units = params.num_rows * ceil_div(params.num_heads, params.block_heads);
  const bool two_teams = has_two_teams(device.compute_capability) &&
                         (params.batch_invariant || units <= device.sm_count);
  const auto run = params.cluster == 8   ? launch_mma<kFp8, kHasRope, 1, 8>
                   : params.cluster == 4 ? launch_mma<kFp8, kHasRope, 1, 4>
                   : params.cluster == 2 ? launch_mma<kFp8, kHasRope, 2, 2>
                   : two_teams           ? launch_mma<kFp8, kHasRope, 2, 1>
                                         : launch_mma<kFp8, kHasRope, 1, 1>;
  return run(params, device, where, blocks);
}

Status attend_mma(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                  int64_t blocks) {
  const bool fp8 = params.kv_format == KvFormat::kFp8DsMla;
  const auto run = params.rope == 0 ? (fp8 ? launch_teams<true, false> : launch_teams<false, false>)
                                    : (fp8 ? launch_teams<true, true> : launch_teams<false, true>);
  return run(params, device, where, blocks);
}

template <int kCluster>
int64_t ask_clusters_max(int device_idx) {
  const auto kernel = sparse_mla_mma_kernel<false, true, 1, kCluster>;
  using Box = Inbox<Layout<false, true, 1>, kCluster>;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = kCluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(kTeamThreads);
  config.dynamicSmemBytes = Box::kBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  const bool told =
      cudaSetDevice(device_idx) == cudaSuccess &&
      allow_smem(reinterpret_cast<const void*>(kernel), device_idx, Box::kBytes).ok() &&
      cudaOccupancyMaxActiveClusters(&count, kernel, &config) == cudaSuccess;
  cudaGetLastError();
  return told ? count : 0;
}

}  // namespace

int64_t sparse_mla_clusters_max(int device_idx, int blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int64_t> known[kDevices][2];  // one more than it; 0: not yet asked
  if (device_idx < 0 || device_idx >= kDevices || (blocks != 4 && blocks != 8)) {
    return 0;
  }
  std::atomic<int64_t>& count = known[device_idx][blocks == 8 ? 1 : 0];
  if (count == 0) {
    int current = 0;
    cudaGetDevice(&current);
    count = 1 + (blocks == 8 ? ask_clusters_max<8>(device_idx) : ask_clusters_max<4>(device_idx));
    cudaSetDevice(current);
  }
  return count - 1;
}

Status supports_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device) {
  const KvLayout& layout = args.kv.layout;
  if ((layout.format != KvFormat::kLatentBf16 && layout.format != KvFormat::kFp8DsMla) ||
      layout.latent != kLatent || (layout.rope != kRope && layout.rope != 0)) {
    return unsupported("kv.layout: " + std::string(kv_format_name(layout.format)) + " of " +
                       std::to_string(layout.latent) + " + " + std::to_string(layout.rope) +
                       ", expected latent_bf16 or fp8_ds_mla of 512 + 64 or 512 + 0");
  }
  const ConstTensorView& q = args.q.empty() ? args.q_nope : args.q;
  if (q.dtype != DType::kBFloat16) {
    return unsupported("q: " + std::string(dtype_name(q.dtype)) + ", expected bfloat16");
  }
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q, "q", 16));
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q_nope, "q_nope", 16));
  LACUNA_RETURN_IF_ERROR(check_alignment(args.q_rope, "q_rope", 16));
  if (args.out.dtype == DType::kBFloat16) {
    LACUNA_RETURN_IF_ERROR(check_alignment(args.out, "out", 4));
  }
  LACUNA_RETURN_IF_ERROR(check_alignment(args.kv, 16));
  const int64_t needed = Layout<true, true, 1>::kBytes;
  if (device.smem_optin_bytes < needed) {
    return unsupported("this GPU gives a block " + std::to_string(device.smem_optin_bytes) +
                       " bytes of shared memory, needs " + std::to_string(needed));
  }
  return check_sparse_mla_plan(args, device, kHeads);
}

Status run_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device,
                          const Launch& where) {
  return run_sparse_mla_plan(args, device, where, kHeads, has_two_teams(device.compute_capability),
                             attend_mma);
}

}  // namespace lacuna::cuda
