// The router of DeepSeek-V3, a warp a row: choices as ordered keys in shared memory, the best taken
// one at a time, then all taken ones listed in ascending order of id, a lane each.
#include <cstdint>
#include <string>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr unsigned kAll = 0xffffffffu;

// Keys in the order of floats start at 0x007fffff (-inf); the numbers below mark experts.
constexpr uint32_t kOut = 0;  // of a group that does not compete
constexpr uint32_t kNan = 1;
constexpr uint32_t kTaken = 2;

struct Params {
  Strided2<const float> logits;
  const float* bias;
  int num_experts;
  int num_groups;
  int groups_kept;
  int chosen;
  bool normalize;
  float scale;
  int32_t* ids;    // [T, chosen]
  float* weights;  // [T, chosen]
};

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ uint32_t choice_key(float choice) {
  if (choice != choice) {
    return kNan;
  }
  const uint32_t bits = __float_as_uint(choice + 0.0f);  // -0 becomes +0: they tie
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ float choice_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key & 0x7fffffffu : ~key);
}

// Calls visit(i) for the experts of a group, from another one on in each lane, so that lanes which
// take whole groups read different banks.
template <class Visit>
__device__ void for_each_of_group(int group, int size, int lane_idx, Visit&& visit) {
  int at = lane_idx % size;
#pragma unroll 4
  for (int step = 0; step < size; ++step) {
    visit(group * size + at);
    at = at + 1 == size ? 0 : at + 1;
  }
}

// Marks the experts of all but the best groups. A lane takes whole groups.
__device__ void keep_best_groups(const Params& p, int lane_idx, uint32_t* keys,
                                 float* group_scores) {
  const int size = p.num_experts / p.num_groups;
  for (int group = lane_idx; group < p.num_groups; group += kWarp) {
    float first = -INFINITY;
    float second = -INFINITY;
    for_each_of_group(group, size, lane_idx, [&](int e) {
      const float choice = choice_of(keys[e]);
      second = fmaxf(second, fminf(first, choice));
      first = fmaxf(first, choice);
    });
    group_scores[group] = first + second;
  }
  __syncwarp();
  for (int group = lane_idx; group < p.num_groups; group += kWarp) {
    const float mine = group_scores[group];
    int better = 0;
    for (int other = 0; other < p.num_groups; ++other) {
      const float theirs = group_scores[other];
      better += theirs > mine || (theirs == mine && other < group) ? 1 : 0;
    }
    if (better >= p.groups_kept) {
      for_each_of_group(group, size, lane_idx, [&](int e) { keys[e] = kOut; });
    }
  }
  __syncwarp();
}

// The best that is left of a lane's experts (every 32nd); kOut and id -1 when none is.
struct Best {
  uint32_t key;
  int id;
};

__device__ Best best_of_lane(const Params& p, int lane_idx, const uint32_t* keys) {
  Best best = {kOut, -1};
#pragma unroll 8
  for (int e = lane_idx; e < p.num_experts; e += kWarp) {
    const uint32_t key = keys[e];
    if (key != kTaken && key > best.key) {  // of equal ones the first
      best = {key, e};
    }
  }
  return best;
}

__global__ __launch_bounds__(kWarp) void moe_route_kernel(const Params p) {
  extern __shared__ uint32_t keys[];  // [experts]
  float* group_scores = reinterpret_cast<float*>(keys + p.num_experts);
  int32_t* ids = reinterpret_cast<int32_t*>(group_scores + p.num_groups);  // [chosen]
  pdl_launch_dependents();
  pdl_wait();
  const int64_t t = blockIdx.x;
  const int lane_idx = static_cast<int>(threadIdx.x);
  const float* logits = p.logits.row(t);
#pragma unroll 8  // loads in flight
  for (int e = lane_idx; e < p.num_experts; e += kWarp) {
    keys[e] = choice_key(sigmoid(logits[e]) + p.bias[e]);
  }
  __syncwarp();
  if (p.num_groups > 1) {
    keep_best_groups(p, lane_idx, keys, group_scores);
  }
  Best mine = best_of_lane(p, lane_idx, keys);
  for (int n = 0; n < p.chosen; ++n) {
    const uint32_t key = __reduce_max_sync(kAll, mine.key);
    const unsigned id =
        __reduce_min_sync(kAll, mine.key == key ? static_cast<unsigned>(mine.id) : kAll);
    if (mine.key == key && static_cast<unsigned>(mine.id) == id) {
      keys[id] = kTaken;
      mine = best_of_lane(p, lane_idx, keys);
    }
  }
  __syncwarp();
  int listed = 0;
  for (int begin = 0; begin < p.num_experts && listed < p.chosen; begin += kWarp) {
    const int e = begin + lane_idx;
    const bool taken = e < p.num_experts && keys[e] == kTaken;
    const unsigned taken_lanes = __ballot_sync(kAll, taken);
    if (taken) {
      ids[listed + __popc(taken_lanes & ((1u << lane_idx) - 1))] = e;
    }
    listed += __popc(taken_lanes);
  }
  __syncwarp();
  float sum = 0;
  for (int n = lane_idx; n < p.chosen; n += kWarp) {
    sum += sigmoid(logits[ids[n]]);
  }
  sum = reduce_warp(sum, Sum());
  for (int n = lane_idx; n < p.chosen; n += kWarp) {
    const float score = sigmoid(logits[ids[n]]);
    p.ids[t * p.chosen + n] = ids[n];
    p.weights[t * p.chosen + n] = (p.normalize ? score / (sum + 1e-20f) : score) * p.scale;
  }
}

int64_t smem_bytes(const MoeRouteArgs& args) {
  return (args.logits.shape[1] + args.num_groups + args.ids.shape[1]) *
         static_cast<int64_t>(sizeof(uint32_t));
}

Status supports_route(const MoeRouteArgs& args, const DeviceInfo& device) {
  if (smem_bytes(args) > device.smem_optin_bytes) {
    return unsupported("logits: " + std::to_string(args.logits.shape[1]) +
                       " experts do not fit the " + std::to_string(device.smem_optin_bytes) +
                       " bytes of shared memory of a block");
  }
  return ok_status();
}

Status run_route(const MoeRouteArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params params = {.logits = strided2<const float>(args.logits),
                         .bias = static_cast<const float*>(args.bias.data),
                         .num_experts = static_cast<int>(args.logits.shape[1]),
                         .num_groups = args.num_groups,
                         .groups_kept = args.groups_kept,
                         .chosen = static_cast<int>(args.ids.shape[1]),
                         .normalize = args.normalize,
                         .scale = static_cast<float>(args.scale),
                         .ids = static_cast<int32_t*>(args.ids.data),
                         .weights = static_cast<float*>(args.weights.data)};
  return launch("cuda/moe_route", moe_route_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(args.ids.shape[0])),
                 .block = dim3(kWarp),
                 .smem_bytes = smem_bytes(args),
                 .pdl = true},
                params);
}

}  // namespace

const Kernel<MoeRouteArgs> kMoeRoute = {
    .name = "cuda/moe_route", .supports = supports_route, .run = run_route};

}  // namespace lacuna::cuda
