// Writes tokens into paged caches (append_kv, append_index_keys) and reads ranges back (gather_kv).
#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/cache.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// slot_mapping is int32 or int64.
HWY_INLINE int64_t slot_at(const ConstTensorView& slots, int64_t t) {
  const int64_t i = t * slots.strides[0];
  return slots.dtype == DType::kInt64 ? slots.as<int64_t>()[i]
                                      : static_cast<int64_t>(slots.as<int32_t>()[i]);
}

HWY_INLINE char* block_at(const KvCacheView& kv, int64_t block) {
  return static_cast<char*>(kv.data) + block * kv.block_stride_bytes;
}

// 2^ceil(log2(x)) for a normal positive x, by its exponent: exact where log2 would round.
HWY_INLINE float power_of_two_at_least(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const bool exact = (bits & 0x7fffffu) == 0;
  return std::bit_cast<float>((bits & 0x7f800000u) + (exact ? 0u : 0x800000u));
}

// The floor stands on amax/448 for latents and on amax for index keys.
HWY_INLINE float latent_scale(float amax, Fp8ScaleRule rule) {
  return rule == Fp8ScaleRule::kAmax ? std::max(amax / 448.0f, FLT_MIN)
                                     : power_of_two_at_least(std::max(amax / 448.0f, 1e-4f));
}
HWY_INLINE float index_scale(float amax, Fp8ScaleRule rule) {
  const float scale = std::max(amax, 1e-4f) / 448.0f;
  return rule == Fp8ScaleRule::kAmax ? scale : power_of_two_at_least(scale);
}

// to[i] = from[i] * scale, rounded once to the type of `to`.
template <class From, class To>
HWY_NOINLINE void convert_scaled(const From* from, int64_t n, float scale, To* to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto scale_v = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store_float(hn::Mul(load_float(d, from + i), scale_v), d, to + i);
  }
  for (; i < n; ++i) {
    store_scalar(to_float(from[i]) * scale, to + i);
  }
}

// Same type: the bytes. Else widened or rounded.
template <class From, class To>
HWY_NOINLINE void convert(const From* from, int64_t n, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, static_cast<size_t>(n) * sizeof(From));
  } else if constexpr (std::is_same_v<To, float>) {
    widen(from, n, to);
  } else {
    narrow(from, n, to);
  }
}

// Largest magnitude of the finite elements: an infinity must not turn its neighbours into zeros, it
// saturates.
HWY_NOINLINE float finite_amax(const float* x, int64_t n) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  auto largest = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto absolute = hn::Abs(hn::LoadU(d, x + i));
    const auto finite = hn::Le(absolute, hn::Set(d, FLT_MAX));  // false for NaN too
    largest = hn::Max(largest, hn::IfThenElseZero(finite, absolute));
  }
  float amax = hn::GetLane(hn::MaxOfLanes(d, largest));
  for (; i < n; ++i) {
    const float absolute = std::fabs(x[i]);
    amax = absolute <= FLT_MAX ? std::max(amax, absolute) : amax;
  }
  return amax;
}

// to = e4m3(x / scale).
HWY_NOINLINE void quantize(const float* x, int64_t n, float scale, Fp8E4M3* to) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto scale_v = hn::Set(d, scale);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    store_float(hn::Div(hn::LoadU(d, x + i), scale_v), d, to + i);
  }
  for (; i < n; ++i) {
    to[i] = to_fp8_e4m3(x[i] / scale);
  }
}

template <class T>
void write_fp8_ds_mla(const T* latent, const T* rope, int64_t rope_width, Fp8ScaleRule rule,
                      char* record) {
  float group[kFp8DsMlaScaleBlock];
  for (int64_t g = 0; g < kFp8DsMlaLatent / kFp8DsMlaScaleBlock; ++g) {
    convert(latent + g * kFp8DsMlaScaleBlock, kFp8DsMlaScaleBlock, group);
    const float scale = latent_scale(finite_amax(group, kFp8DsMlaScaleBlock), rule);
    quantize(group, kFp8DsMlaScaleBlock, scale,
             reinterpret_cast<Fp8E4M3*>(record + g * kFp8DsMlaScaleBlock));
    std::memcpy(record + kFp8DsMlaScaleOffset + 4 * g, &scale, sizeof(scale));
  }
  Bf16* to = reinterpret_cast<Bf16*>(record + kFp8DsMlaRopeOffset);
  if (rope_width > 0) {
    convert(rope, rope_width, to);
  }
  std::memset(to + rope_width, 0, static_cast<size_t>(kFp8DsMlaRope - rope_width) * sizeof(Bf16));
}

template <class T, class Stored>
HWY_INLINE void write_latent(const T* latent, int64_t latent_width, const T* rope,
                             int64_t rope_width, char* record) {
  Stored* to = reinterpret_cast<Stored*>(record);
  convert(latent, latent_width, to);
  if (rope_width > 0) {
    convert(rope, rope_width, to + latent_width);
  }
}

template <class T>
void append_kv_rows_typed(const AppendKvArgs& args, int64_t begin, int64_t end) {
  const KvCacheView& kv = args.kv;
  const int64_t latent_width = kv.layout.latent;
  const int64_t rope_width = kv.layout.rope;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = slot_at(args.slot_mapping, t);
    if (slot < 0 || slot >= kv.num_slots()) {
      continue;
    }
    const T* latent = args.latent.as<T>() + t * args.latent.strides[0];
    const T* rope = rope_width == 0 ? nullptr : args.rope.as<T>() + t * args.rope.strides[0];
    char* record = block_at(kv, slot / kv.block_size) + slot % kv.block_size * kv.row_bytes;
    switch (kv.layout.format) {
      case KvFormat::kLatentBf16:
        write_latent<T, Bf16>(latent, latent_width, rope, rope_width, record);
        break;
      case KvFormat::kLatentF32:
        write_latent<T, float>(latent, latent_width, rope, rope_width, record);
        break;
      default:
        write_fp8_ds_mla(latent, rope, rope_width, args.scale_rule, record);
    }
  }
}

void append_kv_rows(const AppendKvArgs& args, int64_t begin, int64_t end) {
  args.latent.dtype == DType::kBFloat16 ? append_kv_rows_typed<Bf16>(args, begin, end)
                                        : append_kv_rows_typed<float>(args, begin, end);
}

// x times the Walsh-Hadamard matrix in Sylvester order times n^-0.5; n is a power of two.
void hadamard_transform(float* x, int64_t n) {
  for (int64_t half = 1; half < n; half *= 2) {
    for (int64_t i = 0; i < n; i += 2 * half) {
      for (int64_t j = i; j < i + half; ++j) {
        const float a = x[j];
        const float b = x[j + half];
        x[j] = a + b;
        x[j + half] = a - b;
      }
    }
  }
  convert_scaled(x, n, static_cast<float>(1.0 / std::sqrt(static_cast<double>(n))), x);
}

// `key` holds dim floats of scratch.
void append_index_key_rows(const AppendIndexKeysArgs& args, int64_t begin, int64_t end,
                           float* key) {
  const KvCacheView& kv = args.kv;
  const int64_t dim = kv.layout.latent;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t slot = slot_at(args.slot_mapping, t);
    if (slot < 0 || slot >= kv.num_slots()) {
      continue;
    }
    const int64_t row = t * args.keys.strides[0];
    if (args.keys.dtype == DType::kBFloat16) {
      convert(args.keys.as<Bf16>() + row, dim, key);
    } else {
      convert(args.keys.as<float>() + row, dim, key);
    }
    if (args.hadamard) {
      hadamard_transform(key, dim);
    }
    char* block = block_at(kv, slot / kv.block_size);
    const int64_t offset = slot % kv.block_size;
    switch (kv.layout.format) {
      case KvFormat::kIndexBf16:
        convert(key, dim, reinterpret_cast<Bf16*>(block + offset * kv.row_bytes));
        break;
      case KvFormat::kIndexF32:
        convert(key, dim, reinterpret_cast<float*>(block + offset * kv.row_bytes));
        break;
      default: {
        const float scale = index_scale(finite_amax(key, dim), args.scale_rule);
        quantize(key, dim, scale, reinterpret_cast<Fp8E4M3*>(block + offset * dim));
        std::memcpy(block + kv.block_size * dim + 4 * offset, &scale, sizeof(scale));
      }
    }
  }
}

template <class Out>
HWY_INLINE void read_record(const KvCacheView& kv, const char* record, float latent_scale,
                            float rope_scale, Out* out) {
  const int64_t latent = kv.layout.latent;
  const int64_t rope = kv.layout.rope;
  switch (kv.layout.format) {
    case KvFormat::kLatentBf16:
      convert_scaled(reinterpret_cast<const Bf16*>(record), latent, latent_scale, out);
      convert_scaled(reinterpret_cast<const Bf16*>(record) + latent, rope, rope_scale,
                     out + latent);
      break;
    case KvFormat::kLatentF32:
      convert_scaled(reinterpret_cast<const float*>(record), latent, latent_scale, out);
      convert_scaled(reinterpret_cast<const float*>(record) + latent, rope, rope_scale,
                     out + latent);
      break;
    default:
      for (int64_t i = 0; i < latent; i += kFp8DsMlaScaleBlock) {
        float scale;
        std::memcpy(&scale, record + kFp8DsMlaScaleOffset + i / kFp8DsMlaScaleBlock * 4,
                    sizeof(scale));
        convert_scaled(reinterpret_cast<const Fp8E4M3*>(record + i), kFp8DsMlaScaleBlock,
                       scale * latent_scale, out + i);
      }
      convert_scaled(reinterpret_cast<const Bf16*>(record + kFp8DsMlaRopeOffset), rope, rope_scale,
                     out + latent);
  }
}

template <class Out>
void gather_range_typed(const GatherKvArgs& args, int64_t range, int64_t begin, int64_t end) {
  const KvCacheView& kv = args.kv;
  const int64_t request = args.request_ids.as<int32_t>()[range * args.request_ids.strides[0]];
  if (request < 0 || request >= args.block_table.shape[0]) {
    return;
  }
  const int64_t start = args.starts.as<int32_t>()[range * args.starts.strides[0]];
  const int64_t out_start = args.out_starts.as<int32_t>()[range * args.out_starts.strides[0]];
  // Offsets in the range whose output row exists.
  begin = std::max(begin, -out_start);
  end = std::min(end, args.out.shape[0] - out_start);
  const int32_t* table = args.block_table.as<int32_t>() + request * args.block_table.strides[0];
  const int64_t width = kv.layout.d_qk();
  const float latent_scale = kv.latent_scale == nullptr ? 1.0f : *kv.latent_scale;
  const float rope_scale = kv.rope_scale == nullptr ? 1.0f : *kv.rope_scale;
  for (int64_t j = begin; j < end; ++j) {
    Out* out = args.out.as<Out>() + (out_start + j) * args.out.strides[0];
    const int64_t position = start + j;
    const int64_t column = position < 0 ? -1 : position / kv.block_size;
    const int64_t block =
        column >= 0 && column < args.block_table.shape[1] ? int64_t{table[column]} : -1;
    if (block < 0 || block >= kv.num_blocks) {
      std::memset(out, 0, static_cast<size_t>(width) * sizeof(Out));
      continue;
    }
    const char* record = block_at(kv, block) + position % kv.block_size * kv.row_bytes;
    read_record(kv, record, latent_scale, rope_scale, out);
  }
}

void gather_range(const GatherKvArgs& args, int64_t range, int64_t begin, int64_t end) {
  args.out.dtype == DType::kBFloat16 ? gather_range_typed<Bf16>(args, range, begin, end)
                                     : gather_range_typed<float>(args, range, begin, end);
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(append_kv_rows);
HWY_EXPORT(append_index_key_rows);
HWY_EXPORT(gather_range);

// Formats that are named but that nothing writes or reads yet.
template <class Args>
Status supports_format(const Args& args, const DeviceInfo&) {
  switch (args.kv.layout.format) {
    case KvFormat::kDsV4Fp8:
    case KvFormat::kDsV41Fp8:
    case KvFormat::kNvfp4DsMla:
      return unsupported("kv: layout " + std::string(kv_format_name(args.kv.layout.format)) +
                         " has no kernel; latent_bf16, latent_f32, fp8_ds_mla and the index "
                         "layouts have");
    default:
      return ok_status();
  }
}

// Positions of one task of gather_kv.
constexpr int64_t kGatherPositions = 64;

Status gather_kv(const GatherKvArgs& args, const DeviceInfo& device, const Launch&) {
  const int64_t ranges = args.request_ids.shape[0];
  const auto length_of = [&](int64_t range) {
    return int64_t{args.lengths.as<int32_t>()[range * args.lengths.strides[0]]};
  };
  int64_t length_max = 0;
  for (int64_t range = 0; range < ranges; ++range) {
    length_max = std::max(length_max, length_of(range));
  }
  const int64_t tasks_per_range = div_up(length_max, kGatherPositions);
  const auto gather = HWY_DYNAMIC_DISPATCH(gather_range);
  device.thread_pool->parallel_for(ranges * tasks_per_range, [&](int64_t task, int) {
    const int64_t range = task / tasks_per_range;
    const int64_t begin = task % tasks_per_range * kGatherPositions;
    gather(args, range, begin, std::min(begin + kGatherPositions, length_of(range)));
  });
  return ok_status();
}

int64_t append_index_keys_workspace(const AppendIndexKeysArgs& args, const DeviceInfo& device) {
  Workspace workspace;
  workspace.take<float>(round_up(args.kv.layout.latent, 16) * device.num_threads);
  return workspace.used_bytes();
}

Status append_index_keys(const AppendIndexKeysArgs& args, const DeviceInfo& device,
                         const Launch& launch) {
  Workspace workspace(launch.workspace, launch.workspace_bytes);
  const int64_t stride = round_up(args.kv.layout.latent, 16);
  float* keys = workspace.take<float>(stride * device.num_threads);
  const auto append = HWY_DYNAMIC_DISPATCH(append_index_key_rows);
  parallel_ranges(device, args.keys.shape[0], grain_rows(16 * args.kv.layout.latent),
                  [&](int64_t begin, int64_t end, int worker) {
                    append(args, begin, end, keys + worker * stride);
                  });
  return ok_status();
}

}  // namespace

const Kernel<AppendKvArgs> kAppendKv = {
    .name = "cpu/append_kv",
    .supports = supports_format<AppendKvArgs>,
    .run =
        [](const AppendKvArgs& args, const DeviceInfo& device, const Launch&) {
          const auto append = HWY_DYNAMIC_DISPATCH(append_kv_rows);
          parallel_ranges(device, args.latent.shape[0], grain_rows(4 * args.kv.row_bytes),
                          [&](int64_t begin, int64_t end, int) { append(args, begin, end); });
          return ok_status();
        },
};

const Kernel<AppendIndexKeysArgs> kAppendIndexKeys = {
    .name = "cpu/append_index_keys",
    .supports = supports_format<AppendIndexKeysArgs>,
    .workspace_bytes = append_index_keys_workspace,
    .run = append_index_keys,
};

const Kernel<GatherKvArgs> kGatherKv = {
    .name = "cpu/gather_kv",
    .supports = supports_format<GatherKvArgs>,
    .run = gather_kv,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
