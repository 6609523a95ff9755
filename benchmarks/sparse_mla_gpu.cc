// Cold: every node of a graph has its own lists, drawn from all cached tokens, and between two
// graphs a buffer larger than L2 is rewritten. Warm: every node has the same lists.
#include "benchmarks/sparse_mla_gpu.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "benchmarks/gather_floor.h"
#include "benchmarks/peer_library.h"
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

struct Shape {
  int64_t heads;
  int64_t topk;
  int64_t rows;
  KvLayout layout;
};

class Bench {
 public:
  Bench(GpuBench gpu, const SparseMlaGrid& grid, const Peer* peer)
      : gpu_(std::move(gpu)), grid_(grid), peer_(peer) {}

  Status set_layout(const KvLayout& layout);
  Status measure(const Shape& shape, const TellLine& tell);

 private:
  // Gathers of these lists in all shapes that could be fastest.
  std::vector<Enqueue> gathers(const std::vector<ConstTensorView>& lists) const;

  GpuBench gpu_;
  const SparseMlaGrid& grid_;
  const Peer* peer_;
  DeviceMemory pool_;
  KvCacheView kv_;
};

// A pool of random tokens, written by the library.
Status Bench::set_layout(const KvLayout& layout) {
  const int64_t tokens = grid_.context > 0 ? grid_.context : kPoolBytes / layout.record_bytes() + 1;
  pool_ = DeviceMemory();
  LACUNA_ASSIGN_OR_RETURN(pool_, gpu_.allocate(tokens * layout.record_bytes()));
  kv_ = flat_rows(pool_.data(), layout, tokens, gpu_.where());
  const int64_t filled = std::min(tokens, kFilledTokens);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory values, gpu_.random_f32(filled * layout.d_qk(), 3));
  std::vector<int64_t> slots(filled);
  std::iota(slots.begin(), slots.end(), 0);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory device_slots, gpu_.upload(slots));
  const float* latent = static_cast<const float*>(values.data());
  AppendKvArgs append = {.latent = view_of(latent, {filled, layout.latent}, gpu_.where()),
                         .slot_mapping = view_of(static_cast<const int64_t*>(device_slots.data()),
                                                 {filled}, gpu_.where()),
                         .kv = kv_};
  if (layout.rope > 0) {
    append.rope = view_of(latent + filled * layout.latent, {filled, layout.rope}, gpu_.where());
  }
  LACUNA_RETURN_IF_ERROR(append_kv(gpu_.context(), append, {.stream = gpu_.stream()}));
  LACUNA_RETURN_IF_ERROR(gpu_.repeat(pool_.data(), filled * layout.record_bytes(), pool_.bytes()));
  return gpu_.synchronize();
}

std::vector<Enqueue> Bench::gathers(const std::vector<ConstTensorView>& lists) const {
  std::vector<Enqueue> gathers;
  const int64_t entries = lists[0].num_elements();
  const int sm_count = gpu_.device().sm_count;
  for (int config = 0; config < kGatherConfigs; ++config) {
    for (int64_t rows : {16, 32, 64, 128, 256, 512, 1024, 2048}) {
      const int64_t blocks = (entries + rows - 1) / rows;
      // Fewer blocks than half the SMs, or very many short ones, are never best.
      if ((rows > 16 && blocks < sm_count / 2) || blocks > 64 * sm_count) {
        continue;
      }
      const GatherShape shape = {.config = config, .rows_per_block = rows};
      gathers.push_back([this, &lists, shape](int64_t i, void* stream) {
        return gather_rows(kv_, lists[i], shape, gpu_.device(), stream);
      });
    }
  }
  return gathers;
}

Status Bench::measure(const Shape& shape, const TellLine& tell) {
  const int64_t d_qk = shape.layout.d_qk();
  const int64_t entries = shape.rows * shape.topk;
  const int64_t nodes =
      std::clamp(kGraphBytes / (entries * shape.layout.record_bytes()), kNodesMin, kNodesMax);
  std::vector<int32_t> ids(nodes * entries);
  for (int64_t i = 0; i < std::ssize(ids); i += 4) {
    const std::array<uint32_t, 4> bits = philox4x32(7, static_cast<uint64_t>(i));
    for (int64_t j = i; j < std::min<int64_t>(std::ssize(ids), i + 4); ++j) {
      ids[j] = static_cast<int32_t>(
          (static_cast<uint64_t>(bits[j - i]) * static_cast<uint64_t>(kv_.num_rows())) >> 32);
    }
  }
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lists_memory, gpu_.upload(ids));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory query,
                          gpu_.random_bf16(shape.rows * shape.heads * d_qk, 11));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory out,
                          gpu_.allocate(2 * shape.rows * shape.heads * shape.layout.latent));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lse, gpu_.allocate(4 * shape.rows * shape.heads));

  const Device where = gpu_.where();
  std::vector<ConstTensorView> lists;
  for (int64_t i = 0; i < nodes; ++i) {
    lists.push_back(view_of(static_cast<const int32_t*>(lists_memory.data()) + i * entries,
                            {shape.rows, shape.topk}, where));
  }
  const auto args = [&](int64_t i) {
    return SparseMlaArgs{
        .q =
            view_of(static_cast<const Bf16*>(query.data()), {shape.rows, shape.heads, d_qk}, where),
        .kv = kv_,
        .indices = lists[i],
        .softmax_scale = 1 / std::sqrt(192.0),
        .out = view_of(static_cast<Bf16*>(out.data()),
                       {shape.rows, shape.heads, shape.layout.latent}, where),
        .lse = view_of(static_cast<float*>(lse.data()), {shape.rows, shape.heads}, where),
        .kernel = grid_.kernel};
  };
  std::vector<Subject> subjects(1);
  LACUNA_ASSIGN_OR_RETURN(subjects[0], gpu_.subject(args));
  DeviceMemory peer_workspace;
  if (peer_ != nullptr) {
    LACUNA_RETURN_IF_ERROR(peer_->supports(args(0)));
    LACUNA_ASSIGN_OR_RETURN(peer_workspace, gpu_.allocate(peer_->workspace_bytes(args(0))));
    subjects.push_back(
        {.kernel = peer_->name(), .peer = peer_->name(), .enqueue = [&](int64_t i, void* stream) {
           return peer_->run(args(i), peer_workspace.data(), stream);
         }});
  }
  const double pairs = static_cast<double>(entries);
  const double query_rows = static_cast<double>(shape.rows * shape.heads);
  const double latent = static_cast<double>(shape.layout.latent);
  return gpu_.measure(subjects, gathers(lists), nodes,
                      {.op = "sparse_mla",
                       .heads = shape.heads,
                       .d_qk = d_qk,
                       .topk = shape.topk,
                       .rows = shape.rows,
                       .context = kv_.num_rows(),
                       .dtype = grid_.dtype,
                       // Keys and their ids, query, output and LSE.
                       .bytes = pairs * (static_cast<double>(shape.layout.record_bytes()) + 4) +
                                query_rows * (2 * static_cast<double>(d_qk) + 2 * latent + 4),
                       .flops = 2 * pairs * static_cast<double>(shape.heads) *
                                (static_cast<double>(d_qk) + latent)},
                      tell);
}

}  // namespace

Status measure_sparse_mla(GpuBench gpu, const SparseMlaGrid& grid, const Peer* peer,
                          const TellLine& tell) {
  Bench bench(std::move(gpu), grid, peer);
  for (const KvLayout& layout : grid.layouts) {
    LACUNA_RETURN_IF_ERROR(bench.set_layout(layout));
    for (const int64_t heads : grid.heads) {
      for (const int64_t topk : grid.topk) {
        for (const int64_t rows : grid.rows) {
          LACUNA_RETURN_IF_ERROR(
              bench.measure({.heads = heads, .topk = topk, .rows = rows, .layout = layout}, tell));
        }
      }
    }
  }
  return ok_status();
}

std::string sparse_mla_method(const GpuMethod& method) {
  return method_text(method, "10 to 60 calls",
                     "each call has its own lists of random rows out of the whole context") +
         "; floor: the fastest of the gather-only kernels on the same lists, taking turns with the "
         "subject";
}

}  // namespace lacuna::bench
