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
#include "core/device_memory.h"
#include "core/rng.h"
#include "ops/dispatch.h"

namespace lacuna::bench {
namespace {

constexpr int64_t kPoolBytes = int64_t{4} << 30;
constexpr int64_t kFilledTokens = 16384;  // random ones, repeated through the pool
constexpr int64_t kScrubBytes = int64_t{256} << 20;
// Nodes of a graph: enough to hide its start, as many as bring 128 MB.
constexpr int64_t kNodesMin = 10;
constexpr int64_t kNodesMax = 60;
constexpr int64_t kGraphBytes = int64_t{256} << 20;
constexpr int64_t kFloorRounds = 3;

struct Shape {
  int64_t heads;
  int64_t topk;
  int64_t rows;
  KvLayout layout;
};

Result<KvLayout> layout_of(const std::string& dtype, int64_t d_qk) {
  if (d_qk != 576 && d_qk != 512) {
    return invalid_argument("d_qk: " + std::to_string(d_qk) +
                            ", expected 576 (latent 512, rope 64) or 512 (latent 512)");
  }
  if (dtype == "bf16") {
    return KvLayout::latent_bf16(512, d_qk - 512);
  }
  if (dtype == "f32") {
    return KvLayout::latent_f32(512, d_qk - 512);
  }
  if (dtype == "fp8_ds_mla") {
    return KvLayout::fp8_ds_mla(d_qk - 512);
  }
  return invalid_argument("dtype: \"" + dtype + "\", expected bf16, f32 or fp8_ds_mla");
}

// Calls visit(i, value) with values uniform in [-1, 1).
template <class Visit>
void for_random(int64_t count, uint64_t seed, Visit&& visit) {
  for (int64_t i = 0; i < count; i += 4) {
    const std::array<uint32_t, 4> bits = philox4x32(seed, static_cast<uint64_t>(i));
    for (int64_t j = i; j < std::min(count, i + 4); ++j) {
      visit(j, static_cast<float>(bits[j - i] >> 8) * 0x1p-23f - 1.0f);
    }
  }
}

class Bench {
 public:
  Bench(const Context& context, const DeviceInfo& device, const SparseMlaGrid& grid,
        const Peer* peer, const Runtime* runtime, GpuTimer timer)
      : context_(context),
        device_(device),
        grid_(grid),
        peer_(peer),
        runtime_(runtime),
        timer_(std::move(timer)) {}

  Status set_layout(const KvLayout& layout);
  Status measure(const Shape& shape, std::vector<SparseMlaTime>* lines,
                 const std::function<void(const SparseMlaTime&)>& tell);

 private:
  Result<DeviceMemory> allocate(int64_t bytes) {
    return DeviceMemory::allocate(runtime_, device_.device.index, bytes);
  }
  Status upload(void* to, const void* from, int64_t bytes) {
    LACUNA_RETURN_IF_ERROR(runtime_->copy(to, from, bytes, timer_.stream()));
    return runtime_->synchronize(device_.device.index, timer_.stream());
  }
  Result<std::vector<Timing>> time(const std::vector<Enqueue>& subjects, int64_t nodes,
                                   int64_t rounds, bool cold);
  // The fastest shape of the gather for these lists.
  Result<GatherShape> best_gather(const std::vector<ConstTensorView>& lists, int64_t nodes,
                                  bool cold);

  const Context& context_;
  const DeviceInfo& device_;
  const SparseMlaGrid& grid_;
  const Peer* peer_;
  const Runtime* runtime_;
  GpuTimer timer_;
  DeviceMemory pool_;
  DeviceMemory scrub_;
  KvCacheView kv_;
};

// A pool of random tokens, written by the library.
Status Bench::set_layout(const KvLayout& layout) {
  const int64_t tokens = grid_.context > 0 ? grid_.context : kPoolBytes / layout.record_bytes() + 1;
  pool_ = DeviceMemory();
  LACUNA_ASSIGN_OR_RETURN(pool_, allocate(tokens * layout.record_bytes()));
  kv_ = flat_rows(pool_.data(), layout, tokens, device_.device);
  const int64_t filled = std::min(tokens, kFilledTokens);
  std::vector<float> values(filled * layout.d_qk());
  for_random(static_cast<int64_t>(values.size()), 3, [&](int64_t i, float x) { values[i] = x; });
  std::vector<int64_t> slots(filled);
  std::iota(slots.begin(), slots.end(), 0);
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory on_device,
                          allocate(static_cast<int64_t>(4 * values.size() + 8 * slots.size())));
  auto* device_slots = static_cast<int64_t*>(on_device.data());
  auto* device_values = reinterpret_cast<float*>(device_slots + filled);
  LACUNA_RETURN_IF_ERROR(upload(device_slots, slots.data(), 8 * filled));
  LACUNA_RETURN_IF_ERROR(
      upload(device_values, values.data(), static_cast<int64_t>(4 * values.size())));
  AppendKvArgs append = {
      .latent = view_of(static_cast<const float*>(device_values), {filled, layout.latent},
                        device_.device),
      .slot_mapping = view_of(static_cast<const int64_t*>(device_slots), {filled}, device_.device),
      .kv = kv_};
  if (layout.rope > 0) {
    append.rope = view_of(static_cast<const float*>(device_values + filled * layout.latent),
                          {filled, layout.rope}, device_.device);
  }
  LACUNA_RETURN_IF_ERROR(append_kv(context_, append, {.stream = timer_.stream()}));
  auto* bytes = static_cast<char*>(pool_.data());
  for (int64_t at = filled; at < tokens; at += filled) {
    LACUNA_RETURN_IF_ERROR(runtime_->copy(bytes + at * layout.record_bytes(), bytes,
                                          std::min(filled, tokens - at) * layout.record_bytes(),
                                          timer_.stream()));
  }
  if (scrub_.bytes() == 0) {
    LACUNA_ASSIGN_OR_RETURN(scrub_, allocate(kScrubBytes));
  }
  return runtime_->synchronize(device_.device.index, timer_.stream());
}

Result<std::vector<Timing>> Bench::time(const std::vector<Enqueue>& subjects, int64_t nodes,
                                        int64_t rounds, bool cold) {
  const Enqueue before = [&](int64_t, void* stream) {
    return cold ? runtime_->fill_bytes(scrub_.data(), 1, scrub_.bytes(), stream) : ok_status();
  };
  return grid_.graphs ? timer_.time_graphs(subjects, nodes, rounds, before)
                      : timer_.time_events(subjects, rounds, before);
}

Result<GatherShape> Bench::best_gather(const std::vector<ConstTensorView>& lists, int64_t nodes,
                                       bool cold) {
  GatherShape best;
  double best_us = 0;
  const int64_t entries = lists[0].num_elements();
  for (int config = 0; config < kGatherConfigs; ++config) {
    for (int64_t rows : {16, 32, 64, 128, 256, 512, 1024, 2048}) {
      const int64_t blocks = (entries + rows - 1) / rows;
      // Fewer blocks than half the SMs, or very many short ones, are never best.
      if ((rows > 16 && blocks < device_.sm_count / 2) || blocks > 64 * device_.sm_count) {
        continue;
      }
      const GatherShape shape = {.config = config, .rows_per_block = rows};
      const Enqueue gather = [&](int64_t i, void* stream) {
        return gather_rows(kv_, lists[cold ? i % std::ssize(lists) : 0], shape, device_, stream);
      };
      LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                              time({gather}, nodes, kFloorRounds, cold));
      if (best_us == 0 || timings[0].us_median < best_us) {
        best_us = timings[0].us_median;
        best = shape;
      }
    }
  }
  return best;
}

Status Bench::measure(const Shape& shape, std::vector<SparseMlaTime>* lines,
                      const std::function<void(const SparseMlaTime&)>& tell) {
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
  std::vector<Bf16> query(shape.rows * shape.heads * d_qk);
  for_random(std::ssize(query), 11, [&](int64_t i, float x) { query[i] = to_bf16(x); });
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lists_memory, allocate(4 * std::ssize(ids)));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory query_memory, allocate(2 * std::ssize(query)));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory out,
                          allocate(2 * shape.rows * shape.heads * shape.layout.latent));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory lse, allocate(4 * shape.rows * shape.heads));
  LACUNA_RETURN_IF_ERROR(upload(lists_memory.data(), ids.data(), 4 * std::ssize(ids)));
  LACUNA_RETURN_IF_ERROR(upload(query_memory.data(), query.data(), 2 * std::ssize(query)));

  const Device where = device_.device;
  std::vector<ConstTensorView> lists;
  for (int64_t i = 0; i < nodes; ++i) {
    lists.push_back(view_of(static_cast<const int32_t*>(lists_memory.data()) + i * entries,
                            {shape.rows, shape.topk}, where));
  }
  SparseMlaArgs args = {
      .q = view_of(static_cast<const Bf16*>(query_memory.data()), {shape.rows, shape.heads, d_qk},
                   where),
      .kv = kv_,
      .indices = lists[0],
      .softmax_scale = 1 / std::sqrt(192.0),
      .out = view_of(static_cast<Bf16*>(out.data()), {shape.rows, shape.heads, shape.layout.latent},
                     where),
      .lse = view_of(static_cast<float*>(lse.data()), {shape.rows, shape.heads}, where),
      .kernel = grid_.kernel};
  const Explanation explanation = explain(context_, args);
  LACUNA_RETURN_IF_ERROR(explanation.status);
  LACUNA_ASSIGN_OR_RETURN(const int64_t workspace_size, workspace_bytes(context_, args));
  LACUNA_ASSIGN_OR_RETURN(const DeviceMemory workspace, allocate(workspace_size));
  DeviceMemory peer_workspace;
  if (peer_ != nullptr) {
    LACUNA_RETURN_IF_ERROR(peer_->supports(args));
    LACUNA_ASSIGN_OR_RETURN(peer_workspace, allocate(peer_->workspace_bytes(args)));
  }

  for (const bool cold : {true, false}) {
    LACUNA_ASSIGN_OR_RETURN(const GatherShape gather, best_gather(lists, nodes, cold));
    const auto list = [&](int64_t i) { return lists[cold ? i % std::ssize(lists) : 0]; };
    std::vector<Enqueue> subjects = {
        [&](int64_t i, void* stream) {
          SparseMlaArgs call = args;
          call.indices = list(i);
          return sparse_mla(
              context_, call,
              {.stream = stream, .workspace = workspace.data(), .workspace_bytes = workspace_size});
        },
        [&](int64_t i, void* stream) {
          return gather_rows(kv_, list(i), gather, device_, stream);
        }};
    if (peer_ != nullptr) {
      subjects.push_back([&](int64_t i, void* stream) {
        SparseMlaArgs call = args;
        call.indices = list(i);
        return peer_->run(call, peer_workspace.data(), stream);
      });
    }
    LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                            time(subjects, nodes, grid_.rounds, cold));
    const double pairs = static_cast<double>(entries);
    const double query_rows = static_cast<double>(shape.rows * shape.heads);
    const double latent = static_cast<double>(shape.layout.latent);
    SparseMlaTime line = {.kernel = explanation.kernel,
                          .peer = "none",
                          .heads = shape.heads,
                          .d_qk = d_qk,
                          .topk = shape.topk,
                          .rows = shape.rows,
                          .context = kv_.num_rows(),
                          .dtype = grid_.dtype,
                          .cache = cold ? "cold" : "warm",
                          .timing = timings[0],
                          .floor_us = timings[1].us_median,
                          // Keys and their ids, query, output and LSE.
                          .bytes = pairs * (static_cast<double>(shape.layout.record_bytes()) + 4) +
                                   query_rows * (2 * static_cast<double>(d_qk) + 2 * latent + 4),
                          .flops = 2 * pairs * static_cast<double>(shape.heads) *
                                   (static_cast<double>(d_qk) + latent)};
    lines->push_back(line);
    tell(line);
    if (peer_ != nullptr) {
      line.kernel = peer_->name();
      line.peer = peer_->name();
      line.timing = timings[2];
      lines->push_back(line);
      tell(line);
    }
  }
  return ok_status();
}

}  // namespace

Result<std::vector<SparseMlaTime>> measure_sparse_mla(
    const Context& context, const DeviceInfo& device, const SparseMlaGrid& grid, const Peer* peer,
    const std::function<void(const SparseMlaTime&)>& tell) {
  const Runtime* runtime = nullptr;
  for (const Backend* backend : context.state().backends) {
    if (runtime == nullptr && backend->device_kind == device.device.kind) {
      runtime = backend->runtime;
    }
  }
  if (runtime == nullptr) {
    return unsupported("no backend serves " + device.name);
  }
  LACUNA_ASSIGN_OR_RETURN(GpuTimer timer, GpuTimer::create(runtime, device.device.index));
  Bench bench(context, device, grid, peer, runtime, std::move(timer));
  std::vector<SparseMlaTime> lines;
  for (const int64_t d_qk : grid.d_qk) {
    LACUNA_ASSIGN_OR_RETURN(const KvLayout layout, layout_of(grid.dtype, d_qk));
    LACUNA_RETURN_IF_ERROR(bench.set_layout(layout));
    for (const int64_t heads : grid.heads) {
      for (const int64_t topk : grid.topk) {
        for (const int64_t rows : grid.rows) {
          LACUNA_RETURN_IF_ERROR(bench.measure(
              {.heads = heads, .topk = topk, .rows = rows, .layout = layout}, &lines, tell));
        }
      }
    }
  }
  return lines;
}

std::string sparse_mla_method(const SparseMlaGrid& grid) {
  const std::string rounds = std::to_string(grid.rounds);
  return (grid.graphs ? "time a node of a graph of 10 to 60 calls, median, p10 and p90 of " +
                            rounds + " launches"
                      : "two events around one call, median, p10 and p90 of " + rounds + " calls") +
         "; cold: each call has its own lists of random rows out of the whole context, and 256 MB "
         "are rewritten before; warm: the same lists again and again; floor: the fastest of the "
         "gather-only kernels on the same lists, taking turns with the subject";
}

}  // namespace lacuna::bench
