// build_schedule: cuts the rows of a step so that blocks of threads get equal shares of the keys.
// One block of threads walks the rows' lengths three times: their sum, the tasks of rows that are
// cut, then the tasks. Rows that are cut come first: they are the longest.
#include <string>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;

struct Params {
  Strided1<const int32_t> valid_counts;
  int64_t num_rows;
  int64_t list_width;
  int64_t parts;  // that the keys of all rows are cut into
  int64_t keys_per_split_min;
  int32_t kind;
  int4* schedule;
};

__device__ int64_t list_length(const Params& p, int64_t row) {
  if (!p.valid_counts) {
    return p.list_width;
  }
  const int64_t count = p.valid_counts(row);
  return count < 0 ? 0 : count < p.list_width ? count : p.list_width;
}

// Sum of `value` over the threads before this one; `total` is the sum over all.
__device__ int64_t scan_block(int64_t value, int64_t* scratch, int64_t& total) {
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  int64_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int64_t other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    inclusive += lane_idx >= offset ? other : 0;
  }
  __syncthreads();
  if (lane_idx == kWarp - 1) {
    scratch[warp_idx] = inclusive;
  }
  __syncthreads();
  int64_t before = inclusive - value;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    before += w < warp_idx ? scratch[w] : 0;
    total += scratch[w];
  }
  return before;
}

__global__ __launch_bounds__(kThreads) void build_schedule_kernel(const Params p) {
  __shared__ int64_t scratch[kWarps];
  int64_t keys = 0;
  for (int64_t t = threadIdx.x; t < p.num_rows; t += kThreads) {
    keys += list_length(p, t);
  }
  const int64_t total = reduce_block<kThreads>(keys, Sum(), scratch);
  int64_t keys_per_split = (total + p.parts - 1) / p.parts;
  keys_per_split = (keys_per_split + kSplitKeys - 1) / kSplitKeys * kSplitKeys;
  keys_per_split = keys_per_split > p.keys_per_split_min ? keys_per_split : p.keys_per_split_min;
  const auto splits_of = [&](int64_t row) {
    const int64_t splits = (list_length(p, row) + keys_per_split - 1) / keys_per_split;
    return splits > 1 ? splits : int64_t{1};
  };
  int64_t cut_tasks = 0;
  for (int64_t t = threadIdx.x; t < p.num_rows; t += kThreads) {
    const int64_t splits = splits_of(t);
    cut_tasks += splits > 1 ? splits : 0;
  }
  int64_t next_cut = 0;
  int64_t next_whole = reduce_block<kThreads>(cut_tasks, Sum(), scratch);
  const int64_t rows = p.kind == kInvariant ? 0 : p.num_rows;
  for (int64_t first = 0; first < rows; first += kThreads) {
    const int64_t t = first + threadIdx.x;
    const int64_t splits = t < rows ? splits_of(t) : 0;
    int64_t all_cut = 0;
    int64_t all_whole = 0;
    const int64_t cut_before = scan_block(splits > 1 ? splits : 0, scratch, all_cut);
    const int64_t whole_before = scan_block(splits == 1 ? 1 : 0, scratch, all_whole);
    const int64_t at = splits > 1 ? next_cut + cut_before : next_whole + whole_before;
    for (int64_t s = 0; s < splits; ++s) {
      const bool last = s + 1 == splits;
      p.schedule[1 + at + s] = make_int4(
          static_cast<int>(t), static_cast<int>(s * keys_per_split),
          last ? INT32_MAX : static_cast<int>((s + 1) * keys_per_split), static_cast<int>(splits));
    }
    next_cut += all_cut;
    next_whole += all_whole;
  }
  if (threadIdx.x == 0) {
    p.schedule[0] = make_int4(p.kind, static_cast<int>(rows == 0 ? 0 : next_whole),
                              static_cast<int>(p.num_rows), static_cast<int>(p.list_width));
  }
}

PlanShape shape_of(const SparseMlaScheduleArgs& args, const DeviceInfo& device) {
  return {.num_rows = args.num_rows,
          .list_width = args.list_width,
          .count_max = args.list_width,
          .num_heads = args.num_heads,
          .sm_count = device.sm_count,
          .batch_invariant = args.batch_invariant};
}

Status supports_build_schedule(const SparseMlaScheduleArgs& args, const DeviceInfo& device) {
  const int64_t needed =
      1 + (args.batch_invariant ? 0 : scheduled_tasks_max(shape_of(args, device)));
  if (args.schedule.shape[0] < needed) {
    return unsupported("schedule has " + std::to_string(args.schedule.shape[0]) +
                       " entries, needs " + std::to_string(needed) +
                       " (schedule_entries() is always enough)");
  }
  if (args.num_rows > INT32_MAX || args.list_width > INT32_MAX) {
    return unsupported("num_rows, list_width: " + std::to_string(args.num_rows) + ", " +
                       std::to_string(args.list_width) + ", expected at most 2^31 - 1");
  }
  return ok_status();
}

Status run_build_schedule(const SparseMlaScheduleArgs& args, const DeviceInfo& device,
                          const Launch& where) {
  const PlanShape shape = shape_of(args, device);
  const Params params = {
      .valid_counts = strided1<const int32_t>(args.valid_counts),
      .num_rows = args.num_rows,
      .list_width = args.list_width,
      .parts = balanced_parts(shape),
      .keys_per_split_min = std::max(
          kScheduledKeys, ceil_div(ceil_div(args.list_width, kSplitsMax), kSplitKeys) * kSplitKeys),
      .kind = args.batch_invariant ? kInvariant : kBalanced,
      .schedule = static_cast<int4*>(args.schedule.data)};
  return launch("cuda/build_schedule", build_schedule_kernel, device, where,
                {.grid = dim3(1), .block = dim3(kThreads)}, params);
}

}  // namespace

const Kernel<SparseMlaScheduleArgs> kBuildSchedule = {
    .name = "cuda/build_schedule", .supports = supports_build_schedule, .run = run_build_schedule};

}  // namespace lacuna::cuda
