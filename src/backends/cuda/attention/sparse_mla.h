// What the sparse MLA kernels share: how rows are cut into splits, what a kernel is told of a call,
// and the joining of splits. The cut is a function of shapes alone, so that a shape's bits are the
// same whatever its rows hold.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "backends/cuda/attention/plan_shape.h"
#include "backends/cuda/device/addressing.h"
#include "backends/cuda/device/strided.h"
#include "core/workspace.h"
#include "ops/backend.h"

namespace lacuna::cuda {

// Splits are cut at multiples of this: the tile of every kernel.
inline constexpr int64_t kSplitKeys = 32;
// Splits of a prepared schedule are not shorter: schedule_entries() has room for these.
inline constexpr int64_t kScheduledKeys = 64;
// Heads that a plan counts as one unit of work: the rows of a tensor core tile.
inline constexpr int64_t kPlanHeads = 16;

// An entry of a schedule. Entry 0 is the header; the tasks follow, those of rows that are cut
// first, in order, so that a task's number is the slot of its partial state.
struct ScheduleHeader {
  int32_t kind;  // kBalanced or kInvariant
  int32_t num_tasks;
  int32_t num_rows;
  int32_t list_width;
};
struct ScheduleTask {
  int32_t row;
  int32_t begin;  // entries of the list
  int32_t end;    // the last split of a row ends at INT32_MAX: wherever the list ends
  int32_t num_splits;
};
static_assert(sizeof(ScheduleHeader) == 16 && sizeof(ScheduleTask) == 16);

// Values that memory which is no schedule hardly holds.
inline constexpr int32_t kBalanced = 0x4c43'5501;
inline constexpr int32_t kInvariant = 0x4c43'5502;

struct SplitPlan {
  int64_t num_splits;      // of every row
  int64_t keys_per_split;  // a multiple of kSplitKeys; the last split takes what remains
  int64_t rows_per_launch;
  // 4, 8: the splits of a row are a cluster of so many blocks, which joins them.
  int64_t cluster = 1;
  int64_t block_heads = kPlanHeads;  // heads that a block serves
};

// `heads_per_block` is the kernel's: how many heads one block of threads serves.
SplitPlan plan_splits(const PlanShape& shape, int64_t heads_per_block);

// Blocks of a plan that fill the GPU: what a balanced schedule cuts the keys of a step into.
int64_t balanced_parts(const PlanShape& shape);

// Tasks that a balanced schedule of this shape has at most, and those of rows that are cut.
int64_t scheduled_tasks_max(const PlanShape& shape);
int64_t scheduled_slots_max(const PlanShape& shape);

// Partial states, times heads, that any plan of this shape needs: grows with every extent.
int64_t partial_heads_max(const PlanShape& shape);

// A call, as kernels receive it.
struct SparseMlaParams {
  const void* q_nope;  // of the query's dtype
  int64_t q_nope_strides[2];
  const void* q_rope;
  int64_t q_rope_strides[2];
  const char* kv;
  int64_t row_bytes;
  int64_t row_bound;
  const float* latent_scale;
  const float* rope_scale;
  Strided2<const int32_t> indices;
  int64_t list_width;
  Strided1<const int32_t> request_ids;  // null: indices are rows
  PositionsToRows positions_to_rows;
  Strided1<const int32_t> valid_counts;
  float softmax_scale;
  Strided1<const float> sink;
  void* out;
  int64_t out_strides[2];
  Strided2<float> lse;
  Strided2<float> max_logits;
  int32_t num_heads;
  int32_t latent;
  int32_t rope;
  KvFormat kv_format;
  DType q_dtype;
  DType out_dtype;
  int64_t num_rows;
  bool batch_invariant;

  // The cut: by a schedule, or the same for every row.
  const int4* schedule;
  int32_t num_splits;
  int64_t keys_per_split;
  int64_t first_row;  // rows of this launch begin here
  int64_t num_slots;
  int32_t block_heads;  // heads that a block serves, by the plan
  int32_t cluster;      // blocks of the cluster that the splits of a row are and that joins them; 1
  float* partial_out;   // [slots, H, latent], not normalised
  float2* partial_sums;  // [slots, H]: largest score and sum of weights
};

// What the two kernels have in common outside of the GPU.
PlanShape plan_shape(const SparseMlaArgs& args, const DeviceInfo& device);
int64_t sparse_mla_workspace_bytes(const SparseMlaArgs& args, const DeviceInfo& device);
// Refuses what does not fit a grid or a schedule.
Status check_sparse_mla_plan(const SparseMlaArgs& args, const DeviceInfo& device,
                             int64_t heads_per_block);

// "splits of 512 keys, 4 a row", or "whole rows".
std::string describe_cut(int64_t num_splits, int64_t keys_per_split);
// "a schedule of at most 196 tasks".
std::string describe_schedule(int64_t num_tasks);

// Refuse data and rows that do not lie at multiples of `bytes`.
Status check_alignment(const ConstTensorView& tensor, const char* name, int64_t bytes);
Status check_alignment(const KvCacheView& kv, int64_t bytes);

// What a call says of tensors, without the cut and its partial states.
SparseMlaParams sparse_mla_params(const SparseMlaArgs& args);

// Starts an attention kernel of `blocks` blocks of threads: head block blockIdx.x % head_blocks of
// item blockIdx.x / head_blocks.
using Attend = Status (*)(const SparseMlaParams& params, const DeviceInfo& device,
                          const Launch& where, int64_t blocks);
// GPUs whose blocks may have 227 KB, for two teams of sparse_mla_mma: sm_90 and the families of
// sm_100 and sm_110.
constexpr bool has_two_teams(int compute_capability) {
  return compute_capability >= 90 && compute_capability < 120;
}

// Launches `attend`, then the combine kernel, as often as the plan wants. `can_pair`: where a row
// has two splits and all blocks run at once, `attend` is asked to join them (params.cluster).
Status run_sparse_mla_plan(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& where,
                           int64_t heads_per_block, bool can_pair, Attend attend);

// Joins the partial states of `num_items` rows (or of the first tasks of a schedule).
Status combine_splits(const SparseMlaParams& params, const DeviceInfo& device, const Launch& where,
                      int64_t num_items);

// The kernels: tensor cores for the released models' widths, and float32 for everything.
Status supports_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device);
Status run_sparse_mla_mma(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& where);
// DeviceInfo::clusters_max, of sm_90 and the like: blocks of these clusters fill an SM.
int64_t sparse_mla_clusters_max(int device_idx, int blocks);
Status supports_sparse_mla_simt(const SparseMlaArgs& args, const DeviceInfo& device);
Status run_sparse_mla_simt(const SparseMlaArgs& args, const DeviceInfo& device,
                           const Launch& where);

}  // namespace lacuna::cuda
