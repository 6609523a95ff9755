// See moe_experts.h.
#include <algorithm>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/moe_experts.h"

namespace lacuna::cuda {
namespace {

constexpr int kRouteThreads = 1024;
constexpr int64_t kExpertsMax = 4096;
// Outputs that are kept until they are added up. Experts' weights are read once a chunk, so it
// holds thousands of rows of the largest models.
constexpr int64_t kProductBytesMax = int64_t{512} << 20;
constexpr int64_t kChunkRowsMin = 64;

// ---- Grouping ----

struct RouteParams {
  const int32_t* ids;  // of the chunk
  int num_entries;
  int experts;
  int tile_rows;
  int32_t* entries;
  ExpertTile* tiles;
  int32_t* num_tiles;
};

__device__ bool names_expert(const RouteParams& p, int32_t id) { return id >= 0 && id < p.experts; }

// One block: the number of entries of each expert, where its slots and tiles begin, then the slots.
__global__ __launch_bounds__(kRouteThreads) void route_kernel(const RouteParams p) {
  extern __shared__ int32_t route_smem[];
  int32_t* counts = route_smem;               // [experts]
  int32_t* offsets = route_smem + p.experts;  // [experts]: of slots, then of the next free one
  const int thread_idx = static_cast<int>(threadIdx.x);
  for (int e = thread_idx; e < p.experts; e += kRouteThreads) {
    counts[e] = 0;
  }
  pdl_wait();
  __syncthreads();
  for (int i = thread_idx; i < p.num_entries; i += kRouteThreads) {
    const int32_t id = p.ids[i];
    if (names_expert(p, id)) {
      atomicAdd(&counts[id], 1);
    }
  }
  __syncthreads();
  if (thread_idx < kWarp) {
    // Neighbouring experts a lane; sums of the lanes before it.
    const int each = (p.experts + kWarp - 1) / kWarp;
    const int begin = min(thread_idx * each, p.experts);
    const int end = min(begin + each, p.experts);
    int slots = 0;
    int tiles = 0;
    for (int e = begin; e < end; ++e) {
      slots += counts[e];
      tiles += (counts[e] + p.tile_rows - 1) / p.tile_rows;
    }
    int slots_before = slots;
    int tiles_before = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int more_slots = __shfl_up_sync(0xffffffffu, slots_before, offset);
      const int more_tiles = __shfl_up_sync(0xffffffffu, tiles_before, offset);
      if (thread_idx >= offset) {
        slots_before += more_slots;
        tiles_before += more_tiles;
      }
    }
    if (thread_idx == kWarp - 1) {
      *p.num_tiles = tiles_before;
    }
    slots_before -= slots;
    tiles_before -= tiles;
    for (int e = begin; e < end; ++e) {
      offsets[e] = slots_before;
      for (int at = 0; at < counts[e]; at += p.tile_rows) {
        p.tiles[tiles_before++] = {e, slots_before + at, min(p.tile_rows, counts[e] - at)};
      }
      slots_before += counts[e];
    }
  }
  __syncthreads();
  for (int i = thread_idx; i < p.num_entries; i += kRouteThreads) {
    const int32_t id = p.ids[i];
    if (names_expert(p, id)) {
      p.entries[atomicAdd(&offsets[id], 1)] = i;
    }
  }
}

// ---- Adding up ----

constexpr int kCombineThreads = 256;
constexpr int kCombineColumns = 1024;  // a block

struct CombineParams {
  const int32_t* ids;
  const float* weights;
  const float* products;
  int64_t width;
  int chosen;
  int experts;
  float* out;
  int64_t out_stride;
  unsigned column_blocks;
};

__global__ __launch_bounds__(kCombineThreads) void combine_kernel(const CombineParams p) {
  pdl_wait();
  const int64_t row = blockIdx.x / p.column_blocks;
  const int64_t column0 = static_cast<int64_t>(blockIdx.x % p.column_blocks) * kCombineColumns;
#pragma unroll
  for (int i = 0; i < kCombineColumns / kCombineThreads; ++i) {
    const int64_t column = column0 + i * kCombineThreads + threadIdx.x;
    if (column >= p.width) {
      return;
    }
    float sum = 0;
    for (int k = 0; k < p.chosen; ++k) {
      const int64_t entry = row * p.chosen + k;
      const int32_t id = p.ids[entry];
      if (id >= 0 && id < p.experts) {
        sum = fmaf(p.weights[entry], p.products[entry * p.width + column], sum);
      }
    }
    p.out[row * p.out_stride + column] = sum;
  }
}

// The distance of one matrix of neighbouring experts, the same for all.
Result<int64_t> equal_distance(const MoeExpertsArgs& args, ConstTensorView ExpertWeights::*member,
                               const char* name) {
  const ConstTensorView& first = args.experts[0].*member;
  if (args.experts.size() == 1) {
    return int64_t{0};
  }
  const char* base = first.as<char>();
  const int64_t bytes = (args.experts[1].*member).as<char>() - base;
  for (size_t e = 2; e < args.experts.size(); ++e) {
    if ((args.experts[e].*member).as<char>() - base != static_cast<int64_t>(e) * bytes) {
      return unsupported(std::string(name) + ": expert " + std::to_string(e) + " does not lie " +
                         std::to_string(bytes) +
                         " bytes behind the one before it; this kernel needs equal distances");
    }
  }
  const int64_t size = size_bytes(first.dtype);
  if (bytes % size != 0) {
    return unsupported(std::string(name) + ": experts lie " + std::to_string(bytes) +
                       " bytes apart, no whole number of elements");
  }
  return bytes / size;
}

}  // namespace

int64_t MoeShape::chunk_rows() const {
  const int64_t row_bytes = std::max<int64_t>(1, 4 * chosen * width);
  return std::min(rows, std::max(kProductBytesMax / row_bytes, kChunkRowsMin));
}

int64_t MoeShape::tiles_max(int64_t chunk, int64_t tile_rows) const {
  const int64_t entries = chunk * chosen;
  // Each expert may have one tile that is not full; an entry makes at most one.
  return std::min(entries, entries / tile_rows + experts);
}

MoeScratch carve_moe(const MoeExpertsArgs& args, Workspace workspace) {
  const MoeShape shape(args);
  const int64_t rows = shape.chunk_rows();
  const int64_t entries = rows * shape.chosen;
  MoeScratch scratch = {};
  scratch.entries = workspace.take<int32_t>(entries);
  // A bound that holds for the smallest tiles: it grows with the rows, whatever tiles they take.
  scratch.tiles = workspace.take<ExpertTile>(std::min(entries, entries / 16 + shape.experts));
  scratch.num_tiles = workspace.take<int32_t>(1);
  scratch.hidden = workspace.take<char>(entries * shape.hidden * size_bytes(args.x.dtype));
  scratch.products = workspace.take<float>(entries * shape.width);
  scratch.used_bytes = workspace.used_bytes();
  return scratch;
}

Result<ExpertStrides> expert_strides(const MoeExpertsArgs& args) {
  const MoeShape shape(args);
  if (shape.experts > kExpertsMax) {
    return unsupported("experts: " + std::to_string(shape.experts) + ", this kernel takes up to " +
                       std::to_string(kExpertsMax));
  }
  if (shape.chunk_rows() * shape.chosen > INT32_MAX) {
    return unsupported("ids: " + std::to_string(shape.chosen) + " experts a row are too many");
  }
  ExpertStrides strides;
  LACUNA_ASSIGN_OR_RETURN(strides.gate, equal_distance(args, &ExpertWeights::gate, "experts.gate"));
  LACUNA_ASSIGN_OR_RETURN(strides.up, equal_distance(args, &ExpertWeights::up, "experts.up"));
  LACUNA_ASSIGN_OR_RETURN(strides.down, equal_distance(args, &ExpertWeights::down, "experts.down"));
  if (args.experts[0].gate.dtype == DType::kFloat8E4M3) {
    LACUNA_ASSIGN_OR_RETURN(strides.gate_scale,
                            equal_distance(args, &ExpertWeights::gate_scale, "experts.gate_scale"));
    LACUNA_ASSIGN_OR_RETURN(strides.up_scale,
                            equal_distance(args, &ExpertWeights::up_scale, "experts.up_scale"));
    LACUNA_ASSIGN_OR_RETURN(strides.down_scale,
                            equal_distance(args, &ExpertWeights::down_scale, "experts.down_scale"));
  }
  return strides;
}

Status launch_route(const MoeExpertsArgs& args, int64_t begin, int64_t rows, int64_t tile_rows,
                    const MoeScratch& scratch, const DeviceInfo& device, const Launch& where) {
  const MoeShape shape(args);
  const RouteParams params = {.ids = args.ids.as<int32_t>() + begin * shape.chosen,
                              .num_entries = static_cast<int>(rows * shape.chosen),
                              .experts = static_cast<int>(shape.experts),
                              .tile_rows = static_cast<int>(tile_rows),
                              .entries = scratch.entries,
                              .tiles = scratch.tiles,
                              .num_tiles = scratch.num_tiles};
  return launch("cuda/moe_experts: routing", route_kernel, device, where,
                {.block = dim3(kRouteThreads), .smem_bytes = 8 * shape.experts, .pdl = true},
                params);
}

Status launch_combine(const MoeExpertsArgs& args, int64_t begin, int64_t rows,
                      const MoeScratch& scratch, const DeviceInfo& device, const Launch& where) {
  const MoeShape shape(args);
  const int64_t column_blocks = ceil_div(shape.width, kCombineColumns);
  const CombineParams params = {.ids = args.ids.as<int32_t>() + begin * shape.chosen,
                                .weights = args.weights.as<float>() + begin * shape.chosen,
                                .products = scratch.products,
                                .width = shape.width,
                                .chosen = static_cast<int>(shape.chosen),
                                .experts = static_cast<int>(shape.experts),
                                .out = args.out.as<float>() + begin * args.out.strides[0],
                                .out_stride = args.out.strides[0],
                                .column_blocks = static_cast<unsigned>(column_blocks)};
  return launch("cuda/moe_experts: sum", combine_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(rows * column_blocks)),
                 .block = dim3(kCombineThreads),
                 .pdl = true},
                params);
}

}  // namespace lacuna::cuda
