// Rotary position embedding, interleaved or in halves, from tables of cosines and sines. A row's
// heads are cut into items: pairs to rotate and elements to copy, four of either a thread where the
// memory allows, else one.
#include <algorithm>
#include <cstdint>

#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"
#include "backends/cuda/model/rows.cuh"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = int64_t{1} << 20;  // beyond it a block takes several tiles

template <class Out>
struct Params {
  Strided3<const float> x;
  Strided1<const int32_t> positions;
  const float* cosine;  // [P, pairs]
  const float* sine;
  int64_t pairs;
  int64_t offset;
  Strided3<Out> out;
  int64_t rows;
  int64_t heads;
  int64_t width;
  int64_t copied;  // elements of a head outside the rotated ones, 0 in place
};

// kCount pairs from pair i on. All of them are read before one is written: out may be x.
template <int kCount, bool kInterleaved, class Out>
__device__ void rotate(const float* x, const float* cosine, const float* sine, int64_t i,
                       int64_t pairs, Out* out) {
  constexpr bool kVector = kCount == 4;
  float c[4];
  float s[4];
  load_four(cosine + i, kCount, kVector, c);
  load_four(sine + i, kCount, kVector, s);
  if constexpr (kInterleaved) {
    constexpr int kHalf = kVector ? 4 : 2;  // elements of an access
    float in[2][4];
    float turned[2][4];
    load_four(x + 2 * i, kHalf, kVector, in[0]);
    if constexpr (kVector) {
      load_four(x + 2 * i + 4, 4, true, in[1]);
    }
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float a = in[j / 2][j % 2 * 2];
      const float b = in[j / 2][j % 2 * 2 + 1];
      turned[j / 2][j % 2 * 2] = a * c[j] - b * s[j];
      turned[j / 2][j % 2 * 2 + 1] = a * s[j] + b * c[j];
    }
    store_four(turned[0], kHalf, kVector, out + 2 * i);
    if constexpr (kVector) {
      store_four(turned[1], 4, true, out + 2 * i + 4);
    }
  } else {
    float a[4];
    float b[4];
    load_four(x + i, kCount, kVector, a);
    load_four(x + pairs + i, kCount, kVector, b);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const float low = a[j] * c[j] - b[j] * s[j];
      b[j] = a[j] * s[j] + b[j] * c[j];
      a[j] = low;
    }
    store_four(a, kCount, kVector, out + i);
    store_four(b, kCount, kVector, out + pairs + i);
  }
}

template <int kCount, bool kInterleaved, class Out>
__global__ __launch_bounds__(kThreads) void rope_kernel(const Params<Out> p) {
  pdl_launch_dependents();
  pdl_wait();
  // With kCount 4 every width here is a multiple of 4.
  const int64_t head_items = (p.pairs + p.copied) / kCount;
  const int64_t row_items = p.heads * head_items;
  const int64_t tiles = (row_items + kThreads - 1) / kThreads;
  for (int64_t task = blockIdx.x; task < p.rows * tiles; task += gridDim.x) {
    const int64_t t = task / tiles;
    const int64_t item = (task - t * tiles) * kThreads + threadIdx.x;
    if (item >= row_items) {
      continue;
    }
    const int64_t head = item / head_items;
    const int64_t i = (item - head * head_items) * kCount;
    const float* x = p.x.row(t, head);
    Out* out = p.out.row(t, head);
    if (i < p.pairs) {
      const int64_t angles = p.positions(t) * p.pairs;
      rotate<kCount, kInterleaved>(x + p.offset, p.cosine + angles, p.sine + angles, i, p.pairs,
                                   out + p.offset);
    } else {
      const int64_t before = i - p.pairs;
      const int64_t at = before < p.offset ? before : before + 2 * p.pairs;
      float copy[4];
      load_four(x + at, kCount, kCount == 4, copy);
      store_four(copy, kCount, kCount == 4, out + at);
    }
  }
}

template <class Out>
Status run_typed(const RopeArgs& args, const DeviceInfo& device, const Launch& where) {
  const int64_t pairs = args.cos_table.shape[1];
  const int64_t width = args.x.shape[2];
  const Params<Out> params = {.x = strided3<const float>(args.x),
                              .positions = strided1<const int32_t>(args.positions),
                              .cosine = static_cast<const float*>(args.cos_table.data),
                              .sine = static_cast<const float*>(args.sin_table.data),
                              .pairs = pairs,
                              .offset = args.offset,
                              .out = strided3<Out>(args.out),
                              .rows = args.x.shape[0],
                              .heads = args.x.shape[1],
                              .width = width,
                              .copied = args.x.data == args.out.data ? 0 : width - 2 * pairs};
  const bool by_four = pairs % 4 == 0 && args.offset % 4 == 0 && width % 4 == 0 &&
                       rows_of_fours(args.x) && rows_of_fours(args.cos_table) &&
                       rows_of_fours(args.sin_table) && rows_of_fours(args.out);
  const int64_t row_items = params.heads * (pairs + params.copied) / (by_four ? 4 : 1);
  const int64_t blocks = std::min(params.rows * ceil_div(row_items, kThreads), kBlocksMax);
  void (*kernel)(Params<Out>) =
      args.interleaved ? (by_four ? rope_kernel<4, true, Out> : rope_kernel<1, true, Out>)
                       : (by_four ? rope_kernel<4, false, Out> : rope_kernel<1, false, Out>);
  return launch("cuda/rope", kernel, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true},
                params);
}

Status run_rope(const RopeArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.out.dtype == DType::kBFloat16 ? run_typed<Bf16>(args, device, where)
                                            : run_typed<float>(args, device, where);
}

}  // namespace

const Kernel<RopeArgs> kRope = {
    .name = "cuda/rope", .supports = supports_all<RopeArgs>, .run = run_rope};

}  // namespace lacuna::cuda
