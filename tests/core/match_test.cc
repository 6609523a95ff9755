// Every message of the shape checks, word for word: they are what a stranger reads first.
#include "core/match.h"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

namespace lacuna {
namespace {

float storage[64];

ConstTensorView floats(std::initializer_list<int64_t> shape) {
  return view_of(static_cast<const float*>(storage), shape);
}

TEST(ShapeString, WritesShapesAndAbsence) {
  EXPECT_EQ(shape_string(floats({2, 3, 4})), "[2, 3, 4]");
  EXPECT_EQ(shape_string(floats({0})), "[0]");
  EXPECT_EQ(shape_string({}), "absent");
}

TEST(Match, BindsADimensionOnceAndHoldsItAfter) {
  Dim t("T"), h("H");
  const ConstTensorView q = floats({2, 4});
  const ConstTensorView lse = floats({2, 4});
  EXPECT_FALSE(t.bound());
  EXPECT_TRUE(match(q, "q").shape({&t, &h}).status().ok());
  EXPECT_TRUE(t.bound());
  EXPECT_EQ(t.value(), 2);
  EXPECT_EQ(h.value(), 4);
  EXPECT_TRUE(match(lse, "lse").shape({&t, &h}).status().ok());
  const ConstTensorView out = floats({2, 5});
  const Status status = match(out, "out").shape({&t, &h}).status();
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "out: extent 5 in dimension 1 of [2, 5], expected H = 4 as in q");
}

TEST(Match, NamesTheSourceOfAGivenDimension) {
  Dim d("d_qk", 576, "the layout's latent + rope");
  const ConstTensorView q = floats({64});
  EXPECT_EQ(match(q, "q").shape({&d}).status().message(),
            "q: extent 64 in dimension 0 of [64], expected d_qk = 576 as in the layout's latent + "
            "rope");
}

TEST(Match, BindsAZeroExtent) {
  Dim t("T");
  const ConstTensorView none = make_view<const void>(nullptr, DType::kFloat32, {0});
  EXPECT_TRUE(match(none, "q").shape({&t}).status().ok());
  EXPECT_TRUE(t.bound());
  EXPECT_EQ(t.value(), 0);
  const ConstTensorView one = floats({1});
  EXPECT_EQ(match(one, "lse").shape({&t}).status().message(),
            "lse: extent 1 in dimension 0 of [1], expected T = 0 as in q");
}

TEST(Match, RefusesAWrongRank) {
  Dim t("T"), h("H"), d("D");
  const ConstTensorView q = floats({2, 3});
  EXPECT_EQ(match(q, "q").shape({&t, &h, &d}).status().message(),
            "q: shape [2, 3], expected [T, H, D] (rank 3)");
  const ConstTensorView absent;
  EXPECT_EQ(match(absent, "q").shape({&t}).status().message(),
            "q: shape absent, expected [T] (rank 1)");
}

TEST(Match, RefusesNegativeExtentsAndNullData) {
  Dim t("T"), d("D");
  ConstTensorView negative = floats({2, 3});
  negative.shape[1] = -3;
  EXPECT_EQ(match(negative, "q").shape({&t, &d}).status().message(),
            "q: negative extent in shape [2, -3]");
  Dim t2("T"), d2("D");
  const ConstTensorView null = make_view<const void>(nullptr, DType::kFloat32, {2, 3});
  EXPECT_EQ(match(null, "q").shape({&t2, &d2}).status().message(), "q: null data for shape [2, 3]");
}

TEST(Match, RefusesDataThatIsNotAlignedToItsElement) {
  Dim t("T");
  ConstTensorView q = floats({2});
  q.data = reinterpret_cast<const char*>(storage) + 2;
  EXPECT_EQ(match(q, "q").shape({&t}).status().message(),
            "q: data is not aligned to its element, 4 bytes");
}

TEST(Match, RefusesOtherTypes) {
  const ConstTensorView q = floats({2});
  EXPECT_TRUE(match(q, "q").dtypes({DType::kBFloat16, DType::kFloat32}).status().ok());
  EXPECT_EQ(match(q, "q").dtypes({DType::kInt32}).status().message(),
            "q: dtype float32, expected int32");
  EXPECT_EQ(match(q, "q").dtypes({DType::kBFloat16, DType::kFloat16}).status().message(),
            "q: dtype float32, expected bfloat16 or float16");
}

TEST(Match, RefusesStrides) {
  ConstTensorView q = floats({2, 3});
  EXPECT_TRUE(match(q, "q").last_contiguous().contiguous().status().ok());
  q.strides[0] = 7;
  EXPECT_TRUE(match(q, "q").last_contiguous().status().ok());
  EXPECT_EQ(match(q, "q").contiguous().status().message(),
            "q: shape [2, 3] is not contiguous, expected row-major contiguous");
  q.strides[1] = 2;
  EXPECT_EQ(match(q, "q").last_contiguous().status().message(),
            "q: stride 2 in the last dimension, expected 1 (other dimensions may have any stride)");
  q.shape[1] = 1;  // the stride of an extent of 1 is never used
  EXPECT_TRUE(match(q, "q").last_contiguous().status().ok());
}

TEST(Match, RefusesAnotherDevice) {
  const ConstTensorView q = floats({2});
  EXPECT_TRUE(match(q, "q").device({}).status().ok());
  EXPECT_EQ(match(q, "q").device({DeviceKind::kCuda, 1}).status().message(),
            "q: on cpu, expected cuda:1");
}

TEST(Match, KeepsTheFirstOfManyErrors) {
  const ConstTensorView q = floats({2});
  EXPECT_EQ(match(q, "q").dtypes({DType::kInt32}).device({DeviceKind::kCuda, 0}).status().message(),
            "q: dtype float32, expected int32");
}

TEST(CheckDevices, NamesTheTensorThatDiffersAndSkipsAbsentOnes) {
  const ConstTensorView here = floats({2});
  ConstTensorView there = here;
  there.device = {DeviceKind::kCuda, 0};
  EXPECT_TRUE(check_devices({}, {{here, "q"}, {{}, "sink"}}).ok());
  EXPECT_EQ(check_devices({}, {{here, "q"}, {there, "out"}}).message(),
            "out: on cuda:0, expected cpu");
}

TEST(CheckCache, AcceptsWhatTheMakersMake) {
  alignas(64) static char bytes[4 * 656];
  EXPECT_TRUE(check_cache(paged_rows(bytes, KvLayout::fp8_ds_mla(), 2, 2), "kv").ok());
  EXPECT_TRUE(check_cache(flat_rows(bytes, KvLayout::latent_bf16(512, 64), 1), "kv").ok());
  EXPECT_TRUE(check_cache(paged_rows(bytes, KvLayout::index_fp8(), 2, 4), "kv").ok());
  EXPECT_TRUE(check_cache(paged_rows(nullptr, KvLayout::latent_f32(8, 0), 0, 4), "kv").ok());
}

TEST(CheckCache, SaysWhichNumbersDoNotFit) {
  alignas(64) static char bytes[8192];
  const KvCacheView good = paged_rows(bytes, KvLayout::latent_bf16(8, 4), 2, 4);
  struct Row {
    std::function<void(KvCacheView&)> change;
    const char* message;
  };
  const Row rows[] = {
      {[](KvCacheView& kv) { kv.num_blocks = -1; },
       "kv: num_blocks -1 and block_size 4 must not be negative"},
      {[](KvCacheView& kv) { kv.block_size = -4; },
       "kv: num_blocks 2 and block_size -4 must not be negative"},
      {[](KvCacheView& kv) { kv.data = nullptr; }, "kv: null data for 2 blocks"},
      {[](KvCacheView& kv) { kv.layout.latent = 0; },
       "kv: layout widths latent 0, rope 4; latent must be positive and rope not negative"},
      {[](KvCacheView& kv) { kv.layout.rope = -1; },
       "kv: layout widths latent 8, rope -1; latent must be positive and rope not negative"},
      {[](KvCacheView& kv) { kv.layout.format = KvFormat::kFp8DsMla; },
       "kv: fp8_ds_mla holds latent 512 and rope 64 or 0, given latent 8, rope 4"},
      {[](KvCacheView& kv) { kv.row_bytes = 23; },
       "kv: row_bytes 23 is less than the 24 bytes of a latent_bf16 record"},
      {[](KvCacheView& kv) { kv.block_stride_bytes = 94; },
       "kv: block_stride_bytes 94 is less than block_size * row_bytes = 96"},
      {[](KvCacheView& kv) { kv.block_stride_bytes = 97; },
       "kv: data, block_stride_bytes 97 and row_bytes 24 must be multiples of 2 in a latent_bf16 "
       "cache"},
      {[](KvCacheView& kv) { kv.data = static_cast<char*>(kv.data) + 1; },
       "kv: data, block_stride_bytes 96 and row_bytes 24 must be multiples of 2 in a latent_bf16 "
       "cache"},
      {[](KvCacheView& kv) {
         kv = paged_rows(kv.data, KvLayout::latent_f32(8, 4), 2, 4);
         kv.row_bytes = 50;
         kv.block_stride_bytes = 200;
       },
       "kv: data, block_stride_bytes 200 and row_bytes 50 must be multiples of 4 in a latent_f32 "
       "cache"},
      {[](KvCacheView& kv) {
         kv = paged_rows(kv.data, KvLayout::index_fp8(15), 2, 3);
         kv.block_stride_bytes = 60;
       },
       "kv: block_size * dim = 45 leaves the float32 scales of index_fp8 unaligned, expected a "
       "multiple of 4"},
      {[](KvCacheView& kv) {
         kv.layout = KvLayout::index_fp8(16);
         kv.row_bytes = 24;
       },
       "kv: row_bytes 24 of a planar layout must be its record size 20"},
  };
  EXPECT_TRUE(check_cache(good, "kv").ok());
  for (const Row& row : rows) {
    KvCacheView kv = good;
    row.change(kv);
    const Status status = check_cache(kv, "kv");
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << row.message;
    EXPECT_EQ(status.message(), row.message);
  }
}

TEST(CheckRowIds, RefusesRowsThatInt32CanNotName) {
  constexpr int64_t kLast = int64_t{1} << 31;
  EXPECT_TRUE(check_row_ids(0, 64, 64, "kv").ok());
  EXPECT_TRUE(check_row_ids(1, kLast, kLast, "kv").ok());
  EXPECT_FALSE(check_row_ids(1, kLast + 1, kLast + 1, "kv").ok());
  EXPECT_TRUE(check_row_ids(kLast / 64, 64, 64, "kv").ok());
  EXPECT_TRUE(check_row_ids(4, 64, (kLast - 64) / 3, "kv").ok());
  EXPECT_EQ(check_row_ids(kLast / 64 + 1, 64, 64, "kv").message(),
            "kv: 33554433 blocks of 64 rows go beyond the 2^31 rows that int32 ids can name");
  // Products that overflow int64 are refused, not wrapped.
  EXPECT_FALSE(check_row_ids(INT64_MAX, 64, INT64_MAX, "kv").ok());
  EXPECT_FALSE(check_row_ids(INT64_MAX, 1, 1, "kv").ok());
}

}  // namespace
}  // namespace lacuna
