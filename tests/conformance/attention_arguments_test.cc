// Wrong arguments of the attention operations: one at a time, each named by the error.
#include <cmath>
#include <limits>

#include "tests/conformance/arguments.h"
#include "tests/support/attention_cases.h"

namespace lacuna::testing {
namespace {

constexpr unsigned kAll = 7;
constexpr unsigned kNone = 0;

TEST(SparseMlaArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    for (bool split : {false, true}) {
      const SparseMlaCase test_case{.name = "arguments",
                                    .heads = 4,
                                    .width = 20,
                                    .block_size = 16,
                                    .split_q = split,
                                    .counts = CountPattern::kRagged,
                                    .seq_lens = {40, 30},
                                    .query_lens = {2, 2},
                                    .sink = true};
      SparseMlaCase named = test_case;
      named.rows = 4;
      SparseMlaProblem problem(named, where);
      ArgumentFuzz<SparseMlaArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
      if (split) {
        // The first tensor binds T and H: a wrong extent there shows in the next one.
        fuzz.tensor({"q_nope", 4, true}, LACUNA_FIELD(q_nope));
        fuzz.tensor({"q_rope", kAll, true}, LACUNA_FIELD(q_rope));
        fuzz.expect_error("q_rope of another dtype", "q_rope",
                          [](auto* args) { args->q_rope.dtype = DType::kFloat32; });
        fuzz.expect_error("no q_rope", "q_rope", [](auto* args) { args->q_rope = {}; });
        fuzz.expect_error("fused and split", "q", [](auto* args) { args->q = args->q_nope; });
        fuzz.expect_error("no query", "q", [](auto* args) { args->q_nope = {}; });
        continue;
      }
      fuzz.common();
      fuzz.tensor({"q", 4, true}, LACUNA_FIELD(q));
      fuzz.tensor({"indices", 1, true}, LACUNA_FIELD(indices));
      fuzz.tensor({"block_table", kNone, true}, LACUNA_FIELD(block_table));
      fuzz.tensor({"request_ids", kAll, false}, LACUNA_FIELD(request_ids));
      fuzz.tensor({"valid_counts", kAll, false}, LACUNA_FIELD(valid_counts));
      fuzz.tensor({"sink", kAll, false}, LACUNA_FIELD(sink));
      fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
      fuzz.tensor({"lse", kAll, false}, LACUNA_FIELD(lse));
      fuzz.tensor({"max_logits", kAll, false}, LACUNA_FIELD(max_logits));
      fuzz.cache("kv", &SparseMlaArgs::kv, KvLayout::index_bf16(576));
      fuzz.expect_error("kv with blocks of a row and a half", "kv",
                        [](auto* args) { args->kv.block_stride_bytes += 2; });
      fuzz.expect_error("kv with block_size 0", "kv", [](auto* args) { args->kv.block_size = 0; });
      fuzz.expect_error("latent width", "q", [](auto* args) { args->kv.layout.latent = 500; });
      for (double scale : {0.0, 1e-60, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
        fuzz.expect_error("softmax_scale", "softmax_scale",
                          [scale](auto* args) { args->softmax_scale = scale; });
      }
      for (int rows : {0, -1, 9}) {
        fuzz.expect_error("rows_per_request", "rows_per_request",
                          [rows](auto* args) { args->rows_per_request = rows; });
      }
      fuzz.expect_error("valid_count_max", "valid_count_max",
                        [](auto* args) { args->valid_count_max = -2; });
      fuzz.expect_error("tables with rows", "block_table",
                        [](auto* args) { args->index_kind = IndexKind::kRows; });
      fuzz.expect_error("no block_table", "block_table",
                        [](auto* args) { args->block_table = {}; });
      fuzz.expect_error("no request_ids", "request_ids",
                        [](auto* args) { args->request_ids = {}; });
      fuzz.expect_error("no indices", "indices", [](auto* args) { args->indices = {}; });
      fuzz.expect_error("no out", "out", [](auto* args) { args->out = {}; });
    }
  }
}

TEST(BuildScheduleArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    BufferSet buffers(where);
    TestTensor counts = buffers.ints("valid_counts", {3, 4, 5});
    const int64_t entries = schedule_entries(conformance_context(), 3, 64);
    TestTensor schedule = buffers.tensor("schedule", Role::kOutput, DType::kInt32, {entries, 4});
    ArgumentFuzz<SparseMlaScheduleArgs> fuzz(&buffers, {.num_rows = 3,
                                                        .list_width = 64,
                                                        .num_heads = 8,
                                                        .d_qk = 576,
                                                        .valid_counts = counts.view(Side::kDevice),
                                                        .schedule = schedule.view(Side::kDevice)});
    fuzz.common();
    fuzz.tensor({"valid_counts", kAll, false}, LACUNA_FIELD(valid_counts));
    fuzz.tensor({"schedule", 2, true}, LACUNA_FIELD(schedule));
    fuzz.expect_error("num_rows", "num_rows", [](auto* args) { args->num_rows = -1; });
    fuzz.expect_error("list_width", "list_width", [](auto* args) { args->list_width = -1; });
    fuzz.expect_error("num_heads", "num_heads", [](auto* args) { args->num_heads = -1; });
    fuzz.expect_error("d_qk", "d_qk", [](auto* args) { args->d_qk = -1; });
    fuzz.expect_error("a schedule that is too short", "schedule",
                      [](auto* args) { args->schedule.shape[0] = 1; });
    fuzz.expect_error("no schedule", "schedule", [](auto* args) { args->schedule = {}; });
  }
}

TEST(MhaArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    for (bool split : {false, true}) {
      const MhaCase test_case{.name = "arguments",
                              .q_lens = {5, 3},
                              .k_lens = {9, 7},
                              .heads = 2,
                              .split_k = split,
                              .by_lengths = split,
                              .mask_topk = 4,
                              .key_start = {1, 33}};
      MhaProblem problem(test_case, where);
      ArgumentFuzz<MhaArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
      fuzz.tensor({"q", kNone, true}, LACUNA_FIELD(q));
      if (split) {
        fuzz.tensor({"k_nope", 6, true}, LACUNA_FIELD(k_nope));
        fuzz.tensor({"k_rope", 1, true}, LACUNA_FIELD(k_rope));
        fuzz.tensor({"seqlens_q", kNone, false}, LACUNA_FIELD(seqlens_q));
        fuzz.tensor({"seqlens_k", kAll, false}, LACUNA_FIELD(seqlens_k));
        fuzz.expect_error("k_rope too wide", "k_nope", [](auto* args) { ++args->k_rope.shape[1]; });
        fuzz.expect_error("fused and split", "k", [](auto* args) { args->k = args->k_nope; });
      } else {
        fuzz.tensor({"k", 6, true}, LACUNA_FIELD(k));
        fuzz.tensor({"cu_seqlens_q", kNone, false}, LACUNA_FIELD(cu_seqlens_q));
        fuzz.tensor({"cu_seqlens_k", kAll, false}, LACUNA_FIELD(cu_seqlens_k));
        fuzz.expect_error("no keys", "k", [](auto* args) { args->k = {}; });
        fuzz.expect_error("lengths and starts", "cu_seqlens_q",
                          [](auto* args) { args->seqlens_q = args->cu_seqlens_q; });
        fuzz.expect_error("no sequences", "cu_seqlens_q",
                          [](auto* args) { args->cu_seqlens_q = {}; });
      }
      fuzz.common();
      fuzz.tensor({"v", 3, true}, LACUNA_FIELD(v));
      fuzz.tensor({"mask", 1, true}, LACUNA_FIELD(mask));
      fuzz.tensor({"key_start", kAll, false}, LACUNA_FIELD(key_start));
      fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
      fuzz.tensor({"lse", kAll, false}, LACUNA_FIELD(lse));
      fuzz.expect_error("mask stride", "mask", [](auto* args) { args->mask.strides[0] += 1; });
      fuzz.expect_error("softmax_scale", "softmax_scale",
                        [](auto* args) { args->softmax_scale = 0; });
      fuzz.expect_error("seqlen_q_max", "seqlen_q_max",
                        [](auto* args) { args->seqlen_q_max = -2; });
      fuzz.expect_error("seqlen_k_max", "seqlen_k_max",
                        [](auto* args) { args->seqlen_k_max = -2; });
      fuzz.expect_error("no v", "v", [](auto* args) { args->v = {}; });
      fuzz.expect_error("no out", "out", [](auto* args) { args->out = {}; });
    }
  }
}

TEST(BuildMaskArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    BuildMaskProblem problem({.name = "arguments",
                              .rows = 4,
                              .width = 20,
                              .key_count = 200,
                              .counts = true,
                              .key_begin = {0, 1, 2, 3}},
                             where);
    ArgumentFuzz<BuildMaskArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"indices", kNone, true}, LACUNA_FIELD(indices));
    fuzz.tensor({"valid_counts", kAll, false}, LACUNA_FIELD(valid_counts));
    fuzz.tensor({"key_begin", kAll, false}, LACUNA_FIELD(key_begin));
    fuzz.tensor({"mask", 1, true}, LACUNA_FIELD(mask));
    fuzz.expect_error("mask stride", "mask", [](auto* args) { args->mask.strides[0] = 9; });
    fuzz.expect_error("mask rows that overlap", "mask",
                      [](auto* args) { args->mask.strides[0] = 4; });
    fuzz.expect_error("key_count", "key_count", [](auto* args) { args->key_count = -1; });
    fuzz.expect_error("key_count", "key_count", [](auto* args) { args->key_count = 225; });
  }
}

TEST(MergeStatesArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    MergeStatesProblem problem({.name = "arguments", .num_states = 2}, where);
    const MergeStatesArgs valid = problem.args(Side::kDevice);
    ArgumentFuzz<MergeStatesArgs> fuzz(&problem.buffers, valid);
    fuzz.common();
    fuzz.tensor({"out", kAll & ~7u, true}, LACUNA_FIELD(out));
    fuzz.tensor({"lse", 3, false}, LACUNA_FIELD(lse));
    fuzz.expect_error("no states", "states", [](auto* args) { args->states = {}; });
    std::vector<PartialState> many(65, valid.states[0]);
    fuzz.expect_error("65 states", "states", [&](auto* args) { args->states = many; });
    std::vector<PartialState> states(valid.states.begin(), valid.states.end());
    const auto state = [&](const char* what, const char* name, auto&& apply) {
      std::vector<PartialState> changed = states;
      apply(changed[1]);
      fuzz.expect_error(what, name, [&](auto* args) { args->states = changed; });
    };
    state("null out", "states[1].out", [](PartialState& s) { s.out.data = nullptr; });
    state("null lse", "states[1].lse", [](PartialState& s) { s.lse.data = nullptr; });
    state("no lse", "states[1].lse", [](PartialState& s) { s.lse = {}; });
    state("int out", "states[1].out", [](PartialState& s) { s.out.dtype = DType::kInt32; });
    state("bf16 lse", "states[1].lse", [](PartialState& s) { s.lse.dtype = DType::kBFloat16; });
    state("rows", "states[1].out", [](PartialState& s) { ++s.out.shape[0]; });
    state("heads", "states[1].lse", [](PartialState& s) { ++s.lse.shape[1]; });
    state("stride", "states[1].out", [](PartialState& s) { s.out.strides[2] = 2; });
    state("device", "states[1].out", [&where](PartialState& s) {
      s.out.device = {where.device.kind == DeviceKind::kCpu ? DeviceKind::kCuda : DeviceKind::kCpu,
                      0};
    });
  }
}

TEST(RescaleByLseArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    RescaleByLseProblem problem({.name = "arguments"}, where);
    ArgumentFuzz<RescaleByLseArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"out", kNone, true}, LACUNA_FIELD(out));
    fuzz.tensor({"lse", 6, false}, LACUNA_FIELD(lse));
    fuzz.tensor({"merged_lse", 3, false}, LACUNA_FIELD(merged_lse));
    for (int rank : {-1, 2}) {
      fuzz.expect_error("rank", "rank", [rank](auto* args) { args->rank = rank; });
    }
  }
}

}  // namespace
}  // namespace lacuna::testing
