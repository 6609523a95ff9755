// Oracle of append_index_keys.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/reference/scale_rule.h"

namespace lacuna::reference {
namespace {

// Entry (i, j) of the Sylvester-ordered Walsh-Hadamard matrix is -1 to the number of common bits.
std::vector<double> hadamard(const std::vector<double>& x) {
  std::vector<double> y(x.size(), 0.0);
  for (size_t i = 0; i < x.size(); ++i) {
    for (size_t j = 0; j < x.size(); ++j) {
      y[i] += std::popcount(i & j) % 2 == 0 ? x[j] : -x[j];
    }
    y[i] /= std::sqrt(static_cast<double>(x.size()));
  }
  return y;
}

}  // namespace

void append_index_keys(const AppendIndexKeysArgs& args) {
  const KvCacheView& kv = args.kv;
  const int64_t dim = kv.layout.latent;
  for (int64_t t = 0; t < args.keys.shape[0]; ++t) {
    const int64_t slot = integer(args.slot_mapping, t);
    if (slot < 0 || slot >= kv.num_slots()) {
      continue;
    }
    std::vector<double> key(dim);
    for (int64_t i = 0; i < dim; ++i) {
      key[i] = element(args.keys, t, i);
    }
    if (args.hadamard) {
      key = hadamard(key);
    }
    char* block = static_cast<char*>(kv.data) + slot / kv.block_size * kv.block_stride_bytes;
    const int64_t offset = slot % kv.block_size;
    if (kv.layout.format == KvFormat::kIndexFp8) {
      float amax = 0;
      for (double value : key) {
        amax = std::max(amax, std::fabs(static_cast<float>(value)));
      }
      const float floored = std::max(amax, 1e-4f);
      const float scale = args.scale_rule == Fp8ScaleRule::kAmax
                              ? floored / 448.0f
                              : power_of_two_at_least(floored / 448.0);
      std::memcpy(block + kv.block_size * dim + 4 * offset, &scale, 4);
      for (int64_t i = 0; i < dim; ++i) {
        block[offset * dim + i] =
            static_cast<char>(to_fp8_e4m3(static_cast<float>(key[i]) / scale).bits);
      }
      continue;
    }
    char* record = block + offset * kv.row_bytes;
    for (int64_t i = 0; i < dim; ++i) {
      const float value = static_cast<float>(key[i]);
      if (kv.layout.format == KvFormat::kIndexBf16) {
        const Bf16 bits = to_bf16(value);
        std::memcpy(record + 2 * i, &bits, 2);
      } else {
        std::memcpy(record + 4 * i, &value, 4);
      }
    }
  }
}

}  // namespace lacuna::reference
