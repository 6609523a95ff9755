// Which lane the prefill rows of a step take: one pure function of host-known lengths, with its
// limits and thresholds as data.
#pragma once

#include <cstdint>
#include <string_view>

#include "attention/routing_tables.h"

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

// What the choice depends on: maxima and sums over the prefill requests of the step.
struct PrefillShape {
  int64_t num_requests = 0;
  int64_t seq_len_max = 0;  // keys after this step
  int64_t seq_len_sum = 0;
  int64_t num_rows = 0;       // query rows
  int64_t query_len_max = 0;  // query rows of one request
  bool has_context = false;   // some request has keys from earlier steps
};

enum class MaskedMha : uint8_t {
  kAuto = 0,  // where the table says that it pays
  kNever,
  kAlways,  // wherever the dense lane does not serve and the buffers allow it
};

struct RoutingLimits {
  int64_t index_topk = 0;
  int64_t mha_keys_max = 0;  // un-absorbed keys that the MHA lanes' buffers hold at a time
  // Rows that the buffers of partial states hold. A step with more keys than mha_keys_max is
  // attended to in pieces, whose states wait there for their merge. 0: one piece only.
  int64_t chunked_rows_max = 0;
  int64_t mask_words_max = 0;  // words that the mask buffer holds; 0: no masked lane
  MaskedMha masked = MaskedMha::kAuto;
  const MaskedMhaTable* masked_table = nullptr;  // null: the device has no measured region
  bool force_mqa = false;                        // both MHA lanes off
  bool force_dense = false;  // every row attends to every key (the deliberate mistake "dense")
};

// Words of one row's mask over `num_keys` keys; rows are a multiple of 16 bytes.
constexpr int64_t mask_row_words(int64_t num_keys) { return (num_keys + 127) / 128 * 4; }

// Dense MHA when every prefill sequence has at most index_topk keys (inclusive: then selection
// would keep all of them), else masked MHA where it pays; both only when their buffers hold the
// step. Sparse MQA otherwise.
Lane choose_prefill_lane(const PrefillShape& shape, const RoutingLimits& limits);

}  // namespace lacuna
