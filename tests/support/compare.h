// Comparison of results with the oracle. Every function returns an empty text, or one that names
// the first wrong coordinate, both values and the tolerance.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "lacuna/tensor.h"
#include "tests/reference/reference.h"

namespace lacuna::testing {

// A value passes when its error is at most `abs`, or at most rel * |expected|. `cosine` bounds
// 1 - 2 sum(a e) / sum(a a + e e) over the whole tensor; 0: not looked at. NaN and infinities must
// agree exactly.
struct Tolerance {
  double abs = 0;
  double rel = 0;
  double cosine = 0;
};

// Attention outputs that passed through a 16-bit type: FlashMLA's own sparse decode tests use
// these. The cosine distance catches what the elementwise bound lets through (a lost key).
inline constexpr Tolerance kOut16{.abs = 1e-3, .rel = 2.01 / 128, .cosine = 5e-6};
inline constexpr Tolerance kLse{.abs = 1e-6, .rel = 8.01 / 65536};

std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const double> expected, const Tolerance& tolerance);
// `slack[i]` is added to the absolute tolerance of element i.
std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const double> expected, const Tolerance& tolerance,
                    std::span<const double> slack);
// Exact.
std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const int32_t> expected);

// Out, LSE and max_logits of an attention operation. `exact_inputs`: query and keys are f32 and so
// is the output, so that only float32 arithmetic separates the two. Absent tensors are skipped.
// A row without keys must be exactly 0.
std::string compare_attention(const ConstTensorView& out, const ConstTensorView& lse,
                              const ConstTensorView& max_logits,
                              const reference::AttentionResult& expected, int64_t d_qk,
                              bool exact_inputs);

// Whether `actual` is a selection of min(k, visible) keys that the scores allow: distinct,
// ascending, tail -1, and no key left out beats a chosen one by more than `margin` (scores within a
// rounding error of each other may change places). `logits` are row t's.
std::string check_selection_by_margin(std::span<const int32_t> list, int64_t count,
                                      std::span<const double> logits, int64_t visible, int64_t k,
                                      std::span<const double> margin);

}  // namespace lacuna::testing
