// The engine sizes its memory before it is ready: afterwards no step asks a Runtime for memory, and
// steady decoding takes nothing large from the heap. The counters stand here: a Runtime around the
// CPU's, and this program's own operator new.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "engine/nano.h"
#include "lacuna/engine.h"
#include "ops/backend.h"

namespace {

// Of the heap, by all threads, while `watching`.
std::atomic<bool> watching{false};
std::atomic<size_t> largest_bytes{0};
std::atomic<int64_t> num_heap_allocations{0};

void* take(std::size_t bytes, std::size_t alignment) noexcept {
  if (watching.load(std::memory_order_relaxed)) {
    num_heap_allocations.fetch_add(1, std::memory_order_relaxed);
    size_t largest = largest_bytes.load(std::memory_order_relaxed);
    while (bytes > largest && !largest_bytes.compare_exchange_weak(largest, bytes)) {
    }
  }
  return alignment <= alignof(std::max_align_t)
             ? std::malloc(bytes == 0 ? 1 : bytes)
             : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

void* take_or_throw(std::size_t bytes, std::size_t alignment) {
  void* data = take(bytes, alignment);
  if (data == nullptr) {
    throw std::bad_alloc();
  }
  return data;
}

}  // namespace

void* operator new(std::size_t bytes) { return take_or_throw(bytes, 0); }
void* operator new[](std::size_t bytes) { return take_or_throw(bytes, 0); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return take_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, 0); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return take(bytes, 0); }
void operator delete(void* data) noexcept { std::free(data); }
void operator delete[](void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t) noexcept { std::free(data); }
void operator delete(void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { std::free(data); }
void operator delete(void* data, const std::nothrow_t&) noexcept { std::free(data); }
void operator delete[](void* data, const std::nothrow_t&) noexcept { std::free(data); }

namespace lacuna {
namespace {

// Runtimes are tables of plain functions, so what they count is the program's.
const Runtime* counted_runtime = nullptr;
std::atomic<int64_t> num_allocations{0};
std::atomic<int64_t> num_frees{0};

Result<void*> count(Result<void*> allocated) {
  num_allocations += allocated.ok() && *allocated != nullptr ? 1 : 0;
  return allocated;
}

// The CPU backend as it is, over a Runtime that counts.
struct CountingState : ContextState {
  explicit CountingState(const Context& context) : base(context) {
    devices = base.state().devices;
    for (const Backend* backend : base.state().backends) {
      counted_runtime = backend->runtime;
      runtime = *backend->runtime;
      runtime.allocate = [](int device_idx, int64_t bytes) {
        return count(counted_runtime->allocate(device_idx, bytes));
      };
      runtime.allocate_pinned = [](int64_t bytes) {
        return count(counted_runtime->allocate_pinned(bytes));
      };
      runtime.free = [](int device_idx, void* data) {
        ++num_frees;
        counted_runtime->free(device_idx, data);
      };
      runtime.free_pinned = [](void* data) {
        ++num_frees;
        counted_runtime->free_pinned(data);
      };
      copies.push_back(*backend);
      copies.back().runtime = &runtime;
      backends.push_back(&copies.back());
      if (backend->device_kind == DeviceKind::kCpu) {
        break;
      }
    }
  }
  Context base;
  Runtime runtime;
  std::deque<Backend> copies;
};

Context counting_context() {
  const Result<Context> context = Context::create({.num_threads = 2, .use_cuda = false});
  EXPECT_TRUE(context.ok());
  num_allocations = 0;
  num_frees = 0;
  return Context::from_state(std::make_shared<CountingState>(*context));
}

// Requests of every kind, at random.
class Traffic {
 public:
  Traffic(Engine& engine, uint32_t seed)
      : longest(engine.info().max_model_len - 1), engine_(engine), random_(seed) {}

  // In [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
  }

  void submit() {
    const EngineInfo& info = engine_.info();
    Request request;
    const int64_t length = between(0, 2) == 0 || only_long
                               ? between(longest / 2 + 1, longest)
                               : between(1, std::max<int64_t>(1, longest / 8));
    // Some prompts begin alike, so that the prefix cache has something to give.
    const bool shares = between(0, 2) == 0;
    for (int64_t i = 0; i < length; ++i) {
      request.prompt.push_back(
          static_cast<int32_t>(shares ? 3 + i % 50 : between(3, info.vocab_size - 1)));
    }
    request.priority = static_cast<int>(between(0, 1));
    request.prompt_logprobs = between(0, 9) == 0;
    request.prompt_top_logprobs = between(0, 19) == 0 ? 3 : 0;
    request.record_selection = between(0, 9) == 0;
    SamplingParams& sampling = request.sampling;
    sampling.max_tokens = between(1, 60);
    sampling.ignore_eos = true;
    sampling.temperature = between(0, 1) == 0 ? 0 : 1.3;
    sampling.seed = random_();
    if (between(0, 3) == 0) {
      sampling.top_k = 5;
      sampling.top_p = 0.9;
      sampling.frequency_penalty = 0.5;
      sampling.repetition_penalty = 1.1;
      sampling.logit_bias = {{7, 2.0f}};
      sampling.min_tokens = 1;
      sampling.top_logprobs = 20;
    }
    const Result<int64_t> id = engine_.submit(std::move(request));
    ASSERT_TRUE(id.ok()) << id.status().message();
    open_.push_back(*id);
  }

  void cancel_one() {
    if (!open_.empty()) {
      engine_.cancel(open_[between(0, static_cast<int64_t>(open_.size()) - 1)]);
    }
  }

  void step() {
    const Result<std::vector<TokenEvent>> events = engine_.step();
    ASSERT_TRUE(events.ok()) << events.status().message();
    for (const TokenEvent& event : *events) {
      num_cancelled += event.finish == FinishReason::kCancelled ? 1 : 0;
      num_unfinished_prefills += event.finish == FinishReason::kNone && event.token_id < 0 ? 1 : 0;
      if (event.finish != FinishReason::kNone) {
        std::erase(open_, event.request_id);
        engine_.take_record(event.request_id);
      }
    }
  }

  int64_t num_open() const { return static_cast<int64_t>(open_.size()); }

  int64_t longest;  // prompt
  bool only_long = false;
  int64_t num_cancelled = 0;
  int64_t num_unfinished_prefills = 0;

 private:
  Engine& engine_;
  std::mt19937 random_;
  std::vector<int64_t> open_;
};

// A model of random weights whose lists hold 8 keys: every lane in few rows.
EngineOptions micro_options(const std::string& prefill_lane) {
  EngineOptions options;
  options.model_dir = std::string(LACUNA_SOURCE_DIR) + "/tests/golden/glm-dsa-micro";
  options.skip_tokenizer = true;
  options.max_model_len = 256;
  options.max_num_seqs = 8;
  options.max_num_batched_tokens = 48;
  options.block_size = 16;
  options.kv_cache_tokens = 600;  // of the 2048 that all could have: some are preempted
  options.prefill_lane = prefill_lane;
  options.mha_keys_max = prefill_lane == "masked" ? 64 : 0;  // in pieces
  return options;
}

class RuntimeMemory : public testing::TestWithParam<const char*> {};

TEST_P(RuntimeMemory, NoStepAsksTheRuntimeForMemory) {
  const Context context = counting_context();
  auto engine = make_engine(micro_options(GetParam()), context);
  ASSERT_NE(engine, nullptr);
  const int64_t at_ready = num_allocations;
  EXPECT_GE(at_ready, 4) << "the cache, the model's buffers, the logits and the workspace";
  Traffic traffic(*engine, 1);
  for (int step = 0; step < 1500 || engine->has_work(); ++step) {
    if (step < 1500 && traffic.num_open() < 24 && traffic.between(0, 1) == 0) {
      traffic.submit();
    }
    if (traffic.between(0, 29) == 0) {
      traffic.cancel_one();
    }
    traffic.step();
    ASSERT_EQ(num_allocations, at_ready) << "step " << step;
  }
  // All of it happened.
  const EngineCounters counters = engine->counters();
  EXPECT_GT(counters.num_preemptions, 5);
  EXPECT_GT(counters.prefix_hits, 100);
  EXPECT_GT(traffic.num_cancelled, 10);
  EXPECT_GT(traffic.num_unfinished_prefills, 50);
  const std::string lane = GetParam();
  EXPECT_GT(counters.rows_by_lane[0], 1000) << row_lane_name(0);
  EXPECT_EQ(counters.rows_by_lane[1] > 20, lane != "mqa") << row_lane_name(1);
  EXPECT_EQ(counters.rows_by_lane[2] > 1000, lane == "masked") << row_lane_name(2);
  EXPECT_EQ(counters.blocks_used, 0);
  EXPECT_EQ(num_frees, 0);
  engine.reset();
  EXPECT_EQ(num_frees, at_ready);
}

// Buffers are sized by asking for the largest steps; none that comes may want more.
TEST(Admission, NoStepFailsForWantOfWorkspace) {
  const Context context = counting_context();
  std::mt19937 random(7);
  const auto one_of = [&](std::initializer_list<int64_t> values) {
    return values.begin()[random() % values.size()];
  };
  for (int geometry = 0; geometry < 48; ++geometry) {
    EngineOptions options = micro_options(geometry % 3 == 0 ? "masked" : "auto");
    options.dtype = geometry % 2 == 0 ? DType::kBFloat16 : DType::kFloat32;
    options.model_dir = std::string(LACUNA_SOURCE_DIR) + "/tests/golden/" +
                        (geometry % 5 == 0 ? "v32-micro" : "glm-dsa-micro");
    options.max_model_len = one_of({5, 9, 31, 100, 250});
    options.max_num_seqs = one_of({1, 2, 3, 7, 20, 33});
    options.max_num_batched_tokens = one_of({1, 2, 7, 17, 40, 65, 150});
    options.block_size = one_of({1, 7, 16});
    options.kv_cache_tokens = one_of({0, options.max_model_len + 40});
    options.mha_keys_max = 0;
    if (geometry % 12 == 1) {
      // Lists of 128 keys: many prompts fit the dense lane, and its keys want the most workspace.
      options.model_dir = nano_dir();
      options.max_model_len = 256;
      options.max_num_seqs = one_of({7, 16});
      options.max_num_batched_tokens = one_of({150, 256});
      options.kv_cache_tokens = 0;
    }
    const auto engine = make_engine(options, context);
    ASSERT_NE(engine, nullptr);
    const int64_t at_ready = num_allocations;
    Traffic traffic(*engine, geometry);
    if (geometry % 4 == 1) {
      // Steps whose prompts all fit the lists take the dense lane.
      traffic.only_long = true;
      traffic.longest = std::min(traffic.longest, engine->info().index_topk);
    }
    for (int step = 0; step < 80; ++step) {
      while (traffic.num_open() < options.max_num_seqs + 2 && traffic.between(0, 3) != 0) {
        traffic.submit();
      }
      traffic.step();
      ASSERT_FALSE(HasFatalFailure())
          << "geometry " << geometry << ": " << options.max_model_len << " tokens, "
          << options.max_num_seqs << " sequences, " << options.max_num_batched_tokens << " rows";
    }
    EXPECT_EQ(num_allocations, at_ready);
  }
}

INSTANTIATE_TEST_SUITE_P(Lanes, RuntimeMemory, testing::Values("auto", "mqa", "masked"),
                         [](const auto& info) { return std::string(info.param); });

TEST(HeapUse, SteadyDecodingTakesNothingLargeFromTheHeap) {
  constexpr int kSequences = 16;
  constexpr int kSteps = 256;
  EngineOptions options = nano_options();
  options.dtype = DType::kBFloat16;
  options.max_num_seqs = kSequences;
  options.max_num_batched_tokens = 256;
  const auto engine = make_engine(options, counting_context());
  ASSERT_NE(engine, nullptr);
  for (int i = 0; i < kSequences; ++i) {
    Request request;
    request.prompt = ids_of(filler(20 + 10 * i, i));
    request.sampling.max_tokens = 700;
    request.sampling.ignore_eos = true;
    if (i % 2 == 1) {
      request.sampling.temperature = 1;
      request.sampling.repetition_penalty = 1.1;
      request.sampling.top_logprobs = 5;
      request.sampling.stop = {"\x01"};
    }
    ASSERT_TRUE(engine->submit(std::move(request)).ok());
  }
  const auto steps = [&](int count) {
    for (int step = 0; step < count; ++step) {
      const auto events = engine->step();
      ASSERT_TRUE(events.ok()) << events.status().message();
      ASSERT_EQ(events->size(), kSequences);
    }
  };
  while (engine->counters().generated_tokens < 32 * kSequences) {
    const auto events = engine->step();
    ASSERT_TRUE(events.ok()) << events.status().message();
  }
  // The events that are handed out are the largest thing that a step makes.
  largest_bytes = 0;
  num_heap_allocations = 0;
  watching = true;
  steps(kSteps);
  watching = false;
  EXPECT_GT(num_heap_allocations, kSteps) << "events are counted, so the counter works";
  EXPECT_LE(largest_bytes, kSequences * sizeof(TokenEvent));
  std::printf("%.1f allocations a step, the largest %zu bytes\n",
              static_cast<double>(num_heap_allocations) / kSteps, largest_bytes.load());
}

}  // namespace
}  // namespace lacuna
