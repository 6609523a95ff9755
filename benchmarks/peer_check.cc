// The problems are those of the conformance suite.
#include "benchmarks/peer_check.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "benchmarks/gpu_bench.h"
#include "core/check.h"
#include "tests/support/attention_cases.h"
#include "tests/support/compare.h"

namespace lacuna::bench {
namespace {

std::string error_of(const Peer& peer, testing::SparseMlaProblem& problem) {
  const SparseMlaArgs args = problem.args(testing::Side::kDevice);
  const Status supported = peer.supports(args);
  if (!supported.ok()) {
    return supported.message();
  }
  testing::DeviceBuffer workspace(problem.buffers.where(), peer.workspace_bytes(args));
  problem.buffers.upload();
  const Status status = peer.run(args, workspace.data(), nullptr);
  problem.buffers.download();
  if (!status.ok()) {
    return status.message();
  }
  const std::string touched = problem.buffers.untouched_error();
  if (!touched.empty()) {
    return touched;
  }
  const reference::AttentionResult& expected = problem.expected();
  const ConstTensorView raw = problem.lse.result();
  std::vector<float> lse(raw.as<float>(), raw.as<float>() + raw.num_elements());
  for (size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(expected.lse[i])) {
      if (!peer.is_empty_lse(lse[i])) {
        return "lse of a row without keys is " + std::to_string(lse[i]) +
               ", not what the peer says it is";
      }
      lse[i] = static_cast<float>(expected.lse[i]);
    } else {
      lse[i] = peer.convert_lse(lse[i]);
    }
  }
  const ConstTensorView converted =
      view_of(static_cast<const float*>(lse.data()), {raw.shape[0], raw.shape[1]});
  return testing::compare_attention(problem.out.result(), converted, {}, expected,
                                    args.kv.layout.d_qk(), false);
}

}  // namespace

Status check_peer(const Context& context, const DeviceInfo& device, const Peer& peer,
                  const KvLayout& layout, int64_t heads, int64_t topk) {
  LACUNA_ASSIGN_OR_RETURN(const Runtime* runtime, runtime_of(context, device));
  for (const testing::ListPattern list :
       {testing::ListPattern::kShuffled, testing::ListPattern::kModular,
        testing::ListPattern::kEmptyRows}) {
    const int64_t width = std::min<int64_t>(topk, 512);
    testing::SparseMlaProblem problem({.name = "peer",
                                       .rows = 4,
                                       .heads = heads,
                                       .width = width,
                                       .layout = layout,
                                       .block_size = 2 * width + 16,  // one block: flat rows
                                       .list = list,
                                       .max_logits = false,
                                       .uniform_data = true},
                                      {runtime, device.device});
    const std::string error = error_of(peer, problem);
    if (!error.empty()) {
      return internal_error("peer: " + std::string(peer.name()) + " with " + std::to_string(heads) +
                            " heads, " + std::to_string(width) + " keys: " + error);
    }
  }
  return ok_status();
}

}  // namespace lacuna::bench
