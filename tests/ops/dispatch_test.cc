// Dispatch over made-up backends, kernels and an operation of its own: the order of choice, the
// refusals, and what a call checks before a kernel runs.
#include "ops/dispatch.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lacuna {

// An operation that only dispatch knows. Kernels look at `size` and say where they were.
struct ProbeArgs {
  int size = 0;
  Device device = {};
  std::string* ran = nullptr;
  std::string_view kernel = {};
};

struct ProbeBackend : Backend {
  std::vector<Kernel<ProbeArgs>> kernels;
};

template <>
struct Op<ProbeArgs> {
  static constexpr const char* kName = "probe";
  static KernelList<ProbeArgs> list(const Backend& backend) {
    return static_cast<const ProbeBackend&>(backend).kernels;
  }
  static Status validate(const ProbeArgs& args) {
    return args.size < 0 ? invalid_argument("size: negative") : ok_status();
  }
  static Device device(const ProbeArgs& args) { return args.device; }
  static bool nothing_to_do(const ProbeArgs& args) { return args.size == 0; }
};

namespace {

Status any_size(const ProbeArgs&, const DeviceInfo&) { return ok_status(); }
Status size_up_to_8(const ProbeArgs& args, const DeviceInfo&) {
  return args.size <= 8 ? ok_status()
                        : unsupported("size " + std::to_string(args.size) + ", at most 8");
}
Status even_size(const ProbeArgs& args, const DeviceInfo&) {
  return args.size % 2 == 0 ? ok_status() : unsupported("size must be even");
}
bool size_from_4(const ProbeArgs& args, const DeviceInfo&) { return args.size >= 4; }
bool never(const ProbeArgs&, const DeviceInfo&) { return false; }
int64_t hundred_bytes_each(const ProbeArgs& args, const DeviceInfo&) { return 100 * args.size; }

template <char kLetter>
Status say(const ProbeArgs& args, const DeviceInfo& info, const Launch&) {
  *args.ran += kLetter + info.name;
  return ok_status();
}
Status fail(const ProbeArgs&, const DeviceInfo&, const Launch&) {
  return internal_error("the driver failed");
}

ProbeBackend backend(
    std::vector<Kernel<ProbeArgs>> kernels, DeviceKind kind = DeviceKind::kCpu,
    bool (*available)(const DeviceInfo&) = [](const DeviceInfo&) { return true; }) {
  ProbeBackend result;
  result.name = "made up";
  result.runtime = nullptr;
  result.device_kind = kind;
  result.available = available;
  result.kernels = std::move(kernels);
  return result;
}

// A context with one CPU device and one made-up GPU.
Context context_of(std::vector<const Backend*> backends) {
  auto state = std::make_shared<ContextState>();
  DeviceInfo cpu;
  cpu.name = "@cpu";
  state->devices.push_back(cpu);
  DeviceInfo gpu;
  gpu.name = "@gpu";
  gpu.device = {DeviceKind::kCuda, 0};
  gpu.compute_capability = 80;
  state->devices.push_back(gpu);
  state->backends = std::move(backends);
  return Context::from_state(std::move(state));
}

const Kernel<ProbeArgs> kSmall = {"x/small", size_up_to_8, size_from_4, nullptr, say<'s'>};
const Kernel<ProbeArgs> kEven = {"x/even", even_size, nullptr, nullptr, say<'e'>};
const Kernel<ProbeArgs> kSlow = {"y/slow", any_size, never, nullptr, say<'l'>};
const Kernel<ProbeArgs> kOther = {"y/other", any_size, never, nullptr, say<'o'>};

std::string text(const Explanation& explanation) {
  return explanation.kernel + (explanation.preferred ? " (preferred)" : "") +
         refusals_text(explanation.refusals);
}

class Dispatch : public testing::Test {
 protected:
  std::string run(ProbeArgs args, Launch launch = {}) {
    std::string ran;
    args.ran = &ran;
    const Status status = run_op(context_, args, launch);
    return status.ok() ? ran
                       : std::string(status_code_name(status.code())) + ": " + status.message();
  }

  const ProbeBackend first_ = backend({kSmall, kEven});
  const ProbeBackend second_ = backend({kSlow, kOther});
  Context context_ = context_of({&first_, &second_});
};

TEST_F(Dispatch, TakesTheFirstThatSupportsAndIsPreferred) {
  EXPECT_EQ(run({.size = 4}), "s@cpu");
  EXPECT_EQ(run({.size = 7}), "s@cpu");
}

TEST_F(Dispatch, PassesOverKernelsThatSupportButDoNotPay) { EXPECT_EQ(run({.size = 2}), "e@cpu"); }

TEST_F(Dispatch, PassesOverKernelsThatRefuse) { EXPECT_EQ(run({.size = 10}), "e@cpu"); }

TEST_F(Dispatch, FallsBackToTheFirstThatSupportsWhenNoneIsPreferred) {
  EXPECT_EQ(run({.size = 3}), "s@cpu");   // before y/slow in the list
  EXPECT_EQ(run({.size = 11}), "l@cpu");  // x/small refuses; y/slow comes before y/other
}

TEST_F(Dispatch, ForcesAKernelPastPreferred) {
  EXPECT_EQ(run({.size = 4, .kernel = "y/other"}), "o@cpu");
  EXPECT_EQ(run({.size = 1, .kernel = "x/small"}), "s@cpu");
}

TEST_F(Dispatch, NeverForcesAKernelPastItsRefusal) {
  EXPECT_EQ(run({.size = 9, .kernel = "x/small"}),
            "unsupported: probe: the kernel asked for cannot run these arguments: x/small: size 9, "
            "at most 8; x/even: not the kernel that was asked for; y/slow: not the kernel that was "
            "asked for; y/other: not the kernel that was asked for");
}

TEST_F(Dispatch, ListsWhatThereIsWhenTheNameIsUnknown) {
  EXPECT_EQ(run({.size = 4, .kernel = "x/smal"}),
            "not found: probe: there is no kernel \"x/smal\" for cpu: x/small: not the kernel that "
            "was asked for; x/even: not the kernel that was asked for; y/slow: not the kernel that "
            "was asked for; y/other: not the kernel that was asked for");
}

TEST_F(Dispatch, ListsEveryRefusalWhenNothingRuns) {
  const Context context = context_of({&first_});
  std::string ran;
  const Status status = run_op(context, ProbeArgs{.size = 11, .ran = &ran}, {});
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.message(),
            "probe: no kernel on cpu runs these arguments: x/small: size 11, at most 8; x/even: "
            "size must be even");
  EXPECT_EQ(ran, "");
}

TEST_F(Dispatch, SaysThatABackendHasNoKernelAtAll) {
  const ProbeBackend empty = backend({});
  EXPECT_EQ(run_op(context_of({&empty}), ProbeArgs{.size = 1}, {}).message(),
            "probe: no kernel on cpu runs these arguments");
}

TEST_F(Dispatch, StaysOnTheDeviceOfTheArguments) {
  const ProbeBackend gpu = backend({kSlow}, DeviceKind::kCuda);
  context_ = context_of({&gpu, &first_});
  EXPECT_EQ(run({.size = 4}), "s@cpu");
  EXPECT_EQ(run({.size = 4, .device = {DeviceKind::kCuda, 0}}), "l@gpu");
  EXPECT_EQ(run({.size = 4, .device = {DeviceKind::kCuda, 1}}),
            "unsupported: probe: this context has no device cuda:1");
}

TEST_F(Dispatch, SkipsBackendsThatTheDeviceLacks) {
  const ProbeBackend hopper = backend({kEven}, DeviceKind::kCuda, [](const DeviceInfo& info) {
    return info.compute_capability == 90;
  });
  const ProbeBackend portable = backend({kSlow}, DeviceKind::kCuda);
  context_ = context_of({&hopper, &portable});
  const Device gpu = {DeviceKind::kCuda, 0};
  EXPECT_EQ(run({.size = 4, .device = gpu}), "l@gpu");
  EXPECT_EQ(text(explain_op(context_, ProbeArgs{.size = 4, .device = gpu})),
            "y/slow: x/even: made up does not run on @gpu (compute capability 8.0); y/slow: can "
            "run, but does not pay here");
  EXPECT_EQ(run({.size = 4, .device = gpu, .kernel = "x/even"}),
            "not found: probe: there is no kernel \"x/even\" for cuda:0: x/even: made up does not "
            "run on @gpu (compute capability 8.0); y/slow: not the kernel that was asked for");
}

TEST_F(Dispatch, ValidatesBeforeItChooses) {
  EXPECT_EQ(run({.size = -1, .kernel = "none"}), "invalid argument: size: negative");
  EXPECT_FALSE(explain_op(context_, ProbeArgs{.size = -1}).status.ok());
  EXPECT_FALSE(op_workspace_bytes(context_, ProbeArgs{.size = -1}).ok());
}

TEST_F(Dispatch, DoesNothingWhenThereIsNothingToDo) {
  const Context nobody = context_of({});
  EXPECT_TRUE(run_op(nobody, ProbeArgs{.size = 0}, {}).ok());
  EXPECT_EQ(*op_workspace_bytes(nobody, ProbeArgs{.size = 0}), 0);
}

TEST_F(Dispatch, PassesOnWhatTheKernelReturns) {
  const ProbeBackend broken = backend({{"z/broken", any_size, nullptr, nullptr, fail}});
  context_ = context_of({&broken});
  EXPECT_EQ(run({.size = 1}), "internal error: the driver failed");
}

TEST_F(Dispatch, ChecksTheWorkspaceOfTheChosenKernel) {
  const ProbeBackend hungry =
      backend({{"z/hungry", any_size, nullptr, hundred_bytes_each, say<'h'>}, kSlow});
  context_ = context_of({&hungry});
  alignas(64) char memory[512];
  EXPECT_EQ(*op_workspace_bytes(context_, ProbeArgs{.size = 4}), 400);
  EXPECT_EQ(*op_workspace_bytes(context_, ProbeArgs{.size = 4, .kernel = "y/slow"}), 0);
  EXPECT_EQ(run({.size = 4}, {.workspace = memory, .workspace_bytes = 400}), "h@cpu");
  EXPECT_EQ(run({.size = 4}, {.workspace = memory, .workspace_bytes = 399}),
            "out of memory: z/hungry: needs a workspace of 400 bytes, given 399");
  EXPECT_EQ(run({.size = 4}), "out of memory: z/hungry: needs a workspace of 400 bytes, given 0");
  EXPECT_EQ(run({.size = 4}, {.workspace = nullptr, .workspace_bytes = 400}),
            "out of memory: z/hungry: needs a workspace of 400 bytes, given 0");
  EXPECT_EQ(run({.size = 4}, {.workspace = memory + 8, .workspace_bytes = 400}),
            "invalid argument: z/hungry: the workspace must be aligned to 64 bytes");
  EXPECT_EQ(run({.size = 4, .kernel = "y/slow"}), "l@cpu");
}

TEST_F(Dispatch, ExplainsAChoiceForSpeed) {
  const Explanation explanation = explain_op(context_, ProbeArgs{.size = 10});
  EXPECT_TRUE(explanation.status.ok());
  EXPECT_EQ(text(explanation),
            "x/even (preferred): x/small: size 10, at most 8; y/slow: can run, but does not pay "
            "here; y/other: can run, but does not pay here");
}

TEST_F(Dispatch, ExplainsAChoiceForLackOfAnother) {
  EXPECT_EQ(text(explain_op(context_, ProbeArgs{.size = 11})),
            "y/slow: x/small: size 11, at most 8; x/even: size must be even; y/slow: can run, but "
            "does not pay here; y/other: can run, but does not pay here");
}

TEST_F(Dispatch, ExplainsThatNothingRuns) {
  const Explanation explanation = explain_op(context_of({&first_}), ProbeArgs{.size = 11});
  EXPECT_EQ(explanation.status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(text(explanation), ": x/small: size 11, at most 8; x/even: size must be even");
}

TEST_F(Dispatch, ExplainsHowTheChosenKernelWouldRun) {
  const ProbeBackend telling =
      backend({{"z/telling", size_up_to_8, nullptr, nullptr, say<'t'>,
                [](const ProbeArgs& args, const DeviceInfo& info) {
                  return std::to_string(args.size) + " parts on " + info.name;
                }},
               kSlow});
  const Context context = context_of({&telling});
  EXPECT_EQ(explain_op(context, ProbeArgs{.size = 4}).detail, "4 parts on @cpu");
  EXPECT_EQ(explain_op(context, ProbeArgs{.size = 9}).detail, "");
}

TEST_F(Dispatch, ExplainsWithoutRunning) {
  std::string ran;
  EXPECT_EQ(explain_op(context_, ProbeArgs{.size = 4, .ran = &ran}).kernel, "x/small");
  EXPECT_EQ(ran, "");
}

// A state with an H200 and its slice, which has the name of a card of its own.
ContextState two_gpus() {
  ContextState state;
  state.devices.resize(3);
  state.devices[1] = {.device = {DeviceKind::kCuda, 0}, .name = "H200", .sm_count = 132};
  state.devices[2] = {.device = {DeviceKind::kCuda, 1}, .name = "H200 MIG", .sm_count = 16};
  return state;
}

TEST(GiveTuning, GoesToTheDevicesThatWereMeasured) {
  ContextState state = two_gpus();
  const Tuning table = {.device = "H200 MIG", .sm_count = 16, .sparse_mla_splits = {{8, 1, 64, 1}}};
  ASSERT_TRUE(give_tuning(table, "t.csv", state).ok());
  EXPECT_EQ(state.devices[0].tuning, nullptr);
  EXPECT_EQ(state.devices[1].tuning, nullptr);
  ASSERT_NE(state.devices[2].tuning, nullptr);
  EXPECT_EQ(state.devices[2].tuning->sparse_mla_splits.size(), 1u);
}

TEST(GiveTuning, RefusesATableOfAnotherDevice) {
  ContextState state = two_gpus();
  const char* others =
      ", but cuda:0 is H200 with 132 SMs; cuda:1 is H200 MIG with 16 SMs; lacuna tune measures a "
      "table for a device";
  EXPECT_EQ(give_tuning({.device = "H100", .sm_count = 132}, "t.csv", state).message(),
            std::string("tuning_file: t.csv was measured on H100 with 132 SMs") + others);
  EXPECT_EQ(give_tuning({.device = "H200", .sm_count = 16}, "t.csv", state).message(),
            std::string("tuning_file: t.csv was measured on H200 with 16 SMs") + others);
  for (const DeviceInfo& device : state.devices) {
    EXPECT_EQ(device.tuning, nullptr);
  }
  state.devices.resize(1);
  state.cuda_status = "not asked for";
  EXPECT_EQ(give_tuning({.device = "H200", .sm_count = 132}, "t.csv", state).message(),
            "tuning_file: t.csv was measured on H200 with 132 SMs, but there is no GPU: not asked "
            "for; lacuna tune measures a table for a device");
}

}  // namespace
}  // namespace lacuna
