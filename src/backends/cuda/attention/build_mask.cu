// Index lists to bit masks, one block of threads a row: bits are set in shared memory and leave it
// in one coalesced pass. Rows longer than the shared segment take several passes over their list.
#include <algorithm>

#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
// 16 KB, 131,072 keys: several blocks share an SM.
constexpr int64_t kSegmentWords = 4096;

struct Params {
  Strided2<const int32_t> indices;  // [T, W]
  int64_t list_width;
  Strided1<const int32_t> valid_counts;
  Strided1<const int32_t> key_begin;
  int64_t key_count;
  int32_t* mask;
  int64_t row_words;  // of a row, padding included: all are written
  bool vectors;       // rows are whole aligned vectors of 16 bytes
};

__global__ __launch_bounds__(kThreads) void build_mask_kernel(const Params p, int segment_words) {
  extern __shared__ uint4 shared_vectors[];
  uint32_t* words = reinterpret_cast<uint32_t*>(shared_vectors);  // [segment_words]
  const int thread_idx = static_cast<int>(threadIdx.x);
  const int64_t t = blockIdx.x;
  pdl_wait();
  pdl_launch_dependents();
  int64_t count = p.list_width;
  if (p.valid_counts) {
    count = min(count, int64_t{p.valid_counts(t)});
  }
  const int64_t key_begin = p.key_begin ? p.key_begin(t) : 0;
  const int32_t* indices = p.indices.row(t);
  int32_t* row = p.mask + t * p.row_words;
  for (int64_t begin = 0; begin < p.row_words; begin += segment_words) {
    const int num_words = static_cast<int>(min(int64_t{segment_words}, p.row_words - begin));
    for (int w = thread_idx; w < num_words; w += kThreads) {
      words[w] = 0;
    }
    __syncthreads();
    const int64_t bit_begin = 32 * begin;
    const int64_t bit_end = min(bit_begin + 32 * num_words, p.key_count);
    for (int64_t c = thread_idx; c < count; c += kThreads) {
      const int64_t id = indices[c];
      const int64_t bit = id - key_begin;
      if (id >= 0 && bit >= bit_begin && bit < bit_end) {
        const int in_segment = static_cast<int>(bit - bit_begin);
        atomicOr(&words[in_segment >> 5], 1u << (in_segment & 31));
      }
    }
    __syncthreads();
    if (p.vectors) {
      uint4* to = reinterpret_cast<uint4*>(row + begin);
      for (int v = thread_idx; v < num_words / 4; v += kThreads) {
        to[v] = shared_vectors[v];
      }
    } else {
      for (int w = thread_idx; w < num_words; w += kThreads) {
        row[begin + w] = static_cast<int32_t>(words[w]);
      }
    }
    __syncthreads();
  }
}

Status run_build_mask(const BuildMaskArgs& args, const DeviceInfo& device, const Launch& where) {
  // The row stride is a multiple of four words and at least `words`, as validation has checked.
  const Params params = {.indices = strided2<const int32_t>(args.indices),
                         .list_width = args.indices.shape[1],
                         .valid_counts = strided1<const int32_t>(args.valid_counts),
                         .key_begin = strided1<const int32_t>(args.key_begin),
                         .key_count = args.key_count,
                         .mask = static_cast<int32_t*>(args.mask.data),
                         .row_words = args.mask.strides[0],
                         .vectors = reinterpret_cast<uintptr_t>(args.mask.data) % 16 == 0};
  const int64_t segment_words = std::min(params.row_words, kSegmentWords);
  return launch("cuda/build_mask", build_mask_kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(args.mask.shape[0])),
                 .block = dim3(kThreads),
                 .smem_bytes = segment_words * 4,
                 .pdl = true},
                params, static_cast<int>(segment_words));
}

}  // namespace

const Kernel<BuildMaskArgs> kBuildMask = {
    .name = "cuda/build_mask", .supports = supports_all<BuildMaskArgs>, .run = run_build_mask};

}  // namespace lacuna::cuda
