// Pools repeat the tokens that the host made; lists are drawn from all of them.
#include "benchmarks/sparse_mla_calls.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/check.h"
#include "core/rng.h"

namespace lacuna::bench {
namespace {

constexpr int64_t kPoolBytes = int64_t{4} << 30;
constexpr int64_t kFilledTokens = 16384;  // random ones, repeated through the pool
// Nodes of a graph: enough to hide its start, as many as bring 256 MB.
constexpr int64_t kNodesMin = 10;
constexpr int64_t kNodesMax = 60;
constexpr int64_t kGraphBytes = int64_t{256} << 20;

}  // namespace

Result<SparseMlaPool> make_sparse_mla_pool(GpuBench& gpu, const KvLayout& layout, int64_t context) {
  const int64_t tokens = context > 0 ? context : kPoolBytes / layout.record_bytes() + 1;
  SparseMlaPool pool;
  LACUNA_ASSIGN_OR_RETURN(pool.memory, gpu.allocate(tokens * layout.record_bytes()));
  pool.kv = flat_rows(pool.memory.data(), layout, tokens, gpu.where());
  const int64_t filled = std::min(tokens, kFilledTokens);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory values, gpu.random_f32(filled * layout.d_qk(), 3));
  std::vector<int64_t> slots(filled);
  std::iota(slots.begin(), slots.end(), 0);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory device_slots, gpu.upload(slots));
  const float* latent = static_cast<const float*>(values.data());
  AppendKvArgs append = {.latent = view_of(latent, {filled, layout.latent}, gpu.where()),
                         .slot_mapping = view_of(static_cast<const int64_t*>(device_slots.data()),
                                                 {filled}, gpu.where()),
                         .kv = pool.kv};
  if (layout.rope > 0) {
    append.rope = view_of(latent + filled * layout.latent, {filled, layout.rope}, gpu.where());
  }
  LACUNA_RETURN_IF_ERROR(append_kv(gpu.context(), append, {.stream = gpu.stream()}));
  LACUNA_RETURN_IF_ERROR(
      gpu.repeat(pool.memory.data(), filled * layout.record_bytes(), pool.memory.bytes()));
  LACUNA_RETURN_IF_ERROR(gpu.synchronize());
  return pool;
}

Result<SparseMlaCalls> SparseMlaCalls::create(GpuBench& gpu, const KvCacheView& kv, int64_t heads,
                                              int64_t topk, int64_t rows,
                                              std::optional<int64_t> count) {
  const int64_t d_qk = kv.layout.d_qk();
  const int64_t valid = count.value_or(topk);
  const int64_t bytes = rows * valid * kv.layout.record_bytes();
  const int64_t nodes = std::clamp(kGraphBytes / std::max<int64_t>(bytes, 1), kNodesMin, kNodesMax);
  std::vector<int32_t> ids(nodes * rows * valid);
  for (int64_t i = 0; i < std::ssize(ids); i += 4) {
    const std::array<uint32_t, 4> bits = philox4x32(7, static_cast<uint64_t>(i));
    for (int64_t j = i; j < std::min<int64_t>(std::ssize(ids), i + 4); ++j) {
      ids[j] = static_cast<int32_t>(
          (static_cast<uint64_t>(bits[j - i]) * static_cast<uint64_t>(kv.num_rows())) >> 32);
    }
  }
  std::vector<int32_t> wide_ids;
  std::vector<int32_t> counts;
  if (count.has_value()) {
    wide_ids.assign(nodes * rows * topk, -1);
    for (int64_t row = 0; row < nodes * rows; ++row) {
      std::copy_n(ids.begin() + row * valid, valid, wide_ids.begin() + row * topk);
    }
    counts.assign(rows, static_cast<int32_t>(valid));
  }
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory lists, gpu.upload(ids));
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory wide_lists, gpu.upload(wide_ids));
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory valid_counts, gpu.upload(counts));
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory query, gpu.random_bf16(rows * heads * d_qk, 11));
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory out, gpu.allocate(2 * rows * heads * kv.layout.latent));
  LACUNA_ASSIGN_OR_RETURN(DeviceMemory lse, gpu.allocate(4 * rows * heads));
  SparseMlaCalls calls;
  const Device where = gpu.where();
  calls.kv_ = kv;
  calls.q_ = view_of(static_cast<const Bf16*>(query.data()), {rows, heads, d_qk}, where);
  calls.out_ = view_of(static_cast<Bf16*>(out.data()), {rows, heads, kv.layout.latent}, where);
  calls.lse_ = view_of(static_cast<float*>(lse.data()), {rows, heads}, where);
  const auto views = [&](const DeviceMemory& of, int64_t width) {
    std::vector<ConstTensorView> views;
    for (int64_t i = 0; i < nodes; ++i) {
      views.push_back(
          view_of(static_cast<const int32_t*>(of.data()) + i * rows * width, {rows, width}, where));
    }
    return views;
  };
  calls.lists_ = views(lists, valid);
  calls.indices_ = count.has_value() ? views(wide_lists, topk) : calls.lists_;
  if (count.has_value()) {
    calls.valid_counts_ = view_of(static_cast<const int32_t*>(valid_counts.data()), {rows}, where);
  }
  for (DeviceMemory* memory : {&lists, &wide_lists, &valid_counts, &query, &out, &lse}) {
    calls.memory_.push_back(std::move(*memory));
  }
  return calls;
}

SparseMlaArgs SparseMlaCalls::args(int64_t i, std::string_view kernel) const {
  return {.q = q_,
          .kv = kv_,
          .indices = indices_[i],
          .valid_counts = valid_counts_,
          .softmax_scale = 1 / std::sqrt(192.0),
          .out = out_,
          .lse = lse_,
          .kernel = kernel};
}

}  // namespace lacuna::bench
