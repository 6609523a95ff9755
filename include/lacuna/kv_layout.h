// Byte layouts of a cached token. A layout names a record format and its widths; everything else
// (bytes a row, where a part lies, whether parts are planar within a block) follows from it here
// and nowhere else. docs/kv_cache.md has the byte diagrams.
#pragma once

#include <cstdint>
#include <string_view>

namespace lacuna {

enum class KvFormat : uint8_t {
  kLatentBf16 = 0,  // latent | rope, bf16
  kLatentF32,       // latent | rope, f32
  kFp8DsMla,    // 512 e4m3 | 4 f32 scales (one per 128) | 64 bf16 rope; 656 B, also without rope
                // (bytes zeroed)
  kIndexF32,    // index key, f32
  kIndexBf16,   // index key, bf16
  kIndexFp8,    // planar in a block: all 128 B e4m3 rows, then all f32 scales; 132 B a token
  kDsV4Fp8,     // named, no kernel yet: 448 e4m3 + 64 bf16, then 7 ue8m0 + 1 pad, planar; 584 B
  kDsV41Fp8,    // named, no kernel yet: 512 e4m3 + 16 ue8m0; 528 B
  kNvfp4DsMla,  // named, no kernel yet: 256 B e2m1 + 64 B e4m3 rope + 32 e4m3 scales; 352 B
};

constexpr std::string_view kv_format_name(KvFormat format) {
  switch (format) {
    case KvFormat::kLatentBf16:
      return "latent_bf16";
    case KvFormat::kLatentF32:
      return "latent_f32";
    case KvFormat::kFp8DsMla:
      return "fp8_ds_mla";
    case KvFormat::kIndexF32:
      return "index_f32";
    case KvFormat::kIndexBf16:
      return "index_bf16";
    case KvFormat::kIndexFp8:
      return "index_fp8";
    case KvFormat::kDsV4Fp8:
      return "ds_v4_fp8";
    case KvFormat::kDsV41Fp8:
      return "ds_v41_fp8";
    case KvFormat::kNvfp4DsMla:
      return "nvfp4_ds_mla";
  }
  return "unknown";
}

// fp8_ds_mla: byte offsets within the 656 B record.
inline constexpr int64_t kFp8DsMlaLatent = 512;
inline constexpr int64_t kFp8DsMlaScaleBlock = 128;  // latent elements that share one f32 scale
inline constexpr int64_t kFp8DsMlaScaleOffset = 512;
inline constexpr int64_t kFp8DsMlaRopeOffset = 528;
inline constexpr int64_t kFp8DsMlaRope = 64;
inline constexpr int64_t kFp8DsMlaRowBytes = 656;
static_assert(kFp8DsMlaScaleOffset == kFp8DsMlaLatent);
static_assert(kFp8DsMlaRopeOffset ==
              kFp8DsMlaScaleOffset + 4 * (kFp8DsMlaLatent / kFp8DsMlaScaleBlock));
static_assert(kFp8DsMlaRowBytes == kFp8DsMlaRopeOffset + 2 * kFp8DsMlaRope);

struct KvLayout {
  KvFormat format = KvFormat::kLatentBf16;
  // Latent formats: width of the latent (= d_v of MQA). Index formats: width of the index key.
  int64_t latent = 0;
  int64_t rope = 0;  // width of the rope key; 0 for NoPE models and index keys

  friend constexpr bool operator==(const KvLayout&, const KvLayout&) = default;

  static constexpr KvLayout latent_bf16(int64_t latent, int64_t rope) {
    return {KvFormat::kLatentBf16, latent, rope};
  }
  static constexpr KvLayout latent_f32(int64_t latent, int64_t rope) {
    return {KvFormat::kLatentF32, latent, rope};
  }
  // rope is 64, or 0 for NoPE models (same 656 bytes, rope bytes zero).
  static constexpr KvLayout fp8_ds_mla(int64_t rope = kFp8DsMlaRope) {
    return {KvFormat::kFp8DsMla, kFp8DsMlaLatent, rope};
  }
  static constexpr KvLayout index_f32(int64_t dim) { return {KvFormat::kIndexF32, dim, 0}; }
  static constexpr KvLayout index_bf16(int64_t dim) { return {KvFormat::kIndexBf16, dim, 0}; }
  // Any key width; the released models have 128, which makes 132 bytes a token.
  static constexpr KvLayout index_fp8(int64_t dim = 128) { return {KvFormat::kIndexFp8, dim, 0}; }

  constexpr bool is_index() const {
    return format == KvFormat::kIndexF32 || format == KvFormat::kIndexBf16 ||
           format == KvFormat::kIndexFp8;
  }
  constexpr bool is_latent() const {
    return format == KvFormat::kLatentBf16 || format == KvFormat::kLatentF32 ||
           format == KvFormat::kFp8DsMla;
  }
  // Planar: the parts of a token lie in separate planes of its block, so a token has no single
  // address.
  constexpr bool is_planar() const {
    return format == KvFormat::kIndexFp8 || format == KvFormat::kDsV4Fp8;
  }
  // Bytes of one token's record, all its parts counted.
  constexpr int64_t record_bytes() const {
    switch (format) {
      case KvFormat::kLatentBf16:
      case KvFormat::kIndexBf16:
        return 2 * (latent + rope);
      case KvFormat::kLatentF32:
      case KvFormat::kIndexF32:
        return 4 * (latent + rope);
      case KvFormat::kFp8DsMla:
        return kFp8DsMlaRowBytes;
      case KvFormat::kIndexFp8:
        return latent + 4;
      case KvFormat::kDsV4Fp8:
        return 584;
      case KvFormat::kDsV41Fp8:
        return 528;
      case KvFormat::kNvfp4DsMla:
        return 352;
    }
    return 0;
  }
  // Width of an attention key (latent + rope).
  constexpr int64_t d_qk() const { return latent + rope; }
};

static_assert(KvLayout::latent_bf16(512, 64).record_bytes() == 1152);
static_assert(KvLayout::index_fp8().record_bytes() == 132);

}  // namespace lacuna
