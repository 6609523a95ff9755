// The lane of prefill rows, at each of its boundaries.
#include "attention/mode.h"

#include <gtest/gtest.h>

#include <set>
#include <string_view>

namespace lacuna {
namespace {

constexpr RoutingLimits kLimits = {.index_topk = 128, .mha_keys_max = 256};

TEST(ChoosePrefillLane, IndexTopkIsInclusive) {
  EXPECT_EQ(choose_prefill_lane({1, 1, 1}, kLimits), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane({1, 127, 127}, kLimits), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane({1, 128, 128}, kLimits), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane({1, 129, 129}, kLimits), Lane::kSparseMqa);
  EXPECT_EQ(choose_prefill_lane({1, 100000, 100000}, kLimits), Lane::kSparseMqa);
}

TEST(ChoosePrefillLane, OneLongSequenceDecidesForAll) {
  EXPECT_EQ(choose_prefill_lane({2, 128, 138}, kLimits), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane({2, 129, 139}, kLimits), Lane::kSparseMqa);
}

TEST(ChoosePrefillLane, TheKeysOfAllSequencesMustFitTheBuffers) {
  EXPECT_EQ(choose_prefill_lane({2, 128, 256}, kLimits), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane({3, 128, 257}, kLimits), Lane::kSparseMqa);
  RoutingLimits none = kLimits;
  none.mha_keys_max = 0;
  EXPECT_EQ(choose_prefill_lane({1, 1, 1}, none), Lane::kSparseMqa);
}

TEST(ChoosePrefillLane, ForceMqaTurnsTheDenseLaneOff) {
  RoutingLimits limits = kLimits;
  limits.force_mqa = true;
  for (const int64_t length : {1, 128, 129}) {
    EXPECT_EQ(choose_prefill_lane({1, length, length}, limits), Lane::kSparseMqa);
  }
}

TEST(ChoosePrefillLane, ForceDenseTakesEveryLength) {
  RoutingLimits limits = kLimits;
  limits.force_dense = true;
  for (const int64_t length : {1, 128, 129, 256, 100000}) {
    EXPECT_EQ(choose_prefill_lane({1, length, length}, limits), Lane::kDenseMha);
  }
}

TEST(ChoosePrefillLane, WithoutPrefillEverythingIsMqa) {
  for (const bool dense : {false, true}) {
    RoutingLimits limits = kLimits;
    limits.force_dense = dense;
    EXPECT_EQ(choose_prefill_lane({0, 0, 0}, limits), Lane::kSparseMqa);
  }
}

// One prefill of `rows` rows that ends at `seq_len` keys.
PrefillShape one(int64_t rows, int64_t seq_len) {
  return {.num_requests = 1,
          .seq_len_max = seq_len,
          .seq_len_sum = seq_len,
          .num_rows = rows,
          .query_len_max = rows,
          .has_context = seq_len > rows};
}

constexpr MaskedThreshold kPure[] = {{200, 50}, {400, 150}};
constexpr MaskedThreshold kContext[] = {{300, 100}};
constexpr MaskedMhaTable kTable = {"test", 1, 4, 24, 16, kPure, kContext};
constexpr RoutingLimits kMasked = {.index_topk = 128,
                                   .mha_keys_max = 256,
                                   .chunked_rows_max = 256,
                                   .mask_words_max = 256 * 16,
                                   .masked_table = &kTable};

TEST(ChoosePrefillLane, TheTableDecidesAboveTopk) {
  EXPECT_EQ(choose_prefill_lane(one(128, 128), kMasked), Lane::kDenseMha);
  EXPECT_EQ(choose_prefill_lane(one(129, 129), kMasked), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(200, 200), kMasked), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(256, 256), kMasked), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(99, 300), kMasked), Lane::kSparseMqa);
  EXPECT_EQ(choose_prefill_lane(one(100, 300), kMasked), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(100, 301), kMasked), Lane::kSparseMqa);
  RoutingLimits limits = kMasked;
  limits.masked_table = nullptr;  // a device that was not measured
  EXPECT_EQ(choose_prefill_lane(one(100, 300), limits), Lane::kSparseMqa);
  EXPECT_EQ(choose_prefill_lane(one(128, 128), limits), Lane::kDenseMha);
}

TEST(ChoosePrefillLane, TheMaskedLaneMayBeForcedOrForbidden) {
  RoutingLimits limits = kMasked;
  limits.masked = MaskedMha::kAlways;
  limits.masked_table = nullptr;
  EXPECT_EQ(choose_prefill_lane(one(1, 129), limits), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(1, 128), limits), Lane::kDenseMha);
  limits.force_mqa = true;
  EXPECT_EQ(choose_prefill_lane(one(1, 129), limits), Lane::kSparseMqa);
  limits = kMasked;
  limits.masked = MaskedMha::kNever;
  EXPECT_EQ(choose_prefill_lane(one(100, 300), limits), Lane::kSparseMqa);
}

TEST(ChoosePrefillLane, RowsOwnKeysAndTheMaskMustFitTheBuffers) {
  RoutingLimits limits = kMasked;
  limits.masked = MaskedMha::kAlways;
  EXPECT_EQ(choose_prefill_lane(one(256, 500), limits), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(257, 500), limits), Lane::kSparseMqa);
  // 512 keys are 16 words a row, one key more is 4 words more.
  EXPECT_EQ(choose_prefill_lane(one(256, 512), limits), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(256, 513), limits), Lane::kSparseMqa);
  EXPECT_EQ(choose_prefill_lane(one(204, 513), limits), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(205, 513), limits), Lane::kSparseMqa);
  limits.chunked_rows_max = 0;  // one piece only
  EXPECT_EQ(choose_prefill_lane(one(10, 256), limits), Lane::kMaskedMha);
  EXPECT_EQ(choose_prefill_lane(one(10, 257), limits), Lane::kSparseMqa);
}

TEST(MaskRowWords, AreWholeGroupsOfSixteenBytes) {
  EXPECT_EQ(mask_row_words(1), 4);
  EXPECT_EQ(mask_row_words(128), 4);
  EXPECT_EQ(mask_row_words(129), 8);
}

TEST(LaneNames, AreDistinct) {
  std::set<std::string_view> names;
  for (int lane = 0; lane < kNumLanes; ++lane) {
    names.insert(lane_name(static_cast<Lane>(lane)));
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"sparse MQA", "dense MHA", "masked MHA"}));
}

}  // namespace
}  // namespace lacuna
