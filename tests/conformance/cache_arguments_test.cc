// Wrong arguments of the cache operations: one at a time, each named by the error.
#include "tests/conformance/arguments.h"
#include "tests/support/cache_cases.h"

namespace lacuna::testing {
namespace {

constexpr unsigned kAll = 7;
constexpr unsigned kNone = 0;

TEST(AppendKvArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
      AppendKvProblem problem({.name = "arguments", .layout = layout}, where);
      ArgumentFuzz<AppendKvArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
      fuzz.common();
      fuzz.tensor({"latent", 2, true}, LACUNA_FIELD(latent));
      fuzz.tensor({"rope", 3, true}, LACUNA_FIELD(rope));
      fuzz.tensor({"slot_mapping", kAll, false}, LACUNA_FIELD(slot_mapping));
      fuzz.cache("kv", &AppendKvArgs::kv, KvLayout::index_bf16(576));
      fuzz.expect_error("kv with block_size 0", "kv", [](auto* args) { args->kv.block_size = 0; });
      fuzz.expect_error("no rope", "rope", [](auto* args) { args->rope = {}; });
      fuzz.expect_error("rope of another dtype", "rope",
                        [](auto* args) { args->rope.dtype = DType::kFloat32; });
    }
  }
}

TEST(AppendIndexKeysArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    AppendIndexKeysProblem problem({.name = "arguments", .layout = KvLayout::index_fp8()}, where);
    ArgumentFuzz<AppendIndexKeysArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"keys", 2, true}, LACUNA_FIELD(keys));
    fuzz.tensor({"slot_mapping", kAll, false}, LACUNA_FIELD(slot_mapping));
    fuzz.cache("kv", &AppendIndexKeysArgs::kv, KvLayout::latent_bf16(128, 0));
    fuzz.expect_error("kv with block_size 0", "kv", [](auto* args) { args->kv.block_size = 0; });
    AppendIndexKeysProblem odd({.name = "arguments", .layout = KvLayout::index_bf16(33)}, where);
    ArgumentFuzz<AppendIndexKeysArgs> odd_fuzz(&odd.buffers, odd.args(Side::kDevice));
    odd_fuzz.expect_error("hadamard of an odd width", "hadamard",
                          [](auto* args) { args->hadamard = true; });
  }
}

TEST(GatherKvArguments, WrongOnesAreNamed) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    GatherKvProblem problem({.name = "arguments"}, where);
    ArgumentFuzz<GatherKvArgs> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    fuzz.tensor({"block_table", kNone, true}, LACUNA_FIELD(block_table));
    fuzz.tensor({"request_ids", kNone, false}, LACUNA_FIELD(request_ids));
    fuzz.tensor({"starts", kAll, false}, LACUNA_FIELD(starts));
    fuzz.tensor({"lengths", kAll, false}, LACUNA_FIELD(lengths));
    fuzz.tensor({"out_starts", kAll, false}, LACUNA_FIELD(out_starts));
    fuzz.tensor({"out", 2, true}, LACUNA_FIELD(out));
    fuzz.cache("kv", &GatherKvArgs::kv, KvLayout::index_bf16(576));
    fuzz.expect_error("kv with block_size 0", "kv", [](auto* args) { args->kv.block_size = 0; });
  }
}

}  // namespace
}  // namespace lacuna::testing
