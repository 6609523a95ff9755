// Grids, data and tolerances of the matrix products.
#include <algorithm>
#include <climits>
#include <cmath>

#include "tests/reference/model_ops.h"
#include "tests/support/compare.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kBf16 = DType::kBFloat16;
constexpr auto kFp8 = DType::kFloat8E4M3;

std::string short_name(DType dtype) {
  return dtype == kF32 ? "f32" : dtype == kBf16 ? "bf16" : "fp8";
}

// Unit roundoff: half an ulp, relative.
double rounding_of(DType dtype) { return dtype == kBf16 ? 0x1p-8 : 0x1p-24; }

// The error of a float32 sum of n products relative to the sum of their magnitudes. A chain of m
// additions errs by at most m 2^-24; kernels sum in eight chains or more (SIMD lanes, the steps of
// a tensor core), or in one whose errors walk at random.
double chain_error(int64_t n) { return (static_cast<double>(n) / 8 + 8) * 0x1p-24; }

// The product of an FP8 weight and its scale is a number of up to 28 bits. A kernel may round it to
// bf16 where x is bf16 too (that is how these models are run where FP8 is only stored), and not
// where x is f32.
double weight_error(DType x, DType weight) {
  return weight == kFp8 && x == kBf16 ? rounding_of(kBf16) : 0;
}

TensorOptions matrix_options(int64_t width, int64_t gap) {
  return {.strides = {width + gap, 1}, .offset = gap};
}

// Scales of ordinary checkpoints: weights of about 0.02 whose largest becomes 448. Not powers of
// two.
void fill_scales(TestTensor* scales, Random* random) {
  scales->fill([&] { return (0.5 + random->uniform()) * 0x1p-7; });
}

// FP8 holds values of the scale's range; others are about 1.
void fill_weight(TestTensor* weight, DType dtype, float spread, Random* random) {
  weight->fill([&] {
    const float value = random->bell();
    return dtype == kFp8 ? std::clamp(60 * value, -448.0f, 448.0f) : spread * value;
  });
}

int64_t scale_blocks(int64_t extent) {
  return (extent + kWeightScaleBlock - 1) / kWeightScaleBlock;
}

std::string check_product(const ConstTensorView& out, const reference::Product& expected,
                          double relative) {
  std::vector<double> slack(expected.scale.size());
  for (size_t i = 0; i < slack.size(); ++i) {
    slack[i] = expected.scale[i] * relative + std::fabs(expected.out[i]) * rounding_of(out.dtype);
  }
  return compare("out", out, expected.out, {}, slack);
}

}  // namespace

// --------------------------------------------------------------------------------------- linear

std::vector<LinearCase> linear_cases() {
  std::vector<LinearCase> cases;
  const auto add = [&](LinearCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_n" + std::to_string(c.columns) + "_k" +
             std::to_string(c.depth) + "_" + short_name(c.x) + "_" + short_name(c.weight) + "_" +
             short_name(c.out) + (c.gap > 0 ? "_gap" + std::to_string(c.gap) : "");
    cases.push_back(std::move(c));
  };
  const DType wide[] = {kF32, kBf16};
  // Every combination of dtypes, in few rows and in many, at a width with a rest and at one
  // without.
  for (DType weight : {kF32, kBf16, kFp8}) {
    for (DType x : wide) {
      for (DType out : wide) {
        for (int64_t rows : {1, 5, 40}) {
          add({.rows = rows, .columns = 130, .depth = 257, .x = x, .weight = weight, .out = out},
              "plain");
          add({.rows = rows, .columns = 192, .depth = 320, .x = x, .weight = weight, .out = out},
              "plain");
        }
      }
    }
  }
  // Row counts about the sizes of tiles, and gaps that keep or lose alignment.
  for (int64_t rows : {0, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129}) {
    add({.rows = rows, .columns = 72, .depth = 128, .gap = 8}, "rows");
    add({.rows = rows,
         .columns = 33,
         .depth = 72,
         .x = kF32,
         .weight = kF32,
         .out = kF32,
         .gap = 3},
        "rows");
    add({.rows = rows, .columns = 200, .depth = 384, .weight = kFp8}, "rows");
  }
  for (const auto& [columns, depth] : {std::pair<int64_t, int64_t>{1, 1},
                                       {7, 3},
                                       {64, 64},
                                       {130, 48},
                                       {400, 257},
                                       {1, 513},
                                       {513, 8},
                                       {24, 1040},
                                       {0, 16}}) {
    for (int64_t rows : {1, 3, 64}) {
      add({.rows = rows, .columns = columns, .depth = depth, .gap = 3}, "odd");
      add({.rows = rows, .columns = columns, .depth = depth, .x = kF32, .weight = kF32, .gap = 1},
          "odd");
      add({.rows = rows, .columns = columns, .depth = depth, .weight = kFp8, .gap = 1}, "odd");
    }
  }
  // Nothing to sum: zeros.
  add({.rows = 5, .columns = 20, .depth = 0, .x = kF32, .out = kF32}, "empty_depth");
  add({.rows = 20, .columns = 20, .depth = 0}, "empty_depth");
  // As wide as models: partial sums of several blocks of threads.
  for (int64_t rows : {1, 16, 100}) {
    add({.rows = rows, .columns = 512, .depth = 2048}, "wide");
    add({.rows = rows, .columns = 512, .depth = 2048, .weight = kFp8}, "wide");
    add({.rows = rows, .columns = 1536, .depth = 512, .out = kF32}, "wide");
    add({.rows = rows, .columns = 256, .depth = 1024, .x = kF32, .weight = kF32, .out = kF32},
        "wide");
  }
  add({.rows = 300, .columns = 100, .depth = 40}, "many");
  add({.rows = 300, .columns = 100, .depth = 40, .x = kF32, .weight = kF32, .out = kF32}, "many");
  for (DType weight : {kBf16, kFp8}) {
    for (int64_t rows : {4, 40}) {
      add({.rows = rows, .columns = 128, .depth = 256, .weight = weight, .nan_row = true}, "nan");
    }
  }
  for (int64_t rows : {4, 40}) {
    add({.rows = rows, .columns = 128, .depth = 256, .nan_weight = true}, "nan_weight");
  }
  add({.rows = 4, .columns = 300, .depth = 300, .weight = kFp8, .zero_scale = true}, "zero_scale");
  return cases;
}

LinearProblem::LinearProblem(const LinearCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const LinearCase& c = case_;
  Random random(c.seed);
  x = buffers.tensor("x", Role::kInput, c.x, {c.rows, c.depth}, matrix_options(c.depth, c.gap));
  x.fill([&] { return random.bell(); });
  weight = buffers.tensor("weight", Role::kInput, c.weight, {c.columns, c.depth},
                          matrix_options(c.depth, c.gap));
  fill_weight(&weight, c.weight, 1, &random);
  if (c.nan_weight) {
    weight.set(std::nan(""), 3, c.depth - 1);
    weight.set(-std::nan(""), c.columns - 2, c.depth / 2);
  }
  if (c.weight == kFp8) {
    weight_scale = buffers.tensor("weight_scale", Role::kInput, kF32,
                                  {scale_blocks(c.columns), scale_blocks(c.depth)});
    fill_scales(&weight_scale, &random);
    if (c.zero_scale) {
      weight_scale.set(0, 1, 1);
    }
  }
  for (int64_t i = 0; c.nan_row && i < c.depth; ++i) {
    x.set(std::nan(""), 0, i);
  }
  out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.columns},
                       matrix_options(c.columns, c.gap));
}

LinearArgs LinearProblem::args(Side side) const {
  LinearArgs args;
  args.x = x.view(side);
  args.weight = weight.view(side);
  args.weight_scale = weight_scale.view(side);
  args.out = out.view(side);
  return args;
}

std::string LinearProblem::verify() {
  return check_product(out.result(), reference::linear(args(Side::kHost)),
                       chain_error(case_.depth) + weight_error(case_.x, case_.weight));
}

// ---------------------------------------------------------------------------------- head_linear

std::vector<HeadLinearCase> head_linear_cases() {
  std::vector<HeadLinearCase> cases;
  const auto add = [&](HeadLinearCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_h" + std::to_string(c.heads) + "_n" +
             std::to_string(c.columns) + "_k" + std::to_string(c.depth) + "_" + short_name(c.x) +
             "_" + short_name(c.weight) + "_" + short_name(c.out) +
             (c.columns_contiguous ? "_ncontiguous" : "") +
             (c.gap > 0 ? "_gap" + std::to_string(c.gap) : "");
    cases.push_back(std::move(c));
  };
  for (bool columns_contiguous : {false, true}) {
    for (DType weight : {kF32, kBf16}) {
      for (DType x : {kF32, kBf16}) {
        for (DType out : {kF32, kBf16}) {
          add({.rows = 5,
               .columns = 33,
               .depth = 17,
               .x = x,
               .weight = weight,
               .out = out,
               .columns_contiguous = columns_contiguous,
               .gap = 3},
              "plain");
          add({.rows = 20,
               .columns = 64,
               .depth = 32,
               .x = x,
               .weight = weight,
               .out = out,
               .columns_contiguous = columns_contiguous},
              "plain");
        }
      }
    }
    for (int64_t rows : {0, 1, 2, 8, 9, 16, 17, 64, 150}) {
      add({.rows = rows,
           .heads = 2,
           .columns = 64,
           .depth = 72,
           .columns_contiguous = columns_contiguous,
           .gap = 8},
          "rows");
      add({.rows = rows,
           .columns = 9,
           .depth = 5,
           .x = kF32,
           .weight = kF32,
           .out = kF32,
           .columns_contiguous = columns_contiguous,
           .gap = 1},
          "rows");
    }
    // W_UK^T and W_UV of real models, of few heads.
    for (int64_t rows : {1, 33}) {
      add({.rows = rows,
           .heads = 2,
           .columns = 512,
           .depth = 128,
           .columns_contiguous = columns_contiguous},
          "absorb");
      add({.rows = rows,
           .heads = 2,
           .columns = 128,
           .depth = 512,
           .columns_contiguous = columns_contiguous},
          "absorb");
    }
    add({.rows = 6,
         .heads = 40,
         .columns = 16,
         .depth = 8,
         .columns_contiguous = columns_contiguous},
        "heads");
  }
  add({.rows = 3, .columns = 20, .depth = 0}, "empty_depth");
  return cases;
}

HeadLinearProblem::HeadLinearProblem(const HeadLinearCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const HeadLinearCase& c = case_;
  Random random(c.seed);
  const auto rows = [&](int64_t width) -> TensorOptions {
    return {.strides = {c.heads * (width + c.gap) + c.gap, width + c.gap, 1}, .offset = c.gap};
  };
  x = buffers.tensor("x", Role::kInput, c.x, {c.rows, c.heads, c.depth}, rows(c.depth));
  x.fill([&] { return random.bell(); });
  const int64_t inner = (c.columns_contiguous ? c.columns : c.depth) + c.gap;
  const int64_t outer = c.columns_contiguous ? c.depth : c.columns;
  weight = buffers.tensor("weight", Role::kInput, c.weight, {c.heads, c.columns, c.depth},
                          {.strides = {inner * outer + c.gap, c.columns_contiguous ? 1 : inner,
                                       c.columns_contiguous ? inner : 1},
                           .offset = c.gap});
  weight.fill([&] { return random.bell(); });
  out = buffers.tensor("out", Role::kOutput, c.out, {c.rows, c.heads, c.columns}, rows(c.columns));
}

HeadLinearArgs HeadLinearProblem::args(Side side) const {
  HeadLinearArgs args;
  args.x = x.view(side);
  args.weight = weight.view(side);
  args.out = out.view(side);
  return args;
}

std::string HeadLinearProblem::verify() {
  return check_product(out.result(), reference::head_linear(args(Side::kHost)),
                       chain_error(case_.depth));
}

// ---------------------------------------------------------------------------------- moe_experts

std::vector<MoeExpertsCase> moe_experts_cases() {
  std::vector<MoeExpertsCase> cases;
  const auto add = [&](MoeExpertsCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_d" + std::to_string(c.width) + "_f" +
             std::to_string(c.hidden) + "_" + std::to_string(c.chosen) + "of" +
             std::to_string(c.experts) + "_" + short_name(c.x) + "_" + short_name(c.weight) +
             (c.gap > 0 ? "_gap" + std::to_string(c.gap) : "");
    cases.push_back(std::move(c));
  };
  for (DType x : {kF32, kBf16}) {
    for (DType weight : {kF32, kBf16, kFp8}) {
      for (int64_t rows : {0, 1, 3, 9, 64}) {
        add({.rows = rows, .width = 33, .hidden = 20, .x = x, .weight = weight, .gap = 3}, "odd");
        add({.rows = rows,
             .width = 128,
             .hidden = 64,
             .chosen = 3,
             .experts = 5,
             .x = x,
             .weight = weight},
            "plain");
      }
      add({.rows = 7, .width = 160, .hidden = 136, .x = x, .weight = weight, .expert_gap = 16},
          "expert_gap");
    }
  }
  for (DType weight : {kBf16, kFp8}) {
    add({.rows = 17, .width = 200, .hidden = 300, .chosen = 3, .experts = 6, .weight = weight},
        "partial_blocks");
    add({.rows = 1, .width = 512, .hidden = 256, .chosen = 8, .experts = 16, .weight = weight},
        "decode");
    add({.rows = 40, .width = 256, .hidden = 128, .chosen = 4, .experts = 64, .weight = weight},
        "many_experts");
    // Several tiles of one expert, and none of others.
    add({.rows = 200, .width = 64, .hidden = 48, .chosen = 1, .weight = weight, .one_expert = true},
        "one_expert");
    add({.rows = 150,
         .width = 64,
         .hidden = 32,
         .chosen = 2,
         .experts = 12,
         .weight = weight,
         .hot_experts = true},
        "hot_experts");
    add({.rows = 5, .width = 64, .hidden = 32, .weight = weight, .skip_all = true}, "none");
  }
  add({.rows = 3, .width = 40, .hidden = 24, .chosen = 1, .experts = 1, .skip_some = false},
      "single");
  return cases;
}

MoeExpertsProblem::MoeExpertsProblem(const MoeExpertsCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const MoeExpertsCase& c = case_;
  Random random(c.seed);
  x = buffers.tensor("x", Role::kInput, c.x, {c.rows, c.width}, matrix_options(c.width, c.gap));
  x.fill([&] { return random.bell(); });
  ids = buffers.tensor("ids", Role::kInput, DType::kInt32, {c.rows, c.chosen});
  // The same expert may come twice in a row.
  ids.fill([&]() -> double {
    if (c.skip_all || (c.skip_some && random.chance(0.15))) {
      return random.chance(0.5) ? -1 : INT_MIN;
    }
    const int64_t among = c.hot_experts && random.chance(0.9) ? 2 : c.experts;
    return static_cast<double>(c.one_expert ? c.experts - 1 : random.integer(0, among - 1));
  });
  weights = buffers.tensor("weights", Role::kInput, kF32, {c.rows, c.chosen});
  weights.fill([&] { return random.uniform(); });
  const float spread = 1 / std::sqrt(static_cast<float>(c.width));
  const auto matrices = [&](const char* name, int64_t rows, int64_t columns, TestTensor* tensor,
                            TestTensor* scale) {
    *tensor = buffers.tensor(name, Role::kInput, c.weight, {c.experts, rows, columns},
                             {.strides = {rows * columns + c.expert_gap, columns, 1}});
    fill_weight(tensor, c.weight, spread, &random);
    if (c.weight == kFp8) {
      const int64_t blocks[] = {scale_blocks(rows), scale_blocks(columns)};
      *scale = buffers.tensor(std::string(name) + "_scale", Role::kInput, kF32,
                              {c.experts, blocks[0], blocks[1]},
                              {.strides = {blocks[0] * blocks[1] + c.expert_gap, blocks[1], 1}});
      fill_scales(scale, &random);
    }
  };
  matrices("experts.gate", c.hidden, c.width, &gate, &gate_scale);
  matrices("experts.up", c.hidden, c.width, &up, &up_scale);
  matrices("experts.down", c.width, c.hidden, &down, &down_scale);
  out =
      buffers.tensor("out", Role::kOutput, kF32, {c.rows, c.width}, matrix_options(c.width, c.gap));
  for (Side side : {Side::kHost, Side::kDevice}) {
    std::vector<ExpertWeights>& experts = side == Side::kHost ? host_experts_ : device_experts_;
    for (int64_t e = 0; e < c.experts; ++e) {
      const auto matrix = [&](const TestTensor& tensor) -> ConstTensorView {
        if (tensor.empty()) {
          return {};
        }
        const ConstTensorView all = ConstTensorView(tensor.view(side)).slice(0, e, 1);
        return make_view<const void>(all.data, all.dtype, {all.shape[1], all.shape[2]}, all.device);
      };
      experts.push_back({.gate = matrix(gate),
                         .up = matrix(up),
                         .down = matrix(down),
                         .gate_scale = matrix(gate_scale),
                         .up_scale = matrix(up_scale),
                         .down_scale = matrix(down_scale)});
    }
  }
}

MoeExpertsArgs MoeExpertsProblem::args(Side side) const {
  MoeExpertsArgs args;
  args.x = x.view(side);
  args.ids = ids.view(side);
  args.weights = weights.view(side);
  args.experts = side == Side::kHost ? host_experts_ : device_experts_;
  args.out = out.view(side);
  return args;
}

std::string MoeExpertsProblem::verify() {
  const reference::ExpertsOutput expected = reference::moe_experts(args(Side::kHost));
  // The hidden activation is rounded to the dtype of x by every kernel and by the oracle not.
  const double of_hidden = rounding_of(case_.x) + chain_error(case_.hidden) +
                           chain_error(case_.chosen) + weight_error(case_.x, case_.weight) +
                           0x1p-20;  // the exponential and the division of silu
  const double of_input = chain_error(case_.width) + weight_error(case_.x, case_.weight);
  std::vector<double> slack(expected.out.size());
  for (size_t i = 0; i < slack.size(); ++i) {
    slack[i] = expected.hidden_scale[i] * of_hidden + expected.input_scale[i] * of_input;
  }
  return compare("out", out.result(), expected.out, {}, slack);
}

}  // namespace lacuna::testing
