// sm90/sparse_mla_small_head: shapes, shared memory and the launch interface. The portable twin is
// cuda/sparse_mla_mma.
#pragma once

#include <cstdint>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/sm90/attention/split_kv.h"

namespace lacuna::sm90 {

inline constexpr int kWarpgroup = 128;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kSmallHeadsMax = 32;
inline constexpr int kLatent = 512;
inline constexpr int kRope = 64;
inline constexpr int kSlabBytes = static_cast<int>(kTileKeys) * 128;  // 64 columns of a tile
inline constexpr int kLatentSlabs = kLatent / 64;
// A tile's latent comes in groups of slabs, each with its own barriers; its rope apart.
inline constexpr int kGroupSlabs = 2;
inline constexpr int kGroupsOfTile = kLatentSlabs / kGroupSlabs;
inline constexpr int kSlotBytes = kGroupSlabs * kSlabBytes;

// Heads rounded up to what wgmma has.
constexpr int padded_heads(int64_t heads) { return heads <= 8 ? 8 : heads <= 16 ? 16 : 32; }

// Warpgroups that gather. With one, a tile's copies take so long to start that few tiles end late:
// 8 rows of 2048 keys 13.7 us instead of 12.9 with 16 heads. With 32 heads there are no registers
// for a second: prefill takes 829 us instead of 790.
constexpr int gatherers(int heads) { return heads <= 16 ? 2 : 1; }

// Shared memory of a block for `kHeads` heads (8, 16 or 32).
template <int kHeads>
struct SmallHeadSmem {
  // Groups in flight or in use, and rope slabs: as many as there is room for.
  static constexpr int kSlots = kHeads == 8 ? 12 : kHeads == 16 ? 11 : 9;
  static constexpr int kRopeSlots = kHeads == 32 ? 3 : 2;
  static constexpr int kValidTiles = 4;  // more than the tiles in the slots
  static constexpr int kWarps = kWarpgroup / 32;
  static constexpr int kGatherThreads = gatherers(kHeads) * kWarpgroup;
  static constexpr int kThreads = kConsumers * kWarpgroup + kGatherThreads;

  static constexpr int kSlotsAt = 0;
  static constexpr int kRopeAt = kSlotsAt + kSlots * kSlotBytes;
  static constexpr int kQueryAt = kRopeAt + kRopeSlots * kSlabBytes;
  static constexpr int kWeightBytes = static_cast<int>(kTileKeys) * kHeads * 2;
  static constexpr int kWeightsAt = kQueryAt + (kLatentSlabs + 1) * kHeads * 128;
  // [consumer][parity of its tile] weights as bf16; [consumer][warp][head] largest scores.
  static constexpr int kMaximaAt = kWeightsAt + kConsumers * 2 * kWeightBytes;
  // Of a task, by the parity of its number: [consumer][warp][head] sum of weights and largest
  // score, [consumer][head] reference.
  static constexpr int kStatsAt = kMaximaAt + kConsumers * kWarps * kHeads * 4;
  static constexpr int kReferencesAt = kStatsAt + 2 * kConsumers * kWarps * kHeads * 8;
  // [consumer][head]: what its sums and the other's are multiplied by.
  static constexpr int kFactorsAt = kReferencesAt + 2 * kConsumers * kHeads * 4;
  static constexpr int kValidAt = kFactorsAt + kConsumers * kHeads * 8;
  static constexpr int kBarriersAt = kValidAt + kValidTiles * static_cast<int>(kTileKeys);
  static constexpr int kNumBarriers = 2 * (kSlots + kRopeSlots + 1);
  static constexpr int kBytes = kBarriersAt + 8 * kNumBarriers;
};
static_assert(SmallHeadSmem<8>::kBytes <= 227 * 1024);
static_assert(SmallHeadSmem<16>::kBytes <= 227 * 1024);
static_assert(SmallHeadSmem<32>::kBytes <= 227 * 1024);
static_assert(SmallHeadSmem<8>::kWeightsAt % 1024 == 0 && SmallHeadSmem<8>::kBarriersAt % 8 == 0);

// A call, as the kernels receive it. Partial states lie as the registers that hold them: [slot]
// [slab][8 heads][thread of a warpgroup] float4, so that they are written and read in whole lines.
struct SmallHeadParams {
  cuda::SparseMlaParams call;
  int32_t num_items;  // splits of rows, or tasks of a schedule at most; with runs, see there
  bool cluster;       // a row's splits, at most kClusterMax, are a cluster, which joins them
  // Of the last rows: items are the whole rows, then the runs' parts 0, then their parts 1.
  RowRuns runs;
  int32_t num_whole_rows;
  float scale_log2;  // softmax_scale times log2(e)
};

template <int kHeads>
Status launch_small_head(const SmallHeadParams& params, const DeviceInfo& device,
                         const Launch& where);
extern template Status launch_small_head<8>(const SmallHeadParams&, const DeviceInfo&,
                                            const Launch&);
extern template Status launch_small_head<16>(const SmallHeadParams&, const DeviceInfo&,
                                             const Launch&);
extern template Status launch_small_head<32>(const SmallHeadParams&, const DeviceInfo&,
                                             const Launch&);

// Joins the states of `num_items` rows (of those in runs, or of the first tasks of a schedule).
Status combine_small_head(const SmallHeadParams& params, const DeviceInfo& device,
                          const Launch& where, int64_t num_items);

}  // namespace lacuna::sm90
