// Compiled by nvcc for every architecture of the build, never run: the conversions of dtype.h must
// be usable in device code and constexpr on both sides.
#include <cstdint>

#include "lacuna/dtype.h"

namespace lacuna {

static_assert(to_bf16(1.0f).bits == 0x3f80 && to_float(Bf16{0x3f80}) == 1.0f);
static_assert(to_fp16(1.0f).bits == 0x3c00 && to_float(Fp16{0x3c00}) == 1.0f);
static_assert(to_fp8_e4m3(1.0f).bits == 0x38 && to_float(Fp8E4M3{0x38}) == 1.0f);
static_assert(size_bytes(DType::kBFloat16) == sizeof(Bf16));

__global__ void convert_all_types(const float* in, Bf16* bf16, Fp16* fp16, Fp8E4M3* fp8,
                                  float* out) {
  constexpr Bf16 kOne = to_bf16(1.0f);
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  bf16[i] = to_bf16(in[i]);
  fp16[i] = to_fp16(in[i]);
  fp8[i] = to_fp8_e4m3(in[i]);
  out[i] = to_float(bf16[i]) + to_float(fp16[i]) + to_float(fp8[i]) + to_float(kOne);
}

}  // namespace lacuna
