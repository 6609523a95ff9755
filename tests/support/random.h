// Seeded random numbers for tests: a stream of the counter-based generator in core/rng.h, so that a
// (seed, stream) pair gives the same data on every machine and in any order of cases.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/rng.h"

namespace lacuna::testing {

class Random {
 public:
  explicit Random(uint64_t seed, uint64_t stream = 0) : seed_(seed), stream_(stream) {}

  uint32_t bits() {
    if (next_ == 4) {
      words_ = philox4x32(seed_, counter_++, stream_);
      next_ = 0;
    }
    return words_[next_++];
  }

  // In [0, 1), with 24 bits.
  float uniform() { return static_cast<float>(bits() >> 8) * 0x1p-24f; }

  // In [low, high], both included.
  int64_t integer(int64_t low, int64_t high) {
    const uint64_t span = static_cast<uint64_t>(high - low) + 1;
    const uint64_t wide = (static_cast<uint64_t>(bits()) << 32) | bits();
    return low + static_cast<int64_t>(wide % span);
  }

  bool chance(double probability) { return uniform() < probability; }

  // Roughly normal (sum of four bytes), mean 0, deviation 1, within +-3.5: one word a value.
  float bell() {
    const uint32_t word = bits();
    const uint32_t sum =
        (word & 0xff) + ((word >> 8) & 0xff) + ((word >> 16) & 0xff) + (word >> 24);
    return (static_cast<float>(sum) - 510.0f) * (1.0f / 147.8f);
  }

  template <class T>
  void shuffle(std::vector<T>* values) {
    for (size_t i = values->size(); i > 1; --i) {
      std::swap((*values)[i - 1], (*values)[integer(0, static_cast<int64_t>(i) - 1)]);
    }
  }

 private:
  uint64_t seed_;
  uint64_t stream_;
  uint64_t counter_ = 0;
  std::array<uint32_t, 4> words_ = {};
  int next_ = 4;
};

}  // namespace lacuna::testing
