// Multi-head attention for every width, type and stride, without tensor cores: a block of threads
// owns 16 query rows of one head and a chunk of the value columns, and walks the keys 32 at a time
// with a running softmax. Scores are summed over slices of the depth that pass through shared
// memory.
#include <cmath>
#include <cstdint>
#include <limits>

#include "backends/cuda/attention/mha.h"
#include "backends/cuda/attention/mha_tiles.cuh"
#include "backends/cuda/device/element.cuh"
#include "backends/cuda/device/pdl.cuh"
#include "backends/cuda/device/reduce.cuh"
#include "backends/cuda/device/strided.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTileRows = 16;
constexpr int kTileKeys = 32;
constexpr int kSlice = 64;  // of the depth
constexpr int kColumnsPerThread = 2;
constexpr int kChunk = kThreads * kColumnsPerThread;  // value columns of a block
// A thread scores one key for four rows, and four threads share a key.
constexpr int kRowsPerThread = kTileRows * kTileKeys / kThreads;
// Eight neighbouring threads share a row in the softmax, four keys each.
constexpr int kThreadsPerRow = kThreads / kTileRows;
constexpr int kKeysPerThread = kTileKeys / kThreadsPerRow;

template <class T>
struct Params {
  MhaInputs<T> in;
  int num_chunks;
  int d_qk;
  int d_nope;
  int d_v;
  float softmax_scale;
};

template <class T>
__device__ float load_key(const Params<T>& p, int64_t row, int head, int i) {
  return load_float(i < p.d_nope ? p.in.k.row(row, head)[i] : p.in.k_rope.row(row)[i - p.d_nope]);
}

template <class T>
__global__ __launch_bounds__(kThreads) void mha_simt_kernel(const __grid_constant__ Params<T> p) {
  __shared__ float queries[kTileRows][kSlice];
  __shared__ float keys[kTileKeys][kSlice + 1];    // a column of it is read without conflicts
  __shared__ float weights[kTileKeys][kTileRows];  // scores, then exponentials
  __shared__ float factors[kTileRows];             // what the sums so far are multiplied by
  __shared__ uint32_t kept[kTileRows];             // a bit a key
  const int thread_idx = static_cast<int>(threadIdx.x);
  pdl_wait();
  pdl_launch_dependents();
  const int chunk = static_cast<int>(blockIdx.x) % p.num_chunks;
  const int head = static_cast<int>(blockIdx.x) / p.num_chunks % p.in.num_heads;
  MhaTile tile;
  if (!find_tile(p.in.sequences, static_cast<int64_t>(blockIdx.x) / p.num_chunks / p.in.num_heads,
                 kTileRows, &tile)) {
    return;
  }
  const int64_t q_row = int64_t{tile.q_begin} + tile.query;
  const int rows = min(kTileRows, tile.q_count - tile.query);
  const int key_end = tile_keys(p.in.sequences, tile, kTileRows);
  const int score_key = thread_idx % kTileKeys;
  const int score_row = thread_idx / kTileKeys * kRowsPerThread;
  const int softmax_row = thread_idx / kThreadsPerRow;
  const int softmax_key = thread_idx % kThreadsPerRow;
  float max_score = -INFINITY;  // of softmax_row
  float sum = 0;                // of softmax_row and this thread's keys
  float acc[kColumnsPerThread][kTileRows] = {};

  for (int key = 0; key < key_end; key += kTileKeys) {
    uint32_t bits = 0;
    if (thread_idx < kTileRows) {
      bits = low_bits(visible_keys(p.in.sequences, tile, thread_idx) - key);
      if (p.in.sequences.mask != nullptr && bits != 0) {
        const int32_t* row =
            p.in.sequences.mask + (q_row + thread_idx) * p.in.sequences.mask_stride;
        const uint32_t bit = tile.key_start + static_cast<uint32_t>(key);
        bits &= __funnelshift_r(mask_word(p.in.sequences, row, bit >> 5),
                                mask_word(p.in.sequences, row, (bit >> 5) + 1), bit & 31);
      }
      kept[thread_idx] = bits;
    }
    if (__syncthreads_or(bits != 0) == 0) {
      continue;
    }
    float scores[kRowsPerThread] = {};
    for (int begin = 0; begin < p.d_qk; begin += kSlice) {
      for (int i = thread_idx; i < kTileRows * kSlice; i += kThreads) {
        const int row = i / kSlice;
        const int column = begin + i % kSlice;
        queries[row][i % kSlice] = row < rows && column < p.d_qk
                                       ? load_float(p.in.q.row(q_row + row, head)[column])
                                       : 0.0f;
      }
      for (int i = thread_idx; i < kTileKeys * kSlice; i += kThreads) {
        const int row = key + i / kSlice;
        const int column = begin + i % kSlice;
        keys[i / kSlice][i % kSlice] = row < key_end && column < p.d_qk
                                           ? load_key(p, int64_t{tile.k_begin} + row, head, column)
                                           : 0.0f;
      }
      __syncthreads();
#pragma unroll 8
      for (int i = 0; i < kSlice; ++i) {
        const float x = keys[score_key][i];
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
          scores[r] = fmaf(queries[score_row + r][i], x, scores[r]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const bool keep = ((kept[score_row + r] >> score_key) & 1u) != 0;
      weights[score_key][score_row + r] = keep ? scores[r] * p.softmax_scale : -INFINITY;
    }
    __syncthreads();
    float tile_max = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
      tile_max = fmaxf(tile_max, weights[softmax_key + i * kThreadsPerRow][softmax_row]);
    }
    const float new_max = fmaxf(max_score, reduce_warp<kThreadsPerRow>(tile_max, Max()));
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    const float factor = expf(max_score - base);
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kKeysPerThread; ++i) {
      float& weight = weights[softmax_key + i * kThreadsPerRow][softmax_row];
      weight = expf(weight - base);
      sum += weight;
    }
    max_score = new_max;
    if (softmax_key == 0) {
      factors[softmax_row] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kColumnsPerThread; ++c) {
      const int column = chunk * kChunk + c * kThreads + thread_idx;
      if (column < p.d_v) {
#pragma unroll
        for (int r = 0; r < kTileRows; ++r) {
          acc[c][r] *= factors[r];
        }
        const int num_keys = min(kTileKeys, key_end - key);
        for (int k = 0; k < num_keys; ++k) {
          const float value = load_float(p.in.v.row(int64_t{tile.k_begin} + key + k, head)[column]);
#pragma unroll
          for (int r = 0; r < kTileRows; ++r) {
            acc[c][r] = fmaf(weights[k][r], value, acc[c][r]);
          }
        }
      }
    }
    __syncthreads();
  }

  sum = reduce_warp<kThreadsPerRow>(sum, Sum());
  if (softmax_key == 0) {
    const bool empty = sum == 0.0f;
    factors[softmax_row] = empty ? 0.0f : 1.0f / sum;
    if (p.in.lse && chunk == 0 && softmax_row < rows) {
      p.in.lse(q_row + softmax_row, head) = empty ? -INFINITY : max_score + logf(sum);
    }
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < kColumnsPerThread; ++c) {
    const int column = chunk * kChunk + c * kThreads + thread_idx;
#pragma unroll
    for (int r = 0; r < kTileRows; ++r) {
      if (column < p.d_v && r < rows) {
        const int64_t at = (q_row + r) * p.in.out_strides[0] + head * p.in.out_strides[1] + column;
        const float value = acc[c][r] * factors[r];
        if (p.in.bf16_out) {
          static_cast<Bf16*>(p.in.out)[at] = from_float<Bf16>(value);
        } else {
          static_cast<float*>(p.in.out)[at] = value;
        }
      }
    }
  }
}

template <class T>
Status run_typed(const MhaArgs& args, const DeviceInfo& device, const Launch& where) {
  const Params<T> params = {
      .in = mha_inputs<T>(args),
      // Without columns one block a tile still writes the LSE.
      .num_chunks = static_cast<int>(std::max<int64_t>(1, ceil_div(args.v.shape[2], kChunk))),
      .d_qk = static_cast<int>(args.q.shape[2]),
      .d_nope = static_cast<int>(mha_keys(args).shape[2]),
      .d_v = static_cast<int>(args.v.shape[2]),
      .softmax_scale = static_cast<float>(args.softmax_scale)};
  const int64_t blocks = mha_tiles_max(args, kTileRows) * args.q.shape[1] * params.num_chunks;
  return launch("cuda/mha_simt", mha_simt_kernel<T>, device, where,
                {.grid = dim3(static_cast<unsigned>(blocks)), .block = dim3(kThreads), .pdl = true},
                params);
}

}  // namespace

Status run_mha_simt(const MhaArgs& args, const DeviceInfo& device, const Launch& where) {
  return args.q.dtype == DType::kBFloat16 ? run_typed<Bf16>(args, device, where)
                                          : run_typed<float>(args, device, where);
}

}  // namespace lacuna::cuda
