// Numbers of rows at which a kernel may choose another way of working. Steps of an engine have any
// number of rows; whoever prepares something for each (an algorithm, the code of a kernel) prepares
// it for these.
#pragma once

#include <bit>
#include <cstdint>

namespace lacuna {

// The next such number: 1, 2, 4, 8, then multiples of 8 up to 64, eight to an octave up to 512, and
// four to an octave from there on.
constexpr int64_t round_rows(int64_t rows) {
  if (rows <= 8) {
    return rows <= 1 ? rows : static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(rows)));
  }
  const int64_t octave = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(rows - 1)));
  const int64_t step = rows <= 64 ? 8 : octave / (rows <= 512 ? 8 : 4);
  return (rows + step - 1) / step * step;
}

// The step after `rows`, at most `rows_max`.
constexpr int64_t next_rows(int64_t rows, int64_t rows_max) {
  const int64_t next = round_rows(rows + 1);
  return next < rows_max ? next : rows_max;
}

}  // namespace lacuna
