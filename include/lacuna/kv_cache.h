// Paged KV caches: the view that every operation takes, and the operations that write and read
// cached tokens.
//
// Words: a *position* is logical, within a sequence. A *slot* is block * block_size + offset: where
// append writes. A *row* is block * block_stride_rows + offset: what attention's index lists hold.
// Slots and rows are equal when blocks lie back to back. -1 means none everywhere.
#pragma once

#include <cstdint>
#include <string_view>

#include "lacuna/context.h"
#include "lacuna/kv_layout.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

// Borrowed paged cache of one layer. Token (block b, offset o) of a non-planar layout lies at
//   data + b * block_stride_bytes + o * row_bytes.
// Planar layouts address within the block: kIndexFp8 has its keys at b * block_stride_bytes + o *
// latent and its scale at b * block_stride_bytes + block_size * latent + o * 4 (row_bytes is then
// record_bytes() and only counts). The block stride may exceed block_size * row_bytes (other
// layers' blocks lie between); bytes in the gaps are never touched. Flat rows are a cache of one
// block: see flat_rows().
struct KvCacheView {
  void* data = nullptr;
  Device device = {};
  KvLayout layout = {};
  int64_t num_blocks = 0;
  int64_t block_size = 0;          // tokens a block
  int64_t block_stride_bytes = 0;  // from one block to the next
  int64_t row_bytes = 0;           // from one token to the next within a block
  // Optional per-tensor scales (multiply stored latent / rope values on read; append stores values
  // as given), in the cache's device memory. Null: 1.
  const float* latent_scale = nullptr;
  const float* rope_scale = nullptr;

  constexpr bool empty() const { return data == nullptr && num_blocks == 0; }
  // Rows from one block to the next. Only meaningful when the block stride is a whole number of
  // rows, which every operation on rows checks.
  constexpr int64_t block_stride_rows() const {
    return row_bytes == 0 ? 0 : block_stride_bytes / row_bytes;
  }
  // Bound of row ids: rows r with 0 <= r < num_rows() may be named (rows in gaps must not be).
  constexpr int64_t num_rows() const {
    return num_blocks == 0 ? 0 : (num_blocks - 1) * block_stride_rows() + block_size;
  }
  constexpr int64_t num_slots() const { return num_blocks * block_size; }
};

// A cache of `num_blocks` blocks back to back.
constexpr KvCacheView paged_rows(void* data, KvLayout layout, int64_t num_blocks,
                                 int64_t block_size, Device device = {}) {
  return {.data = data,
          .device = device,
          .layout = layout,
          .num_blocks = num_blocks,
          .block_size = block_size,
          .block_stride_bytes = block_size * layout.record_bytes(),
          .row_bytes = layout.record_bytes()};
}

// `num_rows` rows of one contiguous array: the row bound is num_rows.
constexpr KvCacheView flat_rows(void* data, KvLayout layout, int64_t num_rows, Device device = {}) {
  return paged_rows(data, layout, 1, num_rows, device);
}

// How FP8 writers choose the scale of a group of values with largest magnitude amax.
enum class Fp8ScaleRule : uint8_t {
  kPowerOfTwo = 0,  // latents: 2^ceil(log2(max(amax/448, 1e-4))); index keys: 2^ceil(log2(max(amax,
                    // 1e-4)/448))
  kAmax,            // latents: max(amax/448, FLT_MIN); index keys: max(amax, 1e-4)/448
};

// Appends T tokens to a latent cache. A negative slot is skipped; a slot >= num_slots() is skipped
// too (device data is not validated). NaN and infinities are stored as the format allows (FP8
// saturates). A layout with fp8_ds_mla and rope 0 gets its 128 rope bytes zeroed. T = 0 does
// nothing.
struct AppendKvArgs {
  ConstTensorView latent;        // [T, latent] f32 or bf16; columns contiguous, any row stride
  ConstTensorView rope;          // [T, rope] f32 or bf16, same dtype; absent when layout.rope is 0
  ConstTensorView slot_mapping;  // [T] int64 or int32
  KvCacheView kv;
  Fp8ScaleRule scale_rule = Fp8ScaleRule::kPowerOfTwo;
  std::string_view kernel = {};  // forces a kernel by name; empty: dispatch
};

// Appends T index keys. Same rules. `hadamard` multiplies the key by the Walsh-Hadamard matrix
// (Sylvester order) times dim^-0.5 first; dim must then be a power of two.
struct AppendIndexKeysArgs {
  ConstTensorView keys;          // [T, dim] f32 or bf16; columns contiguous, any row stride
  ConstTensorView slot_mapping;  // [T] int64 or int32
  KvCacheView kv;
  Fp8ScaleRule scale_rule = Fp8ScaleRule::kPowerOfTwo;
  bool hadamard = false;
  std::string_view kernel = {};
};

// Dequantising gather of position ranges into contiguous rows: for range i,
//   out[out_starts[i] + j, :] = latent | rope of request request_ids[i] at position starts[i] + j,
//   0 <= j < lengths[i].
// Rows of `out` outside the ranges keep their bytes. A negative length counts as 0; a position
// whose block is negative, beyond the table or beyond num_blocks gives a row of zeros. Output rows
// at or beyond the extent of `out` are skipped.
struct GatherKvArgs {
  KvCacheView kv;
  ConstTensorView block_table;  // [R, max_blocks] int32; columns contiguous
  ConstTensorView request_ids;  // [N] int32; negative or >= R: range is skipped
  ConstTensorView starts;       // [N] int32, positions
  ConstTensorView lengths;      // [N] int32
  ConstTensorView out_starts;   // [N] int32, rows of out
  TensorView out;               // [rows, latent + rope] bf16 or f32; columns contiguous
  std::string_view kernel = {};
};

Status append_kv(const Context& context, const AppendKvArgs& args, const Launch& launch = {});
Status append_index_keys(const Context& context, const AppendIndexKeysArgs& args,
                         const Launch& launch = {});
Status gather_kv(const Context& context, const GatherKvArgs& args, const Launch& launch = {});

// Bytes of workspace that the call needs; depends on shapes and maxima only and grows with every
// extent.
Result<int64_t> workspace_bytes(const Context& context, const AppendKvArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const AppendIndexKeysArgs& args);
Result<int64_t> workspace_bytes(const Context& context, const GatherKvArgs& args);

Explanation explain(const Context& context, const AppendKvArgs& args);
Explanation explain(const Context& context, const AppendIndexKeysArgs& args);
Explanation explain(const Context& context, const GatherKvArgs& args);

}  // namespace lacuna
