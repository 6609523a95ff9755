// Conversions of element types against an independent implementation: every code is decoded in
// double from its fields, and rounding is a search for the nearest decoded value.
#include "lacuna/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace lacuna {
namespace {

// A small binary format, described by its fields.
struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // false: the "fn" form, where only the last code is NaN, and which saturates
  uint32_t (*encode)(float);
  float (*decode)(uint32_t);

  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint32_t sign_bit() const { return 1u << (bits() - 1); }
  uint32_t infinity() const { return ((1u << exponent_bits) - 1) << mantissa_bits; }
  // The largest positive code that is a finite number.
  uint32_t largest() const { return has_infinity ? infinity() - 1 : sign_bit() - 2; }
};

const Format kBf16 = {"bfloat16",
                      8,
                      7,
                      true,
                      [](float x) -> uint32_t { return to_bf16(x).bits; },
                      [](uint32_t code) { return to_float(Bf16{static_cast<uint16_t>(code)}); }};
const Format kFp16 = {"float16",
                      5,
                      10,
                      true,
                      [](float x) -> uint32_t { return to_fp16(x).bits; },
                      [](uint32_t code) { return to_float(Fp16{static_cast<uint16_t>(code)}); }};
const Format kFp8 = {"float8_e4m3",
                     4,
                     3,
                     false,
                     [](float x) -> uint32_t { return to_fp8_e4m3(x).bits; },
                     [](uint32_t code) { return to_float(Fp8E4M3{static_cast<uint8_t>(code)}); }};

bool is_nan_code(const Format& format, uint32_t code) {
  const uint32_t magnitude = code & (format.sign_bit() - 1);
  return format.has_infinity ? magnitude > format.infinity() : magnitude == format.sign_bit() - 1;
}

// The value of a positive finite code. The infinity code gets the value that its fields would have,
// which is where IEEE rounding puts the border between the largest finite value and infinity.
double decode_magnitude(const Format& format, uint32_t code) {
  const int exponent = static_cast<int>(code >> format.mantissa_bits);
  const double mantissa = code & ((1u << format.mantissa_bits) - 1);
  if (exponent == 0) {
    return std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  }
  return std::ldexp(mantissa + (1 << format.mantissa_bits),
                    exponent - format.bias() - format.mantissa_bits);
}

class Rounder {
 public:
  explicit Rounder(const Format& format) : format_(format) {
    const uint32_t last = format.has_infinity ? format.infinity() : format.largest();
    for (uint32_t code = 0; code <= last; ++code) {
      values_.push_back(decode_magnitude(format, code));
    }
  }

  // The code nearest to x, ties to the even code. x is not NaN.
  uint32_t nearest(float x) const {
    const uint32_t sign = std::signbit(x) ? format_.sign_bit() : 0;
    const double magnitude = std::fabs(static_cast<double>(x));
    const auto above = std::lower_bound(values_.begin(), values_.end(), magnitude);
    if (above == values_.end()) {
      return sign | static_cast<uint32_t>(values_.size() - 1);  // infinity, or saturation
    }
    const auto high = static_cast<uint32_t>(above - values_.begin());
    if (high == 0) {
      return sign;
    }
    const double to_high = values_[high] - magnitude;
    const double to_low = magnitude - values_[high - 1];
    const bool up = to_high < to_low || (to_high == to_low && high % 2 == 0);
    return sign | (up ? high : high - 1);
  }

 private:
  const Format& format_;
  std::vector<double> values_;
};

class DTypeConversion : public testing::TestWithParam<const Format*> {};

TEST_P(DTypeConversion, DecodesEveryCode) {
  const Format& format = *GetParam();
  for (uint32_t code = 0; code < 1u << format.bits(); ++code) {
    const float value = format.decode(code);
    if (is_nan_code(format, code)) {
      ASSERT_TRUE(std::isnan(value)) << format.name << " code " << code;
      continue;
    }
    const uint32_t magnitude = code & (format.sign_bit() - 1);
    double expected = decode_magnitude(format, magnitude);
    if (format.has_infinity && magnitude == format.infinity()) {
      expected = std::numeric_limits<double>::infinity();
    }
    if ((code & format.sign_bit()) != 0) {
      expected = -expected;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << format.name << " code " << code;
    ASSERT_EQ(std::signbit(value), std::signbit(expected)) << format.name << " code " << code;
  }
}

TEST_P(DTypeConversion, EncodesEveryDecodedCodeToItself) {
  const Format& format = *GetParam();
  for (uint32_t code = 0; code < 1u << format.bits(); ++code) {
    const uint32_t again = format.encode(format.decode(code));
    if (is_nan_code(format, code)) {
      ASSERT_TRUE(is_nan_code(format, again)) << format.name << " code " << code;
      ASSERT_EQ(again & format.sign_bit(), code & format.sign_bit()) << format.name;
    } else {
      ASSERT_EQ(again, code) << format.name;
    }
  }
}

void expect_nearest(const Format& format, const Rounder& rounder, float x) {
  ASSERT_EQ(format.encode(x), rounder.nearest(x)) << format.name << " of " << std::hexfloat << x;
}

TEST_P(DTypeConversion, RoundsAroundEveryMidpointToEven) {
  const Format& format = *GetParam();
  const Rounder rounder(format);
  for (uint32_t code = 0; code <= format.largest(); ++code) {
    const double low = decode_magnitude(format, code);
    const double high = decode_magnitude(format, code + 1);
    // Exact in float: a midpoint has one mantissa bit more than the format.
    const auto middle = static_cast<float>(low + (high - low) / 2);
    for (const float x : {static_cast<float>(low), middle, std::nextafterf(middle, 0.0f),
                          std::nextafterf(middle, INFINITY)}) {
      expect_nearest(format, rounder, x);
      expect_nearest(format, rounder, -x);
      if (HasFatalFailure()) {
        return;
      }
    }
  }
}

TEST_P(DTypeConversion, RoundsRandomFloatsToNearest) {
  const Format& format = *GetParam();
  const Rounder rounder(format);
  std::mt19937 random(20240901);
  std::uniform_real_distribution<double> exponent(-30.0, 20.0);
  for (int i = 0; i < 300000; ++i) {
    // Every bit pattern, and patterns within the range of the smaller formats.
    float x = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (i % 2 == 0) {
      x = static_cast<float>(std::exp2(exponent(random))) * (i % 4 == 0 ? 1.0f : -1.0f);
    }
    if (std::isnan(x)) {
      ASSERT_TRUE(is_nan_code(format, format.encode(x))) << format.name;
      continue;
    }
    expect_nearest(format, rounder, x);
    if (HasFatalFailure()) {
      return;
    }
  }
}

TEST_P(DTypeConversion, HandlesTheEndsOfTheFloatRange) {
  const Format& format = *GetParam();
  const Rounder rounder(format);
  using Limits = std::numeric_limits<float>;
  for (const float x :
       {0.0f, Limits::denorm_min(), Limits::min(), Limits::max(), Limits::infinity()}) {
    expect_nearest(format, rounder, x);
    expect_nearest(format, rounder, -x);
  }
  EXPECT_TRUE(is_nan_code(format, format.encode(Limits::quiet_NaN())));
  EXPECT_TRUE(is_nan_code(format, format.encode(Limits::signaling_NaN())));
  // A NaN whose payload is only in the bits that are cut off must not turn into infinity.
  EXPECT_TRUE(is_nan_code(format, format.encode(std::bit_cast<float>(0x7f800001u))));
  EXPECT_TRUE(is_nan_code(format, format.encode(std::bit_cast<float>(0xffffffffu))));
}

INSTANTIATE_TEST_SUITE_P(All, DTypeConversion, testing::Values(&kBf16, &kFp16, &kFp8),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(DType, SaturatesFloat8) {
  EXPECT_EQ(to_float(to_fp8_e4m3(1e30f)), 448.0f);
  EXPECT_EQ(to_float(to_fp8_e4m3(-INFINITY)), -448.0f);
  EXPECT_EQ(to_float(to_fp8_e4m3(464.0f)), 448.0f);
}

TEST(DType, ConvertsAtCompileTime) {
  static_assert(to_float(to_bf16(-2.5f)) == -2.5f);
  static_assert(to_float(to_fp16(0x1p-24f)) == 0x1p-24f);
  static_assert(to_float(to_fp8_e4m3(0x1p-9f)) == 0x1p-9f);
  static_assert(kDTypeOf<Bf16> == DType::kBFloat16 && kDTypeOf<int64_t> == DType::kInt64);
}

TEST(DType, HasSizesAndNames) {
  struct Row {
    DType dtype;
    int64_t bytes;
    std::string_view name;
    bool floating;
  };
  const Row rows[] = {
      {DType::kFloat32, 4, "float32", true},   {DType::kFloat16, 2, "float16", true},
      {DType::kBFloat16, 2, "bfloat16", true}, {DType::kFloat8E4M3, 1, "float8_e4m3", true},
      {DType::kInt32, 4, "int32", false},      {DType::kInt64, 8, "int64", false},
      {DType::kUInt8, 1, "uint8", false},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(size_bytes(row.dtype), row.bytes) << row.name;
    EXPECT_EQ(dtype_name(row.dtype), row.name);
    EXPECT_EQ(is_floating(row.dtype), row.floating) << row.name;
  }
}

}  // namespace
}  // namespace lacuna
