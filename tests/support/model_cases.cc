// Grids, data and tolerances of the operations on rows, of rope and of the router.
#include "tests/support/model_cases.h"

#include <cmath>
#include <limits>

#include "tests/reference/model_ops.h"
#include "tests/support/compare.h"

namespace lacuna::testing {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;

// Unit roundoff: half an ulp, relative.
double rounding_of(DType dtype) { return dtype == kBf16 ? 0x1p-8 : 0x1p-24; }

// The error of a float32 sum of n terms, relative to the sum of their magnitudes: random-walk
// growth of the rounding errors of one chain, with room. Kernels sum in many shorter ones.
double sum_error(int64_t n) { return 0x1p-23 * (4 + std::sqrt(static_cast<double>(n))); }

TensorOptions rows_of(int64_t width, int64_t gap) {
  return {.strides = {width + gap, 1}, .offset = gap};
}

std::string size_name(int64_t rows, int64_t width, int64_t gap) {
  return "_t" + std::to_string(rows) + "_d" + std::to_string(width) +
         (gap > 0 ? "_gap" + std::to_string(gap) : "");
}

std::string short_name(DType dtype) { return dtype == kBf16 ? "_bf16" : "_f32"; }

// Widths about a vector, a warp and a block of threads, and those of models.
constexpr int64_t kWidths[] = {1, 3, 4, 5, 16, 33, 128, 576, 1028, 2049};
constexpr int64_t kRowCounts[] = {0, 1, 3, 9, 64};

}  // namespace

// ------------------------------------------------------------------------------------ embedding

std::vector<EmbeddingCase> embedding_cases() {
  std::vector<EmbeddingCase> cases;
  const auto add = [&](EmbeddingCase c) {
    c.seed = cases.size() + 1;
    c.name = "plain" + size_name(c.no_rows ? 0 : 8, c.width, c.gap) + short_name(c.table);
    cases.push_back(std::move(c));
  };
  for (DType table : {kF32, kBf16}) {
    for (int64_t width : kWidths) {
      for (int64_t gap : {0, 3, 8}) {
        add({.width = width, .table = table, .gap = gap});
      }
    }
    add({.table = table, .no_rows = true});
  }
  return cases;
}

EmbeddingProblem::EmbeddingProblem(const EmbeddingCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const EmbeddingCase& c = case_;
  Random random(c.seed);
  constexpr int32_t kVocabulary = 5;
  const std::vector<int32_t> list = {4, -1, 0, kVocabulary, 2, 2147483647, -2147483647 - 1, 4};
  ids = buffers.ints("ids", c.no_rows ? std::vector<int32_t>() : list, {.strides = {3}});
  table = buffers.tensor("table", Role::kInput, c.table, {kVocabulary, c.width},
                         {.strides = {}, .offset = c.gap});
  table.fill([&] { return random.bell(); });
  out =
      buffers.tensor("out", Role::kOutput, kF32, {ids.extent(0), c.width}, rows_of(c.width, c.gap));
}

EmbeddingArgs EmbeddingProblem::args(Side side) const {
  EmbeddingArgs args;
  args.ids = ids.view(side);
  args.table = table.view(side);
  args.out = out.view(side);
  return args;
}

std::string EmbeddingProblem::verify() {
  return compare("out", out.result(), reference::embedding(args(Side::kHost)), {});
}

// ---------------------------------------------------------------------------------------- norms

namespace {

std::string norm_name(const NormCase& c, const std::string& name) {
  return name + size_name(c.rows, c.width, c.gap) + short_name(c.weight) + short_name(c.out) +
         (c.add ? "_add" : "");
}

// The cases that both norms share.
std::vector<NormCase> norm_cases() {
  std::vector<NormCase> cases;
  for (int64_t rows : kRowCounts) {
    for (int64_t width : kWidths) {
      // Each width meets both of every choice over the row counts.
      const int64_t turn = rows + width;
      cases.push_back({.rows = rows,
                       .width = width,
                       .weight = turn % 2 == 0 ? kBf16 : kF32,
                       .out = turn / 2 % 2 == 0 ? kBf16 : kF32,
                       .gap = turn % 3 == 0   ? 0
                              : turn % 3 == 1 ? 8
                                              : 3,
                       .add = turn / 4 % 2 == 0});
    }
  }
  for (DType weight : {kF32, kBf16}) {
    for (DType out : {kF32, kBf16}) {
      for (bool add : {false, true}) {
        for (int64_t gap : {0, 5}) {
          cases.push_back(
              {.rows = 2, .width = 512, .weight = weight, .out = out, .gap = gap, .add = add});
        }
        // As wide as models, and beyond what a block of threads keeps.
        cases.push_back({.rows = 2, .width = 7168, .weight = weight, .out = out, .add = add});
        cases.push_back({.rows = 2, .width = 9216, .weight = weight, .out = out, .add = add});
      }
    }
  }
  cases.push_back({.rows = 2, .width = 8197, .out = kF32, .add = true});
  return cases;
}

}  // namespace

std::vector<NormCase> rms_norm_cases() {
  std::vector<NormCase> cases = norm_cases();
  for (NormCase& c : cases) {
    c.name = norm_name(c, "plain");
  }
  const auto add = [&](NormCase c, const std::string& name) {
    c.name = norm_name(c, name);
    cases.push_back(std::move(c));
  };
  add({.scale = 0}, "zeros");
  add({.scale = 1e-4f, .eps = 1e-5}, "below_eps");
  add({.scale = 1e17f}, "large");
  for (size_t i = 0; i < cases.size(); ++i) {
    cases[i].seed = i + 1;
  }
  return cases;
}

RmsNormProblem::RmsNormProblem(const NormCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const NormCase& c = case_;
  Random random(c.seed);
  // Written back only with `add`.
  x = buffers.tensor("x", c.add ? Role::kInOut : Role::kInput, kF32, {c.rows, c.width},
                     rows_of(c.width, c.gap));
  x.fill([&] { return 3 * c.scale * random.bell(); });
  if (c.add) {
    add = buffers.tensor("add", Role::kInput, kF32, {c.rows, c.width}, rows_of(c.width, 2 * c.gap));
    add.fill([&] { return c.scale * random.bell(); });
  }
  weight =
      buffers.tensor("weight", Role::kInput, c.weight, {c.width}, {.strides = {}, .offset = c.gap});
  weight.fill([&] { return random.bell(); });
  out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.width}, rows_of(c.width, c.gap));
}

RmsNormArgs RmsNormProblem::args(Side side) const {
  RmsNormArgs args;
  args.x = x.view(side);
  args.add = add.view(side);
  args.weight = weight.view(side);
  args.eps = case_.eps;
  args.out = out.view(side);
  return args;
}

std::string RmsNormProblem::verify() {
  const reference::Normalized expected = reference::rms_norm(args(Side::kHost));
  const std::string error =
      case_.add ? compare("x", x.result(), expected.sum, {}) : std::string();  // exact
  return error.empty() ? compare("out", out.result(), expected.out,
                                 {.rel = rounding_of(case_.out) + sum_error(case_.width)})
                       : error;
}

std::vector<NormCase> layer_norm_cases() {
  std::vector<NormCase> cases;
  const auto add = [&](NormCase c, const std::string& name) {
    c.add = false;
    c.eps = 1e-5;
    c.seed = cases.size() + 1;
    c.name = norm_name(c, name) + (c.mean != 0 ? "_mean" : "");
    cases.push_back(std::move(c));
  };
  int turn = 0;
  for (NormCase c : norm_cases()) {
    if (c.add && c.rows == 2) {
      continue;  // the same without
    }
    c.mean = turn++ % 2 == 0 ? 0.0f : 300.0f;
    add(c, "plain");
  }
  // The indexer's keys.
  for (int64_t rows : {1, 40}) {
    add({.rows = rows, .width = 128, .weight = kF32, .out = kF32}, "index_key");
  }
  add({.scale = 0}, "constant");
  add({.mean = 1e4f}, "far");
  return cases;
}

LayerNormProblem::LayerNormProblem(const NormCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const NormCase& c = case_;
  Random random(c.seed);
  const TensorOptions vector = {.strides = {}, .offset = c.gap};
  x = buffers.tensor("x", Role::kInput, kF32, {c.rows, c.width}, rows_of(c.width, c.gap));
  x.fill([&] { return c.mean + c.scale * random.bell(); });
  weight = buffers.tensor("weight", Role::kInput, c.weight, {c.width}, vector);
  weight.fill([&] { return random.bell(); });
  bias = buffers.tensor("bias", Role::kInput, c.weight, {c.width}, vector);
  bias.fill([&] { return random.bell(); });
  out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.width}, rows_of(c.width, c.gap));
}

LayerNormArgs LayerNormProblem::args(Side side) const {
  LayerNormArgs args;
  args.x = x.view(side);
  args.weight = weight.view(side);
  args.bias = bias.view(side);
  args.eps = case_.eps;
  args.out = out.view(side);
  return args;
}

std::string LayerNormProblem::verify() {
  const reference::LayerNormalized expected = reference::layer_norm(args(Side::kHost));
  const double sums = sum_error(case_.width);
  std::vector<double> slack(expected.out.size());
  for (size_t i = 0; i < slack.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % case_.width;
    // Of the two terms and their sum, and of the mean: its correction is a small sum whose error is
    // relative to the deviation, which the normalisation makes 1.
    slack[i] = std::fabs(expected.out[i]) * rounding_of(case_.out) +
               (std::fabs(expected.scaled[i]) + std::fabs(bias.get(column))) * sums +
               sums * std::fabs(weight.get(column));
  }
  return compare("out", out.result(), expected.out, {}, slack);
}

// ------------------------------------------------------------------------------------- silu_mul

std::vector<SiluMulCase> silu_mul_cases() {
  std::vector<SiluMulCase> cases;
  for (DType out : {kF32, kBf16}) {
    for (int64_t rows : kRowCounts) {
      for (int64_t width : kWidths) {
        const int64_t gap = (rows + width) % 3 == 0 ? 0 : (rows + width) % 3 == 1 ? 8 : 3;
        cases.push_back({.name = "plain" + size_name(rows, width, gap) + short_name(out),
                         .seed = cases.size() + 1,
                         .rows = rows,
                         .width = width,
                         .out = out,
                         .gap = gap});
      }
    }
    cases.push_back({.name = "plain" + size_name(5, 4096, 0) + short_name(out),
                     .seed = cases.size() + 1,
                     .rows = 5,
                     .width = 4096,
                     .out = out});
  }
  return cases;
}

SiluMulProblem::SiluMulProblem(const SiluMulCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const SiluMulCase& c = case_;
  Random random(c.seed);
  const float extremes[] = {0.0f,  -200.0f, 200.0f, -88.0f,
                            1e30f, -1e30f,  1e-30f, std::numeric_limits<float>::quiet_NaN()};
  gate = buffers.tensor("gate", Role::kInput, kF32, {c.rows, c.width}, rows_of(c.width, c.gap));
  gate.fill([&] { return random.chance(0.2) ? extremes[random.bits() % 8] : random.bell(); });
  up = buffers.tensor("up", Role::kInput, kF32, {c.rows, c.width}, rows_of(c.width, 2 * c.gap));
  up.fill([&] { return random.bell(); });
  out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.width}, rows_of(c.width, c.gap));
}

SiluMulArgs SiluMulProblem::args(Side side) const {
  SiluMulArgs args;
  args.gate = gate.view(side);
  args.up = up.view(side);
  args.out = out.view(side);
  return args;
}

std::string SiluMulProblem::verify() {
  // An exponential and a division, and results so small that they lose their last bits.
  return compare("out", out.result(), reference::silu_mul(args(Side::kHost)),
                 {.abs = 1e-36, .rel = rounding_of(case_.out) + 0x1p-20});
}

// ------------------------------------------------------------------------------------------ add

std::vector<AddCase> add_cases() {
  std::vector<AddCase> cases;
  for (int64_t rows : kRowCounts) {
    for (int64_t width : kWidths) {
      const int64_t gap = (rows + width) % 3 == 0 ? 0 : (rows + width) % 3 == 1 ? 8 : 3;
      cases.push_back({.name = "plain" + size_name(rows, width, gap),
                       .seed = cases.size() + 1,
                       .rows = rows,
                       .width = width,
                       .gap = gap});
    }
  }
  return cases;
}

AddProblem::AddProblem(const AddCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const AddCase& c = case_;
  Random random(c.seed);
  x = buffers.tensor("x", Role::kInput, kF32, {c.rows, c.width}, rows_of(c.width, c.gap));
  x.fill([&] { return random.bell(); });
  out = buffers.tensor("out", Role::kInOut, kF32, {c.rows, c.width}, rows_of(c.width, 2 * c.gap));
  out.fill([&] { return random.bell(); });
}

AddArgs AddProblem::args(Side side) const {
  AddArgs args;
  args.x = x.view(side);
  args.out = out.view(side);
  return args;
}

std::string AddProblem::verify() {
  return compare("out", out.result(), reference::add(args(Side::kHost)), {});
}

// ----------------------------------------------------------------------------------------- rope

std::vector<RopeCase> rope_cases() {
  std::vector<RopeCase> cases;
  const auto add = [&](RopeCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + size_name(c.rows, c.width, c.gap) + "_h" + std::to_string(c.heads) + "_p" +
             std::to_string(c.pairs) + "_at" + std::to_string(c.offset) + short_name(c.out) +
             (c.interleaved ? "_interleaved" : "_halves") + (c.in_place ? "_in_place" : "");
    cases.push_back(std::move(c));
  };
  for (bool interleaved : {false, true}) {
    for (int64_t rows : kRowCounts) {
      add({.rows = rows, .interleaved = interleaved, .in_place = true}, "plain");
      add({.rows = rows,
           .heads = 1,
           .width = 576,
           .offset = 512,
           .interleaved = interleaved,
           .in_place = true},
          "latent_row");
      add({.rows = rows,
           .width = 70,
           .offset = 6,
           .interleaved = interleaved,
           .out = kBf16,
           .gap = 3},
          "odd");
    }
    for (DType out : {kF32, kBf16}) {
      for (int64_t gap : {0, 3, 8}) {
        add({.heads = 5,
             .width = 192,
             .offset = 128,
             .interleaved = interleaved,
             .out = out,
             .gap = gap},
            "query");
        add({.heads = 5,
             .width = 128,
             .offset = 0,
             .interleaved = interleaved,
             .out = out,
             .gap = gap},
            "index_query");
      }
    }
    add({.heads = 1, .width = 128, .pairs = 13, .offset = 5, .interleaved = interleaved}, "odd");
    add({.heads = 2,
         .width = 11,
         .pairs = 5,
         .offset = 1,
         .interleaved = interleaved,
         .in_place = true,
         .gap = 1},
        "odd");
    add({.heads = 2, .width = 24, .pairs = 6, .offset = 4, .interleaved = interleaved},
        "six_pairs");
    add({.heads = 2, .width = 8, .pairs = 0, .interleaved = interleaved, .out = kBf16}, "no_pairs");
    add({.heads = 0, .interleaved = interleaved}, "no_heads");
    add({.rows = 2, .heads = 128, .interleaved = interleaved, .out = kBf16, .gap = 8},
        "many_heads");
  }
  return cases;
}

RopeProblem::RopeProblem(const RopeCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const RopeCase& c = case_;
  Random random(c.seed);
  constexpr int64_t kPositions = 40;
  positions = buffers.tensor("positions", Role::kInput, DType::kInt32, {c.rows}, {.strides = {2}});
  positions.fill([&] { return static_cast<double>(random.integer(0, kPositions - 1)); });
  cos_table = buffers.tensor("cos_table", Role::kInput, kF32, {kPositions, c.pairs});
  cos_table.fill([&] { return random.bell(); });
  sin_table = buffers.tensor("sin_table", Role::kInput, kF32, {kPositions, c.pairs});
  sin_table.fill([&] { return random.bell(); });
  const auto heads_of = [&](int64_t gap) -> TensorOptions {
    return {.strides = {c.heads * (c.width + gap) + gap, c.width + gap, 1}, .offset = gap};
  };
  x = buffers.tensor("x", c.in_place ? Role::kInOut : Role::kInput, kF32,
                     {c.rows, c.heads, c.width}, heads_of(2 * c.gap));
  x.fill([&] { return random.bell(); });
  out = c.in_place ? x
                   : buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.heads, c.width},
                                    heads_of(c.gap));
}

RopeArgs RopeProblem::args(Side side) const {
  RopeArgs args;
  args.x = x.view(side);
  args.positions = positions.view(side);
  args.cos_table = cos_table.view(side);
  args.sin_table = sin_table.view(side);
  args.interleaved = case_.interleaved;
  args.offset = case_.offset;
  args.out = out.view(side);
  return args;
}

std::string RopeProblem::verify() {
  const reference::Product expected = reference::rope(args(Side::kHost));
  std::vector<double> slack(expected.out.size());
  for (size_t i = 0; i < slack.size(); ++i) {
    // Two products and a sum; what is copied is rounded to the output only.
    slack[i] = expected.scale[i] * 0x1p-22 + std::fabs(expected.out[i]) * rounding_of(case_.out);
  }
  return compare("out", out.result(), expected.out, {}, slack);
}

// ------------------------------------------------------------------------------------ moe_route

std::vector<MoeRouteCase> moe_route_cases() {
  std::vector<MoeRouteCase> cases;
  const auto add = [&](MoeRouteCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_" + std::to_string(c.chosen) + "of" +
             std::to_string(c.experts) + "_groups" + std::to_string(c.groups_kept) + "of" +
             std::to_string(c.num_groups) + (c.normalize ? "_normalized" : "") +
             (c.gap > 0 ? "_gap" + std::to_string(c.gap) : "");
    cases.push_back(std::move(c));
  };
  for (bool ties : {false, true}) {
    const std::string name = ties ? "ties" : "plain";
    for (int64_t rows : {0, 1, 64}) {
      add({.rows = rows, .ties = ties, .gap = 1}, name);
    }
    add({.rows = 64, .chosen = 8, .normalize = false, .ties = ties}, name);  // all of them
    add({.rows = 9, .experts = 64, .chosen = 6, .num_groups = 8, .groups_kept = 3, .ties = ties},
        name);
    add({.rows = 40,
         .experts = 256,
         .chosen = 8,
         .num_groups = 8,
         .groups_kept = 4,
         .ties = ties,
         .gap = 3},
        name);
    add({.rows = 9, .experts = 384, .chosen = 8, .ties = ties}, name);
    add({.rows = 8,
         .experts = 160,
         .chosen = 6,
         .num_groups = 80,
         .groups_kept = 5,
         .normalize = false,
         .ties = ties},
        name);
    add({.experts = 1500, .chosen = 4, .ties = ties}, name);
    add({.experts = 1500, .chosen = 5, .num_groups = 100, .groups_kept = 7, .ties = ties}, name);
    add({.experts = 1500, .chosen = 70, .num_groups = 4, .groups_kept = 2, .ties = ties}, name);
    add({.experts = 33, .chosen = 33, .ties = ties}, name);
    add({.experts = 1, .chosen = 1, .ties = ties}, name);
  }
  return cases;
}

MoeRouteProblem::MoeRouteProblem(const MoeRouteCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const MoeRouteCase& c = case_;
  Random random(c.seed);
  logits =
      buffers.tensor("logits", Role::kInput, kF32, {c.rows, c.experts}, rows_of(c.experts, c.gap));
  bias = buffers.tensor("bias", Role::kInput, kF32, {c.experts});
  if (c.ties) {
    // Equal choices must be equal in every arithmetic, and so must be equal sums of two: the bias
    // is the same everywhere, and no two logits are opposites.
    logits.fill([&] { return static_cast<double>(random.integer(0, 6)) / 2; });
    bias.fill([] { return 0.125; });
  } else {
    logits.fill([&] { return 2 * random.bell(); });
    bias.fill([&] { return 0.2 * random.bell(); });
  }
  ids = buffers.tensor("ids", Role::kOutput, DType::kInt32, {c.rows, c.chosen});
  weights = buffers.tensor("weights", Role::kOutput, kF32, {c.rows, c.chosen});
}

MoeRouteArgs MoeRouteProblem::args(Side side) const {
  MoeRouteArgs args;
  args.logits = logits.view(side);
  args.bias = bias.view(side);
  args.num_groups = case_.num_groups;
  args.groups_kept = case_.groups_kept;
  args.normalize = case_.normalize;
  args.scale = 2.5;
  args.ids = ids.view(side);
  args.weights = weights.view(side);
  return args;
}

std::string MoeRouteProblem::verify() {
  const reference::Routed expected = reference::moe_route(args(Side::kHost));
  const std::string error = compare("ids", ids.result(), expected.ids);
  // A sigmoid, a sum of positive numbers, a division and a product.
  return error.empty() ? compare("weights", weights.result(), expected.weights,
                                 {.rel = 0x1p-20 + sum_error(case_.chosen)})
                       : error;
}

}  // namespace lacuna::testing
