// Batch -> AttentionPlan.
#include "attention/plan.h"

#include <algorithm>

namespace lacuna {
namespace {

void open_piece(bool causal, int64_t first_row, AttentionPlan* plan) {
  plan->mha_pieces.push_back({.first_row = first_row,
                              .causal = causal,
                              .list_begin = static_cast<int64_t>(plan->mha_starts.size()),
                              .cu_begin = static_cast<int64_t>(plan->cu_seqlens_k.size())});
  plan->cu_seqlens_q.push_back(0);
  plan->cu_seqlens_k.push_back(0);
}

// Adds keys [start, start + length) of a request to the last piece.
void add_keys(int64_t request, int64_t rows, int64_t start, int64_t length, AttentionPlan* plan) {
  MhaPiece& piece = plan->mha_pieces.back();
  piece.num_rows += rows;
  piece.num_keys += length;
  ++piece.num_sequences;
  piece.seqlen_q_max = std::max(piece.seqlen_q_max, rows);
  piece.seqlen_k_max = std::max(piece.seqlen_k_max, length);
  plan->num_mha_keys = std::max(plan->num_mha_keys, piece.num_keys);
  plan->mha_request_ids.push_back(static_cast<int32_t>(request));
  plan->mha_starts.push_back(static_cast<int32_t>(start));
  plan->mha_lengths.push_back(static_cast<int32_t>(length));
  plan->cu_seqlens_q.push_back(static_cast<int32_t>(piece.num_rows));
  plan->cu_seqlens_k.push_back(static_cast<int32_t>(piece.num_keys));
}

void plan_mha(const Batch& batch, const RoutingLimits& limits, int64_t first_request,
              AttentionPlan* plan) {
  const int64_t num_requests = batch.num_requests();
  const auto rows_of = [&](int64_t r) {
    return int64_t{batch.query_starts[r + 1]} - batch.query_starts[r];
  };
  int64_t num_keys = 0;
  for (int64_t r = first_request; r < num_requests; ++r) {
    num_keys += batch.seq_lens[r];
    plan->seqlen_k_max = std::max<int64_t>(plan->seqlen_k_max, batch.seq_lens[r]);
  }
  const bool chunked = num_keys > limits.mha_keys_max && !limits.force_dense;
  open_piece(true, 0, plan);
  for (int64_t r = first_request; r < num_requests; ++r) {
    const int64_t length = chunked ? rows_of(r) : batch.seq_lens[r];
    add_keys(r, rows_of(r), batch.seq_lens[r] - length, length, plan);
  }
  if (!chunked) {
    return;
  }
  // Contexts are packed in order; one that does not fit what is left of a chunk goes on in the
  // next.
  int64_t left = 0;
  int64_t next = 0;  // the request whose rows follow those of the last piece
  for (int64_t r = first_request; r < num_requests; ++r) {
    const int64_t context = batch.seq_lens[r] - rows_of(r);
    for (int64_t start = 0; start < context;) {
      if (left == 0) {
        open_piece(false, batch.query_starts[r] - batch.query_starts[first_request], plan);
        left = limits.mha_keys_max;
        next = r;
      }
      // Rows of a piece are consecutive, also where a request between has no context.
      for (; next < r; ++next) {
        add_keys(next, rows_of(next), 0, 0, plan);
      }
      const int64_t length = std::min(left, context - start);
      add_keys(r, rows_of(r), start, length, plan);
      next = r + 1;
      start += length;
      left -= length;
    }
  }
}

void clear_mha(AttentionPlan* plan) {
  plan->num_mha_keys = 0;
  plan->seqlen_k_max = 0;
  plan->mha_pieces.clear();
  for (std::vector<int32_t>* list : {&plan->mha_request_ids, &plan->mha_starts, &plan->mha_lengths,
                                     &plan->cu_seqlens_q, &plan->cu_seqlens_k}) {
    list->clear();
  }
}

}  // namespace

void plan_uniform(const Batch& batch, int64_t query_len, int64_t visible_length_max,
                  AttentionPlan* plan) {
  plan->prefill_lane = Lane::kSparseMqa;
  plan->num_mqa_rows = batch.num_rows();
  plan->num_list_rows = batch.num_rows();
  plan->mqa_is_decode = true;
  plan->score_keys = true;
  plan->visible_length_max = visible_length_max;
  plan->rows_per_request = static_cast<int>(query_len);
  clear_mha(plan);
}

void plan_attention(const Batch& batch, const RoutingLimits& limits, AttentionPlan* plan) {
  const int64_t num_requests = batch.num_requests();
  // Under force_dense decode rows go to the MHA lane too, so that they see every key.
  const int64_t first_prefill = limits.force_dense ? 0 : batch.num_decodes;
  PrefillShape shape;
  for (int64_t r = first_prefill; r < num_requests; ++r) {
    const int64_t rows = batch.query_starts[r + 1] - batch.query_starts[r];
    ++shape.num_requests;
    shape.seq_len_max = std::max<int64_t>(shape.seq_len_max, batch.seq_lens[r]);
    shape.seq_len_sum += batch.seq_lens[r];
    shape.num_rows += rows;
    shape.query_len_max = std::max(shape.query_len_max, rows);
    shape.has_context = shape.has_context || batch.seq_lens[r] > rows;
  }
  plan->prefill_lane = choose_prefill_lane(shape, limits);
  const bool has_mha = plan->prefill_lane != Lane::kSparseMqa;
  const bool is_masked = plan->prefill_lane == Lane::kMaskedMha;
  const int64_t num_mqa_requests = has_mha ? first_prefill : num_requests;
  plan->num_mqa_rows = num_requests == 0 ? 0 : batch.query_starts[num_mqa_requests];
  plan->num_list_rows = is_masked ? batch.num_rows() : plan->num_mqa_rows;
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
  plan->score_keys = plan->visible_length_max > limits.index_topk ||
                     (is_masked && shape.seq_len_max > limits.index_topk);

  clear_mha(plan);
  if (has_mha) {
    plan_mha(batch, limits, num_mqa_requests, plan);
  }
}

int64_t keys_read(const Batch& batch, const AttentionPlan& plan, int64_t index_topk, int64_t row) {
  const int64_t visible = batch.visible_lengths[row];
  return row < plan.num_mqa_rows ? std::min(visible, index_topk) : visible;
}

}  // namespace lacuna
