// A peer for tests on a GPU: a block a row and head, plain loops in float32, LSE in base two and
// +inf where a row has no keys.
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "benchmarks/peer.h"

namespace {

constexpr int kThreads = 128;
constexpr int kLatent = 512;  // output columns, of which a thread has every kThreads-th
constexpr int kColumns = kLatent / kThreads;

// Two passes over the row's list: every thread scores every kThreads-th key for the largest score,
// then all sum up columns key by key.
__global__ void attend(LacunaPeerShape shape, LacunaPeerCall call) {
  __shared__ float shared[kThreads];
  const int64_t pair = blockIdx.x;
  const int32_t* list = call.indices + pair / shape.heads * shape.topk;
  const auto* q = static_cast<const __nv_bfloat16*>(call.q) + pair * shape.d_qk;
  const auto key_of = [&](int64_t i) {
    const int32_t row = list[i];
    return row < 0 || row >= shape.context
               ? nullptr
               : reinterpret_cast<const __nv_bfloat16*>(static_cast<const char*>(call.kv) +
                                                        row * shape.row_bytes);
  };
  const auto score_of = [&](const __nv_bfloat16* key) {
    float score = 0.0f;
    for (int64_t d = 0; d < shape.d_qk; ++d) {
      score += __bfloat162float(q[d]) * __bfloat162float(key[d]);
    }
    return score * call.softmax_scale * 1.44269504f;
  };
  float max = -INFINITY;
  for (int64_t i = threadIdx.x; i < shape.topk; i += kThreads) {
    const __nv_bfloat16* key = key_of(i);
    max = key == nullptr ? max : fmaxf(max, score_of(key));
  }
  shared[threadIdx.x] = max;
  __syncthreads();
  for (int i = 0; i < kThreads; ++i) {
    max = fmaxf(max, shared[i]);
  }
  float total = 0.0f;
  float sums[kColumns] = {};
  for (int64_t first = 0; first < shape.topk; first += kThreads) {
    const int64_t mine = first + threadIdx.x;
    const __nv_bfloat16* key = mine < shape.topk ? key_of(mine) : nullptr;
    __syncthreads();
    shared[threadIdx.x] = key == nullptr ? 0.0f : exp2f(score_of(key) - max);
    __syncthreads();
    for (int64_t i = first; i < first + kThreads && i < shape.topk; ++i) {
      const float weight = shared[i - first];
      total += weight;
      if (weight == 0.0f) {
        continue;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        sums[c] += weight * __bfloat162float(key_of(i)[c * kThreads + threadIdx.x]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    static_cast<__nv_bfloat16*>(call.out)[pair * kLatent + c * kThreads + threadIdx.x] =
        __float2bfloat16(total == 0.0f ? 0.0f : sums[c] / total);
  }
  if (threadIdx.x == 0) {
    call.lse[pair] = total == 0.0f ? INFINITY : max + log2f(total);
  }
}

const char* supports(const LacunaPeerShape* shape) {
  if (shape->device_kind != LACUNA_PEER_CUDA) {
    return "runs on a GPU only";
  }
  if (shape->d_v != kLatent) {
    return "writes 512 columns only";
  }
  return shape->kv_format == LACUNA_PEER_KV_BF16 ? nullptr : "reads bf16 caches only";
}

int run(const LacunaPeerShape* shape, const LacunaPeerCall* call) {
  attend<<<static_cast<unsigned>(shape->rows * shape->heads), kThreads, 0,
           static_cast<cudaStream_t>(call->stream)>>>(*shape, *call);
  return cudaGetLastError() == cudaSuccess ? 0 : 1;
}

const LacunaPeer kPeer = {LACUNA_PEER_VERSION,
                          "cuda_mock",
                          LACUNA_PEER_LSE_BASE_TWO,
                          std::numeric_limits<float>::infinity(),
                          supports,
                          nullptr,
                          run};

}  // namespace

extern "C" const LacunaPeer* lacuna_peer(void) { return &kPeer; }
