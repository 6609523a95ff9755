// Cold: every node of a graph has its own lists, drawn from all cached tokens, and between two
// graphs a buffer larger than L2 is rewritten. Warm: every node has the same lists.
#include "benchmarks/sparse_mla_gpu.h"

#include <iterator>
#include <optional>
#include <utility>

#include "benchmarks/gather_floor.h"
#include "benchmarks/peer_library.h"
#include "benchmarks/sparse_mla_calls.h"
#include "core/check.h"

namespace lacuna::bench {
namespace {

class Bench {
 public:
  Bench(GpuBench gpu, const SparseMlaGrid& grid, const Peer* peer)
      : gpu_(std::move(gpu)), grid_(grid), peer_(peer) {}

  Status set_layout(const KvLayout& layout) {
    pool_ = SparseMlaPool();
    LACUNA_ASSIGN_OR_RETURN(pool_, make_sparse_mla_pool(gpu_, layout, grid_.context));
    return ok_status();
  }
  Status measure(int64_t heads, int64_t topk, std::optional<int64_t> count, int64_t rows,
                 const TellLine& tell);

 private:
  // Gathers of these lists in all shapes that could be fastest.
  std::vector<Enqueue> gathers(const std::vector<ConstTensorView>& lists) const;

  GpuBench gpu_;
  const SparseMlaGrid& grid_;
  const Peer* peer_;
  SparseMlaPool pool_;
};

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
        return gather_rows(pool_.kv, lists[i], shape, gpu_.device(), stream);
      });
    }
  }
  return gathers;
}

Status Bench::measure(int64_t heads, int64_t topk, std::optional<int64_t> count, int64_t rows,
                      const TellLine& tell) {
  const KvLayout& layout = pool_.kv.layout;
  LACUNA_ASSIGN_OR_RETURN(const SparseMlaCalls calls,
                          SparseMlaCalls::create(gpu_, pool_.kv, heads, topk, rows, count));
  const auto args = [&](int64_t i) { return calls.args(i, grid_.kernel); };
  std::vector<Subject> subjects(1);
  LACUNA_ASSIGN_OR_RETURN(subjects[0], gpu_.subject(args));
  DeviceMemory peer_workspace;
  if (peer_ != nullptr) {
    // A peer knows no counts: it finds the -1 that follow a row's entries.
    const auto peer_args = [&](int64_t i) {
      SparseMlaArgs without_counts = args(i);
      without_counts.valid_counts = {};
      return without_counts;
    };
    LACUNA_RETURN_IF_ERROR(peer_->supports(peer_args(0)));
    LACUNA_ASSIGN_OR_RETURN(peer_workspace, gpu_.allocate(peer_->workspace_bytes(peer_args(0))));
    subjects.push_back({.kernel = peer_->name(),
                        .peer = peer_->name(),
                        .enqueue = [this, peer_args, &peer_workspace](int64_t i, void* stream) {
                          return peer_->run(peer_args(i), peer_workspace.data(), stream);
                        }});
  }
  const double pairs = static_cast<double>(rows * count.value_or(topk));
  const double query_rows = static_cast<double>(rows * heads);
  const double latent = static_cast<double>(layout.latent);
  const double d_qk = static_cast<double>(layout.d_qk());
  return gpu_.measure(subjects, gathers(calls.lists()), std::ssize(calls.lists()),
                      {.op = count.has_value() ? "sparse_mla_count_" + std::to_string(*count)
                                               : std::string("sparse_mla"),
                       .heads = heads,
                       .d_qk = layout.d_qk(),
                       .topk = topk,
                       .rows = rows,
                       .context = pool_.kv.num_rows(),
                       .dtype = grid_.dtype,
                       // Keys and their ids, query, output and LSE.
                       .bytes = pairs * (static_cast<double>(layout.record_bytes()) + 4) +
                                query_rows * (2 * d_qk + 2 * latent + 4),
                       .flops = 2 * pairs * static_cast<double>(heads) * (d_qk + latent)},
                      tell);
}

}  // namespace

Status measure_sparse_mla(GpuBench gpu, const SparseMlaGrid& grid, const Peer* peer,
                          const TellLine& tell) {
  Bench bench(std::move(gpu), grid, peer);
  std::vector<std::optional<int64_t>> counts(grid.counts.begin(), grid.counts.end());
  if (counts.empty()) {
    counts.push_back(std::nullopt);
  }
  for (const KvLayout& layout : grid.layouts) {
    LACUNA_RETURN_IF_ERROR(bench.set_layout(layout));
    for (const int64_t heads : grid.heads) {
      for (const int64_t topk : grid.topk) {
        for (const std::optional<int64_t> count : counts) {
          for (const int64_t rows : grid.rows) {
            LACUNA_RETURN_IF_ERROR(bench.measure(heads, topk, count, rows, tell));
          }
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
