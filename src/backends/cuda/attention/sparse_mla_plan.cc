// Cuts the rows of a call into splits, carves the workspace, and launches the kernels of a plan.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

// What a block costs besides its keys (launch, query, first row's latency, partial state), in keys.
constexpr int64_t kBlockCostKeys = 96;
// Batch-invariant splits: a row of 2048 keys is 8 blocks.
constexpr int64_t kInvariantKeys = 256;
constexpr int64_t kGridXMax = std::numeric_limits<int32_t>::max();
// Tiles that end beyond a list still count in 32 bits.
constexpr int64_t kListWidthMax = int64_t{1} << 30;

// What a call takes in nanoseconds, for the choice between clusters and the combine kernel: H200,
// 8 and 16 heads of 576, cold, 2026-12-01 (docs/kernels/cuda_sparse_mla.md). A cluster's blocks are
// of one team, which is slower at its tiles; eight heads have half as much to send.
constexpr int64_t kClusterNs = 3500;
constexpr int64_t kClusterOf4Octet = 2750;  // instead, for 8 heads a block
constexpr int64_t kClusterOf8Octet = 3150;
constexpr int64_t kClusterTileNs = 1250;
constexpr int64_t kClusterFp8TileNs = 1550;
constexpr int64_t kClusterBlockNs = 10;
constexpr int64_t kClusterKeysMax = 384;  // of a block; for longer ones the model is too coarse
constexpr int64_t kOctet = 8;             // heads; fewer a block save nothing
// Other blocks, with one tile each. More of them than half of the SMs have no room beside those of
// the next call.
constexpr int64_t kSplitNs = 5000;
constexpr int64_t kSplitBlockNs = 21;
constexpr int64_t kManySplitsNs = 7700;
constexpr int64_t kSplitKeyNs = 43;
constexpr int64_t kSplitLongKeys = 256;  // from here on memory is what is waited for
constexpr int64_t kSplitLongKeyNs = 36;

constexpr int64_t round_up(int64_t count, int64_t tile) { return ceil_div(count, tile) * tile; }

// Blocks of threads that one wave holds: an SM is full with one of the tensor core kernel, with two
// of fewer heads.
int64_t wave_blocks(const PlanShape& shape, int64_t heads_per_block) {
  return (heads_per_block < kPlanHeads ? 2 : 1) * shape.sm_count;
}

int64_t head_blocks(const PlanShape& shape, int64_t heads_per_block) {
  return std::max<int64_t>(1, ceil_div(shape.num_heads, heads_per_block));
}

// A batch-invariant call cuts by the list width, whatever was scheduled.
bool is_scheduled(const SparseMlaArgs& args) {
  return !args.schedule.empty() && !args.batch_invariant;
}

// A split's keys so that a list of `keys` has at most kSplitsMax of them.
int64_t keys_per_split_min(int64_t keys) {
  return std::max(kSplitKeys, round_up(ceil_div(keys, kSplitsMax), kSplitKeys));
}

int64_t split_ns(const PlanShape& shape, int64_t blocks, int64_t keys_per_split) {
  return (2 * blocks <= shape.sm_count ? kSplitNs + kSplitBlockNs * blocks : kManySplitsNs) +
         kSplitKeyNs * (std::min(keys_per_split, kSplitLongKeys) - kSplitKeys) +
         kSplitLongKeyNs * std::max<int64_t>(0, keys_per_split - kSplitLongKeys);
}

int64_t cluster_ns(const PlanShape& shape, int64_t cluster, int64_t block_heads, int64_t units,
                   int64_t keys_per_split) {
  const bool octet = std::min(block_heads, shape.num_heads) <= kOctet;
  const int64_t ends = !octet ? kClusterNs : cluster == 4 ? kClusterOf4Octet : kClusterOf8Octet;
  const int64_t tile = shape.fp8 ? kClusterFp8TileNs : kClusterTileNs;
  return ends + tile * (keys_per_split / kSplitKeys) + kClusterBlockNs * units * cluster;
}

// `plan`, or clusters where all of them run at once and are the faster. Few blocks serve 8 heads
// each.
SplitPlan plan_few_rows(const PlanShape& shape, const SplitPlan& plan, int64_t keys) {
  SplitPlan best = plan;
  const int64_t blocks =
      product(shape.num_rows, product(head_blocks(shape, kPlanHeads), plan.num_splits));
  int64_t best_ns = split_ns(shape, blocks, plan.keys_per_split);
  const int64_t octet_blocks =
      product(shape.num_rows, product(head_blocks(shape, kOctet), plan.num_splits));
  if (shape.num_heads > kOctet && 2 * octet_blocks <= shape.sm_count) {
    best.block_heads = kOctet;
  }
  for (const int64_t cluster : {4, 8}) {
    const int64_t keys_per_split = round_up(ceil_div(keys, cluster), kSplitKeys);
    const int64_t units_max = cluster == 4 ? shape.clusters_of_4 : shape.clusters_of_8;
    for (const int64_t block_heads : {kPlanHeads, kOctet}) {
      const int64_t units = product(shape.num_rows, head_blocks(shape, block_heads));
      if (units > units_max || keys_per_split > kClusterKeysMax) {
        continue;
      }
      const int64_t ns = cluster_ns(shape, cluster, block_heads, units, keys_per_split);
      if (ns < best_ns) {
        best_ns = ns;
        best.num_splits = cluster;
        best.keys_per_split = keys_per_split;
        best.cluster = cluster;
        best.block_heads = block_heads;
      }
    }
  }
  return best;
}

// Whether the two splits of every row can be a cluster: all blocks run at once. Not with
// batch_invariant: pairs join in another order than the combine kernel, and whether rows run in
// pairs follows their number.
bool can_be_pairs(const PlanShape& shape, const SplitPlan& plan, int64_t heads_per_block) {
  return !shape.batch_invariant && plan.num_splits == 2 &&
         product(2 * head_blocks(shape, heads_per_block), shape.num_rows) <= shape.sm_count;
}

// How cuda/sparse_mla_mma would cut a call: its blocks serve as many heads as a plan counts as one,
// or 8.
std::string describe_mma(const SparseMlaArgs& args, const DeviceInfo& device) {
  const PlanShape shape = plan_shape(args, device);
  const std::string where = ", on " + std::to_string(device.sm_count) + " SMs";
  if (is_scheduled(args)) {
    return describe_schedule(scheduled_tasks_max(shape)) + where;
  }
  const SplitPlan plan = plan_splits(shape, kPlanHeads);
  const bool pairs =
      has_two_teams(device.compute_capability) && can_be_pairs(shape, plan, kPlanHeads);
  return describe_cut(plan.num_splits, plan.keys_per_split) +
         (pairs || plan.cluster > 1 ? ", joined in clusters" : "") +
         (plan.block_heads == kOctet ? ", 8 heads a block" : "") + where +
         (args.batch_invariant ? ": batch_invariant, by the list width alone" : "");
}

bool lies_at(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

}  // namespace

std::string describe_cut(int64_t num_splits, int64_t keys_per_split) {
  return num_splits == 1 ? "whole rows"
                         : "splits of " + std::to_string(keys_per_split) + " keys, " +
                               std::to_string(num_splits) + " a row";
}

std::string describe_schedule(int64_t num_tasks) {
  return "a schedule of at most " + std::to_string(num_tasks) + " tasks";
}

SplitPlan plan_splits(const PlanShape& shape, int64_t heads_per_block) {
  if (shape.batch_invariant) {
    const int64_t keys = std::max(kInvariantKeys, keys_per_split_min(shape.list_width));
    const int64_t splits = std::max<int64_t>(1, ceil_div(shape.list_width, keys));
    // Rows go in groups whose partial states fit the workspace.
    const int64_t slots = partial_heads_max(shape) / std::max<int64_t>(1, shape.num_heads);
    return {.num_splits = splits,
            .keys_per_split = keys,
            .rows_per_launch = splits == 1 ? shape.num_rows : std::max<int64_t>(1, slots / splits),
            .block_heads = heads_per_block};
  }
  const int64_t keys = std::max<int64_t>(1, std::min(shape.list_width, shape.count_max));
  const int64_t blocks = product(shape.num_rows, head_blocks(shape, heads_per_block));
  const int64_t wave = wave_blocks(shape, heads_per_block);
  SplitPlan best = {.num_splits = 1,
                    .keys_per_split = round_up(keys, kSplitKeys),
                    .rows_per_launch = shape.num_rows,
                    .block_heads = heads_per_block};
  int64_t best_cost = std::numeric_limits<int64_t>::max();
  for (int64_t splits = 1; splits <= kSplitsMax; ++splits) {
    // More than one wave is never worth a cut, so that the partial states have a bound.
    if (splits > 1 && blocks * splits > wave) {
      break;
    }
    const int64_t keys_per_split =
        std::max(keys_per_split_min(keys), round_up(ceil_div(keys, splits), kSplitKeys));
    const int64_t num_splits = ceil_div(keys, keys_per_split);
    // Waves of blocks; the joining grows with the number of states.
    const int64_t cost = ceil_div(blocks * num_splits, wave) * (keys_per_split + kBlockCostKeys) +
                         (num_splits > 1 ? num_splits / 4 : 0);
    if (cost < best_cost) {
      best_cost = cost;
      best.num_splits = num_splits;
      best.keys_per_split = keys_per_split;
    }
  }
  // Only the tensor core kernel has clusters, and blocks of fewer heads.
  return heads_per_block == kPlanHeads && best.num_splits > 1 ? plan_few_rows(shape, best, keys)
                                                              : best;
}

int64_t balanced_parts(const PlanShape& shape) {
  return std::max<int64_t>(1, wave_blocks(shape, kPlanHeads) / head_blocks(shape, kPlanHeads));
}

int64_t scheduled_slots_max(const PlanShape& shape) {
  // A row that is cut has at most twice as many splits as its share of the parts.
  return std::min(
      product(shape.num_rows,
              std::clamp<int64_t>(ceil_div(shape.list_width, kScheduledKeys), 1, kSplitsMax)),
      2 * balanced_parts(shape));
}

int64_t scheduled_tasks_max(const PlanShape& shape) {
  const int64_t per_row =
      std::clamp<int64_t>(ceil_div(shape.list_width, kScheduledKeys), 1, kSplitsMax);
  return std::min(product(shape.num_rows, per_row),
                  std::min(shape.num_rows, kExtentMax) + balanced_parts(shape));
}

int64_t partial_heads_max(const PlanShape& shape) {
  const int64_t splits = std::clamp<int64_t>(ceil_div(shape.list_width, kSplitKeys), 1, kSplitsMax);
  if (splits == 1) {
    return 0;
  }
  // A plan has at most a wave of blocks when it cuts, a schedule at most two, and batch-invariant
  // rows go in groups of four; a block serves at most kPlanHeads heads. One row is cut whatever its
  // number of heads.
  const int64_t by_rows = product(product(shape.num_rows, splits), shape.num_heads);
  const int64_t by_wave = std::max(product(4 * wave_blocks(shape, kPlanHeads), kPlanHeads),
                                   product(2 * kSplitsMax, shape.num_heads));
  return std::min(by_rows, by_wave);
}

PlanShape plan_shape(const SparseMlaArgs& args, const DeviceInfo& device) {
  const int64_t width = args.indices.shape[1];
  const auto clusters_max = [&](int blocks) {
    return device.clusters_max == nullptr ? 0 : device.clusters_max(device.device.index, blocks);
  };
  return {.num_rows = args.out.shape[0],
          .list_width = width,
          .count_max = args.valid_count_max < 0 ? width : std::min(width, args.valid_count_max),
          .num_heads = args.out.shape[1],
          .sm_count = device.sm_count,
          .batch_invariant = args.batch_invariant,
          .clusters_of_4 = clusters_max(4),
          .clusters_of_8 = clusters_max(8),
          .fp8 = args.kv.layout.format == KvFormat::kFp8DsMla};
}

int64_t sparse_mla_workspace_bytes(const SparseMlaArgs& args, const DeviceInfo& device) {
  const int64_t partials = partial_heads_max(plan_shape(args, device));
  Workspace workspace;
  workspace.take<float>(product(partials, args.kv.layout.latent));
  workspace.take<float2>(partials);
  return workspace.used_bytes();
}

Status check_sparse_mla_plan(const SparseMlaArgs& args, const DeviceInfo& device,
                             int64_t heads_per_block) {
  const PlanShape shape = plan_shape(args, device);
  const bool scheduled = is_scheduled(args);
  const SplitPlan plan = plan_splits(shape, heads_per_block);
  const int64_t items =
      scheduled ? scheduled_tasks_max(shape) : product(shape.num_rows, plan.num_splits);
  const int64_t blocks =
      product(items, head_blocks(shape, scheduled ? heads_per_block : plan.block_heads));
  if (blocks > kGridXMax || shape.list_width > kListWidthMax) {
    return unsupported("q: " + std::to_string(shape.num_rows) + " rows of " +
                       std::to_string(shape.num_heads) + " heads and lists of " +
                       std::to_string(shape.list_width) +
                       " are more than one launch holds: give fewer rows a call");
  }
  if (scheduled && args.schedule.shape[0] < 1 + items) {
    return unsupported("schedule has " + std::to_string(args.schedule.shape[0]) +
                       " entries, needs " + std::to_string(1 + items) +
                       " (schedule_entries() is always enough)");
  }
  return ok_status();
}

Status check_alignment(const ConstTensorView& tensor, const char* name, int64_t bytes) {
  const int64_t elements = bytes / size_bytes(tensor.dtype);
  if (tensor.empty() || (lies_at(tensor.data, bytes) && tensor.strides[0] % elements == 0 &&
                         tensor.strides[1] % elements == 0)) {
    return ok_status();
  }
  return unsupported(std::string(name) + ": expected data and rows at multiples of " +
                     std::to_string(bytes) + " bytes");
}

Status check_alignment(const KvCacheView& kv, int64_t bytes) {
  if (lies_at(kv.data, bytes) && kv.row_bytes % bytes == 0) {
    return ok_status();
  }
  return unsupported("kv: rows of " + std::to_string(kv.row_bytes) +
                     " bytes, expected data and rows at multiples of " + std::to_string(bytes));
}

SparseMlaParams sparse_mla_params(const SparseMlaArgs& args) {
  const KvCacheView& kv = args.kv;
  const bool split_q = !args.q_nope.empty();
  const ConstTensorView& q = split_q ? args.q_nope : args.q;
  SparseMlaParams params = {};
  params.q_nope = q.data;
  params.q_rope = split_q
                      ? args.q_rope.data
                      : static_cast<const char*>(q.data) + kv.layout.latent * size_bytes(q.dtype);
  const ConstTensorView& rope = split_q && kv.layout.rope > 0 ? args.q_rope : q;
  for (int d = 0; d < 2; ++d) {
    params.q_nope_strides[d] = q.strides[d];
    params.q_rope_strides[d] = rope.strides[d];
    params.out_strides[d] = args.out.strides[d];
  }
  params.kv = static_cast<const char*>(kv.data);
  params.row_bytes = kv.row_bytes;
  params.row_bound = kv.num_rows();
  params.latent_scale = kv.latent_scale;
  params.rope_scale = kv.rope_scale;
  params.indices = strided2<const int32_t>(args.indices);
  params.list_width = args.indices.shape[1];
  if (args.index_kind == IndexKind::kPositions) {
    params.request_ids = strided1<const int32_t>(args.request_ids);
    params.positions_to_rows =
        positions_to_rows(args.block_table, kv.num_blocks, kv.block_size, kv.block_stride_rows());
  }
  params.valid_counts = strided1<const int32_t>(args.valid_counts);
  params.softmax_scale = static_cast<float>(args.softmax_scale);
  params.sink = strided1<const float>(args.sink);
  params.out = args.out.data;
  params.lse = strided2<float>(args.lse);
  params.max_logits = strided2<float>(args.max_logits);
  params.num_heads = static_cast<int32_t>(args.out.shape[1]);
  params.latent = static_cast<int32_t>(kv.layout.latent);
  params.rope = static_cast<int32_t>(kv.layout.rope);
  params.kv_format = kv.layout.format;
  params.q_dtype = q.dtype;
  params.out_dtype = args.out.dtype;
  params.num_rows = args.out.shape[0];
  params.batch_invariant = args.batch_invariant;
  return params;
}

Status run_sparse_mla_plan(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& where,
                           int64_t heads_per_block, bool can_pair, Attend attend) {
  const PlanShape shape = plan_shape(args, device);
  SparseMlaParams params = sparse_mla_params(args);
  const int64_t partials = partial_heads_max(shape);
  Workspace workspace(where.workspace, where.workspace_bytes);
  params.partial_out = workspace.take<float>(product(partials, args.kv.layout.latent));
  params.partial_sums = workspace.take<float2>(partials);
  params.num_slots = partials / shape.num_heads;

  if (is_scheduled(args)) {
    params.schedule = static_cast<const int4*>(args.schedule.data);
    params.block_heads = static_cast<int32_t>(heads_per_block);
    LACUNA_RETURN_IF_ERROR(attend(
        params, device, where, scheduled_tasks_max(shape) * head_blocks(shape, heads_per_block)));
    const int64_t slots = scheduled_slots_max(shape);
    return partials == 0 ? ok_status() : combine_splits(params, device, where, slots);
  }
  const SplitPlan plan = plan_splits(shape, heads_per_block);
  params.num_splits = static_cast<int32_t>(plan.num_splits);
  params.keys_per_split = plan.keys_per_split;
  params.block_heads = static_cast<int32_t>(plan.block_heads);
  params.cluster = static_cast<int32_t>(plan.cluster);
  if (can_pair && can_be_pairs(shape, plan, heads_per_block)) {
    params.cluster = 2;
  }
  for (int64_t first = 0; first < shape.num_rows; first += plan.rows_per_launch) {
    const int64_t rows = std::min(plan.rows_per_launch, shape.num_rows - first);
    params.first_row = first;
    LACUNA_RETURN_IF_ERROR(attend(params, device, where,
                                  rows * plan.num_splits * head_blocks(shape, plan.block_heads)));
    if (plan.num_splits > 1 && params.cluster == 1) {
      LACUNA_RETURN_IF_ERROR(combine_splits(params, device, where, rows));
    }
  }
  return ok_status();
}

const Kernel<SparseMlaArgs> kSparseMla[2] = {{.name = "cuda/sparse_mla_mma",
                                              .supports = supports_sparse_mla_mma,
                                              .workspace_bytes = sparse_mla_workspace_bytes,
                                              .run = run_sparse_mla_mma,
                                              .describe = describe_mma},
                                             {.name = "cuda/sparse_mla_simt",
                                              .supports = supports_sparse_mla_simt,
                                              .workspace_bytes = sparse_mla_workspace_bytes,
                                              .run = run_sparse_mla_simt}};

}  // namespace lacuna::cuda
