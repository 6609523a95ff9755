// Views: shapes, strides, slices and absence.
#include "lacuna/tensor.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <utility>
#include <vector>

namespace lacuna {
namespace {

TEST(TensorView, IsAbsentByDefault) {
  const TensorView view;
  EXPECT_TRUE(view.empty());
  EXPECT_EQ(view.num_elements(), 0);
  EXPECT_TRUE(ConstTensorView{}.empty());
}

TEST(TensorView, IsPresentWithAZeroExtent) {
  float value = 0;
  const TensorView view = view_of(&value, {0, 4});
  EXPECT_FALSE(view.empty());
  EXPECT_EQ(view.num_elements(), 0);
  EXPECT_TRUE(view.is_contiguous());
}

TEST(TensorView, TakesTypeShapeAndStridesFromItsMaker) {
  std::vector<Bf16> data(24);
  const TensorView view = view_of(data.data(), {2, 3, 4}, {DeviceKind::kCuda, 1});
  EXPECT_EQ(view.dtype, DType::kBFloat16);
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.num_elements(), 24);
  EXPECT_EQ(view.strides[0], 12);
  EXPECT_EQ(view.strides[1], 4);
  EXPECT_EQ(view.strides[2], 1);
  EXPECT_EQ(view.device, (Device{DeviceKind::kCuda, 1}));
  EXPECT_EQ(view.as<Bf16>(), data.data());
}

TEST(TensorView, ConvertsToConstAndNotBack) {
  static_assert(std::is_convertible_v<TensorView, ConstTensorView>);
  static_assert(!std::is_convertible_v<ConstTensorView, TensorView>);
  static_assert(std::is_trivially_copyable_v<TensorView>);
  static_assert(std::is_same_v<decltype(TensorView{}.as<float>()), float*>);
  static_assert(std::is_same_v<decltype(ConstTensorView{}.as<float>()), const float*>);
  const float data[2] = {1, 2};
  static_assert(std::is_same_v<decltype(view_of(data, {2})), ConstTensorView>);
  EXPECT_EQ(view_of(data, {2}).as<float>()[1], 2.0f);
}

TEST(TensorView, SlicesEachDimensionOfAStridedView) {
  std::vector<int32_t> data(60);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<int32_t>(i);
  }
  const TensorView view = view_of(data.data(), {3, 4, 5});
  const TensorView rows = view.slice(0, 1, 2);
  EXPECT_EQ(*rows.as<int32_t>(), 20);
  EXPECT_EQ(rows.shape[0], 2);
  EXPECT_EQ(rows.strides, view.strides);
  const TensorView corner = rows.slice(1, 2, 1).slice(2, 3, 2);
  EXPECT_EQ(*corner.as<int32_t>(), 20 + 2 * 5 + 3);
  EXPECT_EQ(corner.num_elements(), 4);
  const TensorView nothing = view.slice(0, 3, 0);
  EXPECT_FALSE(nothing.empty());
  EXPECT_EQ(nothing.num_elements(), 0);
  EXPECT_EQ(nothing.as<int32_t>(), data.data() + 60);
}

TEST(TensorView, SlicesNullDataWithoutMovingIt) {
  const TensorView view = make_view<void>(nullptr, DType::kFloat32, {0, 4});
  EXPECT_EQ(view.slice(1, 2, 2).data, nullptr);
}

TEST(TensorView, SlicesByBytesOfItsType) {
  std::vector<uint8_t> bytes(64);
  const TensorView fp8 = make_view<void>(bytes.data(), DType::kFloat8E4M3, {4, 8});
  EXPECT_EQ(fp8.slice(0, 1, 1).data, bytes.data() + 8);
  const TensorView int64 = make_view<void>(bytes.data(), DType::kInt64, {4, 2});
  EXPECT_EQ(int64.slice(0, 1, 1).data, bytes.data() + 16);
}

TEST(TensorView, KnowsWhetherItIsContiguous) {
  std::vector<float> data(24);
  const TensorView view = view_of(data.data(), {2, 3, 4});
  EXPECT_TRUE(view.is_contiguous());
  EXPECT_TRUE(view.slice(0, 1, 1).is_contiguous());
  EXPECT_FALSE(view.slice(1, 0, 2).is_contiguous());
  EXPECT_FALSE(view.slice(2, 0, 2).is_contiguous());
  // The stride of an extent of 1 is never used.
  EXPECT_TRUE(view.slice(0, 0, 1).slice(1, 0, 2).is_contiguous());
  TensorView transposed = view_of(data.data(), {4, 6});
  std::swap(transposed.strides[0], transposed.strides[1]);
  EXPECT_FALSE(transposed.is_contiguous());
  TensorView broadcast = view_of(data.data(), {4, 6});
  broadcast.strides[0] = 0;
  EXPECT_FALSE(broadcast.is_contiguous());
}

}  // namespace
}  // namespace lacuna
