// The engine on the small trained model: answers, sampling, stopping, cancelling, queues, records
// and counters; the sparse path is on where it should be, and wrong inputs are refused.
#include "lacuna/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <set>

#include "engine/nano.h"
#include "engine/recorder.h"
#include "ops/backend.h"

namespace lacuna {
namespace {

using Ids = std::vector<int32_t>;
constexpr int32_t kEndOfText = 262;

Request ask(const std::string& prompt) {
  Request request;
  request.prompt = ids_of(prompt);
  request.sampling.max_tokens = 16;
  return request;
}

int64_t calls(const Engine& engine, const std::string& kernel) {
  const EngineCounters counters = engine.counters();
  const auto found = counters.kernel_calls.find(kernel);
  return found == counters.kernel_calls.end() ? 0 : found->second;
}

double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = a.size() == b.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a[i]) - b[i]));
  }
  return worst;
}

// ---- Answers

TEST(Engine, AddsTwoNumbers) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    EngineOptions options = nano_options();
    options.dtype = dtype;
    const auto engine = make_engine(options);
    ASSERT_NE(engine, nullptr);
    const Result<Ids> prompt = engine->encode("#12+34=");
    ASSERT_TRUE(prompt.ok());
    EXPECT_EQ(*prompt, ids_of("#12+34="));
    Request request = ask("#12+34=");
    request.sampling.stop = {"\n"};
    const Answer answer = run(*engine, request);
    EXPECT_EQ(answer.text, "046");
    EXPECT_EQ(answer.tokens, ids_of("046\n"));
    EXPECT_EQ(answer.finish, FinishReason::kStop);
    for (const float logprob : answer.logprobs) {
      EXPECT_GT(logprob, -0.1f);  // it is sure
      EXPECT_LE(logprob, 0.0f);
    }
  }
}

TEST(Engine, AnswersWithEveryCacheFormat) {
  for (const char* kv : {"auto", "bfloat16", "float32", "fp8_ds_mla"}) {
    for (const char* index : {"bfloat16", "float32", "fp8"}) {
      EngineOptions options = nano_options();
      options.dtype = DType::kBFloat16;
      options.kv_cache_dtype = kv;
      options.index_cache_dtype = index;
      options.max_model_len = 512;
      const auto engine = make_engine(options);
      ASSERT_NE(engine, nullptr);
      // The sparse lane, and a question that needs no context.
      Request request = ask(filler(200) + "\n#12+34=");
      request.sampling.stop = {"\n"};
      EXPECT_EQ(run(*engine, request).text, "046") << kv << " " << index;
      EXPECT_GT(engine->counters().rows_by_lane[0], 200);
    }
  }
}

TEST(Engine, RecallsAFactBeyondTheWindow) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  const auto recall = [&](int64_t distance) {
    Request request = ask(filler(40) + "\nqzw=73;\n" + filler(distance, 5) + "\n?qzw:");
    request.sampling.stop = {"\n"};
    return run(*engine, request).text;
  };
  for (const int64_t distance : {50, 200, 600}) {
    EXPECT_EQ(recall(distance), "73") << distance;
  }
}

TEST(Engine, StreamedTextIsTheDecodedAnswer) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  int64_t replaced = 0;
  for (const uint64_t seed : {1, 2, 3}) {
    Request request = ask("#12+34=");
    request.sampling = {.temperature = 30, .seed = seed, .max_tokens = 80, .ignore_eos = true};
    const Answer answer = run(*engine, request);
    ASSERT_EQ(answer.tokens.size(), 80u);
    EXPECT_EQ(answer.text, engine->decode(answer.tokens));
    for (size_t at = answer.text.find("\xEF\xBF\xBD"); at != std::string::npos;
         at = answer.text.find("\xEF\xBF\xBD", at + 1)) {
      ++replaced;
    }
  }
  EXPECT_GT(replaced, 10);  // the answers were wild enough to have broken characters
}

TEST(Engine, InfoSaysWhatWasLoaded) {
  EngineOptions options = nano_options();
  options.block_size = 48;
  options.kv_cache_tokens = 500;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const EngineInfo& info = engine->info();
  EXPECT_EQ(info.architecture, "GlmMoeDsaForCausalLM");
  EXPECT_EQ(info.num_layers, kNanoLayers);
  EXPECT_EQ(info.num_leader_layers, kNanoLeaders);
  EXPECT_EQ(info.num_heads, 16);
  EXPECT_EQ(info.index_topk, kNanoTopk);
  EXPECT_EQ(info.vocab_size, 288);
  EXPECT_EQ(info.max_model_len, 1024);
  EXPECT_EQ(info.kv_cache_tokens, 11 * 48);
  EXPECT_EQ(info.kv_cache_bytes, 11 * 48 * 4 * (4 * 576 + 2 * 128));
  EXPECT_EQ(info.dtype, "float32");
  EXPECT_EQ(info.kv_format, "latent_f32");
  EXPECT_EQ(info.index_format, "index_f32");
  EXPECT_GT(info.weight_bytes, 14000000);
  EXPECT_GT(info.activation_bytes, 0);
}

// ---- Sampling and stopping

TEST(Engine, SeededSamplingRepeatsWhateverTheChunks) {
  const std::string prompt = filler(150);
  Request request = ask(prompt);
  request.sampling = {
      .temperature = 2, .top_p = 0.95, .seed = 11, .max_tokens = 12, .ignore_eos = true};
  EngineOptions options = nano_options();
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const Ids first = run(*engine, request).tokens;
  EXPECT_EQ(first.size(), 12u);
  EXPECT_EQ(run(*engine, request).tokens, first);
  Request other = request;
  other.sampling.seed = 12;
  EXPECT_NE(run(*engine, other).tokens, first);
  Request greedy = request;
  greedy.sampling.temperature = 0;
  EXPECT_NE(run(*engine, greedy).tokens, first);
  for (const int64_t chunk : {17, 64}) {
    options.max_num_batched_tokens = chunk;
    const auto chunked = make_engine(options);
    ASSERT_NE(chunked, nullptr);
    EXPECT_EQ(run(*chunked, request).tokens, first) << chunk;
  }
  // Nor on what is queued behind it.
  const Result<int64_t> id = engine->submit(request);
  ASSERT_TRUE(id.ok());
  ASSERT_TRUE(engine->submit(other).ok());
  Ids queued;
  while (engine->has_work()) {
    const auto events = engine->step();
    ASSERT_TRUE(events.ok());
    for (const TokenEvent& event : *events) {
      if (event.request_id == *id && event.token_id >= 0) {
        queued.push_back(event.token_id);
      }
    }
  }
  EXPECT_EQ(queued, first);
}

TEST(Engine, MaxTokensIsTheLengthOfTheAnswer) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  for (const int64_t n : {1, 2, 9}) {
    Request request = ask("#12+34=");
    request.sampling.max_tokens = n;
    request.sampling.ignore_eos = true;
    const Answer answer = run(*engine, request);
    EXPECT_EQ(static_cast<int64_t>(answer.tokens.size()), n);
    EXPECT_EQ(answer.finish, FinishReason::kLength);
    EXPECT_EQ(answer.text, engine->decode(answer.tokens));
  }
}

TEST(Engine, TheContextEndsAnAnswer) {
  EngineOptions options = nano_options();
  options.max_model_len = 40;
  options.block_size = 16;
  auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  Request request = ask(filler(30));
  request.sampling.max_tokens = 100;
  request.sampling.ignore_eos = true;
  Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens.size(), 10u);
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  // A cache that is smaller than the context: whole blocks of it.
  options.max_model_len = 1024;
  options.kv_cache_tokens = 33;
  engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  answer = run(*engine, request);
  EXPECT_EQ(answer.tokens.size(), 48u - 30u);
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  EXPECT_EQ(run(*engine, request).tokens, answer.tokens);  // the blocks came back
}

TEST(Engine, StopTokensEndTheAnswerAndAreNotShown) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#12+34=");
  request.sampling.stop_token_ids = {'6', '9'};
  const Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens, ids_of("046"));
  EXPECT_EQ(answer.text, "04");
  EXPECT_EQ(answer.finish, FinishReason::kStop);
}

TEST(Engine, EndOfTextStopsUnlessIgnored) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#12+34=");
  request.sampling.max_tokens = 4;
  request.forced_tokens = {'a', kEndOfText, 'b', 'c'};
  Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens, (Ids{'a', kEndOfText}));
  EXPECT_EQ(answer.text, "a");
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  request.sampling.ignore_eos = true;
  answer = run(*engine, request);
  EXPECT_EQ(answer.tokens, (Ids{'a', kEndOfText, 'b', 'c'}));
  EXPECT_EQ(answer.text, "abc");
  EXPECT_EQ(answer.finish, FinishReason::kLength);
}

TEST(Engine, StopStringsAcrossTokens) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#12+34=");
  request.sampling.stop = {"XYZ", "END"};
  request.forced_tokens = ids_of("abENDcd");
  Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens, ids_of("abEND"));
  EXPECT_EQ(answer.text, "ab");
  EXPECT_EQ(answer.finish, FinishReason::kStop);
  for (const TokenEvent& event : answer.events) {
    EXPECT_EQ(event.text.find('E'), std::string::npos);
  }
  // Held text is given out when the answer ends otherwise.
  request.sampling.max_tokens = 4;
  answer = run(*engine, request);
  EXPECT_EQ(answer.text, "abEN");
  EXPECT_EQ(answer.finish, FinishReason::kLength);
  request.forced_tokens = {'a', 'E', 'N', kEndOfText};
  answer = run(*engine, request);
  EXPECT_EQ(answer.text, "aEN");
  EXPECT_EQ(answer.finish, FinishReason::kStop);
}

// ---- Cancelling and queues

TEST(Engine, CancelBeforeTheFirstStep) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  const Result<int64_t> id = engine->submit(ask("#12+34="));
  ASSERT_TRUE(id.ok());
  engine->cancel(*id);
  ASSERT_TRUE(engine->has_work());
  const auto events = engine->step();
  ASSERT_TRUE(events.ok());
  ASSERT_EQ(events->size(), 1u);
  EXPECT_EQ((*events)[0].request_id, *id);
  EXPECT_EQ((*events)[0].finish, FinishReason::kCancelled);
  EXPECT_EQ((*events)[0].token_id, -1);
  EXPECT_EQ((*events)[0].text, "");
  EXPECT_FALSE(engine->has_work());
  EXPECT_EQ(engine->counters().steps, 0);
  EXPECT_EQ(engine->counters().prompt_tokens, 0);
}

TEST(Engine, CancelDuringAnAnswerGivesBackTextAndBlocks) {
  EngineOptions options = nano_options();
  options.max_model_len = 64;
  options.block_size = 16;
  options.kv_cache_tokens = 48;  // one request fills most of it
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  for (int round = 0; round < 5; ++round) {
    Request request = ask(filler(30));
    request.forced_tokens = ids_of("abENDcd");
    request.sampling.stop = {"END"};
    const Result<int64_t> id = engine->submit(request);
    ASSERT_TRUE(id.ok());
    std::string text;
    for (int i = 0; i < 4; ++i) {  // a, b, and E, N, which are held
      const auto events = engine->step();
      ASSERT_TRUE(events.ok());
      ASSERT_EQ(events->size(), 1u);
      text += (*events)[0].text;
    }
    EXPECT_EQ(text, "ab");
    engine->cancel(*id);
    engine->cancel(*id + 1000);  // unknown: ignored
    const auto events = engine->step();
    ASSERT_TRUE(events.ok());
    ASSERT_EQ(events->size(), 1u);
    EXPECT_EQ((*events)[0].finish, FinishReason::kCancelled);
    EXPECT_EQ((*events)[0].text, "EN");
    EXPECT_FALSE(engine->has_work());
    engine->cancel(*id);  // finished: ignored
  }
  Request request = ask("#12+34=");
  request.sampling.stop = {"\n"};
  EXPECT_EQ(run(*engine, request).text, "046");
}

TEST(Engine, CancelDuringAChunkedPrompt) {
  EngineOptions options = nano_options();
  options.max_num_batched_tokens = 50;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const Result<int64_t> id = engine->submit(ask(filler(180)));
  ASSERT_TRUE(id.ok());
  for (int i = 0; i < 2; ++i) {
    const auto events = engine->step();
    ASSERT_TRUE(events.ok());
    ASSERT_EQ(events->size(), 1u);
    EXPECT_EQ((*events)[0].token_id, -1);
    EXPECT_EQ((*events)[0].finish, FinishReason::kNone);
    EXPECT_FALSE((*events)[0].step.decode);
  }
  engine->cancel(*id);
  const auto events = engine->step();
  ASSERT_TRUE(events.ok());
  EXPECT_EQ((*events)[0].finish, FinishReason::kCancelled);
  EXPECT_EQ(engine->counters().prompt_tokens, 100);
  EXPECT_EQ(engine->counters().generated_tokens, 0);
  EXPECT_FALSE(engine->has_work());
}

TEST(Engine, QueuedRequestsRunInOrderAndDoNotMeet) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  const std::vector<std::string> questions = {"#12+34=", "#50+27=", "#08+09=", "#91+11="};
  const std::vector<std::string> expected = {"046", "077", "", "102"};
  std::vector<int64_t> ids;
  for (const std::string& question : questions) {
    Request request = ask(question);
    request.sampling.stop = {"\n"};
    const Result<int64_t> id = engine->submit(request);
    ASSERT_TRUE(id.ok());
    ids.push_back(*id);
  }
  EXPECT_EQ(std::set<int64_t>(ids.begin(), ids.end()).size(), ids.size());
  engine->cancel(ids[2]);
  std::map<int64_t, std::string> texts;
  std::map<int64_t, FinishReason> finishes;
  std::vector<int64_t> order;
  while (engine->has_work()) {
    const auto events = engine->step();
    ASSERT_TRUE(events.ok());
    for (const TokenEvent& event : *events) {
      texts[event.request_id] += event.text;
      finishes[event.request_id] = event.finish;
      if (order.empty() || order.back() != event.request_id) {
        order.push_back(event.request_id);
      }
    }
  }
  // The cancelled one is told of first, the others run one after the other.
  EXPECT_EQ(order, (std::vector<int64_t>{ids[2], ids[0], ids[1], ids[3]}));
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(texts[ids[i]], expected[i]);
    EXPECT_EQ(finishes[ids[i]], i == 2 ? FinishReason::kCancelled : FinishReason::kStop);
  }
  const auto nothing = engine->step();
  ASSERT_TRUE(nothing.ok());
  EXPECT_TRUE(nothing->empty());
}

// ---- Records

TEST(Engine, PromptLogprobsDoNotDependOnHowThePromptIsCut) {
  Request request = ask(filler(280) + "\n#12+34=");
  request.prompt_logprobs = true;
  request.sampling.max_tokens = 1;
  const size_t length = request.prompt.size();
  std::vector<float> whole;
  double worst = 0;
  for (const int64_t chunk : {1024, 128, 61, 7}) {
    for (const int64_t block : {64, 5}) {
      EngineOptions options = nano_options();
      options.max_num_batched_tokens = chunk;
      options.block_size = block;
      const auto engine = make_engine(options);
      ASSERT_NE(engine, nullptr);
      const Answer answer = run(*engine, request);
      const RequestRecord record = engine->take_record(answer.id);
      ASSERT_EQ(record.prompt_logprobs.size(), length - 1);
      EXPECT_TRUE(record.selected_keys.empty());
      EXPECT_TRUE(engine->take_record(answer.id).prompt_logprobs.empty());  // it was taken
      if (whole.empty()) {
        whole = record.prompt_logprobs;
      }
      worst = std::max(worst, worst_difference(record.prompt_logprobs, whole));
    }
  }
  RecordProperty("worst_difference", std::to_string(worst));
  EXPECT_LT(worst, 1e-3);
  EXPECT_TRUE(std::all_of(whole.begin(), whole.end(), [](float v) { return v <= 0 && v > -60; }));
}

TEST(Engine, DecodingATextGivesTheLogprobsOfItAsAPrompt) {
  const Ids text = ids_of(filler(230));
  EngineOptions options = nano_options();
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  Request as_prompt;
  as_prompt.prompt = text;
  as_prompt.prompt_logprobs = true;
  as_prompt.sampling.max_tokens = 1;
  const Answer one = run(*engine, as_prompt);
  const std::vector<float> expected = engine->take_record(one.id).prompt_logprobs;
  Request forced;
  forced.prompt = {text.begin(), text.begin() + 90};
  forced.forced_tokens = {text.begin() + 90, text.end()};
  forced.sampling.max_tokens = static_cast<int64_t>(forced.forced_tokens.size());
  forced.sampling.ignore_eos = true;
  const Answer two = run(*engine, forced);
  ASSERT_EQ(two.tokens, forced.forced_tokens);
  const double worst = worst_difference(two.logprobs, {expected.begin() + 89, expected.end()});
  RecordProperty("worst_difference", std::to_string(worst));
  EXPECT_LT(worst, 1e-3);
}

TEST(Engine, APromptOfOneTokenHasNoLogprobs) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#");
  request.prompt_logprobs = true;
  request.sampling.max_tokens = 2;
  const Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens.size(), 2u);
  EXPECT_TRUE(engine->take_record(answer.id).prompt_logprobs.empty());
  EXPECT_TRUE(engine->take_record(12345).prompt_logprobs.empty());
}

TEST(Engine, RecordsTheSelectionOfEveryRow) {
  for (const int64_t chunk : {1024, 100}) {
    EngineOptions options = nano_options();
    options.max_num_batched_tokens = chunk;
    const auto engine = make_engine(options);
    ASSERT_NE(engine, nullptr);
    Request request = ask(filler(250));
    request.record_selection = true;
    request.sampling.max_tokens = 5;
    request.sampling.ignore_eos = true;
    const Answer answer = run(*engine, request);
    const RequestRecord record = engine->take_record(answer.id);
    EXPECT_TRUE(record.prompt_logprobs.empty());
    ASSERT_EQ(record.selected_keys.size(), 2u);
    EXPECT_EQ(record.selected_keys.begin()->first, 0);
    EXPECT_EQ(record.selected_keys.rbegin()->first, 2);
    const int64_t dense_rows = chunk == 100 ? 100 : 0;  // the first chunk is short enough
    for (const auto& [layer, lists] : record.selected_keys) {
      ASSERT_EQ(static_cast<int64_t>(lists.size()), (250 + 4) * kNanoTopk) << layer;
      for (int64_t row = 0; row < 254; ++row) {
        const int32_t* list = lists.data() + row * kNanoTopk;
        const int64_t count = row < dense_rows ? 0 : std::min<int64_t>(row + 1, kNanoTopk);
        for (int64_t i = 0; i < kNanoTopk; ++i) {
          if (i >= count) {
            ASSERT_EQ(list[i], -1) << layer << " " << row << " " << i;
          } else {
            ASSERT_GE(list[i], i == 0 ? 0 : list[i - 1] + 1) << layer << " " << row << " " << i;
            ASSERT_LE(list[i], row);
          }
        }
      }
    }
    EXPECT_NE(record.selected_keys.at(0), record.selected_keys.at(2));
  }
}

TEST(Engine, ARequestWithoutRecordsLeavesNone) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  const Answer answer = run(*engine, ask("#12+34="));
  const RequestRecord record = engine->take_record(answer.id);
  EXPECT_TRUE(record.prompt_logprobs.empty());
  EXPECT_TRUE(record.selected_keys.empty());
}

// ---- Lanes and counters

TEST(Engine, SparseAttentionRunsExactlyWhereTheContextIsLongerThanTopk) {
  EngineOptions options = nano_options();
  options.max_num_batched_tokens = 64;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  Request request = ask(filler(200));  // chunks of 64, 64, 64, 8: the first two end within 128
  request.sampling.max_tokens = 4;
  request.sampling.ignore_eos = true;
  const Answer answer = run(*engine, request);
  const EngineCounters counters = engine->counters();
  EXPECT_EQ(counters.steps, 7);
  EXPECT_EQ(counters.prompt_tokens, 200);
  EXPECT_EQ(counters.generated_tokens, 4);
  EXPECT_EQ(counters.rows_by_lane, (std::array<int64_t, kNumRowLanes>{64 + 8 + 3, 128, 0}));
  EXPECT_EQ(counters.keys_visible, 203 * 204 / 2);
  EXPECT_EQ(counters.keys_read, 128 * 129 / 2 + (64 + 8 + 3) * 128);
  const int64_t sparse_steps = 2 + 3;
  EXPECT_EQ(calls(*engine, "cpu/sparse_mla"), kNanoLayers * sparse_steps);
  EXPECT_EQ(calls(*engine, "cpu/select_keys"), kNanoLeaders * sparse_steps);
  EXPECT_EQ(calls(*engine, "cpu/mha"), kNanoLayers * 2);
  EXPECT_EQ(calls(*engine, "cpu/append_kv"), kNanoLayers * 7);
  EXPECT_EQ(calls(*engine, "cpu/append_index_keys"), kNanoLeaders * 7);
  EXPECT_EQ(calls(*engine, "cpu/sample"), 4);
  // The same, step by step.
  ASSERT_EQ(answer.events.size(), 7u);
  int64_t read = 0;
  for (size_t i = 0; i < answer.events.size(); ++i) {
    const StepInfo& step = answer.events[i].step;
    EXPECT_EQ(step.decode, i >= 4);
    EXPECT_EQ(step.rows_by_lane[1] > 0, i < 2) << i;
    EXPECT_EQ(step.rows_by_lane[0] > 0, i >= 2) << i;
    EXPECT_GT(step.seconds, 0);
    read += step.keys_read;
  }
  EXPECT_EQ(read, counters.keys_read);
  EXPECT_EQ(answer.events[6].step.keys_visible, 203);
  EXPECT_EQ(answer.events[6].step.keys_read, 128);
}

TEST(Engine, ForceMqaLeavesTheDenseLaneEmpty) {
  EngineOptions options = nano_options();
  options.force_mqa = true;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  run(*engine, ask("#12+34="));
  EXPECT_EQ(engine->counters().rows_by_lane[1], 0);
  EXPECT_EQ(calls(*engine, "cpu/mha"), 0);
  EXPECT_GT(calls(*engine, "cpu/sparse_mla"), 0);
}

// A prompt that needs no selection, in the dense lane, then decoding past index_topk: the index
// keys of the prompt must be there, and the answer must be that of the sparse lane alone.
TEST(Engine, DecodingPastTopkAfterADensePrefill) {
  Request request = ask(filler(60) + "\nqzw=73;\n" + filler(40, 3) + "\n?qzw:");
  ASSERT_LE(static_cast<int64_t>(request.prompt.size()), kNanoTopk);
  ASSERT_GT(static_cast<int64_t>(request.prompt.size()), 100);
  request.sampling.max_tokens = 50;
  request.sampling.ignore_eos = true;
  request.record_selection = true;
  request.prompt_logprobs = true;
  std::vector<Answer> answers;
  std::vector<RequestRecord> records;
  for (const bool force_mqa : {false, true}) {
    EngineOptions options = nano_options();
    options.force_mqa = force_mqa;
    const auto engine = make_engine(options);
    ASSERT_NE(engine, nullptr);
    answers.push_back(run(*engine, request));
    records.push_back(engine->take_record(answers.back().id));
    const int64_t prompt_rows = static_cast<int64_t>(request.prompt.size());
    EXPECT_EQ(engine->counters().rows_by_lane[1], force_mqa ? 0 : prompt_rows);
    EXPECT_EQ(engine->counters().rows_by_lane[0], force_mqa ? prompt_rows + 49 : 49);
  }
  EXPECT_EQ(answers[0].text.substr(0, 2), "73");
  EXPECT_EQ(answers[0].tokens, answers[1].tokens);
  EXPECT_LT(worst_difference(answers[0].logprobs, answers[1].logprobs), 1e-3);
  EXPECT_LT(worst_difference(records[0].prompt_logprobs, records[1].prompt_logprobs), 1e-3);
  for (const int layer : {0, 2}) {
    const Ids& ours = records[0].selected_keys.at(layer);
    const Ids& theirs = records[1].selected_keys.at(layer);
    ASSERT_EQ(ours.size(), theirs.size());
    const size_t decode = request.prompt.size() * kNanoTopk;
    EXPECT_TRUE(std::equal(ours.begin() + decode, ours.end(), theirs.begin() + decode));
  }
}

// Beyond index_topk the lists matter; within it they can not.
TEST(Engine, SelectionsDifferBeyondTopkAndOnlyThere) {
  const int64_t length = 500;
  Request request = ask(filler(30) + "\nqzw=73;\n" + filler(length - 45, 9) + "\n?qzw:");
  request.prompt_logprobs = true;
  request.sampling.stop = {"\n"};
  std::map<SelectionSource::Kind, std::vector<float>> logprobs;
  std::map<SelectionSource::Kind, std::string> texts;
  using Kind = SelectionSource::Kind;
  for (const Kind kind : {Kind::kIndexer, Kind::kDense, Kind::kWindow, Kind::kRandom}) {
    EngineOptions options = nano_options();
    options.selection = {.kind = kind, .seed = 1};
    const auto engine = make_engine(options);
    ASSERT_NE(engine, nullptr);
    const Answer answer = run(*engine, request);
    texts[kind] = answer.text;
    logprobs[kind] = engine->take_record(answer.id).prompt_logprobs;
    EXPECT_EQ(calls(*engine, "cpu/sparse_mla") > 0, kind != Kind::kDense);
    EXPECT_EQ(calls(*engine, "cpu/select_keys") > 0, kind == Kind::kIndexer);
    EXPECT_EQ(engine->counters().keys_read == engine->counters().keys_visible,
              kind == Kind::kDense);
  }
  EXPECT_EQ(texts[Kind::kIndexer], "73");
  EXPECT_NE(texts[Kind::kWindow], "73");  // the fact lies outside
  const auto part = [&](Kind kind, int64_t begin, int64_t end) {
    const std::vector<float>& all = logprobs[kind];
    return std::vector<float>(all.begin() + begin, all.begin() + end);
  };
  const int64_t end = static_cast<int64_t>(request.prompt.size()) - 1;
  for (const Kind kind : {Kind::kDense, Kind::kWindow, Kind::kRandom}) {
    EXPECT_LT(worst_difference(part(Kind::kIndexer, 0, kNanoTopk), part(kind, 0, kNanoTopk)), 1e-3);
    EXPECT_GT(worst_difference(part(Kind::kIndexer, kNanoTopk, end), part(kind, kNanoTopk, end)),
              1e-2);
  }
}

TEST(Engine, GivenListsAreUsed) {
  // The lists that the indexer chose, given back, change nothing; other lists do.
  Request request = ask(filler(200));
  request.prompt_logprobs = true;
  request.record_selection = true;
  request.sampling.max_tokens = 1;
  EngineOptions options = nano_options();
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const RequestRecord record = engine->take_record(run(*engine, request).id);
  options.selection.kind = SelectionSource::Kind::kGiven;
  options.selection.given = record.selected_keys;
  options.selection.given_positions = 200;
  const auto given = make_engine(options);
  ASSERT_NE(given, nullptr);
  const RequestRecord again = given->take_record(run(*given, request).id);
  EXPECT_EQ(again.selected_keys, record.selected_keys);
  EXPECT_LT(worst_difference(again.prompt_logprobs, record.prompt_logprobs), 1e-5);
  EXPECT_EQ(calls(*given, "cpu/select_keys"), 0);
}

TEST(Engine, ThreadsChangeNothing) {
  Request request = ask(filler(300));
  request.prompt_logprobs = true;
  request.sampling.max_tokens = 4;
  std::vector<std::vector<float>> logprobs;
  std::vector<Ids> tokens;
  for (const int threads : {1, 2, 3}) {
    const Result<Context> context = Context::create({.num_threads = threads});
    ASSERT_TRUE(context.ok());
    const auto engine = make_engine(nano_options(), *context);
    ASSERT_NE(engine, nullptr);
    const Answer answer = run(*engine, request);
    tokens.push_back(answer.tokens);
    logprobs.push_back(engine->take_record(answer.id).prompt_logprobs);
  }
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(tokens[i], tokens[0]);
    EXPECT_LT(worst_difference(logprobs[i], logprobs[0]), 1e-4);
  }
}

TEST(Engine, TheTapReportsListsOfLeaderLayersOnly) {
  const auto engine = make_engine(nano_options());
  ASSERT_NE(engine, nullptr);
  std::map<std::string, std::set<int>> layers;
  std::map<std::string, int64_t> rows;
  engine->set_tap([&](std::string_view name, int layer, const ConstTensorView& tensor) {
    layers[std::string(name)].insert(layer);
    rows[std::string(name)] += tensor.shape[0];
  });
  Request request = ask(filler(150));
  request.sampling.max_tokens = 3;
  request.sampling.ignore_eos = true;
  request.prompt_logprobs = true;
  run(*engine, request);
  EXPECT_EQ(layers["topk"], (std::set<int>{0, 2}));
  EXPECT_EQ(layers["attn_out"], (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers["hidden"], (std::set<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers["router_ids"], (std::set<int>{1, 2, 3}));
  EXPECT_EQ(layers["logits"], std::set<int>{-1});
  EXPECT_EQ(layers["prompt_logits"], std::set<int>{-1});
  EXPECT_EQ(rows["topk"], 2 * 152);
  EXPECT_EQ(rows["hidden"], 4 * 152);
  EXPECT_EQ(rows["prompt_logits"], 149);
  EXPECT_EQ(rows["logits"], 3);
  engine->set_tap({});
  rows.clear();
  run(*engine, ask("#12+34="));
  EXPECT_TRUE(rows.empty());
}

TEST(Engine, TheSparseMlaTapSeesEveryLayerOfEveryStep) {
  EngineOptions options = nano_options();
  options.max_num_batched_tokens = 150;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  std::vector<std::pair<int64_t, int>> calls_seen;
  std::vector<int64_t> rows;
  engine->set_sparse_mla_tap([&](const SparseMlaCall& call) {
    calls_seen.emplace_back(call.step, call.layer);
    rows.push_back(call.args.out.shape[0]);
    EXPECT_EQ(call.kernel, "cpu/sparse_mla");
    EXPECT_EQ(call.args.kv.layout.d_qk(), call.args.q_nope.shape[2] + call.args.q_rope.shape[2]);
    EXPECT_EQ(call.args.indices.shape[1], kNanoTopk);
  });
  Request request = ask(filler(200));
  request.sampling.max_tokens = 3;
  request.sampling.ignore_eos = true;
  run(*engine, request);
  std::vector<std::pair<int64_t, int>> want;
  for (int64_t step = 0; step < 4; ++step) {
    for (int layer = 0; layer < kNanoLayers; ++layer) {
      want.emplace_back(step, layer);
    }
  }
  EXPECT_EQ(calls_seen, want);
  EXPECT_EQ(rows,
            (std::vector<int64_t>{150, 150, 150, 150, 50, 50, 50, 50, 1, 1, 1, 1, 1, 1, 1, 1}));
  engine->set_sparse_mla_tap({});
  run(*engine, request);
  EXPECT_EQ(calls_seen.size(), want.size());
}

// ---- Kernels of the test's own, before those of the CPU

// A context whose first backend has the given sparse_mla kernels.
class SpyContext {
 public:
  explicit SpyContext(std::vector<Kernel<SparseMlaArgs>> kernels)
      : real_(one_thread()), kernels_(std::move(kernels)) {
    const Backend& cpu = cpu_backend(real_);
    backend_.name = "spy";
    backend_.runtime = cpu.runtime;
    backend_.device_kind = DeviceKind::kCpu;
    backend_.available = [](const DeviceInfo&) { return true; };
    backend_.sparse_mla = kernels_;
    auto state = std::make_shared<ContextState>();
    state->devices = real_.state().devices;
    state->backends = {&backend_};
    state->backends.insert(state->backends.end(), real_.state().backends.begin(),
                           real_.state().backends.end());
    context_ = std::make_unique<Context>(Context::from_state(std::move(state)));
    cpu_kernel = &cpu.sparse_mla.front();
  }
  const Context& context() const { return *context_; }

  static const Kernel<SparseMlaArgs>* cpu_kernel;

 private:
  Context real_;
  std::vector<Kernel<SparseMlaArgs>> kernels_;
  Backend backend_;
  std::unique_ptr<Context> context_;
};
const Kernel<SparseMlaArgs>* SpyContext::cpu_kernel = nullptr;

std::vector<Ids> lists_seen;
int calls_until_failure = -1;

Kernel<SparseMlaArgs> spy_kernel() {
  return {.name = "spy/sparse_mla",
          .supports = [](const SparseMlaArgs&, const DeviceInfo&) { return ok_status(); },
          .workspace_bytes =
              [](const SparseMlaArgs& args, const DeviceInfo& device) {
                return SpyContext::cpu_kernel->workspace_bytes == nullptr
                           ? int64_t{0}
                           : SpyContext::cpu_kernel->workspace_bytes(args, device);
              },
          .run = [](const SparseMlaArgs& args, const DeviceInfo& device,
                    const Launch& launch) -> Status {
            if (calls_until_failure >= 0 && calls_until_failure-- == 0) {
              return internal_error("the spy was told to fail");
            }
            Ids lists;
            for (int64_t t = 0; t < args.indices.shape[0]; ++t) {
              const int32_t* row = args.indices.as<int32_t>() + t * args.indices.strides[0];
              lists.insert(lists.end(), row, row + args.indices.shape[1]);
            }
            lists_seen.push_back(std::move(lists));
            return SpyContext::cpu_kernel->run(args, device, launch);
          }};
}

Kernel<SparseMlaArgs> picky_kernel() {
  return {.name = "spy/picky",
          .supports = [](const SparseMlaArgs&,
                         const DeviceInfo&) { return unsupported("it only runs on Sundays"); },
          .run = [](const SparseMlaArgs&, const DeviceInfo&, const Launch&) -> Status {
            ADD_FAILURE() << "a kernel that refuses was run";
            return ok_status();
          }};
}

// Layers 1 and 3 have no indexer: they must attend over the very lists of layers 0 and 2.
TEST(Engine, FollowerLayersAttendOverTheirLeadersLists) {
  lists_seen.clear();
  calls_until_failure = -1;
  const SpyContext spy({spy_kernel()});
  EngineOptions options = nano_options();
  options.max_num_batched_tokens = 150;
  const auto engine = make_engine(options, spy.context());
  ASSERT_NE(engine, nullptr);
  Request request = ask(filler(200));
  request.sampling.max_tokens = 4;
  request.sampling.ignore_eos = true;
  request.record_selection = true;
  const Answer answer = run(*engine, request);
  const RequestRecord record = engine->take_record(answer.id);
  EXPECT_EQ(calls(*engine, "spy/sparse_mla"), 4 * 5);
  EXPECT_EQ(calls(*engine, "cpu/sparse_mla"), 0);
  ASSERT_EQ(lists_seen.size(), 4u * 5u);
  size_t row = 0;
  for (size_t step = 0; step < 5; ++step) {
    const Ids& leader = lists_seen[4 * step];
    EXPECT_EQ(lists_seen[4 * step + 1], leader) << step;
    EXPECT_EQ(lists_seen[4 * step + 3], lists_seen[4 * step + 2]) << step;
    EXPECT_NE(lists_seen[4 * step + 2], leader) << step;
    // One sequence in a fresh cache: blocks lie in order, so rows are positions.
    const Ids& recorded = record.selected_keys.at(0);
    EXPECT_TRUE(std::equal(leader.begin(), leader.end(), recorded.begin() + row * kNanoTopk));
    row += leader.size() / kNanoTopk;
  }
  EXPECT_EQ(row, 203u);
}

TEST(Engine, AKernelThatRefusesIsPassedOverUnlessForced) {
  const SpyContext spy({picky_kernel()});
  EngineOptions options = nano_options();
  const auto engine = make_engine(options, spy.context());
  ASSERT_NE(engine, nullptr);
  run(*engine, ask(filler(150)));
  EXPECT_GT(calls(*engine, "cpu/sparse_mla"), 0);
  EXPECT_EQ(calls(*engine, "spy/picky"), 0);
  // Forced, nothing else may take its place, and the error gives every kernel's reason.
  options.kernels = {{"sparse_mla", "spy/picky"}};
  const auto forced = Engine::create(spy.context(), options);
  ASSERT_FALSE(forced.ok());
  EXPECT_EQ(forced.status().code(), StatusCode::kUnsupported);
  for (const char* part : {"sparse_mla: the kernel asked for cannot run these arguments",
                           "spy/picky: it only runs on Sundays",
                           "cpu/sparse_mla: not the kernel that was asked for"}) {
    EXPECT_NE(forced.status().message().find(part), std::string::npos) << forced.status().message();
  }
}

TEST(Engine, AForcedKernelIsTheOneThatRuns) {
  lists_seen.clear();
  calls_until_failure = -1;
  const SpyContext spy({spy_kernel()});
  EngineOptions options = nano_options();
  options.kernels = {{"sparse_mla", "cpu/sparse_mla"}, {"linear", "cpu/linear_gemm"}};
  const auto engine = make_engine(options, spy.context());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#12+34=");
  request.sampling.stop = {"\n"};
  EXPECT_EQ(run(*engine, request).text, "046");
  EXPECT_EQ(calls(*engine, "spy/sparse_mla"), 0);
  EXPECT_TRUE(lists_seen.empty());
  EXPECT_GT(calls(*engine, "cpu/sparse_mla"), 0);
  EXPECT_GT(calls(*engine, "cpu/linear_gemm"), 0);
  EXPECT_EQ(calls(*engine, "cpu/linear_gemv"), 0);
}

// Kernel X, Y, X again on the same weights. Y is X under another name, so that bits and counters
// are known.
TEST(Engine, ForcedKernelsTakeTurnsAndAreCounted) {
  calls_until_failure = -1;
  const SpyContext spy({spy_kernel()});
  const std::string kernels[] = {"spy/sparse_mla", "cpu/sparse_mla"};
  std::vector<std::vector<float>> logprobs;
  for (const int which : {0, 1, 0}) {
    EngineOptions options = nano_options();
    options.force_mqa = true;
    options.kernels = {{"sparse_mla", kernels[which]}};
    const auto engine = make_engine(options, spy.context());
    ASSERT_NE(engine, nullptr);
    Request request = ask(filler(200));
    request.sampling.max_tokens = 5;
    request.sampling.ignore_eos = true;
    logprobs.push_back(run(*engine, request).logprobs);
    EXPECT_EQ(engine->counters().steps, 5);
    EXPECT_EQ(calls(*engine, kernels[which]), kNanoLayers * 5);
    EXPECT_EQ(calls(*engine, kernels[1 - which]), 0);
  }
  EXPECT_EQ(logprobs[0], logprobs[2]);
  EXPECT_EQ(logprobs[0], logprobs[1]);
}

TEST(Engine, AFailedStepLosesItsRequestAndNoOther) {
  EngineOptions options = nano_options();
  options.max_model_len = 256;
  const SpyContext spy({spy_kernel()});
  const auto engine = make_engine(options, spy.context());
  ASSERT_NE(engine, nullptr);
  Request request = ask("#12+34=");
  request.sampling.stop = {"\n"};
  for (int round = 0; round < 3; ++round) {
    ASSERT_TRUE(engine->submit(ask(filler(200))).ok());
    const Result<int64_t> second = engine->submit(request);
    ASSERT_TRUE(second.ok());
    calls_until_failure = 2;  // the third layer of the first step
    const auto failed = engine->step();
    ASSERT_FALSE(failed.ok());
    EXPECT_EQ(failed.status().code(), StatusCode::kInternal);
    EXPECT_EQ(failed.status().message(), "the spy was told to fail");
    ASSERT_TRUE(engine->has_work());
    std::string text;
    while (engine->has_work()) {
      const auto events = engine->step();
      ASSERT_TRUE(events.ok()) << events.status().message();
      for (const TokenEvent& event : *events) {
        EXPECT_EQ(event.request_id, *second);
        text += event.text;
      }
    }
    EXPECT_EQ(text, "046");
  }
}

// ---- Refusals

void expect_refused(const Status& status, StatusCode code, const std::string& message) {
  EXPECT_EQ(status.code(), code) << status.message();
  EXPECT_EQ(status.message(), message);
}

TEST(EngineErrors, RequestsThatMakeNoSense) {
  EngineOptions options = nano_options();
  options.max_model_len = 50;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const auto refusal = [&](const std::function<void(Request&)>& change) {
    Request request = ask("#12+34=");
    change(request);
    const Result<int64_t> id = engine->submit(request);
    EXPECT_FALSE(id.ok());
    return id.status();
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  expect_refused(refusal([](Request& r) { r.prompt.clear(); }), invalid,
                 "prompt: no tokens, expected at least one");
  expect_refused(
      refusal([](Request& r) { r.prompt.assign(50, 'a'); }), invalid,
      "prompt: 50 tokens, the context of 50 tokens (max_model_len) leaves no room for an "
      "answer");
  expect_refused(refusal([](Request& r) { r.prompt[2] = 288; }), invalid,
                 "prompt: token 2 is 288, expected 0 to 287");
  expect_refused(refusal([](Request& r) { r.prompt[6] = -1; }), invalid,
                 "prompt: token 6 is -1, expected 0 to 287");
  expect_refused(refusal([](Request& r) {
                   r.forced_tokens = {5, 999};
                 }),
                 invalid, "forced_tokens: 999, expected 0 to 287");
  expect_refused(refusal([](Request& r) { r.sampling.top_p = 2; }), invalid,
                 "top_p: 2.000000, expected more than 0 and at most 1");
  expect_refused(refusal([](Request& r) { r.sampling.stop_token_ids = {288}; }), invalid,
                 "stop_token_ids: 288, expected an id from 0 to 287");
  EXPECT_FALSE(engine->has_work());
  // The longest prompt that leaves room for one token.
  Request longest = ask(filler(49));
  const Answer answer = run(*engine, longest);
  EXPECT_EQ(answer.tokens.size(), 1u);
  EXPECT_EQ(answer.finish, FinishReason::kLength);
}

TEST(EngineErrors, APromptThatTheCacheCanNotHold) {
  EngineOptions options = nano_options();
  options.kv_cache_tokens = 100;
  options.block_size = 10;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  const Result<int64_t> id = engine->submit(ask(filler(100)));
  ASSERT_FALSE(id.ok());
  expect_refused(id.status(), StatusCode::kInvalidArgument,
                 "prompt: 100 tokens, the cache holds 100 (kv_cache_tokens)");
}

TEST(EngineErrors, TextWithoutATokenizer) {
  EngineOptions options = nano_options();
  options.skip_tokenizer = true;
  const auto engine = make_engine(options);
  ASSERT_NE(engine, nullptr);
  expect_refused(engine->encode("#12+34=").status(), StatusCode::kInvalidArgument,
                 "prompt: given as text, but the tokenizer was skipped; give token ids");
  Request request = ask("#12+34=");
  request.sampling.max_tokens = 4;
  const Answer answer = run(*engine, request);
  EXPECT_EQ(answer.tokens, ids_of("046\n"));
  EXPECT_EQ(answer.text, "");
  EXPECT_EQ(engine->decode(answer.tokens), "");
  request.sampling.stop = {"\n"};
  expect_refused(engine->submit(request).status(), StatusCode::kInvalidArgument,
                 "stop: text needs the tokenizer, which was skipped; use stop_token_ids");
}

TEST(EngineErrors, OptionsThatMakeNoSense) {
  struct Case {
    std::function<void(EngineOptions&)> change;
    StatusCode code;
    const char* begins;
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  const std::vector<Case> cases = {
      {[](auto& o) { o.max_num_batched_tokens = 0; }, invalid,
       "max_num_batched_tokens: 0, expected 1 to 1048576"},
      {[](auto& o) { o.max_num_batched_tokens = 1 << 21; }, invalid,
       "max_num_batched_tokens: 2097152, expected"},
      {[](auto& o) { o.block_size = 0; }, invalid, "block_size: 0, expected 1 to 4096"},
      {[](auto& o) { o.block_size = 4097; }, invalid, "block_size: 4097, expected 1 to 4096"},
      {[](auto& o) { o.max_model_len = 8193; }, invalid,
       "max_model_len: 8193, expected 1 to max_position_embeddings 8192"},
      {[](auto& o) { o.max_model_len = -1; }, invalid, "max_model_len: -1, expected"},
      {[](auto& o) { o.kv_cache_tokens = -1; }, invalid,
       "kv_cache_memory_bytes, kv_cache_tokens: 0, -1, expected 0 (automatic) or a size"},
      {[](auto& o) { o.kv_cache_memory_bytes = 1000; }, invalid,
       "kv_cache_memory_bytes: 1000 holds no block, one takes"},
      {[](auto& o) { o.max_num_seqs = 0; }, invalid, "max_num_seqs: 0, expected 1 to 65536"},
      {[](auto& o) { o.kv_cache_dtype = "int4"; }, invalid,
       "kv_cache_dtype: \"int4\", expected auto, bfloat16, float32 or fp8_ds_mla"},
      {[](auto& o) { o.index_cache_dtype = "int4"; }, invalid,
       "index_cache_dtype: \"int4\", expected auto, bfloat16, float32 or fp8"},
      {[](auto& o) { o.dtype = DType::kFloat16; }, invalid,
       "dtype: float16, expected float32 or bfloat16"},
      {[](auto& o) { o.model_dir = "/nowhere"; }, StatusCode::kNotFound,
       "/nowhere: no such folder"},
      {[](auto& o) {
         o.model_dir = std::string(LACUNA_SOURCE_DIR) + "/tests/golden/v32-micro";
         o.skip_tokenizer = true;
         o.kv_cache_dtype = "fp8_ds_mla";
       },
       StatusCode::kUnsupported,
       "kv_cache_dtype: fp8_ds_mla holds latent 512 and rope 64 or 0, the model has 32 and 8; "
       "bfloat16 and float32 would work"},
      {[](auto& o) { o.model_dir = std::string(LACUNA_SOURCE_DIR) + "/tests/golden/v32-micro"; },
       StatusCode::kNotFound, LACUNA_SOURCE_DIR "/tests/golden/v32-micro: no tokenizer.json"},
  };
  const Context context = one_thread();
  for (const Case& one : cases) {
    EngineOptions options = nano_options();
    one.change(options);
    const auto engine = Engine::create(context, options);
    ASSERT_FALSE(engine.ok()) << one.begins;
    EXPECT_EQ(engine.status().code(), one.code) << engine.status().message();
    EXPECT_TRUE(engine.status().message().starts_with(one.begins)) << engine.status().message();
  }
}

TEST(EngineErrors, ForcedKernelsThatDoNotExist) {
  const Context context = one_thread();
  EngineOptions options = nano_options();
  options.kernels = {{"sparse_attention", "cpu/sparse_mla"}};
  Result<std::unique_ptr<Engine>> engine = Engine::create(context, options);
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(engine.status().message().starts_with(
      "kernel: there is no operation \"sparse_attention\"; there are sparse_mla, "))
      << engine.status().message();
  options.kernels = {{"linear", "cpu/linear_magic"}};
  engine = Engine::create(context, options);
  ASSERT_FALSE(engine.ok());
  EXPECT_EQ(engine.status().code(), StatusCode::kNotFound);
  EXPECT_TRUE(engine.status().message().starts_with(
      "kernel: linear has no kernel \"cpu/linear_magic\"; it has "))
      << engine.status().message();
  for (const char* name : {"cpu/linear_gemv", "cpu/linear_gemm"}) {
    EXPECT_NE(engine.status().message().find(name), std::string::npos);
  }
}

}  // namespace
}  // namespace lacuna
