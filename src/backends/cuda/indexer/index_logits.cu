// The lightning indexer's scores without tensor cores: any width, type and alignment, one thread a
// key. Also the kernels of index_logits as values.
//
// A key's elements pass through registers sixteen at a time and meet eight heads of the query,
// which all threads read from shared memory. Sums run over sixteen elements, then over those sums,
// then over heads: a score has the same bits wherever its row and key stand.
#include "backends/cuda/indexer/score_share.cuh"
#include "backends/cuda/kernels.h"
#include "backends/cuda/launch.h"

namespace lacuna::cuda {
namespace {

constexpr int kThreads = 128;  // and keys that a block scores together
constexpr int kHeads = 8;      // whose sums a thread keeps in registers
constexpr int kDims = 64;      // of those heads in shared memory at a time
constexpr int kChunk = 16;     // dims of a key in registers

__device__ float load_query(const ScoreParams& p, int64_t at) {
  switch (p.q_dtype) {
    case DType::kBFloat16:
      return load_float(static_cast<const Bf16*>(p.q)[at]);
    case DType::kFloat8E4M3:
      return load_float(static_cast<const Fp8E4M3*>(p.q)[at]);
    default:
      return static_cast<const float*>(p.q)[at];
  }
}

template <class Key>
__global__ __launch_bounds__(kThreads, 1) void score_generic_kernel(const ScoreParams p) {
  __shared__ __align__(16) float queries[kHeads][kDims];
  __shared__ float weights[kHeads];
  const ScoreShare share = score_share(p, kThreads);
  const int64_t t = share.t;
  const int32_t request = p.lengths.request_ids(t);
  const float latent_scale = p.keys.latent_scale == nullptr ? 1.0f : *p.keys.latent_scale;
  for (int64_t begin = share.begin; begin < share.end; begin += kThreads) {
    const int64_t position = begin + threadIdx.x;
    const bool mine = position < share.end;
    const KeyPlace place = mine ? p.keys.find(request, static_cast<int32_t>(position)) : KeyPlace{};
    const Key* key = place.block < 0 ? nullptr : reinterpret_cast<const Key*>(p.keys.key_at(place));
    float score = 0.0f;
    for (int64_t head = 0; head < p.num_heads; head += kHeads) {
      float dots[kHeads] = {};
      for (int64_t dim = 0; dim < p.dim; dim += kDims) {
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < kHeads * kDims; i += kThreads) {
          const int64_t h = head + i / kDims;
          const int64_t d = dim + i % kDims;
          queries[i / kDims][i % kDims] =
              h < p.num_heads && d < p.dim
                  ? load_query(p, t * p.q_row_stride + h * p.q_head_stride + d)
                  : 0.0f;
        }
        if (dim == 0 && threadIdx.x < kHeads) {
          const int64_t h = head + threadIdx.x;
          weights[threadIdx.x] = h < p.num_heads ? p.head_weights(t, h) : 0.0f;
        }
        __syncthreads();
        if (key == nullptr) {
          continue;
        }
        for (int chunk = 0; chunk < kDims && dim + chunk < p.dim; chunk += kChunk) {
          float values[kChunk];
#pragma unroll
          for (int i = 0; i < kChunk; ++i) {
            const int64_t d = dim + chunk + i;
            values[i] = d < p.dim ? load_float(key[d]) * latent_scale : 0.0f;
          }
#pragma unroll
          for (int h = 0; h < kHeads; ++h) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kChunk; i += 4) {
              const float4 q = *reinterpret_cast<const float4*>(&queries[h][chunk + i]);
              sum = fmaf(q.x, values[i], sum);
              sum = fmaf(q.y, values[i + 1], sum);
              sum = fmaf(q.z, values[i + 2], sum);
              sum = fmaf(q.w, values[i + 3], sum);
            }
            dots[h] += sum;
          }
        }
      }
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        // A key that is not finite must not meet the heads that do not exist.
        if (head + h < p.num_heads) {
          score = fmaf(weights[h], relu(dots[h]), score);
        }
      }
    }
    if (mine) {
      if (key != nullptr && p.format == KvFormat::kIndexFp8) {
        score *= *p.keys.scale_at(place);
      }
      store_logit(p, t, position, key != nullptr ? score : -INFINITY);
    }
  }
  fill_unscored(p, share);
}

// Enough blocks to fill the device several times over, so that rows of unequal length even out.
constexpr int64_t kBlocksPerSm = 16;

RowLengths logits_lengths(const IndexLogitsArgs& args) {
  return {.request_ids = strided1<const int32_t>(args.request_ids),
          .visible_lengths = strided1<const int32_t>(args.visible_lengths),
          .length_max = args.logits.shape[1]};
}

ScoreParams logits_params(const IndexLogitsArgs& args) {
  ScoreParams params = score_params(args, logits_lengths(args), args.logits);
  params.fill = true;
  return params;
}

Status run_index_logits(const IndexLogitsArgs& args, const DeviceInfo& device,
                        const Launch& where) {
  return score_generic(logits_params(args), device, where);
}

Status supports_index_logits_mma(const IndexLogitsArgs& args, const DeviceInfo&) {
  return score_mma_supports(logits_params(args));
}

Status run_index_logits_mma(const IndexLogitsArgs& args, const DeviceInfo& device,
                            const Launch& where) {
  return score_mma(logits_params(args), device, where);
}

}  // namespace

Status score_generic(const ScoreParams& params, const DeviceInfo& device, const Launch& where) {
  ScoreParams p = params;
  p.splits = std::clamp<int64_t>(
      ceil_div(kBlocksPerSm * device.sm_count, std::max<int64_t>(p.num_rows, 1)), 1,
      std::max<int64_t>(ceil_div(p.num_columns, kThreads), 1));
  const auto kernel = p.format == KvFormat::kIndexFp8    ? score_generic_kernel<Fp8E4M3>
                      : p.format == KvFormat::kIndexBf16 ? score_generic_kernel<Bf16>
                                                         : score_generic_kernel<float>;
  return launch(
      "cuda/index_logits", kernel, device, where,
      {.grid = dim3(static_cast<unsigned>(p.num_rows * p.splits)), .block = dim3(kThreads)}, p);
}

const Kernel<IndexLogitsArgs> kIndexLogits[2] = {
    {.name = "cuda/index_logits_mma",
     .supports = supports_index_logits_mma,
     .run = run_index_logits_mma},
    {.name = "cuda/index_logits",
     .supports = supports_all<IndexLogitsArgs>,
     .run = run_index_logits},
};

}  // namespace lacuna::cuda
