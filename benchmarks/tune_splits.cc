// A cut is forced by a context whose device has a table of one choice. Which cuts there are is the
// kernel's knowledge: counts of splits that it explains alike are one cut.
#include "benchmarks/tune_splits.h"

#include <memory>
#include <set>
#include <utility>

#include "benchmarks/sparse_mla_calls.h"
#include "core/check.h"

namespace lacuna::bench {
namespace {

constexpr const char* kKernel = "sm90/sparse_mla_small_head";
constexpr int64_t kSplitsMax = 64;  // the kernel's, of a row

// The bench's GPU alone, with this table.
Context context_with(const GpuBench& gpu, Tuning tuning) {
  auto state = std::make_shared<ContextState>();
  state->devices = {gpu.device()};
  state->devices[0].tuning = std::make_shared<const Tuning>(std::move(tuning));
  state->backends = gpu.context().state().backends;
  return Context::from_state(std::move(state));
}

Result<TunedShape> tune_shape(GpuBench& gpu, const SparseMlaCalls& calls, SplitChoice shape) {
  const auto args = [&calls](int64_t i) { return calls.args(i, kKernel); };
  // The kernel's own choice first, then each cut.
  std::vector<Enqueue> subjects;
  std::vector<int64_t> splits;
  std::set<std::string> cuts;
  std::string own_cut;
  constexpr int64_t kOwn = -1;
  static_assert(kLastWaveSplits == kOwn + 1);
  for (int64_t count = kOwn; count <= kSplitsMax; ++count) {
    Tuning tuning;
    if (count != kOwn) {
      shape.splits = count;
      tuning.sparse_mla_splits = {shape};
    }
    const Context context = context_with(gpu, std::move(tuning));
    const Explanation explanation = explain(context, args(0));
    LACUNA_RETURN_IF_ERROR(explanation.status);
    if (count == kOwn) {
      own_cut = explanation.detail;
    }
    // A count that does not fit leaves the kernel its own choice.
    if (!cuts.insert(explanation.detail).second) {
      continue;
    }
    LACUNA_ASSIGN_OR_RETURN(Subject subject, gpu.subject(context, args));
    subjects.push_back(std::move(subject.enqueue));
    splits.push_back(count);
  }
  if (subjects.size() < 2) {
    return internal_error(std::string(kKernel) + " takes no cut of " + std::to_string(shape.rows) +
                          " rows of " + std::to_string(shape.keys) + " keys from a table");
  }
  LACUNA_ASSIGN_OR_RETURN(const std::vector<Timing> timings,
                          gpu.time_cold(subjects, std::ssize(calls.lists())));
  size_t best = 1;
  for (size_t i = 2; i < timings.size(); ++i) {
    if (timings[i].us_median < timings[best].us_median) {
      best = i;
    }
  }
  shape.splits = splits[best];
  return TunedShape{.choice = shape,
                    .us = timings[best].us_median,
                    .own_cut = own_cut,
                    .own_us = timings[0].us_median,
                    .num_cuts = std::ssize(subjects) - 1};
}

}  // namespace

Status tune_splits(GpuBench gpu, const TuneGrid& grid,
                   const std::function<void(const TunedShape&)>& tell) {
  LACUNA_ASSIGN_OR_RETURN(const SparseMlaPool pool,
                          make_sparse_mla_pool(gpu, KvLayout::latent_bf16(512, 64), grid.context));
  for (const int64_t heads : grid.heads) {
    for (const int64_t topk : grid.topk) {
      for (const int64_t rows : grid.rows) {
        LACUNA_ASSIGN_OR_RETURN(const SparseMlaCalls calls,
                                SparseMlaCalls::create(gpu, pool.kv, heads, topk, rows));
        LACUNA_ASSIGN_OR_RETURN(
            const TunedShape tuned,
            tune_shape(gpu, calls, {.heads = heads, .rows = rows, .keys = topk}));
        tell(tuned);
      }
    }
  }
  return ok_status();
}

std::string tune_method(const GpuMethod& method) {
  return std::string(kKernel) + ", bf16, d 576: all cuts take turns, each a graph of 10 to 60 " +
         "calls with lists of their own, median of " + std::to_string(method.rounds) +
         " launches, 256 MB rewritten before each; the fastest cut";
}

}  // namespace lacuna::bench
