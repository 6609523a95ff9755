// Decodes one cached record of any layout that has kernels.
#include "core/check.h"
#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

void read_cached_row(const KvCacheView& kv, int64_t block, int64_t offset,
                     std::vector<double>* values) {
  const KvLayout& layout = kv.layout;
  const char* base = static_cast<const char*>(kv.data) + block * kv.block_stride_bytes;
  const char* record = base + offset * kv.row_bytes;
  const double latent_scale = kv.latent_scale == nullptr ? 1 : *kv.latent_scale;
  const double rope_scale = kv.rope_scale == nullptr ? 1 : *kv.rope_scale;
  values->resize(layout.d_qk());
  for (int64_t i = 0; i < layout.d_qk(); ++i) {
    double value = 0;
    switch (layout.format) {
      case KvFormat::kLatentBf16:
      case KvFormat::kIndexBf16:
        value = decode(DType::kBFloat16, record + 2 * i);
        break;
      case KvFormat::kLatentF32:
      case KvFormat::kIndexF32:
        value = decode(DType::kFloat32, record + 4 * i);
        break;
      case KvFormat::kFp8DsMla:
        if (i < kFp8DsMlaLatent) {
          value = decode(DType::kFloat8E4M3, record + i) *
                  load<float>(record + kFp8DsMlaScaleOffset + 4 * (i / kFp8DsMlaScaleBlock));
        } else {
          value = decode(DType::kBFloat16, record + kFp8DsMlaRopeOffset + 2 * (i - layout.latent));
        }
        break;
      case KvFormat::kIndexFp8:
        value = decode(DType::kFloat8E4M3, base + offset * layout.latent + i) *
                load<float>(base + kv.block_size * layout.latent + 4 * offset);
        break;
      case KvFormat::kDsV4Fp8:
      case KvFormat::kDsV41Fp8:
      case KvFormat::kNvfp4DsMla:
        LACUNA_CHECK(!"the oracle does not read this layout");
    }
    (*values)[i] = value * (i < layout.latent ? latent_scale : rope_scale);
  }
}

bool find_row(const KvCacheView& kv, int64_t row, CachedPlace* place) {
  if (row < 0 || row >= kv.num_rows()) {
    return false;
  }
  // With one block the block stride means nothing.
  place->block = kv.num_blocks == 1 ? 0 : row / kv.block_stride_rows();
  place->offset = kv.num_blocks == 1 ? row : row % kv.block_stride_rows();
  return true;
}

bool find_position(const KvCacheView& kv, const ConstTensorView& block_table, int64_t request,
                   int64_t position, CachedPlace* place) {
  if (request < 0 || request >= block_table.shape[0] || position < 0 ||
      position / kv.block_size >= block_table.shape[1]) {
    return false;
  }
  place->block = integer(block_table, request, position / kv.block_size);
  place->offset = position % kv.block_size;
  return place->block >= 0 && place->block < kv.num_blocks;
}

double dot(const double* a, const double* b, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int lane = 0; lane < 8; ++lane) {
      sums[lane] += a[i + lane] * b[i + lane];
    }
  }
  double total = 0;
  for (; i < n; ++i) {
    total += a[i] * b[i];
  }
  for (double sum : sums) {
    total += sum;
  }
  return total;
}

}  // namespace lacuna::reference
