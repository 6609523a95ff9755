// The conformance suite's machinery: the kernels of every backend of a real context, and the one
// checking function that every kernel and every case goes through.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <string>
#include <vector>

#include "ops/dispatch.h"
#include "tests/support/buffer_set.h"
#include "tests/support/poison.h"

namespace lacuna::testing {

// The context under test. Made once: its thread pool outlives every test.
inline const Context& conformance_context() {
  static const Context context = [] {
    Result<Context> made = Context::create({.num_threads = 2});
    LACUNA_CHECK(made.ok());
    return std::move(made).value();
  }();
  return context;
}

// A kernel and a device of its backend.
struct KernelOnDevice {
  std::string name;
  TestDevice where;
};

// Every kernel of an operation, in every backend, on every device that the backend serves. A kernel
// that joins a list is found here without an edit.
template <class Args>
std::vector<KernelOnDevice> kernels_of(const Context& context) {
  std::vector<KernelOnDevice> kernels;
  for (const Backend* backend : context.state().backends) {
    for (const DeviceInfo& info : context.state().devices) {
      if (info.device.kind != backend->device_kind || !backend->available(info)) {
        continue;
      }
      for (const Kernel<Args>& kernel : Op<Args>::list(*backend)) {
        kernels.push_back({kernel.name, {backend->runtime, info.device}});
      }
    }
  }
  return kernels;
}

// The devices of the context, each with the runtime of its first backend.
inline std::vector<TestDevice> devices_of(const Context& context) {
  std::vector<TestDevice> devices;
  for (const DeviceInfo& info : context.state().devices) {
    for (const Backend* backend : context.state().backends) {
      if (info.device.kind == backend->device_kind && backend->available(info)) {
        devices.push_back({backend->runtime, info.device});
        break;
      }
    }
  }
  return devices;
}

// The function of each operation.
#define LACUNA_CALL(ArgsType, op)                                                               \
  inline Status call(const Context& context, const ArgsType& args, const Launch& launch = {}) { \
    return op(context, args, launch);                                                           \
  }
LACUNA_CALL(SparseMlaArgs, sparse_mla)
LACUNA_CALL(SparseMlaScheduleArgs, build_schedule)
LACUNA_CALL(MhaArgs, mha)
LACUNA_CALL(BuildMaskArgs, build_mask)
LACUNA_CALL(MergeStatesArgs, merge_states)
LACUNA_CALL(RescaleByLseArgs, rescale_by_lse)
LACUNA_CALL(TranslateIndicesArgs, translate_indices)
LACUNA_CALL(IndexLogitsArgs, index_logits)
LACUNA_CALL(TopKArgs, top_k)
LACUNA_CALL(SelectKeysArgs, select_keys)
LACUNA_CALL(AppendKvArgs, append_kv)
LACUNA_CALL(AppendIndexKeysArgs, append_index_keys)
LACUNA_CALL(GatherKvArgs, gather_kv)
LACUNA_CALL(EmbeddingArgs, embedding)
LACUNA_CALL(RmsNormArgs, rms_norm)
LACUNA_CALL(LayerNormArgs, layer_norm)
LACUNA_CALL(RopeArgs, rope)
LACUNA_CALL(LinearArgs, linear)
LACUNA_CALL(HeadLinearArgs, head_linear)
LACUNA_CALL(SiluMulArgs, silu_mul)
LACUNA_CALL(MoeRouteArgs, moe_route)
LACUNA_CALL(MoeExpertsArgs, moe_experts)
LACUNA_CALL(AddArgs, add)
LACUNA_CALL(AdjustLogitsArgs, adjust_logits)
LACUNA_CALL(SampleArgs, sample)
LACUNA_CALL(TokenLogprobsArgs, token_logprobs)
LACUNA_CALL(PickTokensArgs, pick_tokens)
#undef LACUNA_CALL

// Calls the operation with exactly the workspace it asks for, filled with `garbage`, and says when
// a byte around the workspace changed.
template <class Args>
Status call_with_workspace(const Context& context, const Args& args, const TestDevice& where,
                           uint8_t garbage = kWorkspaceFills[0]) {
  const Result<int64_t> needed = workspace_bytes(context, args);
  if (!needed.ok()) {
    return needed.status();
  }
  if (*needed < 0) {
    return internal_error("workspace_bytes is negative: " + std::to_string(*needed));
  }
  DeviceBuffer workspace(where, *needed);
  workspace.fill(garbage);
  const Status status = call(
      context, args, {.workspace = workspace.data(), .workspace_bytes = workspace.size_bytes()});
  const std::string canary = workspace.canary_error();
  return status.ok() && !canary.empty() ? internal_error("workspace: " + canary) : status;
}

// What became of one kernel and one case.
struct Verdict {
  std::string error;    // empty: right
  std::string refusal;  // not empty: the kernel does not run this case, and says why
};

// `run` stands between the problem and the kernel so that a deliberately wrong one can be tried.
template <class Problem, class Run>
Verdict check_problem_with(Problem& problem, Run&& run) {
  std::vector<std::vector<uint8_t>> first;
  for (uint8_t garbage : kWorkspaceFills) {
    problem.buffers.upload();
    const Status status = run(garbage);
    problem.buffers.download();
    if (!status.ok()) {
      return {"the call failed: " + status.message(), {}};
    }
    std::string error = problem.buffers.untouched_error();
    if (error.empty()) {
      error = problem.verify();
    }
    if (!error.empty()) {
      return {error, {}};
    }
    if (first.empty()) {
      first = problem.buffers.output_bytes();
    } else if (first != problem.buffers.output_bytes()) {
      return {"two runs that differ in the workspace's old contents give different bits", {}};
    }
  }
  return {};
}

// The whole check of a kernel on a problem: agreement of explain and call, exact workspace, values,
// untouched bytes, repeatability, and the error when the workspace is a byte short.
template <class Problem>
Verdict check_problem(const Context& context, const std::string& kernel, Problem& problem) {
  using Args = typename Problem::Args;
  Args args = problem.args(Side::kDevice);
  args.kernel = kernel;
  const Explanation explanation = explain(context, args);
  if (!explanation.status.ok()) {
    // supports() said no: the call must say the same and touch nothing. A call with nothing to do
    // succeeds before any kernel is asked.
    problem.buffers.upload();
    const Status status = call(context, args);
    problem.buffers.download();
    const std::string touched = problem.buffers.unchanged() ? "" : "a refused call wrote";
    std::string reason;
    for (const KernelRefusal& refusal : explanation.refusals) {
      reason = refusal.kernel == kernel ? refusal.reason : reason;
    }
    if (explanation.status.code() != StatusCode::kUnsupported || reason.empty()) {
      return {"the case is invalid: " + explanation.status.message(), {}};
    }
    const bool same = Op<Args>::nothing_to_do(args)
                          ? status.ok()
                          : status.code() == StatusCode::kUnsupported &&
                                status.message().find(reason) != std::string::npos;
    if (!same) {
      return {"explain refuses (" + reason + "), but the call says: " + status.message(), {}};
    }
    return {touched, reason};
  }
  if (explanation.kernel != kernel) {
    return {"explain names kernel " + explanation.kernel, {}};
  }
  const TestDevice& where = problem.buffers.where();
  const Verdict verdict = check_problem_with(
      problem, [&](uint8_t garbage) { return call_with_workspace(context, args, where, garbage); });
  if (!verdict.error.empty()) {
    return verdict;
  }
  const Result<int64_t> needed = workspace_bytes(context, args);
  if (*needed > 0) {
    DeviceBuffer workspace(where, *needed);
    problem.buffers.upload();
    const Status status =
        call(context, args, {.workspace = workspace.data(), .workspace_bytes = *needed - 1});
    problem.buffers.download();
    if (status.code() != StatusCode::kOutOfMemory ||
        status.message().find(std::to_string(*needed)) == std::string::npos ||
        status.message().find(std::to_string(*needed - 1)) == std::string::npos) {
      return {"a workspace one byte short gives: " + status.message(), {}};
    }
    if (!problem.buffers.unchanged()) {
      return {"a call that refused its workspace wrote to an output", {}};
    }
  }
  return {};
}

// A gtest parameter: a kernel and a case.
template <class Case>
struct KernelCase {
  KernelOnDevice kernel;
  Case test_case;
};

template <class Case>
void PrintTo(const KernelCase<Case>& param, std::ostream* os) {
  *os << param.kernel.name << " " << param.test_case.name << " seed " << param.test_case.seed;
}

template <class Args, class Case>
std::vector<KernelCase<Case>> kernel_cases(const std::vector<Case>& cases) {
  std::vector<KernelCase<Case>> params;
  for (const KernelOnDevice& kernel : kernels_of<Args>(conformance_context())) {
    for (const Case& test_case : cases) {
      params.push_back({kernel, test_case});
    }
  }
  return params;
}

template <class Param>
std::string kernel_case_name(const ::testing::TestParamInfo<Param>& info) {
  std::string name = info.param.kernel.name;
  if (info.param.kernel.where.device.index > 0) {
    name += "_" + std::to_string(info.param.kernel.where.device.index);
  }
  name += "__" + info.param.test_case.name;
  for (char& c : name) {
    c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  }
  return name;
}

template <class Problem, class Case>
void run_kernel_case(const KernelCase<Case>& param) {
  Problem problem(param.test_case, param.kernel.where);
  const Verdict verdict = check_problem(conformance_context(), param.kernel.name, problem);
  if (!verdict.error.empty()) {
    FAIL() << param.kernel.name << ", case " << param.test_case.name << ", seed "
           << param.test_case.seed << ": " << verdict.error;
  }
  if (!verdict.refusal.empty()) {
    GTEST_SKIP() << param.kernel.name << " refuses: " << verdict.refusal;
  }
}

// Declares the suite of one operation: every kernel by every case, and that no case of a CPU
// context is without a kernel.
#define LACUNA_CONFORMANCE(Suite, Problem, Case, cases)                                         \
  class Suite : public ::testing::TestWithParam<KernelCase<Case>> {};                           \
  TEST_P(Suite, AgreesWithOracle) { run_kernel_case<Problem>(GetParam()); }                     \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite,                                                      \
                           ::testing::ValuesIn(kernel_cases<Problem::Args>(cases)),             \
                           kernel_case_name<KernelCase<Case>>);                                 \
  TEST(Suite##Dispatch, HasKernelForEveryCase) {                                                \
    for (const TestDevice& where : devices_of(conformance_context())) {                         \
      for (const Case& test_case : cases) {                                                     \
        Problem problem(test_case, where);                                                      \
        const Explanation chosen = explain(conformance_context(), problem.args(Side::kDevice)); \
        EXPECT_TRUE(chosen.status.ok()) << test_case.name << ": " << chosen.status.message();   \
      }                                                                                         \
    }                                                                                           \
  }

}  // namespace lacuna::testing
