// The lanes against each other and against a double-precision reference: masked MHA in chunks,
// rows of an index group, and whole models with one lane or the other.
#include "attention/lanes.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/device_memory.h"
#include "core/rng.h"
#include "engine/nano.h"
#include "engine/recorder.h"
#include "engine/setup.h"
#include "lacuna/engine.h"
#include "ops/backend.h"

namespace lacuna {
namespace {

constexpr int64_t kHeads = 3;
constexpr int64_t kLatent = 32;
constexpr int64_t kRope = 8;
constexpr int64_t kNope = 16;
constexpr int64_t kValue = 24;
constexpr int64_t kIndexHeads = 2;
constexpr int64_t kIndexDim = 16;
constexpr int64_t kTopk = 20;
constexpr int64_t kBlockSize = 16;
constexpr int64_t kBlocks = 96;
constexpr double kScale = 0.2;

std::vector<float> random_floats(int64_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (int64_t i = 0; i < count; ++i) {
    values[i] = 2 * philox_uniform(seed, static_cast<uint64_t>(i), 7) - 1;
  }
  return values;
}

struct Part {
  int32_t context;
  int32_t rows;
};

// A batch over blocks in a scrambled order, its caches full of noise, and everything that a layer's
// attention needs.
struct Scene {
  Context context = one_thread();
  OpRunner run{context};
  PagedKvCache cache;
  Batch batch;
  AttentionPlan plan;
  IndexLists lists;
  DeviceMemory workspace;
  std::vector<float> q, kv_b, index_q, head_weights;
  std::vector<int32_t> positions, rows, counts, mask;
  std::vector<float> keys, keys_up, merged_out, merged_lse, piece_out, piece_lse, out;

  Scene(int decodes, const std::vector<Part>& parts) {
    const Runtime* runtime = runtime_of(context.state(), DeviceKind::kCpu);
    const PagedKvCacheOptions options = {
        .latent_layout = KvLayout::latent_f32(kLatent, kRope),
        .index_layout = KvLayout::index_f32(kIndexDim),
        .layer_has_indexer = {true, false, false},
        .num_blocks = kBlocks,
        .block_size = kBlockSize,
        .latent_block_stride_bytes = (kBlockSize + 3) * 4 * (kLatent + kRope)};
    Result<PagedKvCache> made = PagedKvCache::create(runtime, options);
    EXPECT_TRUE(made.ok()) << made.status().message();
    cache = std::move(made).value();
    for (int layer = 0; layer < 3; ++layer) {
      const KvCacheView view = cache.latent(layer);
      const std::vector<float> noise =
          random_floats(view.num_rows() * (kLatent + kRope), 100 + layer);
      std::memcpy(view.data, noise.data(), noise.size() * 4);
    }
    const std::vector<float> index_noise = random_floats(kBlocks * kBlockSize * kIndexDim, 99);
    std::memcpy(cache.index(0).data, index_noise.data(), index_noise.size() * 4);

    batch.table_width = 24;
    batch.query_starts.push_back(0);
    int32_t next_block = 0;
    for (const Part& part : parts) {
      const int32_t request = static_cast<int32_t>(batch.seq_lens.size());
      const int32_t length = part.context + part.rows;
      for (int32_t p = part.context; p < length; ++p) {
        batch.token_ids.push_back(0);
        batch.positions.push_back(p);
        batch.visible_lengths.push_back(p + 1);
        batch.request_ids.push_back(request);
        batch.slot_mapping.push_back(-1);
      }
      for (int64_t column = 0; column < batch.table_width; ++column) {
        // 37 and 96 have no common factor: every block once.
        batch.block_table.push_back(column * kBlockSize < length ? next_block++ * 37 % kBlocks
                                                                 : -1);
      }
      batch.query_starts.push_back(static_cast<int32_t>(batch.num_rows()));
      batch.seq_lens.push_back(length);
    }
    batch.num_decodes = decodes;
    EXPECT_LE(next_block, kBlocks);
    const int64_t total = batch.num_rows();
    q = random_floats(total * kHeads * (kNope + kRope), 1);
    kv_b = random_floats(kHeads * (kNope + kValue) * kLatent, 2);
    index_q = random_floats(total * kIndexHeads * kIndexDim, 3);
    head_weights = random_floats(total * kIndexHeads, 4);
    Result<DeviceMemory> memory = DeviceMemory::allocate(runtime, 0, 16 << 20);
    EXPECT_TRUE(memory.ok());
    workspace = std::move(memory).value();
    run.set_launch({.workspace = workspace.data(), .workspace_bytes = workspace.bytes()});
  }

  RoutingLimits limits(int64_t keys_max) const {
    return {.index_topk = kTopk,
            .mha_keys_max = keys_max,
            .chunked_rows_max = 1000,
            .mask_words_max = 1 << 20,
            .masked = MaskedMha::kAlways};
  }

  void select(const RoutingLimits& route, const SelectionSource& source) {
    plan_attention(batch, route, &plan);
    positions.assign(plan.num_list_rows * kTopk, 77);
    rows.assign(plan.num_mqa_rows * kTopk, 77);
    counts.assign(plan.num_list_rows, 77);
    const int64_t words = mask_row_words(plan.seqlen_k_max);
    mask.assign(plan.num_mha_rows(batch) * words, 0x5a5a5a5a);
    lists.positions = view_of(positions.data(), {plan.num_list_rows, kTopk});
    lists.rows = view_of(rows.data(), {plan.num_mqa_rows, kTopk});
    lists.counts = view_of(counts.data(), {plan.num_list_rows});
    lists.mask = view_of(mask.data(), {plan.num_mha_rows(batch), words});
    const int64_t n = plan.num_list_rows;
    const Status status = select_group_keys(
        run, plan, batch, host_tensors(batch, plan),
        {.q = view_of(static_cast<const float*>(index_q.data()), {n, kIndexHeads, kIndexDim}),
         .head_weights = view_of(static_cast<const float*>(head_weights.data()), {n, kIndexHeads})},
        cache.index(0), cache.latent(0), source, 0, kTopk, &lists);
    ASSERT_TRUE(status.ok()) << status.message();
  }

  void attend(int layer) {
    const int64_t n = plan.num_mha_rows(batch);
    const int64_t width = kHeads * (kNope + kValue);
    keys.assign(plan.num_mha_keys * (kLatent + kRope), NAN);
    keys_up.assign(plan.num_mha_keys * width, NAN);
    for (std::vector<float>* buffer : {&merged_out, &piece_out, &out}) {
      buffer->assign(n * kHeads * kValue, NAN);
    }
    merged_lse.assign(n * kHeads, NAN);
    piece_lse.assign(n * kHeads, NAN);
    const int64_t d_qk = kNope + kRope;
    const Status status = mha_lane(
        run, plan, host_tensors(batch, plan), cache.latent(layer),
        {.q = view_of(static_cast<const float*>(q.data()) + plan.num_mqa_rows * kHeads * d_qk,
                      {n, kHeads, d_qk}),
         .kv_b = view_of(static_cast<const float*>(kv_b.data()), {width, kLatent}),
         .mask = lists.mask,
         .qk_nope_head_dim = kNope,
         .v_head_dim = kValue,
         .softmax_scale = kScale,
         .keys = view_of(keys.data(), {plan.num_mha_keys, kLatent + kRope}),
         .keys_up = view_of(keys_up.data(), {plan.num_mha_keys, width}),
         .merged_out = view_of(merged_out.data(), {n, kHeads, kValue}),
         .merged_lse = view_of(merged_lse.data(), {n, kHeads}),
         .piece_out = view_of(piece_out.data(), {n, kHeads, kValue}),
         .piece_lse = view_of(piece_lse.data(), {n, kHeads}),
         .out = view_of(out.data(), {n, kHeads, kValue})});
    ASSERT_TRUE(status.ok()) << status.message();
  }

  const float* cached(int layer, int64_t row, int32_t position) const {
    const KvCacheView view = cache.latent(layer);
    const int64_t block =
        batch.block_table[batch.request_ids[row] * batch.table_width + position / kBlockSize];
    return reinterpret_cast<const float*>(static_cast<const char*>(view.data) +
                                          block * view.block_stride_bytes +
                                          position % kBlockSize * view.row_bytes);
  }

  // Head outputs of a batch row over its list, from the definition.
  std::vector<double> reference(int layer, int64_t row) const {
    std::vector<double> result(kHeads * kValue, 0);
    const int64_t width = kNope + kValue;
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* query = q.data() + (row * kHeads + h) * (kNope + kRope);
      double sum = 0;
      for (int64_t i = 0; i < counts[row]; ++i) {
        const float* key = cached(layer, row, positions[row * kTopk + i]);
        std::vector<double> up(width, 0);
        for (int64_t j = 0; j < width; ++j) {
          for (int64_t d = 0; d < kLatent; ++d) {
            up[j] += static_cast<double>(kv_b[(h * width + j) * kLatent + d]) * key[d];
          }
        }
        double score = 0;
        for (int64_t d = 0; d < kNope; ++d) {
          score += query[d] * up[d];
        }
        for (int64_t d = 0; d < kRope; ++d) {
          score += static_cast<double>(query[kNope + d]) * key[kLatent + d];
        }
        const double weight = std::exp(kScale * score);
        sum += weight;
        for (int64_t d = 0; d < kValue; ++d) {
          result[h * kValue + d] += weight * up[kNope + d];
        }
      }
      for (int64_t d = 0; d < kValue && sum > 0; ++d) {
        result[h * kValue + d] /= sum;
      }
    }
    return result;
  }

  void expect_reference(int layer) const {
    for (int64_t t = 0; t < plan.num_mha_rows(batch); ++t) {
      const std::vector<double> want = reference(layer, plan.num_mqa_rows + t);
      for (size_t i = 0; i < want.size(); ++i) {
        ASSERT_NEAR(out[t * want.size() + i], want[i], 2e-5) << "row " << t << " value " << i;
      }
    }
  }
};

// Two decodes, then contexts that begin and end within words of the mask, and none at all.
const std::vector<Part> kMixed = {{40, 1}, {200, 1}, {1, 5},  {31, 7}, {33, 3},
                                  {0, 26}, {95, 9},  {0, 25}, {210, 4}};
constexpr int64_t kPrefillRows = 79;

TEST(MaskedLane, AgreesWithTheDefinitionForEveryChunkSize) {
  Scene scene(2, kMixed);
  for (const auto kind : {SelectionSource::Kind::kIndexer, SelectionSource::Kind::kRandom,
                          SelectionSource::Kind::kWindow}) {
    for (const int64_t keys_max : {kPrefillRows, int64_t{95}, int64_t{128}, int64_t{1000}}) {
      SCOPED_TRACE(std::to_string(static_cast<int>(kind)) + ", keys " + std::to_string(keys_max));
      scene.select(scene.limits(keys_max), {.kind = kind, .seed = 5});
      ASSERT_EQ(scene.plan.prefill_lane, Lane::kMaskedMha);
      ASSERT_EQ(scene.plan.num_mha_rows(scene.batch), kPrefillRows);
      EXPECT_TRUE(scene.plan.mqa_is_decode);
      EXPECT_EQ(scene.plan.mha_pieces.size() == 1, keys_max == 1000);
      EXPECT_LE(scene.plan.num_mha_keys, keys_max);
      for (const int layer : {0, 2}) {  // the leader, and a follower under the same mask
        scene.attend(layer);
        scene.expect_reference(layer);
      }
    }
  }
}

TEST(MaskedLane, ListsAreThoseOfTheSparseLane) {
  Scene scene(2, kMixed);
  scene.select(scene.limits(128), {});
  const std::vector<int32_t> masked_positions = scene.positions;
  const std::vector<int32_t> masked_rows = scene.rows;
  RoutingLimits sparse = scene.limits(128);
  sparse.force_mqa = true;
  scene.select(sparse, {});
  EXPECT_EQ(scene.positions, masked_positions);
  ASSERT_EQ(masked_rows.size(), 2u * kTopk);  // of the decode rows only
  EXPECT_TRUE(std::equal(masked_rows.begin(), masked_rows.end(), scene.rows.begin()));
}

TEST(DenseLane, ContextsMayBeChunkedToo) {
  // No sequence has more than 20 keys, all together more than the buffers hold.
  Scene scene(0, {{12, 5}, {1, 10}, {0, 7}, {19, 1}, {15, 5}});
  for (const int64_t keys_max : {28, 31, 1000}) {
    scene.select(scene.limits(keys_max), {});
    ASSERT_EQ(scene.plan.prefill_lane, Lane::kDenseMha);
    EXPECT_EQ(scene.plan.num_list_rows, 0);
    scene.lists.mask = {};
    scene.attend(1);
    // The reference needs lists: all visible keys.
    const int64_t total = scene.batch.num_rows();
    scene.counts = scene.batch.visible_lengths;
    scene.positions.assign(total * kTopk, -1);
    for (int64_t t = 0; t < total; ++t) {
      for (int32_t p = 0; p < scene.counts[t]; ++p) {
        scene.positions[t * kTopk + p] = p;
      }
    }
    scene.expect_reference(1);
  }
}

TEST(IndexGroup, OneTranslationIsEveryLayersTranslationBitForBit) {
  Scene scene(2, kMixed);
  RoutingLimits sparse = scene.limits(128);
  sparse.force_mqa = true;
  for (const auto kind : {SelectionSource::Kind::kIndexer, SelectionSource::Kind::kRandom}) {
    scene.select(sparse, {.kind = kind, .seed = 5});
    const Result<std::vector<IndexGroup>> groups =
        form_index_groups({true, false, false}, scene.cache);
    ASSERT_TRUE(groups.ok()) << groups.status().message();
    ASSERT_EQ(groups->size(), 1u);
    ASSERT_EQ(groups->front().layers(), (std::vector<int>{0, 1, 2}));
    const BatchTensors tensors = host_tensors(scene.batch, scene.plan);
    for (const int layer : groups->front().layers()) {
      const KvCacheView latent = scene.cache.latent(layer);
      ASSERT_EQ(latent.block_stride_rows(), kBlockSize + 3);
      std::vector<int32_t> own(scene.rows.size(), 55);
      const Status status = scene.run(
          TranslateIndicesArgs{.indices = scene.lists.positions,
                               .request_ids = tensors.request_ids,
                               .block_table = tensors.block_table,
                               .num_blocks = latent.num_blocks,
                               .block_size = latent.block_size,
                               .block_stride_rows = latent.block_stride_rows(),
                               .rows = view_of(own.data(), {scene.batch.num_rows(), kTopk})});
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(own, scene.rows) << layer;
    }
  }
}

// ------------------------------------------------------------------------------------------------
// Whole models.

struct Model {
  std::string folder;
  int64_t topk;
};

std::vector<Model> models() {
  const std::string golden = std::string(LACUNA_SOURCE_DIR) + "/tests/golden/";
  return {{golden + "v32-micro", 8}, {golden + "glm-dsa-micro", 8}, {nano_dir(), kNanoTopk}};
}

EngineOptions options_of(const Model& model, const std::string& lane, int64_t rows_max,
                         int64_t keys_max) {
  EngineOptions options = nano_options();
  options.model_dir = model.folder;
  options.skip_tokenizer = true;
  options.max_model_len = 512;
  options.prefill_lane = lane;
  options.max_num_batched_tokens = rows_max;
  options.mha_keys_max = lane == "masked" ? keys_max : 0;
  options.block_size = 16;
  return options;
}

std::vector<int32_t> prompt_of(int64_t length, uint32_t seed = 1) {
  std::vector<int32_t> ids = ids_of(filler(length, seed));
  for (int32_t& id : ids) {
    id %= 64;  // the micro vocabularies are small
  }
  return ids;
}

Recorder record(Engine& engine, const std::vector<int32_t>& prompt) {
  Recorder recorder;
  engine.set_tap(recorder.tap());
  Request request;
  request.prompt = prompt;
  request.prompt_logprobs = true;
  request.sampling.max_tokens = 4;
  request.sampling.ignore_eos = true;
  request.forced_tokens = {1, 2, 3};
  run(engine, request);
  engine.set_tap({});
  return recorder;
}

void expect_same(const Recorder& got, const Recorder& want, const std::string& name) {
  const RecordedTensor* a = got.find(name);
  const RecordedTensor* b = want.find(name);
  ASSERT_NE(a, nullptr) << name;
  ASSERT_NE(b, nullptr) << name;
  ASSERT_EQ(a->width, b->width) << name;
  ASSERT_LE(a->rows(), b->rows()) << name;
  if (a->integers) {
    // Rows of the dense lane, which come first, have no lists.
    const std::vector<int32_t> last(b->ints.end() - static_cast<int64_t>(a->ints.size()),
                                    b->ints.end());
    EXPECT_EQ(a->ints, last) << name;
    return;
  }
  ASSERT_EQ(a->floats.size(), b->floats.size()) << name;
  double worst = 0;
  for (size_t i = 0; i < a->floats.size(); ++i) {
    worst = std::max(worst, std::fabs(static_cast<double>(a->floats[i]) - b->floats[i]));
  }
  EXPECT_LE(worst, 2e-4) << name;
}

TEST(MaskedLane, GivesTheLogitsAndListsOfTheSparseLane) {
  constexpr int64_t kLength = 250;
  for (const Model& model : models()) {
    const std::vector<int32_t> prompt = prompt_of(kLength);
    for (const int64_t rows_max : {31, 33, 95, 1024}) {
      const std::unique_ptr<Engine> sparse = make_engine(options_of(model, "mqa", rows_max, 0));
      ASSERT_NE(sparse, nullptr);
      const Recorder want = record(*sparse, prompt);
      EXPECT_EQ(sparse->counters().rows_by_lane[0], kLength + 3);
      // Chunks of the smallest size, of one that is no multiple of 32, and one piece.
      for (const int64_t keys_max : {std::min(rows_max, int64_t{512}), int64_t{107}, int64_t{0}}) {
        if (keys_max != 0 && keys_max < std::min(rows_max, int64_t{512})) {
          continue;
        }
        SCOPED_TRACE(model.folder + ", rows " + std::to_string(rows_max) + ", keys " +
                     std::to_string(keys_max));
        const std::unique_ptr<Engine> masked =
            make_engine(options_of(model, "masked", rows_max, keys_max));
        ASSERT_NE(masked, nullptr);
        const Recorder got = record(*masked, prompt);
        for (const char* name : {"prompt_logits", "logits", "topk.0"}) {
          expect_same(got, want, name);
        }
        // Steps that end within topk keys are dense.
        const int64_t dense = std::min(kLength, model.topk / rows_max * rows_max);
        EXPECT_EQ(masked->counters().rows_by_lane[0], 3);
        EXPECT_EQ(masked->counters().rows_by_lane[1], dense);
        EXPECT_EQ(masked->counters().rows_by_lane[2], kLength - dense);
      }
    }
  }
}

struct Crowd {
  std::map<int64_t, std::vector<int32_t>> tokens;
  std::map<int64_t, std::vector<float>> logprobs;
  int64_t mixed_steps = 0;  // decode rows beside rows of the masked lane
};

Crowd run_crowd(const std::string& lane) {
  EngineOptions options = options_of({nano_dir(), kNanoTopk}, lane, 70, 83);
  options.max_num_seqs = 6;
  const std::unique_ptr<Engine> engine = make_engine(options);
  Crowd crowd;
  for (int i = 0; i < 8; ++i) {
    Request request;
    request.prompt = prompt_of(40 + 53 * i, 10 + i);
    request.sampling.max_tokens = 9;
    request.sampling.ignore_eos = true;
    request.forced_tokens = {65, 66, 67, 68, 69, 70, 71, 72};
    EXPECT_TRUE(engine->submit(std::move(request)).ok());
  }
  while (engine->has_work()) {
    const Result<std::vector<TokenEvent>> events = engine->step();
    EXPECT_TRUE(events.ok()) << events.status().message();
    if (!events.ok()) {
      break;
    }
    bool decodes = false;
    bool masked = false;
    for (const TokenEvent& event : *events) {
      decodes = decodes || event.step.decode;
      masked = masked || event.step.rows_by_lane[2] > 0;
      EXPECT_TRUE(!event.step.decode || event.step.rows_by_lane[0] == 1);
      if (event.token_id >= 0) {
        crowd.tokens[event.request_id].push_back(event.token_id);
        crowd.logprobs[event.request_id].push_back(event.logprob);
      }
    }
    crowd.mixed_steps += decodes && masked;
  }
  return crowd;
}

TEST(MaskedLane, MixedBatchesGiveTheAnswersOfTheSparseLane) {
  const Crowd sparse = run_crowd("mqa");
  const Crowd masked = run_crowd("masked");
  EXPECT_EQ(sparse.mixed_steps, 0);
  EXPECT_GE(masked.mixed_steps, 5);
  EXPECT_EQ(masked.tokens, sparse.tokens);
  for (const auto& [id, logprobs] : sparse.logprobs) {
    ASSERT_EQ(masked.logprobs.at(id).size(), logprobs.size());
    for (size_t i = 0; i < logprobs.size(); ++i) {
      // Forced tokens are improbable: logarithms near -20, whose logits the model's own oracle
      // compares within 5e-3.
      EXPECT_NEAR(masked.logprobs.at(id)[i], logprobs[i], 1e-3) << id << " token " << i;
    }
  }
}

TEST(PrefillLane, BadNamesAndSizesAreRefused) {
  const Context context = one_thread();
  const auto refusal = [&](const EngineOptions& options) {
    const auto engine = Engine::create(context, options);
    EXPECT_FALSE(engine.ok());
    return engine.ok() ? std::string() : engine.status().message();
  };
  EngineOptions options = nano_options();
  options.prefill_lane = "mla";
  EXPECT_EQ(refusal(options), "prefill_lane: \"mla\", expected auto, mqa or masked");
  options.prefill_lane = "masked";
  options.force_mqa = true;
  EXPECT_EQ(refusal(options), "prefill_lane: \"masked\" with force_mqa; one of them would work");
  options.force_mqa = false;
  options.max_num_batched_tokens = 64;
  options.mha_keys_max = 63;
  EXPECT_EQ(refusal(options),
            "mha_keys_max: 63, expected 0 (automatic) or at least the rows of a step, 64");
  options.prefill_lane = "auto";
  options.mha_keys_max = -1;
  EXPECT_EQ(refusal(options), "mha_keys_max: -1, expected 0 (automatic) or a number of keys");
}

}  // namespace
}  // namespace lacuna
