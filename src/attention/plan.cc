// Batch -> AttentionPlan.
#include "attention/plan.h"

#include <algorithm>

namespace lacuna {

void plan_attention(const Batch& batch, const RoutingLimits& limits, AttentionPlan* plan) {
  const int64_t num_requests = batch.num_requests();
  // Under force_dense decode rows go to the MHA lane too, so that they see every key.
  const int64_t first_prefill = limits.force_dense ? 0 : batch.num_decodes;
  PrefillShape shape;
  for (int64_t r = first_prefill; r < num_requests; ++r) {
    ++shape.num_requests;
    shape.seq_len_max = std::max<int64_t>(shape.seq_len_max, batch.seq_lens[r]);
    shape.seq_len_sum += batch.seq_lens[r];
  }
  plan->prefill_lane = choose_prefill_lane(shape, limits);
  const bool has_mha = plan->prefill_lane != Lane::kSparseMqa;
  const int64_t num_mqa_requests = has_mha ? first_prefill : num_requests;
  plan->num_mqa_rows = num_requests == 0 ? 0 : batch.query_starts[num_mqa_requests];
  plan->mqa_is_decode = plan->num_mqa_rows <= batch.num_decode_rows();

  plan->visible_length_max = 0;
  plan->rows_per_request = 1;
  int64_t uniform = -1;
  for (int64_t r = 0; r < num_mqa_requests; ++r) {
    plan->visible_length_max = std::max<int64_t>(plan->visible_length_max, batch.seq_lens[r]);
    const int64_t rows = batch.query_starts[r + 1] - batch.query_starts[r];
    uniform = r == 0 || uniform == rows ? rows : 0;
  }
  if (plan->mqa_is_decode && uniform >= 1 && uniform <= 8) {
    plan->rows_per_request = static_cast<int>(uniform);
  }
  plan->score_keys = plan->visible_length_max > limits.index_topk;

  plan->num_mha_keys = 0;
  plan->seqlen_q_max = 0;
  plan->seqlen_k_max = 0;
  plan->cu_seqlens_q.assign(1, 0);
  plan->cu_seqlens_k.assign(1, 0);
  plan->mha_request_ids.clear();
  plan->mha_starts.clear();
  plan->mha_lengths.clear();
  for (int64_t r = num_mqa_requests; r < num_requests; ++r) {
    const int64_t rows = batch.query_starts[r + 1] - batch.query_starts[r];
    plan->num_mha_keys += batch.seq_lens[r];
    plan->seqlen_q_max = std::max(plan->seqlen_q_max, rows);
    plan->seqlen_k_max = std::max<int64_t>(plan->seqlen_k_max, batch.seq_lens[r]);
    plan->cu_seqlens_q.push_back(static_cast<int32_t>(plan->cu_seqlens_q.back() + rows));
    plan->cu_seqlens_k.push_back(static_cast<int32_t>(plan->num_mha_keys));
    plan->mha_request_ids.push_back(static_cast<int32_t>(r));
    plan->mha_starts.push_back(0);
    plan->mha_lengths.push_back(batch.seq_lens[r]);
  }
}

int64_t keys_read(const Batch& batch, const AttentionPlan& plan, int64_t index_topk, int64_t row) {
  const int64_t visible = batch.visible_lengths[row];
  return row < plan.num_mqa_rows ? std::min(visible, index_topk) : visible;
}

}  // namespace lacuna
