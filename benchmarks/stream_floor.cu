// Blocks of 256 threads, as many as there is work for, take turns through the array; each thread
// has four or eight loads of 16 bytes in flight.
#include "benchmarks/stream_floor.h"

#include <algorithm>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::bench {
namespace {

constexpr int kThreads = 256;

struct Params {
  const uint4* data;
  int64_t count;  // of 16 bytes
};

template <int kBatch>
__global__ __launch_bounds__(kThreads, 4) void stream_kernel(const __grid_constant__ Params p) {
  cuda::pdl_wait();
  cuda::pdl_launch_dependents();
  uint32_t sum = 0;
  const int64_t step = int64_t{gridDim.x} * kThreads * kBatch;
  for (int64_t at = int64_t{blockIdx.x} * kThreads * kBatch + threadIdx.x; at < p.count;
       at += step) {
    uint4 words[kBatch] = {};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (at + i * kThreads < p.count) {
        words[i] = __ldcg(p.data + at + i * kThreads);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sum += words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    }
  }
  // Without a use of the sum there would be no loads, and a use that is never made costs nothing.
  if (sum == 0x5bd1e995u && p.count < 0) {
    __trap();
  }
}

template <int kBatch>
Status launch_stream(const Params& params, const StreamShape& shape, const DeviceInfo& device,
                     void* stream) {
  const int64_t blocks = std::min(cuda::ceil_div(params.count, kThreads * kBatch),
                                  shape.blocks_per_sm * device.sm_count);
  return cuda::launch(
      "read_stream", stream_kernel<kBatch>, device, {.stream = stream},
      {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true}, params);
}

}  // namespace

std::vector<StreamShape> stream_shapes() {
  std::vector<StreamShape> shapes;
  for (const bool long_batches : {false, true}) {
    for (const int64_t blocks_per_sm : {1, 2, 4, 8}) {
      shapes.push_back({.long_batches = long_batches, .blocks_per_sm = blocks_per_sm});
    }
  }
  return shapes;
}

Status read_stream(const void* data, int64_t bytes, const StreamShape& shape,
                   const DeviceInfo& device, void* stream) {
  const Params params = {.data = static_cast<const uint4*>(data), .count = bytes / 16};
  return shape.long_batches ? launch_stream<8>(params, shape, device, stream)
                            : launch_stream<4>(params, shape, device, stream);
}

}  // namespace lacuna::bench
