// Oracle of build_mask.
#include <algorithm>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"

namespace lacuna::reference {

std::vector<int32_t> build_mask(const BuildMaskArgs& args) {
  const int64_t num_rows = args.mask.shape[0];
  const int64_t stride = args.mask.strides[0];
  const int64_t width = args.indices.shape[1];
  std::vector<int32_t> mask(num_rows * stride, 0);
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t begin = integer_or(args.key_begin, t, 0);
    const int64_t count = std::clamp<int64_t>(integer_or(args.valid_counts, t, width), 0, width);
    for (int64_t c = 0; c < count; ++c) {
      const int64_t id = integer(args.indices, t, c);
      const int64_t bit = id - begin;
      if (id >= 0 && bit >= 0 && bit < args.key_count) {
        mask[t * stride + (bit >> 5)] |= static_cast<int32_t>(1u << (bit & 31));
      }
    }
  }
  return mask;
}

}  // namespace lacuna::reference
