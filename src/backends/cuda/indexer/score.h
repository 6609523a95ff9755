// Scoring of cached keys, as index_logits and select_keys share it: which columns of a row are
// scored, where a position's key lies, and the kernels behind one function.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "backends/cuda/device/strided.h"
#include "ops/backend.h"

namespace lacuna::cuda {

// Tokens that a row sees, and how many columns (keys, or pools of `kpool` keys) are scored for it.
struct RowLengths {
  Strided1<const int32_t> request_ids;
  Strided1<const int32_t> visible_lengths;
  int64_t length_max = 0;     // tokens
  int64_t skip_at_most = -1;  // rows of so few tokens are not scored: they select every key
  int32_t kpool = 1;

  LACUNA_HOST_DEVICE int64_t length(int64_t t) const {
    const int64_t visible = request_ids(t) < 0 ? 0 : visible_lengths(t);
    return visible < 0 ? 0 : visible < length_max ? visible : length_max;
  }
  LACUNA_HOST_DEVICE int64_t scored_columns(int64_t t) const {
    const int64_t tokens = length(t);
    // A length is an int32: 64-bit divisions are slow on the device.
    return tokens <= skip_at_most ? 0
                                  : static_cast<uint32_t>(tokens) / static_cast<uint32_t>(kpool);
  }
};

// A key's block and place in it; block < 0: there is no such key.
struct KeyPlace {
  int32_t block = -1;
  int32_t offset = 0;
};

struct KeyAddressing {
  const char* data = nullptr;
  int64_t block_stride_bytes = 0;
  int64_t key_stride_bytes = 0;  // from one key to the next within a block
  int64_t scales_offset = 0;     // of a planar block's scales
  int64_t num_blocks = 0;
  int32_t block_size = 1;
  bool paged = false;
  int64_t num_requests = 0;
  int64_t num_table_columns = 0;
  Strided2<const int32_t> block_table;
  Strided1<const int32_t> key_starts;
  const float* latent_scale = nullptr;
  // n / block_size = n * division_factor >> division_shift for 0 <= n < 2^31.
  uint32_t division_factor = 0;
  int32_t division_shift = 0;

  LACUNA_HOST_DEVICE KeyPlace find(int32_t request, int32_t position) const {
    if (request < 0 || request >= num_requests || num_blocks == 0) {
      return {};
    }
    if (paged) {
      const int32_t column =
          static_cast<int32_t>(static_cast<uint32_t>(position) / static_cast<uint32_t>(block_size));
      if (column >= num_table_columns) {
        return {};
      }
      const int32_t block = block_table(request, column);
      return block < 0 || block >= num_blocks ? KeyPlace{}
                                              : KeyPlace{block, position - column * block_size};
    }
    const int64_t offset = int64_t{key_starts(request)} + position;
    return offset < 0 || offset >= block_size ? KeyPlace{}
                                              : KeyPlace{0, static_cast<int32_t>(offset)};
  }
  LACUNA_HOST_DEVICE const char* block_at(KeyPlace place) const {
    return data + place.block * block_stride_bytes;
  }
  LACUNA_HOST_DEVICE const char* key_at(KeyPlace place) const {
    return block_at(place) + place.offset * key_stride_bytes;
  }
  // Only of planar layouts.
  LACUNA_HOST_DEVICE const float* scale_at(KeyPlace place) const {
    return reinterpret_cast<const float*>(block_at(place) + scales_offset) + place.offset;
  }
};

struct ScoreParams {
  const void* q = nullptr;  // [T, num_heads, dim]
  DType q_dtype = DType::kFloat32;
  int64_t q_row_stride = 0;  // elements
  int64_t q_head_stride = 0;
  Strided2<const float> head_weights;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t dim = 0;
  KvFormat format = KvFormat::kIndexBf16;
  KeyAddressing keys;
  RowLengths lengths;
  void* logits = nullptr;
  DType logits_dtype = DType::kFloat32;
  int64_t logits_row_stride = 0;
  int64_t num_columns = 0;
  bool fill = false;   // columns that are not scored get -inf, else they stay as they were
  int64_t splits = 1;  // blocks of threads a row
};

// `args` gives everything but logits and lengths.
template <class Args>
ScoreParams score_params(const Args& args, const RowLengths& lengths, const TensorView& logits) {
  const KvCacheView& kv = args.keys;
  const bool planar = kv.layout.is_planar();
  const bool paged = !args.block_table.empty();
  ScoreParams p;
  p.q = args.q.data;
  p.q_dtype = args.q.dtype;
  p.q_row_stride = args.q.strides[0];
  p.q_head_stride = args.q.strides[1];
  p.head_weights = strided2<const float>(args.head_weights);
  p.num_rows = args.q.shape[0];
  p.num_heads = args.q.shape[1];
  p.dim = args.q.shape[2];
  p.format = kv.layout.format;
  p.keys = {.data = static_cast<const char*>(kv.data),
            .block_stride_bytes = kv.block_stride_bytes,
            .key_stride_bytes = planar ? kv.layout.latent : kv.row_bytes,
            .scales_offset = kv.block_size * kv.layout.latent,
            .num_blocks = kv.block_size < 1 ? 0 : kv.num_blocks,
            // Positions are int32: a larger block has no more of them.
            .block_size = static_cast<int32_t>(
                std::clamp<int64_t>(kv.block_size, 1, std::numeric_limits<int32_t>::max())),
            .paged = paged,
            .num_requests = paged ? args.block_table.shape[0] : args.key_starts.shape[0],
            .num_table_columns = paged ? args.block_table.shape[1] : 0,
            .block_table = strided2<const int32_t>(args.block_table),
            .key_starts = strided1<const int32_t>(args.key_starts),
            .latent_scale = kv.latent_scale};
  // With l bits, 2^l >= block_size: the factor ceil(2^(31 + l) / block_size) is exact for 31 bits.
  const int bits = std::bit_width(static_cast<uint32_t>(p.keys.block_size - 1));
  p.keys.division_shift = 31 + bits;
  p.keys.division_factor = static_cast<uint32_t>(
      ((uint64_t{1} << p.keys.division_shift) + p.keys.block_size - 1) / p.keys.block_size);
  p.lengths = lengths;
  p.logits = logits.data;
  p.logits_dtype = logits.dtype;
  p.logits_row_stride = logits.strides[0];
  p.num_columns = logits.shape[1];
  return p;
}

// Any width, type and alignment.
Status score_generic(const ScoreParams& params, const DeviceInfo& device, const Launch& where);

// Tensor cores: what it needs, in words, and the launch. It looks at neither logits nor lengths, so
// that every call for a cache takes the same kernel and gives the same bits.
Status score_mma_supports(const ScoreParams& params);
Status score_mma(const ScoreParams& params, const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
