// Where a broken invariant ends.
#include "core/check.h"

#include <cstdio>
#include <cstdlib>

namespace lacuna {

void check_failed(const char* expression, const char* file, int line) {
  std::fprintf(stderr, "lacuna: internal error: %s does not hold at %s:%d\n", expression, file,
               line);
  std::abort();
}

}  // namespace lacuna
