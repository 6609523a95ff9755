// Mixture of experts: the router and the experts' gated MLPs. Rows are grouped by expert, so that
// each expert's weights are read once a chunk; sums over a row's experts run in ascending order of
// expert, whatever the threads do.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "backends/cpu/fp8_weights.h"
#include "backends/cpu/gemm.h"
#include "backends/cpu/kernels.h"
#include "backends/cpu/ranges.h"
#include "core/workspace.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/moe.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/silu-inl.h"
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

// hidden = silu(gate) * up over n elements; rounded through bf16 when asked, as a bf16 GEMM would
// receive it. gate is overwritten.
void activate(float* gate, const float* up, int64_t n, bool round_bf16, float* hidden) {
  if (!round_bf16) {
    silu_mul_row(gate, up, hidden, n);
    return;
  }
  constexpr int64_t kBlock = 256;
  Bf16 rounded[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    silu_mul_row(gate + i, up + i, rounded, count);
    widen(rounded, count, hidden + i);
  }
}

// out += weight * x.
void add_scaled(const float* x, float weight, int64_t n, float* out) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto weight_v = hn::Set(d, weight);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(hn::MulAdd(weight_v, hn::LoadU(d, x + i), hn::LoadU(d, out + i)), d, out + i);
  }
  for (; i < n; ++i) {
    out[i] += weight * x[i];
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(activate);
HWY_EXPORT(add_scaled);

// ---- Router ----

// Scores are kept on the stack for this many experts; those of further ones are computed anew when
// they are asked for (no released model has more than 384).
constexpr int64_t kCachedExperts = 1024;

class Router {
 public:
  Router(const MoeRouteArgs& args, int64_t t)
      : logits_(args.logits.as<float>() + t * args.logits.strides[0]),
        bias_(args.bias.as<float>()),
        group_size_(args.logits.shape[1] / args.num_groups) {
    const int64_t cached = std::min(args.logits.shape[1], kCachedExperts);
    for (int64_t e = 0; e < cached; ++e) {
      choice_[e] = score(e) + bias_[e];
    }
  }

  float score(int64_t e) const { return 1.0f / (1.0f + std::exp(-logits_[e])); }
  float choice(int64_t e) const { return e < kCachedExperts ? choice_[e] : score(e) + bias_[e]; }

  // Sum of the two largest choices of a group.
  float group_score(int64_t group) const {
    const int64_t begin = group * group_size_;
    float first = choice(begin);
    float second = choice(begin + 1);
    if (second > first) {
      std::swap(first, second);
    }
    for (int64_t e = begin + 2; e < begin + group_size_; ++e) {
      const float value = choice(e);
      if (value > first) {
        second = first;
        first = value;
      } else if (value > second) {
        second = value;
      }
    }
    return first + second;
  }

  int64_t group_size() const { return group_size_; }

 private:
  const float* logits_;
  const float* bias_;
  int64_t group_size_;
  float choice_[kCachedExperts];
};

// The best of [0, n) that `allowed` lets pass, ties to the lowest; -1 when there is none.
template <class Value, class Allowed>
int64_t best_of(int64_t n, const Value& value, const Allowed& allowed) {
  int64_t best = -1;
  for (int64_t i = 0; i < n; ++i) {
    if ((best < 0 || value(i) > value(best)) && allowed(i)) {
      best = i;
    }
  }
  return best;
}

void route_row(const MoeRouteArgs& args, int64_t t) {
  const int64_t experts = args.logits.shape[1];
  const int64_t chosen = args.ids.shape[1];
  int32_t* ids = args.ids.as<int32_t>() + t * chosen;
  float* weights = args.weights.as<float>() + t * chosen;
  const Router router(args, t);
  // The rank of a group is the number of groups that beat it; only the first groups_kept compete.
  const auto group_competes = [&](int64_t group) {
    if (args.num_groups == 1) {
      return true;
    }
    const float mine = router.group_score(group);
    int better = 0;
    for (int64_t other = 0; other < args.num_groups; ++other) {
      const float theirs = router.group_score(other);
      better += theirs > mine || (theirs == mine && other < group) ? 1 : 0;
    }
    return better < args.groups_kept;
  };
  constexpr int64_t kCachedGroups = 64;
  bool competes[kCachedGroups];
  const int64_t cached_groups = std::min<int64_t>(args.num_groups, kCachedGroups);
  for (int64_t group = 0; group < cached_groups; ++group) {
    competes[group] = group_competes(group);
  }
  for (int64_t i = 0; i < chosen; ++i) {
    const int64_t best = best_of(
        experts, [&](int64_t e) { return router.choice(e); },
        [&](int64_t e) {
          const int64_t group = e / router.group_size();
          return (group < kCachedGroups ? competes[group] : group_competes(group)) &&
                 std::find(ids, ids + i, static_cast<int32_t>(e)) == ids + i;
        });
    ids[i] = static_cast<int32_t>(best);
  }
  std::sort(ids, ids + chosen);
  float sum = 0;
  for (int64_t i = 0; i < chosen; ++i) {
    weights[i] = ids[i] < 0 ? 0.0f : router.score(ids[i]);
    sum += weights[i];
  }
  const float factor = static_cast<float>(args.scale);
  for (int64_t i = 0; i < chosen; ++i) {
    weights[i] = (args.normalize ? weights[i] / (sum + 1e-20f) : weights[i]) * factor;
  }
}

// ---- Experts ----

// Entries (row, slot) of one expert that are multiplied together, and columns of weights a task.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 128;
// Rows that are grouped at once: bounds the hidden activations, which all experts' outputs need.
constexpr int64_t kHiddenFloats = int64_t{16} << 20;
constexpr int64_t kChunkRowsMin = 64;

struct Shape {
  int64_t rows;
  int64_t width;   // D
  int64_t hidden;  // F
  int64_t chosen;  // entries a row
  int64_t experts;
  bool fp8;  // weights
};

Shape shape_of(const MoeExpertsArgs& args) {
  return {.rows = args.x.shape[0],
          .width = args.x.shape[1],
          .hidden = args.experts[0].gate.shape[0],
          .chosen = args.ids.shape[1],
          .experts = static_cast<int64_t>(args.experts.size()),
          .fp8 = args.experts[0].gate.dtype == DType::kFloat8E4M3};
}

int64_t chunk_rows(const Shape& shape) {
  const int64_t entry_floats = std::max<int64_t>(1, shape.chosen * shape.hidden);
  return std::min(shape.rows, std::max(kHiddenFloats / entry_floats, kChunkRowsMin));
}

struct Tile {
  int32_t expert;
  int32_t begin;  // entries
  int32_t end;
};

struct Scratch {
  float* hidden;     // [entries of a chunk, F], in order of expert
  int32_t* entries;  // [entries]: row * chosen + slot, grouped by expert, ascending
  int32_t* offsets;  // [experts + 1]
  Tile* tiles;       // at most one a full tile of entries and one a rest of each expert
  float* per_worker;
  int64_t per_worker_floats;
  int64_t used_bytes;
};

// Both phases fit: gathered rows, gate and up; or the outputs of a panel. Widened weights too.
int64_t worker_floats(const Shape& shape) {
  const int64_t gather = round_up(kTileRows * shape.width, 16) + 2 * kTileRows * kTileColumns +
                         product_scratch(kTileRows, kTileColumns, shape.width);
  const int64_t scatter =
      kTileRows * kTileColumns + product_scratch(kTileRows, kTileColumns, shape.hidden);
  const int64_t fp8 = shape.fp8 ? kTileColumns * std::max(shape.width, shape.hidden) : 0;
  return std::max(gather, scatter) + fp8;
}

Scratch carve(const Shape& shape, const DeviceInfo& device, Workspace workspace) {
  const int64_t entries = shape.rows * shape.chosen;
  Scratch scratch;
  // Bounds the entries of a chunk and, unlike their number, grows with every extent.
  scratch.hidden = workspace.take<float>(
      std::min(entries * shape.hidden,
               std::max(kHiddenFloats, kChunkRowsMin * shape.chosen * shape.hidden)));
  scratch.entries = workspace.take<int32_t>(entries);
  scratch.offsets = workspace.take<int32_t>(shape.experts + 1);
  scratch.tiles = workspace.take<Tile>(entries / kTileRows + shape.experts);
  scratch.per_worker_floats = worker_floats(shape);
  scratch.per_worker = workspace.take<float>(scratch.per_worker_floats * device.num_threads);
  scratch.used_bytes = workspace.used_bytes();
  return scratch;
}

// Sorts the entries of rows [begin, end) by expert (ids that name none are left out) and cuts each
// expert's into tiles. Returns the number of tiles.
int64_t group_by_expert(const MoeExpertsArgs& args, const Shape& shape, int64_t begin, int64_t end,
                        const Scratch& scratch) {
  const int32_t* ids = args.ids.as<int32_t>();
  int32_t* offsets = scratch.offsets;
  std::fill_n(offsets, shape.experts + 1, 0);
  for (int64_t entry = begin * shape.chosen; entry < end * shape.chosen; ++entry) {
    if (ids[entry] >= 0 && ids[entry] < shape.experts) {
      ++offsets[ids[entry] + 1];
    }
  }
  int64_t num_tiles = 0;
  for (int64_t e = 0; e < shape.experts; ++e) {
    offsets[e + 1] += offsets[e];
    for (int64_t at = offsets[e]; at < offsets[e + 1]; at += kTileRows) {
      scratch.tiles[num_tiles++] = {
          static_cast<int32_t>(e), static_cast<int32_t>(at),
          static_cast<int32_t>(std::min<int64_t>(at + kTileRows, offsets[e + 1]))};
    }
  }
  // offsets[e] becomes the place of the next entry of expert e.
  for (int64_t entry = begin * shape.chosen; entry < end * shape.chosen; ++entry) {
    if (ids[entry] >= 0 && ids[entry] < shape.experts) {
      scratch.entries[offsets[ids[entry]]++] = static_cast<int32_t>(entry);
    }
  }
  return num_tiles;
}

// a [m, k] (f32, contiguous) times rows [column, column + n) of `weight`, transposed.
Status multiply_panel(const float* a, int64_t m, const ConstTensorView& weight,
                      const ConstTensorView& scale, int64_t column, int64_t n, float* c,
                      float* scratch) {
  ConstTensorView rows = weight.slice(0, column, n);
  const int64_t k = weight.shape[1];
  if (weight.dtype == DType::kFloat8E4M3) {
    widen_fp8_rows(weight, scale, column, n, scratch);
    rows = view_of(static_cast<const float*>(scratch), {n, k});
    scratch += n * k;
  }
  return multiply({.m = m,
                   .n = n,
                   .k = k,
                   .a = a,
                   .a_stride = k,
                   .b = rows.data,
                   .b_dtype = rows.dtype,
                   .b_stride = k,
                   .c = c,
                   .c_stride = n},
                  scratch);
}

// Hidden activations of one tile, columns [column, column + n).
Status compute_hidden(const MoeExpertsArgs& args, const Shape& shape, const Scratch& scratch,
                      const Tile& tile, int64_t column, int64_t n, float* mine) {
  const int64_t rows = tile.end - tile.begin;
  float* x = mine;
  float* gate = x + round_up(kTileRows * shape.width, 16);
  float* up = gate + kTileRows * kTileColumns;
  float* rest = up + kTileRows * kTileColumns;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = scratch.entries[tile.begin + i] / shape.chosen;
    const ConstTensorView from = args.x.slice(0, row, 1);
    widen_rows(from.data, from.dtype, 0, 1, shape.width, x + i * shape.width);
  }
  const ExpertWeights& expert = args.experts[tile.expert];
  LACUNA_RETURN_IF_ERROR(
      multiply_panel(x, rows, expert.gate, expert.gate_scale, column, n, gate, rest));
  LACUNA_RETURN_IF_ERROR(multiply_panel(x, rows, expert.up, expert.up_scale, column, n, up, rest));
  for (int64_t i = 0; i < rows; ++i) {
    HWY_DYNAMIC_DISPATCH(activate)
    (gate + i * n, up + i * n, n, args.x.dtype == DType::kBFloat16,
     scratch.hidden + (tile.begin + i) * shape.hidden + column);
  }
  return ok_status();
}

// Columns [column, column + n) of the outputs of rows [begin, end): tile after tile, in ascending
// order of expert.
Status compute_outputs(const MoeExpertsArgs& args, const Shape& shape, const Scratch& scratch,
                       int64_t begin, int64_t end, int64_t num_tiles, int64_t column, int64_t n,
                       float* mine) {
  float* product = mine;
  float* rest = product + kTileRows * kTileColumns;
  float* out = args.out.as<float>() + column;
  for (int64_t t = begin; t < end; ++t) {
    std::fill_n(out + t * args.out.strides[0], n, 0.0f);
  }
  for (int64_t tile_idx = 0; tile_idx < num_tiles; ++tile_idx) {
    const Tile& tile = scratch.tiles[tile_idx];
    const int64_t rows = tile.end - tile.begin;
    const ExpertWeights& expert = args.experts[tile.expert];
    LACUNA_RETURN_IF_ERROR(multiply_panel(scratch.hidden + tile.begin * shape.hidden, rows,
                                          expert.down, expert.down_scale, column, n, product,
                                          rest));
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t entry = scratch.entries[tile.begin + i];
      HWY_DYNAMIC_DISPATCH(add_scaled)
      (product + i * n, args.weights.as<float>()[entry], n,
       out + entry / shape.chosen * args.out.strides[0]);
    }
  }
  return ok_status();
}

int64_t moe_experts_workspace(const MoeExpertsArgs& args, const DeviceInfo& device) {
  return carve(shape_of(args), device, Workspace()).used_bytes;
}

Status moe_experts(const MoeExpertsArgs& args, const DeviceInfo& device, const Launch& launch) {
  const Shape shape = shape_of(args);
  const Scratch scratch = carve(shape, device, {launch.workspace, launch.workspace_bytes});
  const auto mine = [&](int worker) {
    return scratch.per_worker + worker * scratch.per_worker_floats;
  };
  const int64_t chunk = chunk_rows(shape);
  FirstFailure failure;
  for (int64_t begin = 0; begin < shape.rows; begin += chunk) {
    const int64_t end = std::min(begin + chunk, shape.rows);
    const int64_t num_tiles = group_by_expert(args, shape, begin, end, scratch);
    const int64_t hidden_panels = div_up(shape.hidden, kTileColumns);
    device.thread_pool->parallel_for(num_tiles * hidden_panels, [&](int64_t task, int worker) {
      const int64_t column = task % hidden_panels * kTileColumns;
      failure.note(compute_hidden(args, shape, scratch, scratch.tiles[task / hidden_panels], column,
                                  std::min(kTileColumns, shape.hidden - column), mine(worker)));
    });
    device.thread_pool->parallel_for(
        div_up(shape.width, kTileColumns), [&](int64_t task, int worker) {
          const int64_t column = task * kTileColumns;
          failure.note(compute_outputs(args, shape, scratch, begin, end, num_tiles, column,
                                       std::min(kTileColumns, shape.width - column), mine(worker)));
        });
  }
  return failure.take();
}

}  // namespace

const Kernel<MoeRouteArgs> kMoeRoute = {
    .name = "cpu/moe_route",
    .supports = supports_all<MoeRouteArgs>,
    .run =
        [](const MoeRouteArgs& args, const DeviceInfo& device, const Launch&) {
          // An exponential and a few passes an expert.
          parallel_ranges(device, args.logits.shape[0], grain_rows(64 * args.logits.shape[1]),
                          [&](int64_t begin, int64_t end, int) {
                            for (int64_t t = begin; t < end; ++t) {
                              route_row(args, t);
                            }
                          });
          return ok_status();
        },
};

const Kernel<MoeExpertsArgs> kMoeExperts = {
    .name = "cpu/moe_experts",
    .supports = supports_all<MoeExpertsArgs>,
    .workspace_bytes = moe_experts_workspace,
    .run = moe_experts,
};

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
