// What a measurement is: a line of the tables and CSV files of `lacuna bench`, on every device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lacuna::bench {

struct Timing {
  double us_median = 0;
  double us_p10 = 0;
  double us_p90 = 0;
};

inline Timing timing_of(std::vector<double> us) {
  if (us.empty()) {
    return {};
  }
  std::sort(us.begin(), us.end());
  const auto at = [&](double quantile) {
    return us[static_cast<size_t>(quantile * static_cast<double>(us.size() - 1) + 0.5)];
  };
  return {.us_median = at(0.5), .us_p10 = at(0.1), .us_p90 = at(0.9)};
}

// Extents that an operation does not have are 0.
struct BenchLine {
  std::string op;
  std::string kernel;
  std::string peer;  // empty: the library itself
  int64_t heads = 0;
  int64_t d_qk = 0;
  int64_t topk = 0;
  int64_t rows = 0;
  int64_t context = 0;
  std::string dtype;  // of keys
  std::string cache;  // what the caches hold when a call begins: cold, warm or fresh_lists
  Timing timing;
  double floor_us = 0;  // 0: memory is not what bounds it
  double bytes = 0;
  double flops = 0;
};

}  // namespace lacuna::bench
