// The best gather we know: 16-byte cp.async.cg with L2::128B, eight lanes a row, into rows of 128
// bytes whose chunks are permuted, several blocks an SM. A thread waits for its own copies alone,
// so that nothing but the memory stops it.
#include "benchmarks/gather_floor.h"

#include <algorithm>
#include <string>

#include "backends/cuda/device/cp_async.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/launch.h"

namespace lacuna::bench {
namespace {

using cuda::ceil_div;

constexpr int kLanes = 8;  // a row

struct Params {
  const char* kv;
  int64_t row_bytes;
  int64_t copied_chunks;  // of 16 bytes, a row
  const int32_t* indices;
  int64_t count;
  int64_t rows_per_block;
};

template <int kThreads, int kStages>
__global__ __launch_bounds__(kThreads) void gather_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char smem[];
  constexpr int kRows = kThreads / kLanes;  // a stage
  const int row = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int chunks = static_cast<int>(p.copied_chunks);
  const int slabs = (chunks + kLanes - 1) / kLanes;
  const uint32_t to = cuda::smem_address(smem) + row * 128 + ((lane ^ (row & (kLanes - 1))) << 4);
  cuda::pdl_wait();
  cuda::pdl_launch_dependents();
  const int64_t first = static_cast<int64_t>(blockIdx.x) * p.rows_per_block;
  const int64_t end = first + p.rows_per_block < p.count ? first + p.rows_per_block : p.count;
  int64_t at = first + row;
  int32_t next = at < end ? __ldcg(p.indices + at) : -1;
  int stage = 0;
  for (int64_t begin = first; begin < end; begin += kRows) {
    const int32_t entry = next;
    at += kRows;
    next = at < end ? __ldcg(p.indices + at) : -1;
    // The copies that this thread made into the stage have come.
    cuda::cp_async_wait<kStages - 1>();
    if (entry >= 0) {
      const char* from = p.kv + entry * p.row_bytes + lane * 16;
      const uint32_t stage_at = to + stage * slabs * kRows * 128;
      if (chunks == 72) {
#pragma unroll
        for (int slab = 0; slab < 9; ++slab) {
          cuda::cp_async_16(stage_at + slab * kRows * 128, from + slab * 128);
        }
      } else {
        for (int slab = 0; slab < slabs; ++slab) {
          if (slab * kLanes + lane < chunks) {
            cuda::cp_async_16(stage_at + slab * kRows * 128, from + slab * 128);
          }
        }
      }
    }
    cuda::cp_async_commit();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  cuda::cp_async_wait<0>();
}

template <int kThreads, int kStages>
Status launch_gather(const Params& params, const DeviceInfo& device, void* stream) {
  const int64_t slabs = ceil_div(params.copied_chunks, kLanes);
  // Without rows, what it costs to start and to end.
  const int64_t blocks = std::max<int64_t>(1, ceil_div(params.count, params.rows_per_block));
  return cuda::launch("gather_rows", gather_kernel<kThreads, kStages>, device, {.stream = stream},
                      {.grid = dim3(static_cast<unsigned>(blocks)),
                       .block = dim3(kThreads),
                       .smem_bytes = kStages * slabs * (kThreads / kLanes) * 128,
                       .pdl = true},
                      params);
}

}  // namespace

Status gather_rows(const KvCacheView& kv, const ConstTensorView& indices, const GatherShape& shape,
                   const DeviceInfo& device, void* stream) {
  if (kv.row_bytes % 16 != 0 || !indices.is_contiguous() || shape.rows_per_block < 1) {
    return invalid_argument("gather_rows: rows of " + std::to_string(kv.row_bytes) +
                            " bytes, expected a multiple of 16, and contiguous indices");
  }
  const Params params = {.kv = static_cast<const char*>(kv.data),
                         .row_bytes = kv.row_bytes,
                         .copied_chunks = kv.layout.record_bytes() / 16,
                         .indices = indices.as<int32_t>(),
                         .count = indices.num_elements(),
                         .rows_per_block = shape.rows_per_block};
  switch (shape.config) {
    case 0:
      return launch_gather<128, 3>(params, device, stream);  // 54 KB of 1152-byte rows
    case 1:
      return launch_gather<128, 6>(params, device, stream);  // 108 KB
    default:
      return launch_gather<256, 2>(params, device, stream);  // 72 KB
  }
}

std::string describe_gpu(int device_idx) {
  int driver = 0;
  int runtime = 0;
  int clock_khz = 0;
  int memory_khz = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, device_idx);
  cudaDeviceGetAttribute(&memory_khz, cudaDevAttrMemoryClockRate, device_idx);
  const auto version = [](int number) {
    return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
  };
  return "driver for CUDA " + version(driver) + ", runtime " + version(runtime) +
         ", clocks not set (SM at most " + std::to_string(clock_khz / 1000) + " MHz, memory " +
         std::to_string(memory_khz / 1000) + " MHz)";
}

}  // namespace lacuna::bench
