// Tolerances and the texts of mismatches.
#include "tests/support/compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include "tests/reference/element.h"

namespace lacuna::testing {
namespace {

std::string number(double value) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

std::string coordinate(const char* name, const ConstTensorView& tensor, int64_t flat) {
  std::string text = "]";
  for (int d = tensor.rank - 1; d >= 0; --d) {
    text = (d > 0 ? ", " : "") + std::to_string(flat % tensor.shape[d]) + text;
    flat /= tensor.shape[d];
  }
  return std::string(name) + "[" + text;
}

// Calls visit(flat index, address) in row-major order.
template <class Visit>
void for_each_element(const ConstTensorView& tensor, Visit&& visit) {
  int64_t flat = 0;
  for (int64_t i = 0; i < tensor.shape[0]; ++i) {
    for (int64_t j = 0; j < (tensor.rank > 1 ? tensor.shape[1] : 1); ++j) {
      for (int64_t k = 0; k < (tensor.rank > 2 ? tensor.shape[2] : 1); ++k) {
        visit(flat++, reference::element_address(tensor, i, j, k));
      }
    }
  }
}

}  // namespace

std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const double> expected, const Tolerance& tolerance,
                    std::span<const double> slack) {
  if (actual.num_elements() != static_cast<int64_t>(expected.size())) {
    return std::string(name) + ": the oracle has " + std::to_string(expected.size()) +
           " values for " + std::to_string(actual.num_elements());
  }
  std::string error;
  int64_t num_wrong = 0;
  double cross = 0;
  double squares = 0;
  for_each_element(actual, [&](int64_t flat, const char* at) {
    const double a = reference::decode(actual.dtype, at);
    const double e = expected[flat];
    bool right = a == e || (std::isnan(a) && std::isnan(e));
    const double abs_tolerance = tolerance.abs + (slack.empty() ? 0 : slack[flat]);
    if (!right && std::isfinite(a) && std::isfinite(e)) {
      const double difference = std::fabs(a - e);
      right = difference <= abs_tolerance || difference <= tolerance.rel * std::fabs(e);
    }
    if (std::isfinite(a) && std::isfinite(e)) {
      cross += a * e;
      squares += a * a + e * e;
    }
    if (!right && num_wrong++ == 0) {
      error = coordinate(name, actual, flat) + " is " + number(a) + ", expected " + number(e) +
              " (tolerance abs " + number(abs_tolerance) + ", rel " + number(tolerance.rel) + ")";
    }
  });
  if (num_wrong > 0) {
    return error + "; " + std::to_string(num_wrong) + " of " + std::to_string(expected.size()) +
           " values are wrong";
  }
  const double distance = squares == 0 ? 0 : 1 - 2 * cross / squares;
  if (tolerance.cosine > 0 && !(distance <= tolerance.cosine)) {
    return std::string(name) + ": cosine distance " + number(distance) + ", tolerance " +
           number(tolerance.cosine);
  }
  return {};
}

std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const double> expected, const Tolerance& tolerance) {
  return compare(name, actual, expected, tolerance, {});
}

std::string compare(const char* name, const ConstTensorView& actual,
                    std::span<const int32_t> expected) {
  if (actual.num_elements() != static_cast<int64_t>(expected.size())) {
    return std::string(name) + ": the oracle has " + std::to_string(expected.size()) +
           " values for " + std::to_string(actual.num_elements());
  }
  std::string error;
  for_each_element(actual, [&](int64_t flat, const char* at) {
    const int32_t a = reference::load<int32_t>(at);
    if (error.empty() && a != expected[flat]) {
      error = coordinate(name, actual, flat) + " is " + std::to_string(a) + ", expected " +
              std::to_string(expected[flat]);
    }
  });
  return error;
}

std::string compare_attention(const ConstTensorView& out, const ConstTensorView& lse,
                              const ConstTensorView& max_logits,
                              const reference::AttentionResult& expected, int64_t d_qk,
                              bool exact_inputs) {
  constexpr double kEpsilon = 0x1p-24;  // half an ulp of 1 in float32
  // A score is a sum of d_qk products in float32. With n additions in a chain its error is at most
  // n epsilon times the sum of magnitudes (score_scale bounds it); kernels sum in at least eight
  // chains. A relative error of a weight is the absolute error of its score, and the output is a
  // convex combination of values of magnitude at most about 4 here.
  const double chain = static_cast<double>(d_qk) / 8 + 8;
  std::vector<double> lse_slack(expected.score_scale.size());
  std::vector<double> out_slack;
  for (size_t i = 0; i < lse_slack.size(); ++i) {
    // The sum of exponentials adds a few roundings relative to |lse| itself; kLse covers them.
    // Without exact inputs the products are exact and four roundings describe what is seen of the
    // chain at random signs.
    lse_slack[i] = (exact_inputs ? chain : 4.0) * kEpsilon * expected.score_scale[i];
  }
  Tolerance out_tolerance = kOut16;
  if (exact_inputs) {
    out_tolerance = {.abs = 1e-6, .rel = 1e-5, .cosine = 1e-9};
    const size_t d_v = expected.out.size() / std::max<size_t>(lse_slack.size(), 1);
    for (double slack : lse_slack) {
      out_slack.insert(out_slack.end(), d_v, 4 * slack);
    }
  } else {
    // Tensor cores take weights that are rounded to bf16: independent relative errors of at most
    // 2^-9, which average out over many keys but not over few. Four deviations.
    const double rounding = 4 * 0x1p-9 / std::sqrt(3.0);
    for (double scale : expected.weight_scale) {
      out_slack.push_back(rounding * scale);
    }
  }
  std::string error = compare("out", out, expected.out, out_tolerance, out_slack);
  if (error.empty() && !lse.empty()) {
    error = compare("lse", lse, expected.lse, kLse, lse_slack);
  }
  if (error.empty() && !max_logits.empty()) {
    error = compare("max_logits", max_logits, expected.max_logits, kLse, lse_slack);
  }
  if (!error.empty()) {
    return error;
  }
  const int64_t d_v = out.shape[2];
  for_each_element(out, [&](int64_t flat, const char* at) {
    const bool no_keys = expected.lse[flat / d_v] == -std::numeric_limits<double>::infinity();
    if (error.empty() && no_keys && reference::decode(out.dtype, at) != 0) {
      error = coordinate("out", out, flat) + " belongs to a row without keys and is not exactly 0";
    }
  });
  return error;
}

std::string check_selection_by_margin(std::span<const int32_t> list, int64_t count,
                                      std::span<const double> logits, int64_t visible, int64_t k,
                                      std::span<const double> margin) {
  const int64_t wanted = std::min(visible, k);
  if (count != wanted) {
    return "count is " + std::to_string(count) + ", expected " + std::to_string(wanted);
  }
  std::vector<bool> chosen(visible, false);
  int64_t weakest = -1;
  for (int64_t c = 0; c < static_cast<int64_t>(list.size()); ++c) {
    const int64_t id = list[c];
    if (c >= count) {
      if (id != -1) {
        return "entry " + std::to_string(c) + " is " + std::to_string(id) + ", expected -1";
      }
      continue;
    }
    if (id < 0 || id >= visible || (c > 0 && id <= list[c - 1])) {
      return "entry " + std::to_string(c) + " is " + std::to_string(id) +
             ": not a visible position, or not above the entry before it";
    }
    chosen[id] = true;
    if (weakest < 0 || logits[id] + margin[id] < logits[weakest] + margin[weakest]) {
      weakest = id;
    }
  }
  for (int64_t j = 0; j < visible; ++j) {
    if (!chosen[j] && weakest >= 0 && logits[j] - margin[j] > logits[weakest] + margin[weakest]) {
      return "position " + std::to_string(j) + " (score " + number(logits[j]) +
             ") was left out, but " + std::to_string(weakest) + " (score " +
             number(logits[weakest]) + ") was chosen";
    }
  }
  return {};
}

}  // namespace lacuna::testing
