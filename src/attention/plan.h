// AttentionPlan: what the attention of one step will do, decided once from host-known lengths and
// read by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "attention/mode.h"

namespace lacuna {

struct AttentionPlan {
  // Rows [0, num_mqa_rows) take the sparse MQA lane, the rest the MHA lane `prefill_lane`.
  int64_t num_mqa_rows = 0;
  Lane prefill_lane = Lane::kSparseMqa;
  // The MQA call is a decode call: every row in it is a decode row.
  bool mqa_is_decode = false;
  // Some MQA row sees more than index_topk keys, so keys must be scored. When false the lists are
  // identities.
  bool score_keys = false;
  int64_t visible_length_max = 0;  // over MQA rows
  // Consecutive rows of one request in the MQA call when that is uniform, else 1.
  int rows_per_request = 1;

  // The MHA lane's sequences: rows relative to num_mqa_rows, keys gathered from position 0.
  int64_t num_mha_keys = 0;
  int64_t seqlen_q_max = 0;
  int64_t seqlen_k_max = 0;
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> cu_seqlens_k;
  std::vector<int32_t> mha_request_ids;
  std::vector<int32_t> mha_starts;   // zeros: keys from the sequence's first token
  std::vector<int32_t> mha_lengths;  // the sequences' lengths

  int64_t num_mha_rows(const Batch& batch) const { return batch.num_rows() - num_mqa_rows; }
};

// Fills `plan`, reusing its memory.
void plan_attention(const Batch& batch, const RoutingLimits& limits, AttentionPlan* plan);

// Keys that row t of the batch reads in one layer under this plan.
int64_t keys_read(const Batch& batch, const AttentionPlan& plan, int64_t index_topk, int64_t row);

}  // namespace lacuna
