// One causal sequence of bf16 rows. Its masks are random: no tile of keys is free of chosen ones,
// which is the most that a mask can cost.
#include "benchmarks/mha_gpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "core/check.h"
#include "core/rng.h"

namespace lacuna::bench {
namespace {

// Sets of inputs of a shape: so many that they come from memory again when their turn comes again.
constexpr int64_t kSetBytes = int64_t{256} << 20;
constexpr int64_t kSetsMax = 60;

struct Shape {
  int64_t heads;
  int64_t d_qk;
  int64_t topk;
  int64_t rows;
  int64_t context;

  int64_t first_position() const { return context - rows; }
  // A row stride is a multiple of four words.
  int64_t mask_words() const { return topk == 0 ? 0 : (context + 127) / 128 * 4; }
};

// Exactly min(topk, visible) random visible keys a row (Floyd's sampling).
std::vector<int32_t> make_mask(const Shape& shape) {
  std::vector<int32_t> mask(shape.rows * shape.mask_words());
  uint64_t draw = 0;
  std::array<uint32_t, 4> bits = {};
  for (int64_t row = 0; row < shape.rows; ++row) {
    int32_t* words = mask.data() + row * shape.mask_words();
    const int64_t visible = shape.first_position() + row + 1;
    for (int64_t last = visible - std::min(shape.topk, visible); last < visible; ++last) {
      bits = draw % 4 == 0 ? philox4x32(19, draw / 4) : bits;
      int64_t key = static_cast<int64_t>(bits[draw++ % 4] % static_cast<uint64_t>(last + 1));
      key = (static_cast<uint32_t>(words[key / 32]) >> key % 32 & 1u) != 0 ? last : key;
      words[key / 32] =
          static_cast<int32_t>(static_cast<uint32_t>(words[key / 32]) | 1u << key % 32);
    }
  }
  return mask;
}

Status measure(GpuBench& gpu, const Shape& shape, const std::string& kernel, const TellLine& tell) {
  const int64_t d_v = mha_value_width(shape.d_qk);
  const int64_t q_elements = shape.rows * shape.heads * shape.d_qk;
  const int64_t k_elements = shape.context * shape.heads * shape.d_qk;
  const int64_t v_elements = shape.context * shape.heads * d_v;
  const int64_t out_elements = shape.rows * shape.heads * d_v;
  const int64_t set_bytes = 2 * (q_elements + k_elements + v_elements);
  const int64_t sets = std::clamp((kSetBytes + set_bytes - 1) / set_bytes, int64_t{1}, kSetsMax);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory q, gpu.random_bf16(sets * q_elements, 11));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory k, gpu.random_bf16(sets * k_elements, 3));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory v, gpu.random_bf16(sets * v_elements, 5));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory mask, gpu.upload(make_mask(shape)));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory out, gpu.allocate(2 * out_elements));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lse, gpu.allocate(4 * shape.rows * shape.heads));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lengths,
                          gpu.upload(std::vector<int32_t>{static_cast<int32_t>(shape.rows),
                                                          static_cast<int32_t>(shape.context)}));
  const Device where = gpu.where();
  const auto rows_of = [&](const DeviceMemory& memory, int64_t rows, int64_t width, int64_t set) {
    return view_of(static_cast<const Bf16*>(memory.data()) + set * rows * shape.heads * width,
                   {rows, shape.heads, width}, where);
  };
  const auto* seqlens = static_cast<const int32_t*>(lengths.data());
  LACUNA_ASSIGN_OR_RETURN(const Subject subject, gpu.subject([&](int64_t i) {
    const int64_t set = i % sets;
    MhaArgs args = {
        .q = rows_of(q, shape.rows, shape.d_qk, set),
        .k = rows_of(k, shape.context, shape.d_qk, set),
        .v = rows_of(v, shape.context, d_v, set),
        .seqlens_q = view_of(seqlens, {1}, where),
        .seqlens_k = view_of(seqlens + 1, {1}, where),
        .softmax_scale = 1 / std::sqrt(static_cast<double>(shape.d_qk)),
        .out = view_of(static_cast<Bf16*>(out.data()), {shape.rows, shape.heads, d_v}, where),
        .lse = view_of(static_cast<float*>(lse.data()), {shape.rows, shape.heads}, where),
        .kernel = kernel};
    if (shape.topk > 0) {
      args.mask = view_of(static_cast<const int32_t*>(mask.data()),
                          {shape.rows, shape.mask_words()}, where);
    }
    return args;
  }));
  LACUNA_ASSIGN_OR_RETURN(const int64_t nodes, gpu.nodes_for(subject));
  const double rows = static_cast<double>(shape.rows);
  // Row i sees first_position + i + 1 keys.
  const double pairs = rows * static_cast<double>(shape.first_position()) + rows * (rows + 1) / 2;
  return gpu.measure({subject}, {}, nodes,
                     {.op = "mha",
                      .heads = shape.heads,
                      .d_qk = shape.d_qk,
                      .topk = shape.topk,
                      .rows = shape.rows,
                      .context = shape.context,
                      .dtype = "bf16",
                      .bytes = static_cast<double>(set_bytes + 2 * out_elements +
                                                   4 * shape.rows * shape.heads + mask.bytes()),
                      .flops = 2 * pairs * static_cast<double>(shape.heads * (shape.d_qk + d_v))},
                     tell);
}

}  // namespace

Status measure_mha(GpuBench gpu, const MhaGrid& grid, const TellLine& tell) {
  for (const int64_t d_qk : grid.d_qk) {
    for (const int64_t context : grid.contexts) {
      for (const int64_t rows : grid.rows) {
        for (const int64_t heads : grid.heads) {
          for (const int64_t topk : grid.topk) {
            LACUNA_RETURN_IF_ERROR(measure(gpu,
                                           {.heads = heads,
                                            .d_qk = d_qk,
                                            .topk = topk,
                                            .rows = rows == 0 ? context : rows,
                                            .context = context},
                                           grid.kernel, tell));
          }
        }
      }
    }
  }
  return ok_status();
}

std::string mha_method(const GpuMethod& method) {
  return method_text(method, "2 to 60 calls, at least 2 ms", "each call has other rows and keys") +
         "; one causal sequence, the rows its last ones; topk: keys that a row's random mask lets "
         "through, 0: no mask; flops are those of all causal pairs, masked or not; floor 0: "
         "arithmetic is the bound";
}

}  // namespace lacuna::bench
