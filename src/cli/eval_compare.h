// Compares two results of `lacuna eval` over the same problems: which problems flipped, and how
// likely so uneven a split of flips is by chance.
#pragma once

#include <string>
#include <vector>

#include "lacuna/status.h"

namespace lacuna::cli {

struct Comparison {
  int64_t num_problems = 0;
  int64_t exact_a = 0;
  int64_t exact_b = 0;
  std::vector<std::string> only_a;  // ids that only the first result has right
  std::vector<std::string> only_b;
  double p = 1;  // exact two-sided binomial p of only_a against only_b
};

// The chance that a fair coin, thrown `a` + `b` times, splits as unevenly as a : b or more so.
double binomial_two_sided(int64_t a, int64_t b);

// Refuses results over different problems.
Result<Comparison> compare_results(const std::string& path_a, const std::string& path_b);

}  // namespace lacuna::cli
