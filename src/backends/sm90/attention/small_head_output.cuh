// The epilogue of the small-head kernels: accumulators of wgmma, whose rows are output columns and
// whose columns are heads, to the caller's output.
#pragma once

#include "backends/cuda/attention/sparse_mla.cuh"
#include "backends/cuda/device/exp2.cuh"
#include "backends/sm90/ptx/warpgroup.cuh"

namespace lacuna::sm90 {

using cuda::exp2_fast;

// cuda::finish_head with the largest score in units of log2, without latent scales. Approximate to
// 2^-22: a row's end is code that runs once, and short code comes sooner.
__device__ inline float finish_head_log2(const cuda::SparseMlaParams& p, int32_t row, int head,
                                         float max, float sum, bool write) {
  const bool empty = max == cuda::kMinusInfinity;
  const float lse = empty ? max : max + cuda::log2_fast(sum);
  if (write) {
    if (p.lse) {
      p.lse(row, head) = lse * cuda::kLn2;
    }
    if (p.max_logits) {
      p.max_logits(row, head) = max * cuda::kLn2;
    }
  }
  float factor = empty ? 0.0f : __fdividef(1.0f, sum);
  if (p.sink && !empty) {
    // exp(lse) / (exp(lse) + exp(sink)); an infinite exponential gives the right limit.
    factor *= __fdividef(1.0f, 1.0f + exp2_fast(p.sink(head) * cuda::kLog2E - lse));
  }
  return empty ? 0.0f : factor;
}

// Where a lane writes its pair of columns, of a warp's 16 from `column` on for heads 8 pair ..
// 8 pair + 7. Not to be written through when head 8 pair + lane / 4 does not exist.
__device__ inline uint32_t* output_at(const cuda::SparseMlaParams& p, int32_t row, int pair,
                                      int column, int lane) {
  const int head = pair * 8 + lane / 4;
  return reinterpret_cast<uint32_t*>(static_cast<Bf16*>(p.out) + row * p.out_strides[0] +
                                     head * p.out_strides[1] + column) +
         lane % 4;
}

// Lane 4 r + c gives columns r (x, y) and r + 8 (z, w) of heads 2 c (x, z) and 2 c + 1 (y, w), and
// writes columns 2 c, 2 c + 1 and those 8 further of head r.
__device__ inline void write_output(uint32_t* to, bool exists, const float4& value) {
  const uint32_t low = movmatrix_trans(cuda::pack_bf16(value.x, value.y));
  const uint32_t high = movmatrix_trans(cuda::pack_bf16(value.z, value.w));
  if (exists) {
    to[0] = low;
    to[4] = high;
  }
}

}  // namespace lacuna::sm90
