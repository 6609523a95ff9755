// Chooses among the instances of the tile kernel.
#include "backends/cuda/model/product_tile.h"

#include <climits>
#include <string>

namespace lacuna::cuda {
namespace {

template <class W, int kRows>
Status launch_rows(const char* name, const ProductParams& params, bool gated, int64_t tiles_max,
                   const DeviceInfo& device, const Launch& where) {
  return gated ? launch_product_tiles<W, kRows, true>(name, params, tiles_max, device, where)
               : launch_product_tiles<W, kRows, false>(name, params, tiles_max, device, where);
}

}  // namespace

int product_tile_rows(DType weight, int64_t rows_an_expert) {
  if (rows_an_expert <= 16) {
    return 16;
  }
  // FP8 keeps two sets of sums, which leaves no registers for 128 rows.
  return rows_an_expert <= 64 || weight != DType::kBFloat16 ? 64 : 128;
}

Status check_product(const char* name, DType weight, int64_t depth, int64_t weight_stride,
                     int64_t x_elements) {
  const int64_t step = 16 / size_bytes(weight);
  if (depth % step != 0) {
    return unsupported(std::string(name) + ": depth " + std::to_string(depth) +
                       ", this kernel needs a multiple of " + std::to_string(step));
  }
  constexpr int64_t kTileWeightRowsMax = 128;
  if (depth > INT_MAX / 2 || weight_stride < 0 || x_elements < 0 ||
      weight_stride > UINT_MAX / kTileWeightRowsMax || x_elements / 8 > UINT_MAX) {
    return unsupported(std::string(name) +
                       ": this kernel counts 16 bytes in 32 bits, and a stride is negative or too "
                       "large");
  }
  return ok_status();
}

Status launch_product(const char* name, const ProductParams& params, DType weight, bool gated,
                      int tile_rows, int64_t tiles_max, const DeviceInfo& device,
                      const Launch& where) {
  if (weight == DType::kBFloat16) {
    return tile_rows == 16 ? launch_rows<Bf16, 16>(name, params, gated, tiles_max, device, where)
           : tile_rows == 64
               ? launch_rows<Bf16, 64>(name, params, gated, tiles_max, device, where)
               : launch_rows<Bf16, 128>(name, params, gated, tiles_max, device, where);
  }
  return tile_rows == 16 ? launch_rows<Fp8E4M3, 16>(name, params, gated, tiles_max, device, where)
                         : launch_rows<Fp8E4M3, 64>(name, params, gated, tiles_max, device, where);
}

}  // namespace lacuna::cuda
