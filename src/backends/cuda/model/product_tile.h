// Products of rows of bf16 x with matrices of weights, tile by tile, on tensor cores: a linear
// layer of many rows, or the experts of a mixture, each with the rows that were routed to it.
#pragma once

#include "ops/backend.h"

namespace lacuna::cuda {

// Rows of one expert that are multiplied together; slots count rows grouped by expert.
struct ExpertTile {
  int32_t expert;
  int32_t begin;  // slot
  int32_t count;
};

struct ProductParams {
  // One matrix an expert, or two (gate, up), whose products become silu(gate) * up. Strides count
  // elements.
  const void* weight[2] = {};
  const float* scale[2] = {};  // of FP8 weights
  int64_t weight_stride = 0;   // from row to row
  int64_t weight_expert_stride[2] = {};
  int64_t scale_stride = 0;
  int64_t scale_expert_stride[2] = {};
  const Bf16* x = nullptr;
  int64_t x_stride = 0;
  // The tiles that there are, counted on the device; null: one expert, all rows.
  const ExpertTile* tiles = nullptr;
  const int32_t* num_tiles = nullptr;
  // Row of x of slot s: s, or x_rows[s] / x_divisor. Row of out: s, or out_rows[s].
  const int32_t* x_rows = nullptr;
  int32_t x_divisor = 1;
  const int32_t* out_rows = nullptr;
  int64_t rows = 0;  // without tiles
  int64_t columns = 0;
  int64_t depth = 0;
  void* out = nullptr;
  int64_t out_stride = 0;
  bool out_is_bf16 = false;
};

// Rows of a tile where each expert has about `rows_an_expert`. A row's result does not depend on
// it.
int product_tile_rows(DType weight, int64_t rows_an_expert);

// What a kernel that uses launch_product has to ask of a depth and of strides, which it keeps in 32
// bits.
Status check_product(const char* name, DType weight, int64_t depth, int64_t weight_stride,
                     int64_t x_elements);

// `tiles_max`: tiles that there may be. Rows are aligned to 16 bytes.
Status launch_product(const char* name, const ProductParams& params, DType weight, bool gated,
                      int tile_rows, int64_t tiles_max, const DeviceInfo& device,
                      const Launch& where);

// One instance of the kernel (product_tile.cuh).
template <class W, int kRows, bool kGated>
Status launch_product_tiles(const char* name, const ProductParams& params, int64_t tiles_max,
                            const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
