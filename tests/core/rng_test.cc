// Philox 4x32-10 against the known answers that its authors publish, and the uniform made from it.
#include "core/rng.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lacuna {
namespace {

using Words = std::array<uint32_t, 4>;

TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(philox4x32(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32(~0ull, ~0ull, ~0ull),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // Digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0.
  EXPECT_EQ(philox4x32(0x299f31d0a4093822, 0x85a308d3243f6a88, 0x0370734413198a2e),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, IsConstexpr) { static_assert(philox4x32(0, 0)[0] == 0x6627e8d5); }

TEST(PhiloxUniform, StaysBelowOneAndAboveZero) {
  double sum = 0;
  float lowest = 1;
  float highest = 0;
  constexpr int kCount = 100000;
  for (int i = 0; i < kCount; ++i) {
    const float u = philox_uniform(42, i);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    sum += u;
    lowest = std::min(lowest, u);
    highest = std::max(highest, u);
  }
  // The mean of n uniforms has a deviation of 1 / sqrt(12 n); five of them.
  EXPECT_NEAR(sum / kCount, 0.5, 5.0 / 1095.0);
  EXPECT_LT(lowest, 1e-3f);
  EXPECT_GT(highest, 1 - 1e-3f);
}

TEST(PhiloxUniform, DependsOnEveryWordOfKeyAndCounter) {
  const float base = philox_uniform(1, 2, 3);
  EXPECT_EQ(philox_uniform(1, 2, 3), base);
  EXPECT_NE(philox_uniform(1 + (1ull << 32), 2, 3), base);
  EXPECT_NE(philox_uniform(1, 2 + (1ull << 32), 3), base);
  EXPECT_NE(philox_uniform(1, 2, 3 + (1ull << 32)), base);
  EXPECT_NE(philox_uniform(2, 2, 3), base);
}

}  // namespace
}  // namespace lacuna
