// Key lists that the indexer did not choose: what each mistake chooses, and that random is random.
#include "attention/selection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>
#include <vector>

namespace lacuna {
namespace {

using Kind = SelectionSource::Kind;
using List = std::vector<int32_t>;

struct Lists {
  std::vector<List> of_row;
  List tails;  // everything beyond the counts, of all rows
};

// Wider memory than the lists, so that strides count, and old values in it.
Lists choose(const SelectionSource& source, int layer, int64_t k, const List& visible,
             int64_t width) {
  const int64_t rows = static_cast<int64_t>(visible.size());
  const int64_t stride = width + 3;
  List memory(rows * stride, 77);
  List counts(2 * rows, 55);
  TensorView positions = view_of(memory.data(), {rows, stride}).slice(1, 0, width);
  TensorView count_view = view_of(counts.data(), {rows, 2}).slice(1, 0, 1);
  count_view.rank = 1;
  choose_keys(source, layer, k, visible, positions, count_view);
  Lists lists;
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* row = memory.data() + t * stride;
    EXPECT_GE(counts[2 * t], 0);
    EXPECT_LE(counts[2 * t], width);
    EXPECT_EQ(counts[2 * t + 1], 55) << "beyond the counts was written";
    lists.of_row.emplace_back(row, row + counts[2 * t]);
    lists.tails.insert(lists.tails.end(), row + counts[2 * t], row + width);
    for (int64_t c = width; c < stride; ++c) {
      EXPECT_EQ(row[c], 77) << "beyond the list was written";
    }
  }
  return lists;
}

List range(int32_t begin, int32_t end) {
  List list(end - begin);
  std::iota(list.begin(), list.end(), begin);
  return list;
}

void expect_valid(const Lists& lists, const List& visible, int64_t k) {
  for (size_t t = 0; t < visible.size(); ++t) {
    const List& list = lists.of_row[t];
    EXPECT_EQ(static_cast<int64_t>(list.size()), std::min<int64_t>(k, visible[t])) << t;
    for (size_t c = 0; c < list.size(); ++c) {
      EXPECT_TRUE(list[c] >= 0 && list[c] < visible[t]) << t;
      EXPECT_TRUE(c == 0 || list[c] > list[c - 1]) << t;
    }
  }
  for (const int32_t entry : lists.tails) {
    EXPECT_EQ(entry, -1);
  }
}

TEST(ChooseKeys, WindowIsTheLastKeys) {
  const List visible = {1, 3, 4, 5, 100};
  const Lists lists = choose({.kind = Kind::kWindow}, 0, 4, visible, 6);
  EXPECT_EQ(lists.of_row[0], range(0, 1));
  EXPECT_EQ(lists.of_row[1], range(0, 3));
  EXPECT_EQ(lists.of_row[2], range(0, 4));
  EXPECT_EQ(lists.of_row[3], range(1, 5));
  EXPECT_EQ(lists.of_row[4], range(96, 100));
  expect_valid(lists, visible, 4);
}

TEST(ChooseKeys, RandomListsAreValidAtEveryLength) {
  List visible = range(1, 40);
  for (const int32_t more : {1000, 65536, 100000}) {
    visible.push_back(more);
  }
  for (const int64_t k : {1, 7, 20, 128}) {
    expect_valid(choose({.kind = Kind::kRandom, .seed = 3}, 2, k, visible, 128), visible, k);
  }
}

TEST(ChooseKeys, RandomDependsOnSeedLayerAndRowAlone) {
  const SelectionSource source = {.kind = Kind::kRandom, .seed = 9};
  const List visible = {200, 201, 202};
  const Lists all = choose(source, 1, 16, visible, 16);
  for (size_t t = 0; t < visible.size(); ++t) {
    // The same in another batch.
    EXPECT_EQ(choose(source, 1, 16, {visible[t]}, 20).of_row[0], all.of_row[t]);
  }
  EXPECT_NE(all.of_row[0], all.of_row[1]);
  EXPECT_NE(choose(source, 2, 16, {200}, 16).of_row[0], all.of_row[0]);
  EXPECT_NE(choose({.kind = Kind::kRandom, .seed = 10}, 1, 16, {200}, 16).of_row[0], all.of_row[0]);
}

// Each key is chosen with probability k / visible: chi-square over keys, and over pairs of
// neighbours, whose joint probability is k (k - 1) / (n (n - 1)).
TEST(ChooseKeys, RandomIsUniform) {
  constexpr int32_t kVisible = 24;
  constexpr int64_t kListSize = 6;
  constexpr int kDraws = 6000;
  std::vector<int> hits(kVisible, 0);
  std::vector<int> pairs(kVisible, 0);
  for (int draw = 0; draw < kDraws; ++draw) {
    const SelectionSource source = {.kind = Kind::kRandom, .seed = static_cast<uint64_t>(draw)};
    const List list = choose(source, 0, kListSize, {kVisible}, kListSize).of_row[0];
    for (const int32_t key : list) {
      ++hits[key];
      pairs[key] += std::binary_search(list.begin(), list.end(), (key + 1) % kVisible);
    }
  }
  const double p = 1.0 * kListSize / kVisible;
  const double p_pair = p * (kListSize - 1) / (kVisible - 1);
  double chi = 0;
  double chi_pair = 0;
  for (int key = 0; key < kVisible; ++key) {
    chi += std::pow(hits[key] - kDraws * p, 2) / (kDraws * p * (1 - p));
    chi_pair += std::pow(pairs[key] - kDraws * p_pair, 2) / (kDraws * p_pair * (1 - p_pair));
  }
  // 23 and 24 degrees of freedom: the 99.99 % points are about 56 and 57. The draws are fixed, so
  // this never flickers.
  EXPECT_LT(chi, 57);
  EXPECT_LT(chi_pair, 57);
  EXPECT_GT(chi, 5);  // nor suspiciously even
}

TEST(ChooseKeys, GivenListsAreTakenByPositionAndCutToWhatIsVisible) {
  SelectionSource source = {.kind = Kind::kGiven};
  source.given_positions = 4;
  source.given[2] = {0, -1, -1,  //
                     0, 1,  -1,  //
                     0, 2,  5,   // 5 is not visible from position 2
                     1, 2,  3};
  const Lists lists = choose(source, 2, 3, {1, 2, 3, 4, 5}, 3);
  EXPECT_EQ(lists.of_row[0], List{0});
  EXPECT_EQ(lists.of_row[1], (List{0, 1}));
  EXPECT_EQ(lists.of_row[2], (List{0, 2}));
  EXPECT_EQ(lists.of_row[3], (List{1, 2, 3}));
  EXPECT_EQ(lists.of_row[4], List{});  // no list was given for position 4
  for (const int32_t entry : lists.tails) {
    EXPECT_EQ(entry, -1);
  }
  EXPECT_EQ(choose(source, 1, 3, {4}, 3).of_row[0], List{});  // nor for layer 1
  EXPECT_EQ(choose(source, 2, 3, {4}, 2).of_row[0], (List{1, 2}));
}

}  // namespace
}  // namespace lacuna
