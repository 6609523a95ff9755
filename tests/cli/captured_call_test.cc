// What `lacuna probe` says of a kernel: the truth about right ones and about wrong ones.
#include "cli/captured_call.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/attention_cases.h"

namespace lacuna::cli {
namespace {

using testing::Side;

// What is wrong with "test/spoilt" after the CPU's kernel has run.
enum class Damage { kNone, kOneValue, kLostKey, kLse };
Damage damage = Damage::kNone;
const Kernel<SparseMlaArgs>* cpu_kernel = nullptr;

Status run_spoilt(const SparseMlaArgs& args, const DeviceInfo& device, const Launch& launch) {
  std::vector<int32_t> counts(args.out.shape[0], static_cast<int32_t>(args.indices.shape[1] - 1));
  SparseMlaArgs changed = args;
  if (damage == Damage::kLostKey) {
    changed.valid_counts = view_of(static_cast<const int32_t*>(counts.data()), {args.out.shape[0]});
  }
  const Status status = cpu_kernel->run(changed, device, launch);
  if (damage == Damage::kOneValue) {
    args.out.as<Bf16>()[5] = to_bf16(to_float(args.out.as<Bf16>()[5]) + 0.25f);
  } else if (damage == Damage::kLse) {
    args.lse.as<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  }
  return status;
}

const Kernel<SparseMlaArgs> kKernels[] = {
    {.name = "test/spoilt",
     .supports = [](const SparseMlaArgs&, const DeviceInfo&) { return ok_status(); },
     .workspace_bytes = [](const SparseMlaArgs& args, const DeviceInfo& device) -> int64_t {
       return cpu_kernel->workspace_bytes == nullptr ? 0
                                                     : cpu_kernel->workspace_bytes(args, device);
     },
     .run = run_spoilt},
    {.name = "test/picky",
     .supports = [](const SparseMlaArgs&,
                    const DeviceInfo&) { return unsupported("it only runs on Sundays"); },
     .run = [](const SparseMlaArgs&, const DeviceInfo&,
               const Launch&) { return internal_error("a kernel that refuses was run"); }}};

class CapturedCallTest : public ::testing::Test {
 protected:
  CapturedCallTest() : real_(*Context::create({.num_threads = 1, .use_cuda = false})) {
    const ContextState& state = real_.state();
    const Backend& cpu = **std::find_if(
        state.backends.begin(), state.backends.end(),
        [](const Backend* backend) { return backend->device_kind == DeviceKind::kCpu; });
    cpu_kernel = &cpu.sparse_mla.front();
    runtime_ = cpu.runtime;
    device_ = state.devices.front();
    backend_ = {.name = "test",
                .runtime = runtime_,
                .device_kind = DeviceKind::kCpu,
                .available = [](const DeviceInfo&) { return true; },
                .sparse_mla = kKernels};
    auto with_test_kernels = std::make_shared<ContextState>();
    with_test_kernels->devices = state.devices;
    with_test_kernels->backends = {&backend_, &cpu};
    context_ = std::make_unique<Context>(Context::from_state(std::move(with_test_kernels)));
    damage = Damage::kNone;
  }

  // A call as an engine makes it: split queries, rows of a paged cache with gaps, counts; run on
  // the CPU's kernel.
  std::unique_ptr<testing::SparseMlaProblem> run(DType dtype = DType::kBFloat16) {
    const KvLayout layout =
        dtype == DType::kFloat32 ? KvLayout::latent_f32(64, 16) : KvLayout::latent_bf16(64, 16);
    auto problem =
        std::make_unique<testing::SparseMlaProblem>(testing::SparseMlaCase{.name = "captured",
                                                                           .rows = 5,
                                                                           .heads = 3,
                                                                           .width = 40,
                                                                           .layout = layout,
                                                                           .block_size = 16,
                                                                           .gap_rows = 3,
                                                                           .q_dtype = dtype,
                                                                           .out_dtype = dtype,
                                                                           .split_q = true,
                                                                           .lse = false,
                                                                           .max_logits = false,
                                                                           .out_row_gap = 7},
                                                    testing::TestDevice{runtime_, device_.device});
    problem->buffers.upload();
    const SparseMlaArgs args = problem->args(Side::kDevice);
    const int64_t bytes = *workspace_bytes(real_, args);
    std::vector<char> memory(bytes + 64);
    void* aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
    EXPECT_TRUE(sparse_mla(real_, args, {.workspace = aligned, .workspace_bytes = bytes}).ok());
    return problem;
  }
  CapturedCall capture(const testing::SparseMlaProblem& problem) {
    Result<CapturedCall> call = CapturedCall::copy(problem.args(Side::kDevice), runtime_);
    EXPECT_TRUE(call.ok()) << call.status().message();
    return std::move(call).value();
  }
  Replay replay(const CapturedCall& call, const std::string& kernel) {
    const Result<Replay> replay = call.replay(*context_, device_, runtime_, kernel);
    EXPECT_TRUE(replay.ok()) << replay.status().message();
    return replay.ok() ? *replay : Replay{.error = "failed"};
  }

  const Context real_;
  const Runtime* runtime_ = nullptr;
  DeviceInfo device_;
  Backend backend_;
  std::unique_ptr<Context> context_;
};

TEST_F(CapturedCallTest, TheSameKernelGivesTheSameBitsAfterTheCallersMemoryIsGone) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    auto problem = run(dtype);
    const CapturedCall call = capture(*problem);
    EXPECT_EQ(call.num_rows(), 5);
    EXPECT_EQ(call.num_keys(), 5 * 40);
    problem.reset();
    for (const char* kernel : {"cpu/sparse_mla", "test/spoilt"}) {
      const Replay result = replay(call, kernel);
      EXPECT_EQ(result.error, "");
      EXPECT_EQ(result.refusal, "");
      EXPECT_TRUE(result.bit_equal);
      const double bound = dtype == DType::kFloat32 ? 1e-5 : 1e-2;
      EXPECT_GT(result.rel_frobenius, 0);
      EXPECT_LT(result.rel_frobenius, bound);
      EXPECT_GT(result.max_abs, 0);
      EXPECT_LT(result.max_abs, bound);
      EXPECT_LT(result.lse_error, 1e-5);
    }
  }
}

TEST_F(CapturedCallTest, AnEnginesOutputWithOneOtherBitIsReported) {
  const auto problem = run();
  auto* out = problem->args(Side::kDevice).out.as<uint16_t>();
  *out ^= 1;
  const Replay result = replay(capture(*problem), "cpu/sparse_mla");
  EXPECT_FALSE(result.bit_equal);
  EXPECT_EQ(result.error, "");
}

TEST_F(CapturedCallTest, AWrongKernelIsReported) {
  const CapturedCall call = capture(*run());
  damage = Damage::kOneValue;
  Replay result = replay(call, "test/spoilt");
  EXPECT_NE(result.error.find("out[0, 0, 5] is "), std::string::npos) << result.error;
  EXPECT_NEAR(result.max_abs, 0.25, 0.02);
  EXPECT_FALSE(result.bit_equal);
  damage = Damage::kLostKey;
  result = replay(call, "test/spoilt");
  EXPECT_NE(result.error, "");
  EXPECT_GT(result.rel_frobenius, 0.02);
  EXPECT_FALSE(result.bit_equal);
  damage = Damage::kLse;
  result = replay(call, "test/spoilt");
  EXPECT_NE(result.error.find("lse[0, 1] is nan"), std::string::npos) << result.error;
  EXPECT_TRUE(std::isnan(result.lse_error));
  EXPECT_TRUE(result.bit_equal);
}

TEST_F(CapturedCallTest, ARefusalIsNoError) {
  const CapturedCall call = capture(*run());
  const Replay result = replay(call, "test/picky");
  EXPECT_EQ(result.refusal, "it only runs on Sundays");
  EXPECT_EQ(result.error, "");
  const Result<Replay> unknown = call.replay(*context_, device_, runtime_, "test/none");
  EXPECT_EQ(unknown.status().code(), StatusCode::kNotFound);
}

}  // namespace
}  // namespace lacuna::cli
