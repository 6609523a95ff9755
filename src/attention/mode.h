// Which lane the prefill rows of a step take: one pure function of host-known lengths, with its
// limits as data.
#pragma once

#include <cstdint>
#include <string_view>

namespace lacuna {

enum class Lane : uint8_t {
  kSparseMqa = 0,  // absorbed attention over each row's list
  kDenseMha,       // un-absorbed causal attention over every key
  kMaskedMha,      // un-absorbed causal attention under a bit mask
};
inline constexpr int kNumLanes = 3;

constexpr std::string_view lane_name(Lane lane) {
  switch (lane) {
    case Lane::kSparseMqa:
      return "sparse MQA";
    case Lane::kDenseMha:
      return "dense MHA";
    case Lane::kMaskedMha:
      return "masked MHA";
  }
  return "unknown";
}

// What the choice depends on. Maxima are over the prefill requests of the step.
struct PrefillShape {
  int64_t num_requests = 0;
  int64_t seq_len_max = 0;
  int64_t seq_len_sum = 0;
};

struct RoutingLimits {
  int64_t index_topk = 0;
  int64_t mha_keys_max = 0;  // un-absorbed keys that the MHA lanes' buffers hold in a step
  bool force_mqa = false;    // both MHA lanes off
  bool force_dense = false;  // every row attends to every key (the deliberate mistake "dense")
};

// Dense MHA when every prefill sequence has at most index_topk keys (inclusive: then selection
// would keep all of them) and its buffers hold them; sparse MQA otherwise. Masked MHA has no
// measured region on any device yet, so it is never chosen.
Lane choose_prefill_lane(const PrefillShape& shape, const RoutingLimits& limits);

}  // namespace lacuna
