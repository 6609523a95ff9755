// The engine on a GPU: graphs against eager launches, answers against the CPU's, and what a step
// may not do. Skipped, with the reason, where there is no GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "engine/nano.h"
#include "engine/recorder.h"
#include "lacuna/engine.h"
#include "ops/backend.h"

namespace lacuna {
namespace {

class GpuEngine : public ::testing::Test {
 protected:
  void SetUp() override {
    const ContextState& state = context_.state();
    if (std::none_of(state.devices.begin(), state.devices.end(), [](const DeviceInfo& device) {
          return device.device.kind == DeviceKind::kCuda;
        })) {
      GTEST_SKIP() << "no GPU: " << state.cuda_status;
    }
    for (const Backend* backend : state.backends) {
      if (backend->device_kind == DeviceKind::kCuda) {
        runtime_ = backend->runtime;
      }
    }
  }

  static EngineOptions gpu_options(int64_t sequences) {
    EngineOptions options = nano_options();
    options.device = "cuda";
    options.dtype = DType::kBFloat16;
    options.max_num_seqs = sequences;
    options.max_num_batched_tokens = 512;
    return options;
  }

  // Whether the first GPU, on which the engine runs, is one of sm_90.
  bool has_hopper() const {
    const std::vector<DeviceInfo>& devices = context_.state().devices;
    const auto gpu = std::find_if(devices.begin(), devices.end(), [](const DeviceInfo& device) {
      return device.device.kind == DeviceKind::kCuda;
    });
    return gpu != devices.end() && gpu->compute_capability == 90;
  }

  std::unique_ptr<Engine> make(const EngineOptions& options) {
    return make_engine(options, context_);
  }

  const Context context_ = one_thread();
  const Runtime* runtime_ = nullptr;
};

Request request_of(int which, int num_facts, int64_t max_tokens) {
  Request request;
  request.prompt = ids_of(prompt_about(which, num_facts));
  request.sampling.max_tokens = max_tokens;
  request.sampling.ignore_eos = true;
  request.sampling.seed = static_cast<uint64_t>(which);
  request.sampling.temperature = which % 3 == 1 ? 0.8 : 0;
  request.sampling.top_p = which % 3 == 1 ? 0.9 : 1;
  return request;
}

// Requests of many lengths that come and go: batches of every size up to `sequences`.
Answers churn(Engine& engine, int count, uint32_t seed, uint32_t facts_max = 60,
              uint32_t tokens_max = 40) {
  std::mt19937 random(seed);
  for (int i = 0; i < count; ++i) {
    const int facts = 1 + static_cast<int>(random() % facts_max);
    const int64_t tokens = 1 + static_cast<int64_t>(random() % tokens_max);
    EXPECT_TRUE(engine.submit(request_of(i, facts, tokens)).ok());
  }
  return run_all(engine);
}

// `requests` that come and go, in graphs and in eager launches.
void compare_graphs_with_eager(EngineOptions options, const Context& context, int requests,
                               uint32_t facts_max, uint32_t tokens_max) {
  const auto graphs = make_engine(options, context);
  options.enforce_eager = true;
  const auto eager = make_engine(options, context);
  ASSERT_TRUE(graphs != nullptr && eager != nullptr);
  EXPECT_GT(graphs->info().num_graphs, 0);
  EXPECT_EQ(eager->info().num_graphs, 0);
  const Answers want = churn(*eager, requests, 7, facts_max, tokens_max);
  const Answers got = churn(*graphs, requests, 7, facts_max, tokens_max);
  EXPECT_EQ(got.tokens, want.tokens);
  EXPECT_EQ(got.logprobs, want.logprobs);
  const EngineCounters counters = graphs->counters();
  EXPECT_GT(counters.graph_steps, tokens_max / 2);
  EXPECT_GT(counters.padded_rows, 0);
  EXPECT_EQ(counters.eager_steps.count("enforced"), 0u);
  EXPECT_EQ(eager->counters().graph_steps, 0);
  EXPECT_EQ(eager->counters().eager_steps["enforced"], counters.graph_steps);
  // The same again: the caches hold other bytes by now.
  EXPECT_EQ(churn(*graphs, requests, 7, facts_max, tokens_max).logprobs.size(),
            want.logprobs.size());
}

TEST_F(GpuEngine, GraphsWithPaddedRowsGiveTheBitsOfEagerLaunches) {
  compare_graphs_with_eager(gpu_options(13), context_, 48, 60, 40);
}

// So few steps that compute-sanitizer sees their end: what `./run gpu-test` runs under it.
TEST_F(GpuEngine, GraphsOfFewRequestsGiveTheBitsOfEagerLaunches) {
  compare_graphs_with_eager(gpu_options(5), context_, 7, 30, 12);
}

// Steps whose requests all have 2 to 4 rows: what a prefix in the cache leaves of a prompt.
TEST_F(GpuEngine, GraphsOfSeveralRowsARequestGiveTheBitsOfEagerLaunches) {
  constexpr int64_t kCached = 3 * 64;  // whole blocks, more than index_topk
  EngineOptions options = gpu_options(8);
  options.dtype = DType::kFloat32;
  const auto graphs = make(options);
  options.enforce_eager = true;
  const auto eager = make(options);
  options.enable_prefix_caching = false;
  const auto whole = make(options);
  ASSERT_TRUE(graphs != nullptr && eager != nullptr && whole != nullptr);
  const auto submit = [&](Engine& engine, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      Request request = request_of(static_cast<int>(i), 40, 3);
      request.sampling.temperature = 0;
      request.sampling.top_p = 1;
      request.prompt.resize(kCached + rows);
      ASSERT_TRUE(engine.submit(std::move(request)).ok());
    }
  };
  for (int64_t rows = 2; rows <= 4; ++rows) {
    for (const int64_t count : {1, 3, 5, 8}) {
      SCOPED_TRACE(std::to_string(count) + " requests of " + std::to_string(rows) + " rows");
      submit(*whole, rows, count);
      std::vector<std::vector<float>> want;
      std::vector<std::vector<int32_t>> want_ids;
      const Answers computed = run_all(*whole);
      for (const auto& [id, ids] : computed.tokens) {
        want_ids.push_back(ids);
        want.push_back(computed.logprobs.at(id));
      }
      std::vector<Answers> got;
      for (Engine* engine : {graphs.get(), eager.get()}) {
        submit(*engine, rows, count);  // fills the cache
        run_all(*engine);
        submit(*engine, rows, count);
        const EngineCounters before = engine->counters();
        ASSERT_TRUE(engine->step().ok());
        const EngineCounters after = engine->counters();
        EXPECT_EQ(after.prompt_tokens - before.prompt_tokens, rows * count);
        EXPECT_EQ(after.rows_by_lane[0] - before.rows_by_lane[0], rows * count) << "sparse MQA";
        EXPECT_EQ(after.graph_steps - before.graph_steps, engine == graphs.get() ? 1 : 0);
        EXPECT_EQ(after.padded_rows - before.padded_rows, rows * ((count == 3   ? 4
                                                                   : count == 5 ? 8
                                                                                : count) -
                                                                  count));
        got.push_back(run_all(*engine));
      }
      EXPECT_EQ(got[0].tokens, got[1].tokens);
      EXPECT_EQ(got[0].logprobs, got[1].logprobs);
      ASSERT_EQ(got[0].tokens.size(), want_ids.size());
      size_t at = 0;
      for (const auto& [id, ids] : got[0].tokens) {
        EXPECT_EQ(ids, want_ids[at]);
        for (size_t i = 0; i < ids.size(); ++i) {
          EXPECT_NEAR(got[0].logprobs.at(id)[i], want[at][i], 1e-3);
        }
        ++at;
      }
    }
  }
  EXPECT_EQ(graphs->counters().eager_steps.count("enforced"), 0u);
}

// Kernel X, Y, X again on the same weights: X repeats its bits, Y agrees, and the counters show who
// ran.
TEST_F(GpuEngine, AForcedSparseMlaKernelServesEveryLayerOfEveryStep) {
  std::vector<std::pair<std::string, std::string>> pairs = {
      {"cuda/sparse_mla_mma", "cuda/sparse_mla_simt"}};
  if (has_hopper()) {
    pairs.push_back({"sm90/sparse_mla_small_head", "cuda/sparse_mla_mma"});
  }
  for (const auto& [x_name, y_name] : pairs) {
    SCOPED_TRACE(x_name + " against " + y_name);
    const std::string kernels[] = {x_name, y_name};
    std::vector<Answers> runs;
    for (const int which : {0, 1, 0}) {
      EngineOptions options = gpu_options(1);
      options.force_mqa = true;
      options.kernels = {{"sparse_mla", kernels[which]}};
      const auto engine = make(options);
      ASSERT_NE(engine, nullptr);
      const EngineCounters before = engine->counters();
      Request request = request_of(3, 60, 32);
      request.sampling.temperature = 0;
      ASSERT_TRUE(engine->submit(std::move(request)).ok());
      runs.push_back(run_all(*engine));
      EngineCounters after = engine->counters();
      const auto calls = [&](const std::string& kernel) {
        const auto found = before.kernel_calls.find(kernel);
        return after.kernel_calls[kernel] -
               (found == before.kernel_calls.end() ? 0 : found->second);
      };
      EXPECT_GT(after.graph_steps, 0);
      EXPECT_EQ(calls(kernels[which]), kNanoLayers * (after.steps - before.steps));
      EXPECT_EQ(after.kernel_calls[kernels[1 - which]], 0);
    }
    EXPECT_EQ(runs[0].tokens, runs[2].tokens);
    EXPECT_EQ(runs[0].logprobs, runs[2].logprobs);
    EXPECT_EQ(runs[0].tokens, runs[1].tokens);
    const std::vector<float>& x = runs[0].logprobs.at(1);
    const std::vector<float>& y = runs[1].logprobs.at(1);
    ASSERT_EQ(x.size(), y.size());
    float largest = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(x[i], y[i], 0.1) << i;
      largest = std::max(largest, std::fabs(x[i] - y[i]));
    }
    std::printf("%s against %s: log-probabilities of %zu tokens differ by at most %.5f\n",
                x_name.c_str(), y_name.c_str(), x.size(), largest);
  }
}

// With nothing forced, a batch of decode rows goes to the kernel for few heads.
TEST_F(GpuEngine, ABatchDecodesOnTheKernelForFewHeads) {
  if (!has_hopper()) {
    GTEST_SKIP() << "no GPU of sm_90";
  }
  const auto engine = make(gpu_options(32));
  ASSERT_NE(engine, nullptr);
  for (int r = 0; r < 32; ++r) {
    ASSERT_TRUE(engine->submit(request_of(r, 60, 8)).ok());
  }
  run_all(*engine);
  EXPECT_GT(engine->counters().kernel_calls["sm90/sparse_mla_small_head"], 0);
}

TEST_F(GpuEngine, WhatATapLeavesIsWhatTheNextLayersSee) {
  EngineOptions options = gpu_options(1);
  std::map<std::string, std::vector<float>> hidden;
  for (const bool zeroes : {false, true}) {
    const auto engine = make(options);
    ASSERT_NE(engine, nullptr);
    Recorder recorder;
    engine->set_tap(
        [&, record = recorder.tap()](std::string_view name, int layer, const TensorView& tensor) {
          record(name, layer, tensor);
          if (zeroes && name == "hidden" && layer == 0) {
            std::fill_n(tensor.as<float>(), tensor.num_elements(), 0.0f);
          }
        });
    run(*engine, request_of(1, 20, 1));
    for (const int layer : {0, 1}) {
      hidden[std::to_string(layer) + (zeroes ? " zeroed" : "")] =
          recorder.find("hidden." + std::to_string(layer))->floats;
    }
  }
  EXPECT_EQ(hidden["0"], hidden["0 zeroed"]);
  EXPECT_NE(hidden["1"], hidden["1 zeroed"]);
  // A row of zeros is normalised to zeros, and nothing is added to it.
  for (const float value : hidden["1 zeroed"]) {
    ASSERT_EQ(value, 0.0f);
  }
}

TEST_F(GpuEngine, RepeatedRunsGiveTheSameBits) {
  EngineOptions options = gpu_options(8);
  options.enable_prefix_caching = false;
  const auto engine = make(options);
  ASSERT_NE(engine, nullptr);
  const auto values = [](const Answers& tokens) {
    std::vector<std::vector<float>> lists;
    for (const auto& [id, list] : tokens.logprobs) {
      lists.push_back(list);
    }
    return lists;
  };
  const auto first = values(churn(*engine, 24, 3));
  EXPECT_EQ(values(churn(*engine, 24, 3)), first);
}

// bf16 rounds, and near-ties fall either way: tokens are compared up to the first that differs, and
// there the CPU's own token must have been nearly as likely on the GPU.
TEST_F(GpuEngine, TokensAreTheCpusUpToNearTies) {
  EngineOptions options = gpu_options(8);
  options.max_model_len = 2048;
  const auto gpu = make(options);
  options.device = "cpu";
  const auto cpu = make(options);
  ASSERT_TRUE(gpu != nullptr && cpu != nullptr);
  int64_t same = 0;
  int64_t total = 0;
  int64_t off = 0;
  float largest = 0;
  for (int which = 0; which < 24; ++which) {
    Request request = request_of(which, 4 + 7 * which, 16);
    request.sampling.temperature = 0;
    request.sampling.top_p = 1;
    request.sampling.top_logprobs = 5;
    const Answer want = run(*cpu, request);
    const Answer got = run(*gpu, request);
    ASSERT_EQ(got.tokens.size(), want.tokens.size());
    for (size_t i = 0; i < want.tokens.size(); ++i) {
      ++total;
      if (got.tokens[i] == want.tokens[i]) {
        ++same;
        const float difference = std::fabs(got.logprobs[i] - want.logprobs[i]);
        largest = std::max(largest, difference);
        off += difference > 0.1f;
        continue;
      }
      std::vector<TokenLogprob> top;
      size_t at = 0;
      for (const TokenEvent& event : got.events) {
        if (event.token_id >= 0 && at++ == i) {
          top = event.top_logprobs;
        }
      }
      const auto found = std::find_if(top.begin(), top.end(), [&](const TokenLogprob& token) {
        return token.token_id == want.tokens[i];
      });
      std::printf("prompt %d token %zu: GPU %d, CPU %d\n", which, i, got.tokens[i], want.tokens[i]);
      ASSERT_NE(found, top.end()) << "prompt " << which << " token " << i;
      EXPECT_NEAR(found->logprob, got.logprobs[i], 0.1) << "prompt " << which << " token " << i;
      total += static_cast<int64_t>(want.tokens.size() - i) - 1;
      break;
    }
  }
  std::printf(
      "%lld of %lld tokens are the CPU's; %lld of their log-probabilities are off by more than "
      "0.1, "
      "none by more than %.3f\n",
      static_cast<long long>(same), static_cast<long long>(total), static_cast<long long>(off),
      largest);
  EXPECT_GE(same * 20, total * 19);
  // Where another key is read, because two scores of the indexer nearly tie, more than rounding
  // moves: seldom, and not far.
  EXPECT_LE(off * 100, total);
  EXPECT_LE(largest, 0.5f);
}

TEST_F(GpuEngine, FactsAreRecalledInACrowd) {
  const auto engine = make(gpu_options(16));
  ASSERT_NE(engine, nullptr);
  std::map<int64_t, std::string> expected;
  std::map<int64_t, std::string> text;
  for (int which = 0; which < 32; ++which) {
    std::string answer;
    Request request;
    request.prompt = ids_of(prompt_about(which, 10 + 3 * which, &answer));
    request.sampling.max_tokens = 8;
    request.sampling.stop = {"\n"};
    const auto id = engine->submit(std::move(request));
    ASSERT_TRUE(id.ok());
    expected[*id] = answer;
  }
  while (engine->has_work()) {
    const auto events = engine->step();
    ASSERT_TRUE(events.ok()) << events.status().message();
    for (const TokenEvent& event : *events) {
      text[event.request_id] += event.text;
    }
  }
  EXPECT_EQ(text, expected);
  EXPECT_EQ(engine->counters().blocks_used, 0);
}

// Every value that the layers compute, in f32: the GPU against the CPU on one prompt.
TEST_F(GpuEngine, LayersAgreeWithTheCpusInFloat32) {
  std::map<std::string, RecordedTensor> want;
  for (const char* device : {"cpu", "cuda"}) {
    EngineOptions options = gpu_options(1);
    options.device = device;
    options.dtype = DType::kFloat32;
    const auto engine = make(options);
    ASSERT_NE(engine, nullptr);
    Recorder recorder;
    engine->set_tap(recorder.tap());
    run(*engine, request_of(3, 40, 4));
    if (want.empty()) {
      want = recorder.tensors();
      continue;
    }
    ASSERT_EQ(recorder.tensors().size(), want.size());
    for (const auto& [name, tensor] : want) {
      const RecordedTensor* got = recorder.find(name);
      ASSERT_NE(got, nullptr) << name;
      if (tensor.integers) {
        ASSERT_EQ(got->ints.size(), tensor.ints.size()) << name;
        const int64_t different = static_cast<int64_t>(
            std::inner_product(tensor.ints.begin(), tensor.ints.end(), got->ints.begin(), 0,
                               std::plus<>(), [](int32_t a, int32_t b) { return a == b ? 0 : 1; }));
        EXPECT_LE(different * 1000, static_cast<int64_t>(tensor.ints.size())) << name;
        continue;
      }
      ASSERT_EQ(got->floats.size(), tensor.floats.size()) << name;
      double difference = 0;
      double size = 0;
      for (size_t i = 0; i < tensor.floats.size(); ++i) {
        difference += std::pow(double{got->floats[i]} - tensor.floats[i], 2);
        size += std::pow(double{tensor.floats[i]}, 2);
      }
      EXPECT_LE(std::sqrt(difference), 1e-3 * std::sqrt(size)) << name;
    }
  }
}

// Counts the modules that the driver loads, through CUPTI where it is installed.
class ModuleLoads {
 public:
  ModuleLoads() {
    for (const char* name :
         {"libcupti.so", "libcupti.so.13", "libcupti.so.12", "/usr/local/cuda/lib64/libcupti.so",
          "/usr/local/cuda/extras/CUPTI/lib64/libcupti.so"}) {
      library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (library_ != nullptr) {
        break;
      }
    }
    if (library_ == nullptr) {
      return;
    }
    using Subscribe = int (*)(void**, void (*)(void*, int, uint32_t, const void*), void*);
    using Enable = int (*)(uint32_t, void*, int, uint32_t);
    const auto subscribe = reinterpret_cast<Subscribe>(dlsym(library_, "cuptiSubscribe"));
    const auto enable = reinterpret_cast<Enable>(dlsym(library_, "cuptiEnableCallback"));
    if (subscribe == nullptr || enable == nullptr) {
      return;
    }
    counts_ = subscribe(&subscriber_, on_event, nullptr) == 0 &&
              enable(1, subscriber_, kResourceDomain, kModuleLoaded) == 0;
  }
  ~ModuleLoads() {
    if (subscriber_ != nullptr) {
      reinterpret_cast<int (*)(void*)>(dlsym(library_, "cuptiUnsubscribe"))(subscriber_);
    }
  }
  bool counts() const { return counts_; }
  static int64_t count() { return num_loads; }

 private:
  // CUPTI_CB_DOMAIN_RESOURCE and CUPTI_CBID_RESOURCE_MODULE_LOADED of cupti_callbacks.h.
  static constexpr int kResourceDomain = 3;
  static constexpr uint32_t kModuleLoaded = 6;
  static void on_event(void*, int, uint32_t, const void*) { ++num_loads; }
  static inline std::atomic<int64_t> num_loads{0};

  void* library_ = nullptr;
  void* subscriber_ = nullptr;
  bool counts_ = false;
};

// From before the first use of the GPU on, so that it is seen to count whichever tests ran first.
const ModuleLoads loads;

TEST_F(GpuEngine, AThousandStepsAllocateWaitForAndLoadNothing) {
  EngineOptions options = gpu_options(32);
  options.check_sync = true;
  const auto engine = make(options);
  ASSERT_NE(engine, nullptr);
  if (loads.counts()) {
    EXPECT_GT(ModuleLoads::count(), 0) << "the counter does not count";
  }
  const int64_t loads_before = ModuleLoads::count();
  const RuntimeCounters before = runtime_->counters();
  std::mt19937 random(11);
  int which = 0;
  int64_t events = 0;
  while (engine->counters().steps < 1000) {
    // Batches of every size, and prompts that arrive while others decode.
    if (!engine->has_work() || random() % 16 == 0) {
      for (uint32_t i = random() % 8; i < 8; ++i) {
        ASSERT_TRUE(engine
                        ->submit(request_of(which++, 1 + static_cast<int>(random() % 60),
                                            1 + static_cast<int64_t>(random() % 60)))
                        .ok());
      }
    }
    const int64_t loads_until = ModuleLoads::count();
    const EngineCounters until = engine->counters();
    const auto step = engine->step();
    ASSERT_TRUE(step.ok()) << step.status().message();
    events += static_cast<int64_t>(step->size());
    if (ModuleLoads::count() > loads_until) {
      const EngineCounters now = engine->counters();
      std::string rows;
      for (int lane = 0; lane < kNumRowLanes; ++lane) {
        rows += " " + std::to_string(now.rows_by_lane[lane] - until.rows_by_lane[lane]);
      }
      for (const auto& [name, calls] : now.kernel_calls) {
        if (until.kernel_calls.count(name) == 0) {
          rows += " " + name;
        }
      }
      std::printf("step %lld loaded %lld modules; rows by lane%s\n",
                  static_cast<long long>(now.steps),
                  static_cast<long long>(ModuleLoads::count() - loads_until), rows.c_str());
    }
  }
  const RuntimeCounters after = runtime_->counters();
  EXPECT_GT(events, 1000);
  EXPECT_EQ(after.allocations, before.allocations);
  EXPECT_EQ(after.synchronizations, before.synchronizations);
  EXPECT_GT(after.graph_launches - before.graph_launches, 300);
  EXPECT_EQ(engine->counters().device_waits, 0);
  std::string reasons;
  for (const auto& [reason, count] : engine->counters().eager_steps) {
    reasons += " " + reason + " " + std::to_string(count);
  }
  std::printf("graphs %lld, eager:%s, padded rows %lld, ahead %lld\n",
              static_cast<long long>(engine->counters().graph_steps), reasons.c_str(),
              static_cast<long long>(engine->counters().padded_rows),
              static_cast<long long>(engine->counters().ahead_steps));
  if (loads.counts()) {
    EXPECT_EQ(ModuleLoads::count(), loads_before);
  } else {
    std::printf("libcupti was not found: module loads were not counted\n");
  }
}

TEST_F(GpuEngine, DecodeKeepsTheGpuBusy) {
  EngineOptions options = gpu_options(64);
  const auto engine = make(options);
  ASSERT_NE(engine, nullptr);
  for (int which = 0; which < 64; ++which) {
    ASSERT_TRUE(engine->submit(request_of(which, 30, 300)).ok());
  }
  // Until everybody decodes, and a little more.
  for (int64_t in_a_row = 0; in_a_row < 8;) {
    const int64_t graphs = engine->counters().graph_steps;
    ASSERT_TRUE(engine->step().ok());
    in_a_row = engine->counters().graph_steps > graphs ? in_a_row + 1 : 0;
  }
  const EngineCounters before = engine->counters();
  for (int step = 0; step < 100; ++step) {
    ASSERT_TRUE(engine->step().ok());
  }
  const EngineCounters after = engine->counters();
  const int64_t steps = after.graph_steps - before.graph_steps;
  EXPECT_EQ(steps, 100);
  const double busy =
      (after.device_seconds - before.device_seconds) / (after.step_seconds - before.step_seconds);
  std::printf("batch 64: step %.3f ms, GPU busy %.1f %%\n",
              1e3 * (after.step_seconds - before.step_seconds) / 100, 100 * busy);
  EXPECT_GE(busy, 0.85);
}

}  // namespace
}  // namespace lacuna
