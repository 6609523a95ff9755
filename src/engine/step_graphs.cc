// Which sizes are worth a graph.
#include "engine/step_graphs.h"

#include <algorithm>

namespace lacuna {

std::vector<int64_t> padded_requests(int64_t query_len, int64_t requests_max, int64_t rows_max) {
  constexpr int64_t kRequestsMax = 512;
  const int64_t largest = std::min({requests_max, rows_max / query_len, kRequestsMax});
  std::vector<int64_t> sizes;
  for (int64_t size = 1; size < largest;) {
    sizes.push_back(size);
    if (size < 8 || query_len > 1) {
      size *= 2;
    } else {
      size += size < 64 ? 8 : size < 256 ? 16 : 32;
    }
  }
  if (largest > 0) {
    sizes.push_back(largest);
  }
  return sizes;
}

}  // namespace lacuna
