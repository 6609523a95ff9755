// The engine against Hugging Face transformers: every intermediate value of the golden checkpoints
// (tests/golden/README.md says how they were made), and the trained dsa-nano model.
//
// The micro checkpoints lie in the tree. The tiny ones (20 MB each) are read from the folder that
// LACUNA_GOLDEN_DIR names and skipped when it is not set.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <set>

#include "engine/recorder.h"
#include "lacuna/engine.h"
#include "model/safetensors.h"
#include "ops/backend.h"

namespace lacuna {
namespace {

// Tolerances of tests/golden/README.md for a float32 engine.
constexpr double kTolerance = 2e-4;        // scores, attention, logits, router weights
constexpr double kHiddenTolerance = 4e-4;  // hidden states
// Rows whose k-th and (k+1)-th scores are closer than this may swap keys at the boundary.
constexpr double kMarginMin = 1e-4;

// The device that runs the models: LACUNA_GOLDEN_DEVICE, or the CPU.
std::string golden_device() {
  const char* device = std::getenv("LACUNA_GOLDEN_DEVICE");
  return device == nullptr || *device == '\0' ? "cpu" : device;
}

struct Matrix {
  std::vector<double> values;
  int64_t rows = 0;
  int64_t width = 0;
  double at(int64_t r, int64_t c) const { return values[r * width + c]; }
};

class Oracle {
 public:
  static Oracle open(const std::string& folder) {
    Result<SafetensorsFile> file = SafetensorsFile::open(folder + "/oracle.safetensors");
    EXPECT_TRUE(file.ok()) << file.status().message();
    return Oracle(std::move(file).value());
  }
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  Matrix get(const std::string& name) const {
    const SafetensorsEntry* entry = file_.find(name);
    Matrix matrix;
    if (entry == nullptr) {
      ADD_FAILURE() << "the oracle has no " << name;
      return matrix;
    }
    matrix.rows = entry->shape[0];
    matrix.width = entry->shape.size() > 1 ? entry->shape[1] : 1;
    matrix.values.resize(matrix.rows * matrix.width);
    for (size_t i = 0; i < matrix.values.size(); ++i) {
      if (entry->dtype == DType::kInt32) {
        int32_t value;
        std::memcpy(&value, entry->data.data() + 4 * i, 4);
        matrix.values[i] = value;
      } else {
        float value;
        std::memcpy(&value, entry->data.data() + 4 * i, 4);
        matrix.values[i] = value;
      }
    }
    return matrix;
  }
  std::vector<int32_t> ids(const std::string& name) const {
    const Matrix matrix = get(name);
    return {matrix.values.begin(), matrix.values.end()};
  }

 private:
  explicit Oracle(SafetensorsFile file) : file_(std::move(file)) {}
  SafetensorsFile file_;
};

Matrix recorded(const Recorder& recorder, const std::string& name) {
  Matrix matrix;
  const RecordedTensor* tensor = recorder.find(name);
  if (tensor == nullptr) {
    ADD_FAILURE() << "the engine reported no " << name;
    return matrix;
  }
  matrix.rows = tensor->rows();
  matrix.width = tensor->width;
  if (tensor->integers) {
    matrix.values.assign(tensor->ints.begin(), tensor->ints.end());
  } else {
    matrix.values.assign(tensor->floats.begin(), tensor->floats.end());
  }
  return matrix;
}

// The last want.rows rows of `got` against `want`; prints the first coordinate that is off.
void expect_near(const Matrix& got, const Matrix& want, double tolerance, const std::string& what) {
  ASSERT_GE(got.rows, want.rows) << what;
  ASSERT_EQ(got.width, want.width) << what;
  double worst = 0;
  int64_t reported = 0;
  for (int64_t r = 0; r < want.rows; ++r) {
    for (int64_t c = 0; c < want.width; ++c) {
      const double a = got.at(got.rows - want.rows + r, c);
      const double b = want.at(r, c);
      const double difference = std::fabs(a - b);
      worst = std::max(worst, difference);
      if (!(difference <= tolerance) && reported++ == 0) {
        ADD_FAILURE() << what << "[" << r << ", " << c << "]: " << a << ", expected " << b;
      }
    }
  }
  ::testing::Test::RecordProperty(what, std::to_string(worst));
}

std::vector<int32_t> list_of(const Matrix& lists, int64_t row) {
  std::vector<int32_t> list;
  for (int64_t c = 0; c < lists.width; ++c) {
    if (lists.at(row, c) >= 0) {
      list.push_back(static_cast<int32_t>(lists.at(row, c)));
    }
  }
  return list;
}

// Lists equal in every row whose margin allows judging; the number of other rows that differ is
// returned. The first `rows_without_lists` rows may have taken the dense lane, which has no lists.
int64_t expect_same_lists(const Matrix& got, const Matrix& want, const Matrix& margin,
                          double margin_min, int64_t rows_without_lists, const std::string& what) {
  int64_t doubtful = 0;
  if (got.rows != want.rows && got.rows != want.rows - rows_without_lists) {
    ADD_FAILURE() << what << ": " << got.rows << " rows, expected " << want.rows << " (or "
                  << rows_without_lists << " less)";
    return 0;
  }
  int64_t reported = 0;
  for (int64_t r = want.rows - got.rows; r < want.rows; ++r) {
    const std::vector<int32_t> ours = list_of(got, got.rows - want.rows + r);
    const std::vector<int32_t> theirs = list_of(want, r);
    if (ours == theirs) {
      continue;
    }
    if (margin.values[r] > margin_min) {
      if (reported++ == 0) {
        ADD_FAILURE() << what << " row " << r << " (margin " << margin.values[r]
                      << "): lists differ";
      }
    } else {
      ++doubtful;
      std::set<int32_t> both(ours.begin(), ours.end());
      int64_t missing = 0;
      for (const int32_t p : theirs) {
        missing += both.count(p) == 0;
      }
      EXPECT_LE(missing, 1) << what << " row " << r << ": more than a boundary key differs";
    }
  }
  return doubtful;
}

struct Recording {
  Recorder recorder;
  std::vector<TokenEvent> events;
};

// One request of `prompt`, then `forced` as decode steps; everything is recorded. `inject`, when
// given, replaces each layer's output after it was recorded.
using Inject = std::function<void(int layer, float* hidden)>;
Recording run_engine(EngineOptions options, std::vector<int32_t> prompt,
                     std::vector<int32_t> forced, const Inject& inject = {}) {
  Recording run;
  const Result<Context> context = Context::create({.num_threads = 2});
  EXPECT_TRUE(context.ok());
  Result<std::unique_ptr<Engine>> engine = Engine::create(*context, options);
  if (!engine.ok()) {
    ADD_FAILURE() << engine.status().message();
    return run;
  }
  (*engine)->set_tap(
      [&, record = run.recorder.tap()](std::string_view name, int layer, const TensorView& tensor) {
        record(name, layer, tensor);
        if (inject && name == "hidden") {
          inject(layer, tensor.as<float>());
        }
      });
  Request request;
  request.prompt = std::move(prompt);
  request.prompt_logprobs = true;
  request.sampling.ignore_eos = true;
  request.sampling.max_tokens = static_cast<int64_t>(forced.size()) + 1;
  request.forced_tokens = std::move(forced);
  const Result<int64_t> id = (*engine)->submit(std::move(request));
  EXPECT_TRUE(id.ok()) << id.status().message();
  while ((*engine)->has_work()) {
    Result<std::vector<TokenEvent>> events = (*engine)->step();
    if (!events.ok()) {
      ADD_FAILURE() << events.status().message();
      break;
    }
    for (TokenEvent& event : *events) {
      run.events.push_back(std::move(event));
    }
  }
  return run;
}

// Logits of all prompt rows: the engine reports those that predict prompt tokens and the last one
// apart.
Matrix all_logits(const Recorder& recorder) {
  Matrix logits;
  for (const char* part : {"prompt_logits", "logits"}) {
    if (recorder.find(part) != nullptr) {
      const Matrix matrix = recorded(recorder, part);
      logits.width = matrix.width;
      logits.rows += matrix.rows;
      logits.values.insert(logits.values.end(), matrix.values.begin(), matrix.values.end());
    }
  }
  return logits;
}

// Index scores recomputed in double from what the engine's indexer used: head weights, roped
// queries and keys.
Matrix index_scores(const Recorder& recorder, int layer, int64_t last_rows) {
  const std::string suffix = "." + std::to_string(layer);
  const Matrix q = recorded(recorder, "index_q" + suffix);
  const Matrix k = recorded(recorder, "index_k" + suffix);
  const Matrix w = recorded(recorder, "index_head_weights" + suffix);
  Matrix scores;
  if (w.width == 0) {
    return scores;
  }
  const int64_t dim = k.width;
  scores.rows = std::min(last_rows, q.rows);
  scores.width = k.rows;
  scores.values.assign(scores.rows * scores.width, -std::numeric_limits<double>::infinity());
  for (int64_t r = 0; r < scores.rows; ++r) {
    const int64_t row = q.rows - scores.rows + r;
    for (int64_t j = 0; j <= k.rows - q.rows + row; ++j) {
      double score = 0;
      for (int64_t h = 0; h < w.width; ++h) {
        double dot = 0;
        for (int64_t d = 0; d < dim; ++d) {
          dot += q.at(row, h * dim + d) * k.at(j, d);
        }
        score += w.at(row, h) * std::max(dot, 0.0);
      }
      scores.values[r * scores.width + j] = score;
    }
  }
  return scores;
}

void expect_scores_near(const Matrix& got, const Matrix& want, const std::string& what) {
  ASSERT_EQ(got.rows, want.rows) << what;
  ASSERT_EQ(got.width, want.width) << what;
  for (size_t i = 0; i < want.values.size(); ++i) {
    if (std::isinf(want.values[i])) {
      ASSERT_TRUE(std::isinf(got.values[i])) << what << " element " << i;
    } else {
      ASSERT_NEAR(got.values[i], want.values[i], kTolerance) << what << " element " << i;
    }
  }
}

struct GoldenModel {
  const char* name;
  bool in_tree;
};

std::string folder_of(const GoldenModel& model) {
  if (model.in_tree) {
    return std::string(LACUNA_SOURCE_DIR) + "/tests/golden/" + model.name;
  }
  const char* dir = std::getenv("LACUNA_GOLDEN_DIR");
  return dir == nullptr ? std::string() : std::string(dir) + "/" + model.name;
}

class Golden : public ::testing::TestWithParam<GoldenModel> {
 protected:
  void SetUp() override {
    folder_ = folder_of(GetParam());
    if (folder_.empty() || !std::filesystem::exists(folder_ + "/oracle.safetensors")) {
      GTEST_SKIP() << "LACUNA_GOLDEN_DIR does not name a folder with " << GetParam().name
                   << ": its oracle runs are skipped";
    }
  }

  EngineOptions options(DType dtype = DType::kFloat32) const {
    EngineOptions options;
    options.model_dir = folder_;
    options.device = golden_device();
    options.dtype = dtype;
    options.skip_tokenizer = true;  // these checkpoints have none
    options.max_model_len = 1100;
    return options;
  }

  static constexpr int kLayers = 4;

  // All values of prefill `prefix` against the oracle. `forced_lists`: the oracle's lists were
  // used.
  void compare_prefill(const Recorder& recorder, const Oracle& oracle, const std::string& prefix,
                       bool forced_lists, int64_t rows_without_lists = 0) {
    const bool is_long = prefix == "s1000";
    const auto want = [&](const std::string& name) { return oracle.get(prefix + "." + name); };
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string suffix = "." + std::to_string(layer);
      if (oracle.has(prefix + ".topk" + suffix) && !forced_lists &&
          recorder.find("topk" + suffix) != nullptr) {
        const int64_t doubtful = expect_same_lists(
            recorded(recorder, "topk" + suffix), want("topk" + suffix), want("margin" + suffix),
            is_long ? kMarginMin : 0, rows_without_lists, prefix + " topk" + suffix);
        RecordProperty(prefix + "_doubtful" + suffix, std::to_string(doubtful));
      }
      if (oracle.has(prefix + ".index_scores" + suffix) &&
          recorder.find("index_q" + suffix) != nullptr) {
        expect_scores_near(index_scores(recorder, layer, 1 << 20), want("index_scores" + suffix),
                           prefix + " index_scores" + suffix);
      }
      if (oracle.has(prefix + ".index_scores_last64" + suffix) && !forced_lists) {
        expect_scores_near(index_scores(recorder, layer, 64), want("index_scores_last64" + suffix),
                           prefix + " index_scores_last64" + suffix);
      }
      if (is_long && !forced_lists) {
        continue;  // a swapped key at a near-tie reaches every value: judged with the oracle's
                   // lists instead
      }
      if (oracle.has(prefix + ".attn_out" + suffix)) {
        expect_near(recorded(recorder, "attn_out" + suffix), want("attn_out" + suffix), kTolerance,
                    prefix + " attn_out" + suffix);
        expect_near(recorded(recorder, "hidden" + suffix), want("hidden" + suffix),
                    kHiddenTolerance, prefix + " hidden" + suffix);
      }
      if (oracle.has(prefix + ".router_ids" + suffix)) {
        expect_near(recorded(recorder, "router_ids" + suffix), want("router_ids" + suffix), 0,
                    prefix + " router_ids" + suffix);
        expect_near(recorded(recorder, "router_weights" + suffix), want("router_weights" + suffix),
                    kTolerance, prefix + " router_weights" + suffix);
      }
    }
    if (!is_long || forced_lists) {
      expect_near(all_logits(recorder), want("logits"), kTolerance, prefix + " logits");
    }
  }

  std::vector<std::string> prefills(const Oracle& oracle) const {
    std::vector<std::string> prefixes;
    for (const char* prefix : {"s6", "s48", "s200", "s1000"}) {
      if (oracle.has(std::string(prefix) + ".input_ids")) {
        prefixes.push_back(prefix);
      }
    }
    return prefixes;
  }

  // Leader layer -> the oracle's lists for the prefill.
  static SelectionSource given(const Oracle& oracle, const std::string& prefix) {
    SelectionSource source;
    source.kind = SelectionSource::Kind::kGiven;
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string name = prefix + ".topk." + std::to_string(layer);
      if (oracle.has(name)) {
        const Matrix lists = oracle.get(name);
        source.given_positions = lists.rows;
        source.given[layer].assign(lists.values.begin(), lists.values.end());
      }
    }
    return source;
  }

  std::string folder_;
};

TEST_P(Golden, PrefillsMatchInFloat32) {
  const Oracle oracle = Oracle::open(folder_);
  for (const std::string& prefix : prefills(oracle)) {
    SCOPED_TRACE(prefix);
    compare_prefill(run_engine(options(), oracle.ids(prefix + ".input_ids"), {}).recorder, oracle,
                    prefix, false);
  }
}

TEST_P(Golden, ChunkedPrefillsMatchInFloat32) {
  const Oracle oracle = Oracle::open(folder_);
  for (const std::string& prefix : prefills(oracle)) {
    SCOPED_TRACE(prefix);
    EngineOptions chunked = options();
    chunked.max_num_batched_tokens =
        37;  // chunks start within blocks, and most begin on an odd position
    chunked.block_size = 16;
    // The first chunk of a tiny model fits its index_topk of 64.
    compare_prefill(run_engine(chunked, oracle.ids(prefix + ".input_ids"), {}).recorder, oracle,
                    prefix, false, chunked.max_num_batched_tokens);
  }
}

TEST_P(Golden, SparseLaneAloneMatchesInFloat32) {
  const Oracle oracle = Oracle::open(folder_);
  for (const std::string& prefix : prefills(oracle)) {
    SCOPED_TRACE(prefix);
    EngineOptions mqa = options();
    mqa.force_mqa = true;
    compare_prefill(run_engine(mqa, oracle.ids(prefix + ".input_ids"), {}).recorder, oracle, prefix,
                    false);
  }
}

TEST_P(Golden, MaskedLaneMatchesInFloat32) {
  const Oracle oracle = Oracle::open(folder_);
  for (const std::string& prefix : prefills(oracle)) {
    for (const int64_t rows_max : {1024, 37}) {
      SCOPED_TRACE(prefix + " in steps of " + std::to_string(rows_max));
      EngineOptions masked = options();
      masked.prefill_lane = "masked";
      masked.max_num_batched_tokens = rows_max;
      masked.mha_keys_max = rows_max == 37 ? 53 : 0;  // contexts in chunks that end within words
      compare_prefill(run_engine(masked, oracle.ids(prefix + ".input_ids"), {}).recorder, oracle,
                      prefix, false, rows_max == 37 ? 37 : 0);
    }
  }
}

TEST_P(Golden, LongPrefillMatchesInFloat32WithTheOraclesLists) {
  const Oracle oracle = Oracle::open(folder_);
  for (const std::string& prefix : prefills(oracle)) {
    SCOPED_TRACE(prefix);
    for (const char* lane : {"mqa", "masked"}) {
      SCOPED_TRACE(lane);
      EngineOptions forced = options();
      forced.selection = given(oracle, prefix);
      forced.prefill_lane = lane;
      compare_prefill(run_engine(forced, oracle.ids(prefix + ".input_ids"), {}).recorder, oracle,
                      prefix, true);
    }
  }
}

TEST_P(Golden, DecodeStepsMatchInFloat32) {
  const Oracle oracle = Oracle::open(folder_);
  const std::vector<int32_t> ids = oracle.ids("decode.input_ids");
  const Matrix want = oracle.get("decode.logits");
  const int64_t steps = want.rows;
  const int64_t prefill = static_cast<int64_t>(ids.size()) - steps;
  ASSERT_GE(steps, 12);
  const Recording run = run_engine(options(), {ids.begin(), ids.begin() + prefill},
                                   {ids.begin() + prefill, ids.end()});
  // The first row of "logits" follows the prefill, the others the decode steps.
  const Matrix logits = recorded(run.recorder, "logits");
  ASSERT_EQ(logits.rows, steps + 1);
  expect_near(logits, want, kTolerance, "decode logits");
  Matrix first = logits;
  first.rows = 1;
  Matrix want_first = oracle.get("decode.prefill_last_logits");  // [V]
  want_first.width = want_first.rows;
  want_first.rows = 1;
  expect_near(first, want_first, kTolerance, "logits after the prefill");
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string suffix = "." + std::to_string(layer);
    if (oracle.has("decode.topk" + suffix)) {
      // The prefill's rows come before those of the decode steps.
      Matrix lists = recorded(run.recorder, "topk" + suffix);
      ASSERT_GE(lists.rows, steps);
      lists.values.erase(lists.values.begin(),
                         lists.values.begin() + (lists.rows - steps) * lists.width);
      lists.rows = steps;
      expect_same_lists(lists, oracle.get("decode.topk" + suffix),
                        oracle.get("decode.margin" + suffix), 0, 0, "decode topk" + suffix);
    }
  }
  int64_t decode_steps = 0;
  for (const TokenEvent& event : run.events) {
    decode_steps += event.step.decode;
  }
  EXPECT_EQ(decode_steps, steps);
}

// Each layer gets the oracle's hidden state and the oracle's lists, so that what is measured is one
// layer's rounding and nothing that earlier layers or swapped keys did. u = 2^-9 bounds the
// relative error of one rounding to bf16; it is u / sqrt(3) = 0.0011 in the mean square. attn_out
// is behind eight roundings in series (x, q_latent, q, absorbed q, keys, attended values, head
// outputs, the product's input): sqrt(8) * 0.0011 = 0.0032. Four of them also move the softmax's
// scores, by |s| * 0.0011 * 2: with scores of a few units (these random models have no trained
// scale; YaRN multiplies theirs by 1.87) about as much again. hidden adds the MLP's four roundings
// to a residual that is exact. Measured over the four models: attn_out 0.0060 at most, hidden
// 0.0035, with AVX-512 as on an H200. The bounds are about twice that. Rows whose router chose
// other experts (near-ties flip under rounding) are left out of `hidden`; they may be at most a
// tenth.
TEST_P(Golden, BFloat16StaysWithinTheRoundingBound) {
  constexpr double kAttentionBound = 0.012;
  constexpr double kHiddenBound = 0.007;
  const Oracle oracle = Oracle::open(folder_);
  const std::string prefix = oracle.has("s200.input_ids") ? "s200" : "s48";
  EngineOptions bf16 = options(DType::kBFloat16);
  bf16.selection = given(oracle, prefix);
  bf16.force_mqa = true;
  const Recording run =
      run_engine(bf16, oracle.ids(prefix + ".input_ids"), {}, [&](int layer, float* hidden) {
        const Matrix exact = oracle.get(prefix + ".hidden." + std::to_string(layer));
        std::copy(exact.values.begin(), exact.values.end(), hidden);
      });
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::string suffix = "." + std::to_string(layer);
    const Matrix hidden = oracle.get(prefix + ".hidden" + suffix);
    std::vector<bool> comparable(hidden.rows, true);
    if (oracle.has(prefix + ".router_ids" + suffix)) {
      const Matrix ours = recorded(run.recorder, "router_ids" + suffix);
      const Matrix theirs = oracle.get(prefix + ".router_ids" + suffix);
      for (int64_t r = 0; r < hidden.rows; ++r) {
        for (int64_t c = 0; c < ours.width; ++c) {
          comparable[r] = comparable[r] && ours.at(r, c) == theirs.at(r, c);
        }
      }
      EXPECT_LE(std::count(comparable.begin(), comparable.end(), false), hidden.rows / 10) << layer;
    }
    for (const std::string name : {"attn_out", "hidden"}) {
      const Matrix got = recorded(run.recorder, name + suffix);
      const Matrix want = oracle.get(prefix + "." + name + suffix);
      double error = 0;
      double norm = 0;
      for (int64_t r = 0; r < want.rows; ++r) {
        for (int64_t c = 0; (comparable[r] || name == "attn_out") && c < want.width; ++c) {
          error += std::pow(got.at(r, c) - want.at(r, c), 2);
          norm += std::pow(want.at(r, c), 2);
        }
      }
      const double relative = std::sqrt(error / norm);
      std::printf("%s %s%s: relative error %.5f\n", GetParam().name, name.c_str(), suffix.c_str(),
                  relative);
      EXPECT_LE(relative, name == "attn_out" ? kAttentionBound : kHiddenBound) << name << suffix;
      EXPECT_GT(relative, 1e-5) << "bf16 arithmetic was not used";
    }
  }
}

// Kernel X, Y, X again on one prompt and forced decode steps: X repeats its bits. What another
// kernel's order of sums does to the log-probabilities is printed, not bounded: these are random
// weights, where a key or an expert swapped at a near-tie changes everything after it. The bound of
// a layer is the test above's.
TEST_P(Golden, SparseMlaKernelsTakeTurnsOnHopper) {
  if (golden_device() != "cuda" || GetParam().in_tree) {
    GTEST_SKIP() << "wants a tiny model and LACUNA_GOLDEN_DEVICE=cuda";
  }
  const Result<Context> context = Context::create({.num_threads = 1});
  ASSERT_TRUE(context.ok());
  bool hopper = false;
  for (const DeviceInfo& device : context->state().devices) {
    hopper = hopper || device.compute_capability == 90;
  }
  if (!hopper) {
    GTEST_SKIP() << "no GPU of sm_90";
  }
  const Oracle oracle = Oracle::open(folder_);
  const std::vector<int32_t> ids = oracle.ids("decode.input_ids");
  const int64_t prefill = static_cast<int64_t>(ids.size()) - oracle.get("decode.logits").rows;
  const char* kernels[] = {"sm90/sparse_mla_small_head", "cuda/sparse_mla_mma"};
  std::vector<Matrix> logits;
  for (const int which : {0, 1, 0}) {
    EngineOptions bf16 = options(DType::kBFloat16);
    bf16.force_mqa = true;
    bf16.kernels = {{"sparse_mla", kernels[which]}};
    const Recording run =
        run_engine(bf16, {ids.begin(), ids.begin() + prefill}, {ids.begin() + prefill, ids.end()});
    logits.push_back(recorded(run.recorder, "logits"));
  }
  ASSERT_GT(logits[0].rows, 12);
  EXPECT_EQ(logits[0].values, logits[2].values);
  ASSERT_EQ(logits[0].values.size(), logits[1].values.size());
  double largest = 0;
  int64_t other_tokens = 0;
  for (int64_t r = 0; r < logits[0].rows; ++r) {
    double sums[2] = {};
    int64_t best[2] = {};
    for (int k = 0; k < 2; ++k) {
      for (int64_t c = 0; c < logits[k].width; ++c) {
        sums[k] += std::exp(logits[k].at(r, c));
        best[k] = logits[k].at(r, c) > logits[k].at(r, best[k]) ? c : best[k];
      }
    }
    other_tokens += best[0] != best[1];
    for (int64_t c = 0; c < logits[0].width; ++c) {
      largest = std::max(largest, std::fabs(logits[0].at(r, c) - std::log(sums[0]) -
                                            logits[1].at(r, c) + std::log(sums[1])));
    }
  }
  std::printf(
      "%s, %s against %s: %lld rows of %lld log-probabilities differ by at most %.5f, %lld "
      "greedy tokens are others\n",
      GetParam().name, kernels[0], kernels[1], static_cast<long long>(logits[0].rows),
      static_cast<long long>(logits[0].width), largest, static_cast<long long>(other_tokens));
  EXPECT_GT(largest, 0.0) << "the same kernel ran every time";
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         ::testing::Values(GoldenModel{"v32-micro", true},
                                           GoldenModel{"glm-dsa-micro", true},
                                           GoldenModel{"v32-tiny", false},
                                           GoldenModel{"glm-dsa-tiny", false}),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

// The trained model: lists of the last 64 rows, their logits and the greedy answers of four
// problems. Tolerances of its TRAINING.md: lists equal except keys within 1e-4 of the boundary,
// logits 5e-3 (float32), greedy ids equal. Its oracle notes that one selected key swapped for a
// near-tie moves logits by up to 0.05 in the prompt of 4054 tokens.
TEST(DsaNano, MatchesTheOracleInFloat32) {
  const std::string folder = std::string(LACUNA_SOURCE_DIR) + "/models/dsa-nano";
  const Oracle oracle = Oracle::open(folder);
  for (int p = 0; p < 4; ++p) {
    const std::string prefix = "p" + std::to_string(p);
    SCOPED_TRACE(prefix);
    EngineOptions options;
    options.model_dir = folder;
    options.device = golden_device();
    options.dtype = DType::kFloat32;
    options.max_model_len = 4352;
    const std::vector<int32_t> greedy = oracle.ids(prefix + ".greedy_ids");
    const Recording run = run_engine(options, oracle.ids(prefix + ".input_ids"), greedy);
    std::vector<int32_t> ours;
    const Matrix logits = all_logits(run.recorder);
    const Matrix steps = recorded(run.recorder, "logits");
    for (size_t i = 0; i < greedy.size(); ++i) {
      int32_t best = 0;
      for (int64_t v = 1; v < steps.width; ++v) {
        best = steps.at(static_cast<int64_t>(i), v) > steps.at(static_cast<int64_t>(i), best)
                   ? static_cast<int32_t>(v)
                   : best;
      }
      ours.push_back(best);
    }
    EXPECT_EQ(ours, greedy);
    // Rows of the prompt: all but the decode steps that follow.
    Matrix prompt_logits = logits;
    prompt_logits.rows = static_cast<int64_t>(oracle.ids(prefix + ".input_ids").size());
    int64_t swapped = 0;
    for (const int layer : {0, 2}) {
      Matrix lists = recorded(run.recorder, "topk." + std::to_string(layer));
      lists.rows = prompt_logits.rows;
      const Matrix want = oracle.get(prefix + ".topk_last64." + std::to_string(layer));
      for (int64_t r = 0; r < want.rows; ++r) {
        const std::vector<int32_t> mine = list_of(lists, lists.rows - want.rows + r);
        const std::vector<int32_t> theirs = list_of(want, r);
        std::vector<int32_t> difference;
        std::set_difference(theirs.begin(), theirs.end(), mine.begin(), mine.end(),
                            std::back_inserter(difference));
        EXPECT_LE(difference.size(), 1u) << "layer " << layer << " row " << r;
        swapped += !difference.empty();
      }
    }
    EXPECT_LE(swapped, 2);
    expect_near(prompt_logits, oracle.get(prefix + ".logits_last64"), p == 0 ? 0.05 : 5e-3,
                prefix + " logits");
  }
}

}  // namespace
}  // namespace lacuna
