// Plans of made-up batches: which rows take which lane, and what each call is told.
#include "attention/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace lacuna {
namespace {

struct Part {
  int rows;
  int seq_len;
};

// `decodes` leading parts decode. Every row sees the tokens up to its own.
Batch batch_of(int decodes, const std::vector<Part>& parts) {
  Batch batch;
  batch.query_starts.push_back(0);
  for (const Part& part : parts) {
    const int32_t request = static_cast<int32_t>(batch.seq_lens.size());
    for (int i = 0; i < part.rows; ++i) {
      const int32_t position = part.seq_len - part.rows + i;
      batch.token_ids.push_back(0);
      batch.positions.push_back(position);
      batch.visible_lengths.push_back(position + 1);
      batch.request_ids.push_back(request);
      batch.slot_mapping.push_back(position);
    }
    batch.query_starts.push_back(static_cast<int32_t>(batch.num_rows()));
    batch.seq_lens.push_back(part.seq_len);
  }
  batch.num_decodes = decodes;
  return batch;
}

AttentionPlan plan_of(const Batch& batch, const RoutingLimits& limits) {
  AttentionPlan plan;
  plan_attention(batch, limits, &plan);
  return plan;
}

using Ints = std::vector<int32_t>;
constexpr RoutingLimits kLimits = {.index_topk = 10, .mha_keys_max = 25};

TEST(Plan, ABatchOfDecodesIsOneDecodeCall) {
  const Batch batch = batch_of(3, {{1, 5}, {1, 40}, {1, 11}});
  const AttentionPlan plan = plan_of(batch, kLimits);
  EXPECT_EQ(plan.num_mqa_rows, 3);
  EXPECT_EQ(plan.num_mha_rows(batch), 0);
  EXPECT_TRUE(plan.mqa_is_decode);
  EXPECT_TRUE(plan.score_keys);
  EXPECT_EQ(plan.visible_length_max, 40);
  EXPECT_EQ(plan.rows_per_request, 1);
  EXPECT_EQ(plan.num_mha_keys, 0);
  EXPECT_TRUE(plan.cu_seqlens_q.empty());
  EXPECT_TRUE(plan.cu_seqlens_k.empty());
  EXPECT_TRUE(plan.mha_request_ids.empty());
}

TEST(Plan, ShortDecodesNeedNoScores) {
  EXPECT_FALSE(plan_of(batch_of(2, {{1, 10}, {1, 3}}), kLimits).score_keys);
  EXPECT_TRUE(plan_of(batch_of(2, {{1, 11}, {1, 3}}), kLimits).score_keys);
}

TEST(Plan, RowsPerRequestIsToldWhenItIsUniformAndSmall) {
  EXPECT_EQ(plan_of(batch_of(2, {{2, 30}, {2, 12}}), kLimits).rows_per_request, 2);
  EXPECT_EQ(plan_of(batch_of(2, {{2, 30}, {1, 12}}), kLimits).rows_per_request, 1);
  EXPECT_EQ(plan_of(batch_of(2, {{1, 30}, {2, 12}}), kLimits).rows_per_request, 1);
  EXPECT_EQ(plan_of(batch_of(3, {{2, 30}, {1, 12}, {2, 20}}), kLimits).rows_per_request, 1);
  EXPECT_EQ(plan_of(batch_of(1, {{8, 30}}), kLimits).rows_per_request, 8);
  EXPECT_EQ(plan_of(batch_of(1, {{9, 30}}), kLimits).rows_per_request, 1);
  // Rows of a prefill see keys of their own request too, but it is no decode call.
  EXPECT_EQ(plan_of(batch_of(0, {{2, 30}, {2, 12}}), kLimits).rows_per_request, 1);
}

TEST(Plan, AMixedBatchOfLongPrefillsIsOneCallThatIsNoDecodeCall) {
  const Batch batch = batch_of(2, {{1, 30}, {1, 7}, {5, 5}, {4, 20}});
  const AttentionPlan plan = plan_of(batch, kLimits);
  EXPECT_EQ(plan.prefill_lane, Lane::kSparseMqa);
  EXPECT_EQ(plan.num_mqa_rows, 11);
  EXPECT_EQ(plan.num_mha_rows(batch), 0);
  EXPECT_FALSE(plan.mqa_is_decode);
  EXPECT_EQ(plan.rows_per_request, 1);
  EXPECT_EQ(plan.visible_length_max, 30);
  EXPECT_TRUE(plan.mha_request_ids.empty());
}

TEST(Plan, WhatIsLeftBesideTheDenseLaneIsADecodeCall) {
  const Batch batch = batch_of(2, {{1, 30}, {1, 7}, {5, 5}, {4, 10}});
  const AttentionPlan plan = plan_of(batch, kLimits);
  EXPECT_EQ(plan.prefill_lane, Lane::kDenseMha);
  EXPECT_EQ(plan.num_mqa_rows, 2);
  EXPECT_EQ(plan.num_mha_rows(batch), 9);
  EXPECT_TRUE(plan.mqa_is_decode);
  EXPECT_EQ(plan.rows_per_request, 1);
  EXPECT_EQ(plan.visible_length_max, 30);  // of the decode rows only
  EXPECT_TRUE(plan.score_keys);
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 5, 9}));  // relative to the lane's first row
  EXPECT_EQ(plan.cu_seqlens_k, (Ints{0, 5, 15}));
  EXPECT_EQ(plan.mha_request_ids, (Ints{2, 3}));
  EXPECT_EQ(plan.mha_starts, (Ints{0, 0}));
  EXPECT_EQ(plan.mha_lengths, (Ints{5, 10}));
  EXPECT_EQ(plan.num_mha_keys, 15);
  EXPECT_EQ(plan.seqlen_k_max, 10);
}

TEST(Plan, AChunkInTheDenseLaneReadsItsWholeSequence) {
  // 3 rows after 6 cached tokens.
  const Batch batch = batch_of(0, {{3, 9}});
  const AttentionPlan plan = plan_of(batch, kLimits);
  EXPECT_EQ(plan.prefill_lane, Lane::kDenseMha);
  EXPECT_EQ(plan.num_mqa_rows, 0);
  EXPECT_EQ(plan.visible_length_max, 0);
  EXPECT_FALSE(plan.score_keys);
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 3}));
  EXPECT_EQ(plan.cu_seqlens_k, (Ints{0, 9}));
  EXPECT_EQ(plan.mha_starts, Ints{0});
  EXPECT_EQ(plan.mha_lengths, Ints{9});
}

RoutingLimits masked_limits(int64_t keys_max) {
  RoutingLimits limits = kLimits;
  limits.mha_keys_max = keys_max;
  limits.chunked_rows_max = 100;
  limits.mask_words_max = 1 << 20;
  limits.masked = MaskedMha::kAlways;
  return limits;
}

TEST(Plan, WhatIsLeftBesideTheMaskedLaneIsADecodeCall) {
  const Batch batch = batch_of(2, {{2, 30}, {2, 9}, {5, 5}, {4, 20}});
  const AttentionPlan plan = plan_of(batch, masked_limits(25));
  EXPECT_EQ(plan.prefill_lane, Lane::kMaskedMha);
  EXPECT_EQ(plan.num_mqa_rows, 4);
  EXPECT_EQ(plan.num_list_rows, 13);  // the masked rows need lists too
  EXPECT_TRUE(plan.mqa_is_decode);
  EXPECT_EQ(plan.rows_per_request, 2);
  EXPECT_EQ(plan.visible_length_max, 30);
  EXPECT_TRUE(plan.score_keys);
  ASSERT_EQ(plan.mha_pieces.size(), 1u);
  EXPECT_TRUE(plan.mha_pieces[0].causal);
  EXPECT_EQ(plan.mha_pieces[0].num_keys, 25);
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 5, 9}));
  EXPECT_EQ(plan.cu_seqlens_k, (Ints{0, 5, 25}));
  EXPECT_EQ(keys_read(batch, plan, 10, 0), 10);
  EXPECT_EQ(keys_read(batch, plan, 10, 12), 20);
}

TEST(Plan, MaskedRowsAreScoredWhenNoDecodeRowIs) {
  EXPECT_TRUE(plan_of(batch_of(1, {{1, 7}, {4, 20}}), masked_limits(25)).score_keys);
  const AttentionPlan alone = plan_of(batch_of(0, {{4, 20}}), masked_limits(25));
  EXPECT_EQ(alone.num_mqa_rows, 0);
  EXPECT_EQ(alone.num_list_rows, 4);
  EXPECT_TRUE(alone.score_keys);
}

TEST(Plan, KeysThatDoNotFitAtOnceAreCutIntoPieces) {
  // Contexts 13, 0, 1 and 9 behind 4, 3, 2 and 1 rows; 12 keys at a time.
  const Batch batch = batch_of(1, {{1, 30}, {4, 17}, {3, 3}, {2, 3}, {1, 10}});
  const AttentionPlan plan = plan_of(batch, masked_limits(12));
  EXPECT_EQ(plan.prefill_lane, Lane::kMaskedMha);
  ASSERT_EQ(plan.mha_pieces.size(), 3u);
  EXPECT_EQ(plan.num_mha_keys, 12);
  EXPECT_EQ(plan.seqlen_k_max, 17);
  const MhaPiece& own = plan.mha_pieces[0];
  EXPECT_TRUE(own.causal);
  EXPECT_EQ(own.first_row, 0);
  EXPECT_EQ(own.num_rows, 10);
  EXPECT_EQ(own.num_keys, 10);
  const MhaPiece& first = plan.mha_pieces[1];
  EXPECT_FALSE(first.causal);
  EXPECT_EQ(first.first_row, 0);
  EXPECT_EQ(first.num_rows, 4);
  EXPECT_EQ(first.num_keys, 12);
  // What is left of the first context, then the others; the second has none but lies between.
  const MhaPiece& second = plan.mha_pieces[2];
  EXPECT_FALSE(second.causal);
  EXPECT_EQ(second.first_row, 0);
  EXPECT_EQ(second.num_rows, 10);
  EXPECT_EQ(second.num_sequences, 4);
  EXPECT_EQ(second.num_keys, 11);
  EXPECT_EQ(second.seqlen_q_max, 4);
  EXPECT_EQ(second.seqlen_k_max, 9);
  EXPECT_EQ(plan.mha_request_ids, (Ints{1, 2, 3, 4, 1, 1, 2, 3, 4}));
  EXPECT_EQ(plan.mha_starts, (Ints{13, 0, 1, 9, 0, 12, 0, 0, 0}));
  EXPECT_EQ(plan.mha_lengths, (Ints{4, 3, 2, 1, 12, 1, 0, 1, 9}));
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 4, 7, 9, 10, 0, 4, 0, 4, 7, 9, 10}));
  EXPECT_EQ(plan.cu_seqlens_k, (Ints{0, 4, 7, 9, 10, 0, 12, 0, 1, 1, 2, 11}));
  EXPECT_EQ(second.list_begin, 5);
  EXPECT_EQ(second.cu_begin, 7);
}

// Whatever the sizes: pieces fit, and every key of every sequence is in exactly one.
TEST(Plan, PiecesHaveEveryKeyOnce) {
  uint32_t seed = 1;
  const auto next = [&](uint32_t below) {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int>((seed >> 16) % below);
  };
  for (int round = 0; round < 300; ++round) {
    std::vector<Part> parts;
    int rows = 0;
    for (int n = 1 + next(6); n > 0; --n) {
      const int own = 1 + next(7);
      rows += own;
      parts.push_back({own, own + (next(3) == 0 ? 0 : next(60))});
    }
    parts[0].seq_len += 11;  // above topk
    const int64_t keys_max = rows + next(30);
    const Batch batch = batch_of(0, parts);
    const AttentionPlan plan = plan_of(batch, masked_limits(keys_max));
    ASSERT_EQ(plan.prefill_lane, Lane::kMaskedMha);
    std::vector<std::vector<int>> seen(parts.size());
    for (size_t r = 0; r < parts.size(); ++r) {
      seen[r].assign(parts[r].seq_len, 0);
    }
    for (const MhaPiece& piece : plan.mha_pieces) {
      EXPECT_LE(piece.num_keys, keys_max);
      EXPECT_LE(piece.num_keys, plan.num_mha_keys);
      EXPECT_EQ(piece.first_row, batch.query_starts[plan.mha_request_ids[piece.list_begin]]);
      int64_t num_rows = 0;
      for (int64_t i = 0; i < piece.num_sequences; ++i) {
        const int32_t r = plan.mha_request_ids[piece.list_begin + i];
        EXPECT_EQ(r, plan.mha_request_ids[piece.list_begin] + i);
        EXPECT_EQ(plan.cu_seqlens_q[piece.cu_begin + i], num_rows);
        num_rows += parts[r].rows;
        const int32_t start = plan.mha_starts[piece.list_begin + i];
        const int32_t length = plan.mha_lengths[piece.list_begin + i];
        EXPECT_EQ(plan.cu_seqlens_k[piece.cu_begin + i + 1] - plan.cu_seqlens_k[piece.cu_begin + i],
                  length);
        if (piece.causal) {
          EXPECT_EQ(start + length, parts[r].seq_len);
          EXPECT_GE(length, parts[r].rows);
        } else {
          EXPECT_LE(start + length, parts[r].seq_len - parts[r].rows);
        }
        for (int32_t p = start; p < start + length; ++p) {
          ++seen[r][p];
        }
      }
      EXPECT_EQ(piece.num_rows, num_rows);
    }
    for (const std::vector<int>& keys : seen) {
      EXPECT_EQ(std::count(keys.begin(), keys.end(), 1), static_cast<int64_t>(keys.size()));
    }
  }
}

TEST(Plan, AChunkThatCrossesTopkIsSparse) {
  const AttentionPlan plan = plan_of(batch_of(0, {{3, 11}}), kLimits);
  EXPECT_EQ(plan.prefill_lane, Lane::kSparseMqa);
  EXPECT_EQ(plan.num_mqa_rows, 3);
  EXPECT_FALSE(plan.mqa_is_decode);
  EXPECT_TRUE(plan.score_keys);
  EXPECT_EQ(plan.visible_length_max, 11);
}

TEST(Plan, PrefillsThatDoNotFitTheBuffersTogetherAreSparse) {
  EXPECT_EQ(plan_of(batch_of(0, {{10, 10}, {10, 10}, {5, 5}}), kLimits).prefill_lane,
            Lane::kDenseMha);
  const AttentionPlan plan = plan_of(batch_of(0, {{10, 10}, {10, 10}, {6, 6}}), kLimits);
  EXPECT_EQ(plan.prefill_lane, Lane::kSparseMqa);
  EXPECT_EQ(plan.num_mqa_rows, 26);
  EXPECT_FALSE(plan.score_keys);  // no row sees more than 10 keys: the lists are identities
}

TEST(Plan, ForceMqaLeavesNoRowForTheDenseLane) {
  RoutingLimits limits = kLimits;
  limits.force_mqa = true;
  const Batch batch = batch_of(1, {{1, 7}, {4, 4}});
  const AttentionPlan plan = plan_of(batch, limits);
  EXPECT_EQ(plan.num_mqa_rows, 5);
  EXPECT_FALSE(plan.mqa_is_decode);
  EXPECT_FALSE(plan.score_keys);
  EXPECT_EQ(plan.num_mha_keys, 0);
}

TEST(Plan, ForceDenseTakesDecodeRowsToo) {
  RoutingLimits limits = kLimits;
  limits.force_dense = true;
  limits.mha_keys_max = 100;
  const Batch batch = batch_of(1, {{1, 40}, {4, 20}});
  const AttentionPlan plan = plan_of(batch, limits);
  EXPECT_EQ(plan.prefill_lane, Lane::kDenseMha);
  EXPECT_EQ(plan.num_mqa_rows, 0);
  EXPECT_EQ(plan.mha_request_ids, (Ints{0, 1}));
  EXPECT_EQ(plan.cu_seqlens_q, (Ints{0, 1, 5}));
  EXPECT_EQ(plan.cu_seqlens_k, (Ints{0, 40, 60}));
  EXPECT_EQ(keys_read(batch, plan, 10, 0), 40);
}

TEST(Plan, AUniformPlanIsTheSameForEveryBatchOfItsShape) {
  AttentionPlan plan;
  plan_attention(batch_of(0, {{10, 10}, {5, 5}}), kLimits, &plan);
  ASSERT_EQ(plan.prefill_lane, Lane::kDenseMha);
  for (const int length : {2, 9, 30}) {
    const Batch batch = batch_of(3, {{2, length}, {2, 2}, {2, 5}});
    plan_uniform(batch, 2, 4096, &plan);
    EXPECT_EQ(plan.prefill_lane, Lane::kSparseMqa);
    EXPECT_EQ(plan.num_mqa_rows, 6);
    EXPECT_EQ(plan.num_list_rows, 6);
    EXPECT_EQ(plan.num_mha_rows(batch), 0);
    EXPECT_EQ(plan.rows_per_request, 2);
    EXPECT_EQ(plan.visible_length_max, 4096);
    EXPECT_TRUE(plan.score_keys);
    EXPECT_TRUE(plan.mqa_is_decode);
    EXPECT_TRUE(plan.mha_pieces.empty());
    EXPECT_TRUE(plan.mha_starts.empty());
    EXPECT_TRUE(plan.cu_seqlens_k.empty());
    EXPECT_EQ(plan.num_mha_keys, 0);
  }
}

TEST(Plan, APlanIsFilledAfreshWhateverItHeld) {
  AttentionPlan plan;
  plan_attention(batch_of(2, {{2, 30}, {2, 7}, {5, 5}, {4, 10}}), kLimits, &plan);
  ASSERT_EQ(plan.rows_per_request, 2);
  ASSERT_EQ(plan.mha_request_ids.size(), 2u);
  plan_attention(batch_of(1, {{1, 3}}), kLimits, &plan);
  EXPECT_EQ(plan.num_mqa_rows, 1);
  EXPECT_EQ(plan.rows_per_request, 1);
  EXPECT_EQ(plan.visible_length_max, 3);
  EXPECT_FALSE(plan.score_keys);
  EXPECT_EQ(plan.num_mha_keys, 0);
  EXPECT_EQ(plan.seqlen_k_max, 0);
  EXPECT_TRUE(plan.mha_pieces.empty());
  EXPECT_TRUE(plan.cu_seqlens_q.empty());
  EXPECT_TRUE(plan.cu_seqlens_k.empty());
  EXPECT_TRUE(plan.mha_request_ids.empty());
  EXPECT_TRUE(plan.mha_starts.empty());
  EXPECT_TRUE(plan.mha_lengths.empty());
}

TEST(Plan, AnEmptyBatchHasNothingToDo) {
  const Batch batch;
  const AttentionPlan plan = plan_of(batch, kLimits);
  EXPECT_EQ(plan.num_mqa_rows, 0);
  EXPECT_EQ(plan.num_mha_rows(batch), 0);
  EXPECT_EQ(plan.num_mha_keys, 0);
}

TEST(KeysRead, IsTheListInTheSparseLaneAndEverythingInTheDense) {
  const Batch batch = batch_of(2, {{1, 30}, {1, 7}, {5, 5}, {4, 10}});
  const AttentionPlan plan = plan_of(batch, kLimits);
  ASSERT_EQ(plan.num_mqa_rows, 2);
  const std::vector<int64_t> expected = {10, 7, 1, 2, 3, 4, 5, 7, 8, 9, 10};
  for (int64_t row = 0; row < batch.num_rows(); ++row) {
    EXPECT_EQ(keys_read(batch, plan, kLimits.index_topk, row), expected[row]) << row;
  }
}

TEST(Batch, ClearLeavesNothingAndTensorsHaveTheBatchsShapes) {
  Batch batch = batch_of(1, {{1, 30}, {4, 4}});
  batch.table_width = 3;
  batch.block_table = {7, 8, 9, 1, -1, -1};
  batch.logits_rows = {0, 4};
  EXPECT_EQ(batch.num_decode_rows(), 1);
  AttentionPlan plan;
  plan_attention(batch, kLimits, &plan);
  ASSERT_EQ(plan.prefill_lane, Lane::kDenseMha);
  const BatchTensors tensors = host_tensors(batch, plan);
  for (const ConstTensorView& view :
       {tensors.token_ids, tensors.positions, tensors.request_ids, tensors.visible_lengths}) {
    EXPECT_EQ(view.rank, 1);
    EXPECT_EQ(view.shape[0], 5);
    EXPECT_EQ(view.dtype, DType::kInt32);
  }
  EXPECT_EQ(tensors.visible_lengths.as<int32_t>()[0], 30);
  EXPECT_EQ(tensors.slot_mapping.dtype, DType::kInt64);
  EXPECT_EQ(tensors.slot_mapping.shape[0], 5);
  EXPECT_EQ(tensors.block_table.shape[0], 2);
  EXPECT_EQ(tensors.block_table.shape[1], 3);
  EXPECT_EQ(tensors.block_table.as<int32_t>()[3], 1);
  EXPECT_EQ(tensors.logits_rows.shape[0], 2);
  EXPECT_EQ(tensors.mha_request_ids.shape[0], 1);
  EXPECT_EQ(tensors.mha_request_ids.as<int32_t>()[0], 1);
  EXPECT_EQ(tensors.mha_starts.as<int32_t>()[0], 0);
  EXPECT_EQ(tensors.mha_lengths.as<int32_t>()[0], 4);
  EXPECT_EQ(tensors.cu_seqlens_q.shape[0], 2);
  EXPECT_EQ(tensors.cu_seqlens_k.as<int32_t>()[1], 4);
  batch.clear();
  EXPECT_EQ(batch.num_rows(), 0);
  EXPECT_EQ(batch.num_requests(), 0);
  EXPECT_EQ(batch.num_decode_rows(), 0);
  EXPECT_EQ(batch.table_width, 0);
  EXPECT_TRUE(batch.slot_mapping.empty() && batch.block_table.empty() &&
              batch.logits_rows.empty() && batch.query_starts.empty());
}

}  // namespace
}  // namespace lacuna
