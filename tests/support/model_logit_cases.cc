// Grids, data and tolerances of the operations on logits.
#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>

#include "tests/reference/element.h"
#include "tests/reference/model_ops.h"
#include "tests/support/compare.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {
namespace {

constexpr auto kF32 = DType::kFloat32;
constexpr auto kI32 = DType::kInt32;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A float32 sum of exponentials and its logarithm: errors in the last bits of numbers up to about
// 30 in magnitude, and the sum's.
constexpr Tolerance kLogprob{.abs = 1e-5, .rel = 1e-6};

TensorOptions rows_of(int64_t width, int64_t gap) {
  return {.strides = {width + gap, 1}, .offset = gap};
}

const char* shape_name(LogitShape shape) {
  switch (shape) {
    case LogitShape::kBell:
      return "bell";
    case LogitShape::kIntegers:
      return "integers";
    case LogitShape::kFlat:
      return "flat";
    case LogitShape::kPeaked:
      return "peaked";
    case LogitShape::kHoles:
      return "holes";
    case LogitShape::kInfinite:
      return "infinite";
    case LogitShape::kNothing:
      return "nothing";
  }
  return "";
}

void fill_logits(LogitShape shape, TestTensor* logits, Random* random) {
  const int64_t vocabulary = logits->extent(1);
  logits->fill([&]() -> double {
    const double bell = 3 * random->bell();
    switch (shape) {
      case LogitShape::kBell:
      case LogitShape::kPeaked:
        return bell;
      case LogitShape::kIntegers:
        return random->chance(0.1) ? -0.0 : std::round(bell);
      case LogitShape::kFlat:
        return 5 + bell / 10000;
      case LogitShape::kHoles:
        return random->chance(0.2) ? kNan : random->chance(0.2) ? -kInf : bell;
      case LogitShape::kInfinite:
        return random->chance(0.1) ? kInf : random->chance(0.1) ? kNan : bell;
      case LogitShape::kNothing:
        return random->chance(0.5) ? kNan : -kInf;
    }
    return 0;
  });
  for (int64_t t = 0; t < logits->extent(0) && shape == LogitShape::kPeaked; ++t) {
    logits->set(30, t, random->integer(0, vocabulary - 1));
  }
}

std::string logits_name(LogitShape shape, int64_t rows, int64_t vocabulary, int64_t gap) {
  return std::string(shape_name(shape)) + "_t" + std::to_string(rows) + "_v" +
         std::to_string(vocabulary) + (gap > 0 ? "_gap" + std::to_string(gap) : "");
}

}  // namespace

// -------------------------------------------------------------------------------- adjust_logits

std::vector<AdjustLogitsCase> adjust_logits_cases() {
  std::vector<AdjustLogitsCase> cases;
  for (bool restore : {false, true}) {
    for (int64_t entries : {0, 1, 20, 700}) {
      for (int64_t gap : {0, 3}) {
        cases.push_back({.name = "n" + std::to_string(entries) + (restore ? "_restore" : "_edit") +
                                 (gap > 0 ? "_gap" : ""),
                         .seed = cases.size() + 1,
                         .vocabulary = entries < 100 ? 50 : 900,
                         .entries = entries,
                         .restore = restore,
                         .gap = gap});
      }
    }
  }
  return cases;
}

AdjustLogitsProblem::AdjustLogitsProblem(const AdjustLogitsCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const AdjustLogitsCase& c = case_;
  Random random(c.seed);
  logits = buffers.tensor("logits", Role::kInOut, kF32, {c.rows, c.vocabulary},
                          rows_of(c.vocabulary, c.gap));
  logits.fill([&] { return random.chance(0.1) ? 0.0f : 3 * random.bell(); });
  const auto column = [&](const char* name, Role role, DType dtype) {
    return buffers.tensor(name, role, dtype, {c.entries}, {.strides = {1 + c.gap}});
  };
  rows = column("rows", Role::kInput, kI32);
  ids = column("ids", Role::kInput, kI32);
  // Each place at most once.
  std::vector<int64_t> places(c.rows * c.vocabulary);
  for (size_t i = 0; i < places.size(); ++i) {
    places[i] = static_cast<int64_t>(i);
  }
  random.shuffle(&places);
  for (int64_t n = 0; n < c.entries; ++n) {
    rows.set(static_cast<double>(places[n] / c.vocabulary), n);
    ids.set(static_cast<double>(places[n] % c.vocabulary), n);
    if (n % 7 == 3) {
      const double bad[] = {-1, INT_MIN, INT_MAX};
      rows.set(n % 2 == 0 ? bad[random.integer(0, 2)] : static_cast<double>(c.rows), n);
    } else if (n % 7 == 5) {
      const double bad[] = {-1, INT_MIN, INT_MAX};
      ids.set(n % 2 == 0 ? bad[random.integer(0, 2)] : static_cast<double>(c.vocabulary), n);
    }
  }
  repetition = column("repetition", Role::kInput, kF32);
  repetition.fill([&] { return 0.5f + random.uniform(); });
  add = column("add", Role::kInput, kF32);
  add.fill([&] { return random.chance(0.2) ? -kInf : random.bell(); });
  saved = column("saved", Role::kInOut, kF32);
  saved.fill([&] { return random.bell(); });
}

AdjustLogitsArgs AdjustLogitsProblem::args(Side side) const {
  AdjustLogitsArgs args;
  args.logits = logits.view(side);
  args.rows = rows.view(side);
  args.ids = ids.view(side);
  args.repetition = repetition.view(side);
  args.add = add.view(side);
  args.saved = saved.view(side);
  args.restore = case_.restore;
  return args;
}

std::string AdjustLogitsProblem::verify() {
  const reference::AdjustedLogits expected = reference::adjust_logits(args(Side::kHost));
  const std::string error = compare("logits", logits.result(), expected.logits, {});
  return error.empty() ? compare("saved", saved.result(), expected.saved, {}) : error;
}

// ---------------------------------------------------------------------------------- pick_tokens

std::vector<PickTokensCase> pick_tokens_cases() {
  std::vector<PickTokensCase> cases;
  const auto add = [&](PickTokensCase c) {
    c.seed = cases.size() + 1;
    const char* into[] = {"", "_into_given", "_into_drawn"};
    c.name = "t" + std::to_string(c.rows) + "_n" + std::to_string(c.drawn) +
             into[static_cast<int>(c.into)] + (c.gap > 0 ? "_gap" : "");
    cases.push_back(std::move(c));
  };
  for (int64_t rows : {0, 1, 5, 127, 128, 129, 1000}) {
    for (int64_t gap : {0, 3}) {
      for (int64_t drawn : {0, 1, 8, 300}) {
        add({.rows = rows, .drawn = drawn, .gap = gap});
      }
      add({.rows = rows, .into = PickInto::kGiven, .gap = gap});
      add({.rows = rows, .drawn = rows, .into = PickInto::kDrawn, .gap = gap});
    }
  }
  return cases;
}

PickTokensProblem::PickTokensProblem(const PickTokensCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const PickTokensCase& c = case_;
  Random random(c.seed);
  const auto column = [&](const char* name, Role role, int64_t rows) {
    return buffers.tensor(name, role, kI32, {rows}, {.strides = {1 + c.gap}});
  };
  const auto role_of = [&](PickInto tensor) {
    return c.into == tensor ? Role::kInOut : Role::kInput;
  };
  const auto token = [&] { return static_cast<double>(random.integer(0, 200000)); };
  given = column("given", role_of(PickInto::kGiven), c.rows);
  given.fill(token);
  drawn = column("drawn", role_of(PickInto::kDrawn), c.drawn);
  drawn.fill(token);
  sources = column("sources", Role::kInput, c.rows);
  int64_t t = 0;
  sources.fill([&]() -> double {
    const int64_t row = t++;
    if (random.chance(0.4)) {
      const double none[] = {-1, static_cast<double>(c.drawn), INT_MIN, INT_MAX};
      return none[random.integer(0, 3)];
    }
    // Its own row, where a row of `drawn` must not be read after it was written.
    return static_cast<double>(
        c.into == PickInto::kDrawn || c.drawn == 0 ? row : random.integer(0, c.drawn - 1));
  });
  if (c.into == PickInto::kOther) {
    out = column("out", Role::kOutput, c.rows);
  } else {
    out = c.into == PickInto::kGiven ? given : drawn;
  }
}

PickTokensArgs PickTokensProblem::args(Side side) const {
  PickTokensArgs args;
  args.given = given.view(side);
  args.sources = sources.view(side);
  args.drawn = drawn.view(side);
  args.out = out.view(side);
  return args;
}

std::string PickTokensProblem::verify() {
  return compare("out", out.result(), reference::pick_tokens(args(Side::kHost)));
}

// ------------------------------------------------------------------------------- token_logprobs

std::vector<TokenLogprobsCase> token_logprobs_cases() {
  std::vector<TokenLogprobsCase> cases;
  const auto add = [&](TokenLogprobsCase c) {
    c.seed = cases.size() + 1;
    c.name = logits_name(c.shape, c.rows, c.vocabulary, c.gap);
    cases.push_back(std::move(c));
  };
  for (int64_t vocabulary : {1, 2, 31, 100, 4096, 4097, 12345}) {
    for (int64_t gap : {0, 3}) {
      add({.vocabulary = vocabulary, .gap = gap});
    }
  }
  for (LogitShape shape : {LogitShape::kIntegers, LogitShape::kFlat, LogitShape::kPeaked}) {
    add({.rows = 9, .vocabulary = 5000, .shape = shape});
  }
  add({.rows = 0});
  add({.rows = 70});
  add({.rows = 2, .vocabulary = 151552});
  add({.rows = 2, .vocabulary = 151552, .shape = LogitShape::kFlat, .gap = 1});
  return cases;
}

TokenLogprobsProblem::TokenLogprobsProblem(const TokenLogprobsCase& test_case,
                                           const TestDevice& where)
    : BasicProblem(test_case, where) {
  const TokenLogprobsCase& c = case_;
  Random random(c.seed);
  logits = buffers.tensor("logits", Role::kInput, kF32, {c.rows, c.vocabulary},
                          rows_of(c.vocabulary, c.gap));
  fill_logits(c.shape, &logits, &random);
  // Tokens that are masked out are ordinary.
  for (int64_t t = 0; t < c.rows && c.vocabulary > 10; ++t) {
    logits.set(-kInf, t, 7);
  }
  ids = buffers.tensor("ids", Role::kInput, kI32, {c.rows}, {.strides = {2}});
  int64_t t = 0;
  ids.fill([&] {
    const double special[] = {-1, static_cast<double>(c.vocabulary), INT_MAX, 7};
    const int64_t turn = t++;
    return turn % 9 >= 5 ? special[turn % 9 - 5]
                         : static_cast<double>(random.integer(0, c.vocabulary - 1));
  });
  out = buffers.tensor("out", Role::kOutput, kF32, {c.rows}, {.strides = {1 + c.gap}});
}

TokenLogprobsArgs TokenLogprobsProblem::args(Side side) const {
  TokenLogprobsArgs args;
  args.logits = logits.view(side);
  args.ids = ids.view(side);
  args.out = out.view(side);
  return args;
}

std::string TokenLogprobsProblem::verify() {
  return compare("out", out.result(), reference::token_logprobs(args(Side::kHost)), kLogprob);
}

// --------------------------------------------------------------------------------------- sample

std::vector<SampleCase> sample_cases() {
  std::vector<SampleCase> cases;
  const auto add = [&](SampleCase c) {
    c.seed = cases.size() + 1;
    c.name = logits_name(c.shape, static_cast<int64_t>(c.rows.size()), c.vocabulary, c.gap) +
             (c.logprobs ? "" : "_no_logprobs") +
             (c.same_logits ? "_quantiles" + std::to_string(cases.size()) : "");
    cases.push_back(std::move(c));
  };
  // Every filter alone and together, among greedy rows.
  const std::vector<SampleRow> rows = {
      {.temperature = 0},
      {},
      {.temperature = 0.5f},
      {.temperature = 1.7f, .top_k = 40},
      {.top_k = 1},
      {.temperature = 0, .top_k = 3},
      {.top_p = 0.9f},
      {.temperature = 0.7f, .top_p = 0.5f},
      {.min_p = 0.07f},
      {.temperature = 1.5f, .top_k = 60, .top_p = 0.8f, .min_p = 0.023f},
      {.temperature = 2, .top_k = 900, .top_p = 0.97f},
      {.top_k = INT_MAX, .top_p = 1.5f, .min_p = 0},
      {.top_k = -5, .top_p = 0},
      {.temperature = -1},
      {.temperature = static_cast<float>(kNan)},
      {.temperature = static_cast<float>(kInf)},
      {.temperature = 1e-40f},
      {.temperature = 30, .top_k = 700},
      {.temperature = 30, .top_p = 0.6f},
      {.temperature = 30, .top_k = 5000, .top_p = 0.6f, .min_p = 0.5f},
  };
  const LogitShape shapes[] = {LogitShape::kBell,   LogitShape::kIntegers, LogitShape::kFlat,
                               LogitShape::kPeaked, LogitShape::kHoles,    LogitShape::kInfinite,
                               LogitShape::kNothing};
  for (LogitShape shape : shapes) {
    add({.vocabulary = 257, .shape = shape, .rows = rows});
    add({.vocabulary = 9001, .shape = shape, .rows = rows, .gap = 3});
  }
  for (int64_t vocabulary : {1, 2, 5, 1000, 4096, 16384}) {
    add({.vocabulary = vocabulary, .rows = rows, .logprobs = vocabulary != 1000});
  }
  // One distribution at many quantiles, which pins it.
  for (SampleRow row :
       {SampleRow{}, SampleRow{.temperature = 2, .top_k = 40}, SampleRow{.top_p = 0.9f},
        SampleRow{.min_p = 0.05f},
        SampleRow{.temperature = 1.5f, .top_k = 60, .top_p = 0.8f, .min_p = 0.02f}}) {
    for (int64_t vocabulary : {100, 3000}) {
      add({.vocabulary = vocabulary, .rows = std::vector<SampleRow>(60, row), .same_logits = true});
    }
  }
  // A model's: the candidates of some rows fit a list, those of others do not.
  const std::vector<SampleRow> wide = {{.temperature = 0},
                                       {},
                                       {.top_k = 50, .top_p = 0.9f},
                                       {.top_p = 0.95f},
                                       {.temperature = 8, .top_k = 20000, .top_p = 0.9f},
                                       {.temperature = 8, .top_p = 0.3f, .min_p = 0.1f}};
  add({.vocabulary = 151552, .rows = wide});
  add({.vocabulary = 129280, .shape = LogitShape::kIntegers, .rows = wide});
  add({.vocabulary = 151552, .shape = LogitShape::kFlat, .rows = wide, .gap = 1});
  return cases;
}

SampleProblem::SampleProblem(const SampleCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const SampleCase& c = case_;
  Random random(c.seed);
  const int64_t count = static_cast<int64_t>(c.rows.size());
  logits = buffers.tensor("logits", Role::kInput, kF32, {count, c.vocabulary},
                          rows_of(c.vocabulary, c.gap));
  fill_logits(c.shape, &logits, &random);
  for (int64_t t = 1; t < count && c.same_logits; ++t) {
    for (int64_t i = 0; i < c.vocabulary; ++i) {
      logits.set(logits.get(0, i), t, i);
    }
  }
  const auto column = [&](const char* name, DType dtype, auto value) {
    TestTensor tensor =
        buffers.tensor(name, Role::kInput, dtype, {count}, {.strides = {1 + c.gap}});
    int64_t t = 0;
    tensor.fill([&] { return value(c.rows[t++]); });
    return tensor;
  };
  temperature = column("temperature", kF32, [](const SampleRow& r) { return r.temperature; });
  top_k = column("top_k", kI32, [](const SampleRow& r) { return r.top_k; });
  top_p = column("top_p", kF32, [](const SampleRow& r) { return r.top_p; });
  min_p = column("min_p", kF32, [](const SampleRow& r) { return r.min_p; });
  uniform = column("uniform", kF32, [&](const SampleRow&) {
    return random.chance(0.1) ? 0.0f : random.chance(0.1) ? 1 - 0x1p-24f : random.uniform();
  });
  ids = buffers.tensor("ids", Role::kOutput, kI32, {count}, {.strides = {1 + c.gap}});
  if (c.logprobs) {
    logprobs = buffers.tensor("logprobs", Role::kOutput, kF32, {count}, {.strides = {2}});
  }
}

SampleArgs SampleProblem::args(Side side) const {
  SampleArgs args;
  args.logits = logits.view(side);
  args.temperature = temperature.view(side);
  args.top_k = top_k.view(side);
  args.top_p = top_p.view(side);
  args.min_p = min_p.view(side);
  args.uniform = uniform.view(side);
  args.ids = ids.view(side);
  args.logprobs = logprobs.view(side);
  return args;
}

namespace {

// Whether the running sum of `p` passes `uniform` at token `id`. Sums of float masses may differ by
// some 1e-6 of the total.
bool drawn_by(const std::vector<double>& p, int64_t id, double uniform) {
  double before = 0;
  for (int64_t i = 0; i < id; ++i) {
    before += p[i];
  }
  return p[id] > 0 && before <= uniform + 1e-5 && before + p[id] >= uniform - 1e-5;
}

}  // namespace

std::string SampleProblem::verify() {
  const SampleArgs host = args(Side::kHost);
  std::vector<double> expected_logprobs;
  for (int64_t t = 0; t < ids.extent(0); ++t) {
    const reference::SampledRow row = reference::sample_row(host, t);
    const int64_t id = reference::integer(ids.result(), t);
    const std::string where = "ids[" + std::to_string(t) + "] is " + std::to_string(id);
    if (id < 0 || id >= case_.vocabulary) {
      return where + ", not a token";
    }
    expected_logprobs.push_back(row.logprobs[id]);
    if (row.greedy) {
      if (id != row.best) {
        return where + ", expected the most likely token " + std::to_string(row.best);
      }
      continue;
    }
    const double uniform = reference::element(host.uniform, t);
    bool right = drawn_by(row.p, id, uniform);
    // The crossing token of top_p may be another where a sum comes within rounding of it.
    for (float factor : {1 - 1e-5f, 1 + 1e-5f}) {
      if (right || !(case_.rows[t].top_p < 1)) {
        break;
      }
      SampleArgs moved = host;
      const std::vector<float> top_p(ids.extent(0), case_.rows[t].top_p * factor);
      moved.top_p = view_of(top_p.data(), {ids.extent(0)});
      right = drawn_by(reference::sample_row(moved, t).p, id, uniform);
    }
    if (!right) {
      double before = 0;
      int64_t expected = -1;
      while (before <= uniform && expected + 1 < case_.vocabulary) {
        before += row.p[++expected];
      }
      return where + " of probability " + std::to_string(row.p[id]) + ", expected about token " +
             std::to_string(expected) + " at " + std::to_string(uniform);
    }
  }
  return logprobs.empty() ? ""
                          : compare("logprobs", logprobs.result(), expected_logprobs, kLogprob);
}

}  // namespace lacuna::testing
