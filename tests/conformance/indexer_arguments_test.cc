// Wrong arguments of the indexer's operations: one at a time, each named by the error.
#include "tests/conformance/arguments.h"
#include "tests/support/indexer_cases.h"

namespace lacuna::testing {
namespace {

constexpr unsigned kAll = 7;
constexpr unsigned kNone = 0;

TEST(TranslateIndicesArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    TranslateProblem problem(
        {.name = "arguments", .width = 20, .valid_counts = true, .workspace = true}, where);
    ArgumentFuzz<TranslateIndicesArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"indices", kNone, true}, LACUNA_FIELD(indices));
    fuzz.tensor({"request_ids", kAll, false}, LACUNA_FIELD(request_ids));
    fuzz.tensor({"block_table", kNone, true}, LACUNA_FIELD(block_table));
    fuzz.tensor({"valid_counts", kAll, false}, LACUNA_FIELD(valid_counts));
    fuzz.tensor({"workspace_ids", kAll, false}, LACUNA_FIELD(workspace_ids));
    fuzz.tensor({"workspace_starts", kNone, false}, LACUNA_FIELD(workspace_starts));
    fuzz.tensor({"rows", kAll, true}, LACUNA_FIELD(rows));
    fuzz.tensor({"counts", kAll, false}, LACUNA_FIELD(counts));
    fuzz.expect_error("num_blocks", "num_blocks", [](auto* args) { args->num_blocks = -1; });
    fuzz.expect_error("block_size", "block_size", [](auto* args) { args->block_size = 0; });
    fuzz.expect_error("block_stride_rows", "block_stride_rows",
                      [](auto* args) { args->block_stride_rows = 3; });
    for (const DcpShard& dcp :
         {DcpShard{0, 0, 1}, DcpShard{2, 2, 1}, DcpShard{2, -1, 1}, DcpShard{2, 0, 0}}) {
      fuzz.expect_error("dcp", "dcp", [dcp](auto* args) { args->dcp = dcp; });
    }
    fuzz.expect_error("starts without ids", "workspace_ids",
                      [](auto* args) { args->workspace_ids = {}; });
    fuzz.expect_error("ids without starts", "workspace_starts",
                      [](auto* args) { args->workspace_starts = {}; });
  }
}

TEST(IndexLogitsArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    for (bool ragged : {false, true}) {
      IndexLogitsProblem problem(
          {.name = "arguments", .scoring = {.lengths = {40, 100}, .ragged = ragged}}, where);
      ArgumentFuzz<IndexLogitsArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
      fuzz.common();
      fuzz.tensor({"q", 4, true}, LACUNA_FIELD(q));
      fuzz.tensor({"head_weights", 3, true}, LACUNA_FIELD(head_weights));
      fuzz.tensor({"request_ids", kAll, false}, LACUNA_FIELD(request_ids));
      fuzz.tensor({"visible_lengths", kAll, false}, LACUNA_FIELD(visible_lengths));
      fuzz.tensor({"logits", 1, true}, LACUNA_FIELD(logits));
      if (ragged) {
        fuzz.tensor({"key_starts", kNone, false}, LACUNA_FIELD(key_starts));
        fuzz.expect_error("both", "block_table", [](auto* args) {
          args->block_table = make_view<const void>(args->key_starts.data, DType::kInt32, {1, 2},
                                                    args->key_starts.device);
        });
        continue;
      }
      fuzz.tensor({"block_table", kNone, true}, LACUNA_FIELD(block_table));
      fuzz.cache("keys", &IndexLogitsArgs::keys, KvLayout::latent_bf16(128, 0));
      fuzz.expect_error("keys with block_size 0", "keys",
                        [](auto* args) { args->keys.block_size = 0; });
      fuzz.expect_error("neither", "block_table", [](auto* args) { args->block_table = {}; });
      fuzz.expect_error("next_n", "next_n", [](auto* args) { args->next_n = 0; });
      fuzz.expect_error("scratch_bytes_max", "scratch_bytes_max",
                        [](auto* args) { args->scratch_bytes_max = -1; });
    }
  }
}

template <class Args>
void fuzz_outputs(ArgumentFuzz<Args>* fuzz) {
  fuzz->tensor({"outputs.indices", 1, true}, LACUNA_FIELD(outputs.indices));
  fuzz->tensor({"outputs.rows", 1, true}, LACUNA_FIELD(outputs.rows));
  fuzz->tensor({"outputs.counts", kAll, false}, LACUNA_FIELD(outputs.counts));
  fuzz->tensor({"outputs.mask", 1, true}, LACUNA_FIELD(outputs.mask));
  fuzz->tensor({"block_table", kNone, true}, LACUNA_FIELD(outputs.block_table));
  fuzz->expect_error("a list that is too narrow", "outputs.indices",
                     [](auto* args) { args->outputs.indices.shape[1] = args->k - 1; });
  fuzz->expect_error("rows that are too narrow", "outputs.rows",
                     [](auto* args) { args->outputs.rows.shape[1] = args->k - 1; });
  fuzz->expect_error("no outputs", "outputs", [](auto* args) {
    args->outputs.indices = {};
    args->outputs.rows = {};
    args->outputs.mask = {};
  });
  fuzz->expect_error("mask stride", "outputs.mask",
                     [](auto* args) { args->outputs.mask.strides[0] = 5; });
  fuzz->expect_error("rows without a table", "block_table",
                     [](auto* args) { args->outputs.block_table = {}; });
  fuzz->expect_error("block_size", "block_size", [](auto* args) { args->outputs.block_size = 0; });
  fuzz->expect_error("num_blocks", "num_blocks", [](auto* args) { args->outputs.num_blocks = -1; });
  fuzz->expect_error("block_stride_rows", "block_stride_rows",
                     [](auto* args) { args->outputs.block_stride_rows = 1; });
  for (int64_t k : {0, -1}) {
    fuzz->expect_error("k", "k", [k](auto* args) { args->k = k; });
  }
  fuzz->expect_error("kpool", "kpool", [](auto* args) { args->kpool = 0; });
  fuzz->expect_error("k and kpool", "kpool", [](auto* args) { args->kpool = 3; });
}

TEST(TopKArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    TopKProblem problem({.name = "arguments",
                         .lengths = {100, 80},
                         .k = 16,
                         .row_starts = true,
                         .candidate_ids = true,
                         .rows = true,
                         .mask = true},
                        where);
    TopKArgs valid = problem.args(Side::kDevice);
    ArgumentFuzz<TopKArgs> fuzz(&problem.buffers, valid);
    fuzz.common();
    fuzz.tensor({"logits", kNone, true}, LACUNA_FIELD(logits));
    fuzz.tensor({"row_starts", kAll, false}, LACUNA_FIELD(row_starts));
    fuzz.tensor({"lengths", kAll, false}, LACUNA_FIELD(lengths));
    fuzz.tensor({"candidate_ids", 3, true}, LACUNA_FIELD(candidate_ids));
    fuzz.tensor({"outputs.scores", 1, true}, LACUNA_FIELD(outputs.scores));
    fuzz.tensor({"request_ids", kAll, false}, LACUNA_FIELD(outputs.request_ids));
    fuzz_outputs(&fuzz);
    fuzz.expect_error("rows without request ids", "request_ids",
                      [](auto* args) { args->outputs.request_ids = {}; });
  }
}

TEST(SelectKeysArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    SelectKeysProblem problem({.name = "arguments", .scoring = {.lengths = {40, 100}}, .k = 16},
                              where);
    ArgumentFuzz<SelectKeysArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"q", 4, true}, LACUNA_FIELD(q));
    fuzz.tensor({"head_weights", 3, true}, LACUNA_FIELD(head_weights));
    fuzz.tensor({"request_ids", kAll, false}, LACUNA_FIELD(request_ids));
    fuzz.tensor({"visible_lengths", kAll, false}, LACUNA_FIELD(visible_lengths));
    fuzz.tensor({"block_table", kNone, true}, LACUNA_FIELD(block_table));
    fuzz.cache("keys", &SelectKeysArgs::keys, KvLayout::latent_bf16(128, 0));
    fuzz.expect_error("next_n", "next_n", [](auto* args) { args->next_n = 0; });
    fuzz.expect_error("visible_length_max", "visible_length_max",
                      [](auto* args) { args->visible_length_max = -2; });
    fuzz.expect_error("logits_bytes_max", "logits_bytes_max",
                      [](auto* args) { args->logits_bytes_max = -1; });
    fuzz_outputs(&fuzz);
  }
}

}  // namespace
}  // namespace lacuna::testing
