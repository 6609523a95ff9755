// sm90/sparse_mla_small_head on the host: what it runs, its workspace, its launches.
#include "backends/sm90/attention/sparse_mla_small_head.h"

#include <algorithm>
#include <numbers>
#include <string>

#include "backends/cuda/launch.h"
#include "backends/sm90/kernels.h"

namespace lacuna::sm90 {
namespace {

constexpr int64_t kListWidthMax = int64_t{1} << 30;  // tiles beyond a list still count in 32 bits
constexpr int64_t kItemsMax = int64_t{1} << 30;

bool is_scheduled(const SparseMlaArgs& args) {
  return !args.schedule.empty() && !args.batch_invariant;
}

// States of the cut, or of any schedule.
int64_t states_max(const SparseMlaArgs& args, const DeviceInfo& device) {
  const cuda::PlanShape shape = cuda::plan_shape(args, device);
  return std::max(split_states_max(shape), cuda::scheduled_slots_max(shape));
}

// What blocks are given of a cut of so many rows.
int64_t num_items(const SplitKv& split, int64_t rows) {
  const RowRuns& runs = split.runs;
  return runs.num_runs == 0 ? cuda::product(rows, split.num_splits)
                            : rows - runs.num_rows + runs.num_items();
}

std::string describe(const SplitKv& split) {
  const RowRuns& runs = split.runs;
  const std::string text = cuda::describe_cut(split.num_splits, split.keys_per_split);
  return split.cluster       ? text + ", joined in clusters"
         : runs.num_runs > 0 ? text + " but the last " + std::to_string(runs.num_rows) + ", in " +
                                   std::to_string(runs.num_runs) + " runs of " +
                                   std::to_string(runs.tiles_per_run * kTileKeys) + " keys"
                             : text;
}

Status supports(const SparseMlaArgs& args, const DeviceInfo& device) {
  const KvLayout& layout = args.kv.layout;
  const int64_t heads = args.out.shape[1];
  if (heads > kSmallHeadsMax) {
    return unsupported("q: " + std::to_string(heads) + " heads, expected at most " +
                       std::to_string(kSmallHeadsMax));
  }
  if (layout.format != KvFormat::kLatentBf16 || layout.latent != kLatent ||
      (layout.rope != kRope && layout.rope != 0)) {
    return unsupported("kv.layout: " + std::string(kv_format_name(layout.format)) + " of " +
                       std::to_string(layout.latent) + " + " + std::to_string(layout.rope) +
                       ", expected latent_bf16 of 512 + 64 or 512 + 0");
  }
  if (args.kv.latent_scale != nullptr || args.kv.rope_scale != nullptr) {
    return unsupported("kv: scales of a bf16 cache are applied by cuda/sparse_mla_mma");
  }
  const ConstTensorView& q = args.q.empty() ? args.q_nope : args.q;
  if (q.dtype != DType::kBFloat16) {
    return unsupported("q: " + std::string(dtype_name(q.dtype)) + ", expected bfloat16");
  }
  LACUNA_RETURN_IF_ERROR(cuda::check_alignment(args.q, "q", 16));
  LACUNA_RETURN_IF_ERROR(cuda::check_alignment(args.q_nope, "q_nope", 16));
  LACUNA_RETURN_IF_ERROR(cuda::check_alignment(args.q_rope, "q_rope", 16));
  if (args.out.dtype != DType::kBFloat16) {
    return unsupported("out: " + std::string(dtype_name(args.out.dtype)) + ", expected bfloat16");
  }
  LACUNA_RETURN_IF_ERROR(cuda::check_alignment(args.out, "out", 16));
  LACUNA_RETURN_IF_ERROR(cuda::check_alignment(args.kv, 16));
  constexpr int64_t kNeeded = SmallHeadSmem<32>::kBytes;
  if (device.smem_optin_bytes < kNeeded) {
    return unsupported("this GPU gives a block " + std::to_string(device.smem_optin_bytes) +
                       " bytes of shared memory, needs " + std::to_string(kNeeded));
  }
  const cuda::PlanShape shape = cuda::plan_shape(args, device);
  const int64_t items = is_scheduled(args)
                            ? cuda::scheduled_tasks_max(shape)
                            : num_items(split_kv(shape, device.tuning.get()), shape.num_rows);
  if (shape.num_rows > kItemsMax || items > kItemsMax || shape.list_width > kListWidthMax) {
    return unsupported("q: " + std::to_string(shape.num_rows) + " rows with lists of " +
                       std::to_string(shape.list_width) +
                       " are more than one launch holds: give fewer rows a call");
  }
  if (is_scheduled(args) && args.schedule.shape[0] < 1 + items) {
    return unsupported("schedule has " + std::to_string(args.schedule.shape[0]) +
                       " entries, needs " + std::to_string(1 + items) +
                       " (schedule_entries() is always enough)");
  }
  return ok_status();
}

bool preferred(const SparseMlaArgs& args, const DeviceInfo& device) {
  return prefers_small_head(cuda::plan_shape(args, device));
}

std::string describe(const SparseMlaArgs& args, const DeviceInfo& device) {
  const std::string where = ", on " + std::to_string(device.sm_count) + " SMs";
  const cuda::PlanShape shape = cuda::plan_shape(args, device);
  if (is_scheduled(args)) {
    return cuda::describe_schedule(cuda::scheduled_tasks_max(shape)) + where;
  }
  const SplitKv split = split_kv(shape, device.tuning.get());
  return describe(split) + where + ": " + split.reason;
}

int64_t workspace_bytes(const SparseMlaArgs& args, const DeviceInfo& device) {
  const int64_t heads = states_max(args, device) * padded_heads(args.out.shape[1]);
  Workspace workspace;
  workspace.take<float>(heads * kLatent);
  workspace.take<float2>(heads);
  // A call of fewer rows, which a portable kernel takes, fits into the workspace of a larger one.
  return std::max(workspace.used_bytes(), cuda::sparse_mla_workspace_bytes(args, device));
}

Status attend(const SmallHeadParams& params, const DeviceInfo& device, const Launch& where) {
  switch (padded_heads(params.call.num_heads)) {
    case 8:
      return launch_small_head<8>(params, device, where);
    case 16:
      return launch_small_head<16>(params, device, where);
    default:
      return launch_small_head<32>(params, device, where);
  }
}

Status run(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& where) {
  SmallHeadParams params = {.call = cuda::sparse_mla_params(args)};
  params.scale_log2 = static_cast<float>(params.call.softmax_scale * std::numbers::log2e);
  const int64_t states = states_max(args, device);
  const int64_t heads = states * padded_heads(args.out.shape[1]);
  Workspace workspace(where.workspace, where.workspace_bytes);
  params.call.partial_out = workspace.take<float>(heads * kLatent);
  params.call.partial_sums = workspace.take<float2>(heads);
  params.call.num_slots = states;
  const cuda::PlanShape shape = cuda::plan_shape(args, device);
  if (is_scheduled(args)) {
    params.call.schedule = static_cast<const int4*>(args.schedule.data);
    params.num_items = static_cast<int32_t>(cuda::scheduled_tasks_max(shape));
    LACUNA_RETURN_IF_ERROR(attend(params, device, where));
    const int64_t slots = cuda::scheduled_slots_max(shape);
    return slots == 0 ? ok_status() : combine_small_head(params, device, where, slots);
  }
  const SplitKv split = split_kv(shape, device.tuning.get());
  params.call.num_splits = static_cast<int32_t>(split.num_splits);
  params.call.keys_per_split = split.keys_per_split;
  params.cluster = split.cluster;
  params.runs = split.runs;
  params.num_whole_rows = static_cast<int32_t>(shape.num_rows) - split.runs.num_rows;
  for (int64_t first = 0; first < shape.num_rows; first += split.rows_per_launch) {
    const int64_t rows = std::min(split.rows_per_launch, shape.num_rows - first);
    params.call.first_row = first;
    params.num_items = static_cast<int32_t>(num_items(split, rows));
    LACUNA_RETURN_IF_ERROR(attend(params, device, where));
    if (split.runs.num_runs > 0) {
      LACUNA_RETURN_IF_ERROR(combine_small_head(params, device, where, split.runs.num_rows));
    } else if (split.num_splits > 1 && !split.cluster) {
      LACUNA_RETURN_IF_ERROR(combine_small_head(params, device, where, rows));
    }
  }
  return ok_status();
}

}  // namespace

const Kernel<SparseMlaArgs> kSparseMlaSmallHead = {.name = "sm90/sparse_mla_small_head",
                                                   .supports = supports,
                                                   .preferred = preferred,
                                                   .workspace_bytes = workspace_bytes,
                                                   .run = run,
                                                   .describe = describe};

}  // namespace lacuna::sm90
