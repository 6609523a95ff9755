// Positions to cache rows, one block of threads a list. A list is walked in chunks; with `compact`
// the valid entries of a chunk are packed behind those of the chunks before it, in list order.
#include <algorithm>

#include "backends/cuda/device/addressing.h"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

struct Params {
  Strided2<const int32_t> indices;  // [T, W]
  int64_t list_width;
  Strided1<const int32_t> request_ids;
  Strided1<const int32_t> valid_counts;
  PositionsToRows positions_to_rows;
  DcpShard dcp;
  bool compact;
  Strided1<const int32_t> workspace_ids;
  Strided1<const int32_t> workspace_starts;
  int64_t num_workspaces;
  Strided2<int32_t> rows;  // [T, W], may be indices
  Strided1<int32_t> counts;
};

struct List {
  int32_t request;
  int32_t workspace_start;  // -1: rows come from the block table
};

__device__ int32_t translate(const Params& p, const List& list, int32_t position) {
  if (position < 0) {
    return -1;
  }
  if (list.workspace_start >= 0) {
    return list.workspace_start + position;
  }
  if (p.dcp.size > 1) {
    const int32_t stripe = position / p.dcp.interleave;
    if (stripe % p.dcp.size != p.dcp.rank) {
      return -1;
    }
    position = stripe / p.dcp.size * p.dcp.interleave + position % p.dcp.interleave;
  }
  return p.positions_to_rows(list.request, position);
}

__global__ __launch_bounds__(kThreads) void translate_indices_kernel(const Params p) {
  __shared__ int warp_counts[kWarps];
  const int64_t t = blockIdx.x;
  const int warp_idx = static_cast<int>(threadIdx.x) / kWarp;
  const int lane_idx = static_cast<int>(threadIdx.x) % kWarp;
  List list = {.request = p.request_ids(t), .workspace_start = -1};
  if (p.workspace_ids) {
    const int32_t id = p.workspace_ids(t);
    if (id >= 0 && id < p.num_workspaces) {
      list.workspace_start = p.workspace_starts(id);
    }
  }
  int64_t valid_count = p.list_width;
  if (p.valid_counts) {
    const int64_t count = p.valid_counts(t);
    valid_count = count < valid_count ? count : valid_count;
  }
  const int32_t* indices = p.indices.row(t);
  int32_t* rows = p.rows.row(t);
  int num_valid = 0;
  for (int64_t begin = 0; begin < p.list_width; begin += kThreads) {
    const int64_t c = begin + threadIdx.x;
    const int32_t row = c < valid_count ? translate(p, list, indices[c]) : -1;
    const unsigned valid = __ballot_sync(0xffffffffu, row >= 0);
    if (lane_idx == 0) {
      warp_counts[warp_idx] = __popc(valid);
    }
    __syncthreads();  // also: the whole chunk is read before any of it is written
    int before = num_valid + __popc(valid & ((1u << lane_idx) - 1));
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp_idx ? warp_counts[w] : 0;
      num_valid += warp_counts[w];
    }
    if (!p.compact) {
      if (c < p.list_width) {
        rows[c] = row;
      }
    } else if (row >= 0) {
      rows[before] = row;
    }
    __syncthreads();
  }
  if (p.compact) {
    for (int64_t c = num_valid + threadIdx.x; c < p.list_width; c += kThreads) {
      rows[c] = -1;
    }
  }
  if (p.counts && threadIdx.x == 0) {
    p.counts(t) = num_valid;
  }
}

Status run_translate_indices(const TranslateIndicesArgs& args, const DeviceInfo& device,
                             const Launch& where) {
  const Params params = {
      .indices = strided2<const int32_t>(args.indices),
      .list_width = args.indices.shape[1],
      .request_ids = strided1<const int32_t>(args.request_ids),
      .valid_counts = strided1<const int32_t>(args.valid_counts),
      .positions_to_rows = positions_to_rows(args.block_table, args.num_blocks, args.block_size,
                                             args.block_stride_rows),
      .dcp = args.dcp,
      .compact = args.compact,
      .workspace_ids = strided1<const int32_t>(args.workspace_ids),
      .workspace_starts = strided1<const int32_t>(args.workspace_starts),
      .num_workspaces = args.workspace_starts.shape[0],
      .rows = strided2<int32_t>(args.rows),
      .counts = strided1<int32_t>(args.counts)};
  return launch(
      "cuda/translate_indices", translate_indices_kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(args.indices.shape[0])), .block = dim3(kThreads)},
      params);
}

}  // namespace

const Kernel<TranslateIndicesArgs> kTranslateIndices = {
    .name = "cuda/translate_indices",
    .supports = supports_all<TranslateIndicesArgs>,
    .run = run_translate_indices};

}  // namespace lacuna::cuda
