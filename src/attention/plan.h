// AttentionPlan: what the attention of one step will do, decided once from host-known lengths and
// read by every layer.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/batch.h"
#include "attention/mode.h"

namespace lacuna {

// One call of an MHA lane: some keys of consecutive sequences of the lane, and all rows of these.
struct MhaPiece {
  int64_t first_row = 0;  // relative to the lane's first row
  int64_t num_rows = 0;
  int64_t num_sequences = 0;
  int64_t num_keys = 0;
  int64_t seqlen_q_max = 0;
  int64_t seqlen_k_max = 0;
  bool causal = true;  // the piece ends with the rows' own keys; else it has earlier keys only
  // Where the piece's entries begin in the plan's lists: per sequence, and cumulative.
  int64_t list_begin = 0;
  int64_t cu_begin = 0;
};

struct AttentionPlan {
  // Rows [0, num_mqa_rows) take the sparse MQA lane, the rest the MHA lane `prefill_lane`.
  int64_t num_mqa_rows = 0;
  Lane prefill_lane = Lane::kSparseMqa;
  // Rows [0, num_list_rows) need lists: the MQA rows, and those of the masked lane.
  int64_t num_list_rows = 0;
  // The MQA call is a decode call: every row in it is a decode row.
  bool mqa_is_decode = false;
  // Some row that needs a list sees more than index_topk keys, so keys must be scored. When false
  // the lists are identities.
  bool score_keys = false;
  int64_t visible_length_max = 0;  // over MQA rows
  // Consecutive rows of one request in the MQA call when that is uniform, else 1.
  int rows_per_request = 1;

  // The MHA lane. Pieces are run in order; with more than one the first has all rows and their own
  // keys, the others chunks of the sequences' earlier keys.
  std::vector<MhaPiece> mha_pieces;
  int64_t num_mha_keys = 0;  // of the largest piece
  int64_t seqlen_k_max = 0;  // keys of the longest sequence
  // Of each piece, one after the other: see MhaPiece.
  std::vector<int32_t> mha_request_ids;
  std::vector<int32_t> mha_starts;  // position of the first key
  std::vector<int32_t> mha_lengths;
  std::vector<int32_t> cu_seqlens_q;
  std::vector<int32_t> cu_seqlens_k;

  int64_t num_mha_rows(const Batch& batch) const { return batch.num_rows() - num_mqa_rows; }
};

// Fills `plan`, reusing its memory.
void plan_attention(const Batch& batch, const RoutingLimits& limits, AttentionPlan* plan);

// The plan of a batch whose requests all have `query_len` rows, in the sparse MQA lane, by maxima
// instead of the lengths at hand: it is the same for every batch of this shape, so its launches can
// be captured once and replayed.
void plan_uniform(const Batch& batch, int64_t query_len, int64_t visible_length_max,
                  AttentionPlan* plan);

// Keys that row t of the batch reads in one layer under this plan.
int64_t keys_read(const Batch& batch, const AttentionPlan& plan, int64_t index_topk, int64_t row);

}  // namespace lacuna
