// An FP8 checkpoint computes what the same numbers in F32 compute.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/recorder.h"
#include "lacuna/engine.h"
#include "tests/support/fp8_checkpoint.h"

namespace lacuna {
namespace {

// Logits of all rows of a prompt, in f32 arithmetic.
std::vector<float> logits_of(const std::string& dir, const std::string& device) {
  const Result<Context> context = Context::create({.num_threads = 1});
  EXPECT_TRUE(context.ok());
  EngineOptions options;
  options.model_dir = dir;
  options.device = device;
  options.dtype = DType::kFloat32;
  options.skip_tokenizer = true;
  options.max_model_len = 64;
  options.max_num_seqs = 1;
  Result<std::unique_ptr<Engine>> engine = Engine::create(*context, options);
  if (!engine.ok()) {
    ADD_FAILURE() << engine.status().message();
    return {};
  }
  Recorder recorder;
  (*engine)->set_tap(recorder.tap());
  Request request;
  for (int32_t i = 0; i < 40; ++i) {
    request.prompt.push_back((17 * i + 5) % static_cast<int32_t>(testing::TinyModelWriter::kVocab));
  }
  request.prompt_logprobs = true;
  request.sampling.ignore_eos = true;
  request.sampling.max_tokens = 4;
  request.forced_tokens = {9, 2, 77};
  EXPECT_TRUE((*engine)->submit(std::move(request)).ok());
  while ((*engine)->has_work()) {
    const Result<std::vector<TokenEvent>> events = (*engine)->step();
    if (!events.ok()) {
      ADD_FAILURE() << events.status().message();
      return {};
    }
  }
  std::vector<float> logits;
  for (const char* name : {"prompt_logits", "logits"}) {
    const RecordedTensor* tensor = recorder.find(name);
    if (tensor != nullptr) {
      logits.insert(logits.end(), tensor->floats.begin(), tensor->floats.end());
    }
  }
  return logits;
}

// Each weight is the same number up to one rounding to f32 (2^-24), which an FP8 kernel may do
// before or after it sums. A chain of ten products (two layers of five) passes on relative errors
// of a few times sqrt(K) 2^-24 each, K below 256: 10 * 16 * 2^-24 is 1e-5, of logits of about 1.
TEST(Fp8Checkpoint, HasTheLogitsOfTheSameNumbersInF32) {
  const std::string folder = ::testing::TempDir() + "lacuna_fp8_checkpoint_test";
  testing::TinyModelWriter::write(folder + "/fp8", true);
  testing::TinyModelWriter::write(folder + "/f32", false);
  const std::vector<float> want = logits_of(folder + "/f32", "cpu");
  ASSERT_EQ(want.size(), size_t{43} * testing::TinyModelWriter::kVocab);
  float largest = 0;
  for (const float logit : want) {
    largest = std::max(largest, std::fabs(logit));
  }
  ASSERT_GT(largest, 0.5f);  // a model whose logits are all the same would prove nothing
  for (const std::string device : {"cpu", "auto"}) {
    const std::vector<float> got = logits_of(folder + "/fp8", device);
    ASSERT_EQ(got.size(), want.size()) << device;
    for (size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 1e-5f * largest * 4) << device << ", element " << i;
    }
  }
}

}  // namespace
}  // namespace lacuna
