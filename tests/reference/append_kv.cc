// Oracle of append_kv. The FP8 writers divide in float, as the scale that is stored is a float.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/reference/scale_rule.h"

namespace lacuna::reference {
namespace {

void store(DType dtype, double value, char* at) {
  if (dtype == DType::kBFloat16) {
    const Bf16 bits = to_bf16(static_cast<float>(value));
    std::memcpy(at, &bits, sizeof(bits));
  } else {
    const float f = static_cast<float>(value);
    std::memcpy(at, &f, sizeof(f));
  }
}

void write_fp8_ds_mla(const AppendKvArgs& args, int64_t t, char* record) {
  for (int64_t group = 0; group < kFp8DsMlaLatent; group += kFp8DsMlaScaleBlock) {
    float amax = 0;
    for (int64_t i = group; i < group + kFp8DsMlaScaleBlock; ++i) {
      amax = std::max(amax, std::fabs(static_cast<float>(element(args.latent, t, i))));
    }
    const float scale = args.scale_rule == Fp8ScaleRule::kAmax
                            ? std::max(amax / 448.0f, FLT_MIN)
                            : power_of_two_at_least(std::max(amax / 448.0, 1e-4));
    std::memcpy(record + kFp8DsMlaScaleOffset + group / kFp8DsMlaScaleBlock * 4, &scale, 4);
    for (int64_t i = group; i < group + kFp8DsMlaScaleBlock; ++i) {
      record[i] = static_cast<char>(
          to_fp8_e4m3(static_cast<float>(element(args.latent, t, i)) / scale).bits);
    }
  }
  std::memset(record + kFp8DsMlaRopeOffset, 0, 2 * kFp8DsMlaRope);
  for (int64_t i = 0; i < args.kv.layout.rope; ++i) {
    store(DType::kBFloat16, element(args.rope, t, i), record + kFp8DsMlaRopeOffset + 2 * i);
  }
}

}  // namespace

void append_kv(const AppendKvArgs& args) {
  const KvCacheView& kv = args.kv;
  const KvLayout& layout = kv.layout;
  for (int64_t t = 0; t < args.latent.shape[0]; ++t) {
    const int64_t slot = integer(args.slot_mapping, t);
    if (slot < 0 || slot >= kv.num_slots()) {
      continue;
    }
    char* record = static_cast<char*>(kv.data) + slot / kv.block_size * kv.block_stride_bytes +
                   slot % kv.block_size * kv.row_bytes;
    if (layout.format == KvFormat::kFp8DsMla) {
      write_fp8_ds_mla(args, t, record);
      continue;
    }
    const DType dtype = layout.format == KvFormat::kLatentBf16 ? DType::kBFloat16 : DType::kFloat32;
    for (int64_t i = 0; i < layout.d_qk(); ++i) {
      const double value =
          i < layout.latent ? element(args.latent, t, i) : element(args.rope, t, i - layout.latent);
      store(dtype, value, record + i * size_bytes(dtype));
    }
  }
}

}  // namespace lacuna::reference
