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

TEST(LaneNames, AreDistinct) {
  std::set<std::string_view> names;
  for (int lane = 0; lane < kNumLanes; ++lane) {
    names.insert(lane_name(static_cast<Lane>(lane)));
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"sparse MQA", "dense MHA", "masked MHA"}));
}

}  // namespace
}  // namespace lacuna
