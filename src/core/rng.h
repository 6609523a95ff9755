// Counter-based random numbers (Philox 4x32-10, Salmon et al., SC 2011): a value depends on (key,
// counter) alone, so samples do not depend on batching or call order.
#pragma once

#include <array>
#include <cstdint>

namespace lacuna {

constexpr std::array<uint32_t, 4> philox4x32(uint64_t key, uint64_t counter_lo,
                                             uint64_t counter_hi = 0) {
  std::array<uint32_t, 4> c = {
      static_cast<uint32_t>(counter_lo), static_cast<uint32_t>(counter_lo >> 32),
      static_cast<uint32_t>(counter_hi), static_cast<uint32_t>(counter_hi >> 32)};
  uint32_t k0 = static_cast<uint32_t>(key);
  uint32_t k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * c[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * c[2];
    c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
         static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Uniform in [0, 1) with 24 bits.
constexpr float philox_uniform(uint64_t key, uint64_t counter_lo, uint64_t counter_hi = 0) {
  return static_cast<float>(philox4x32(key, counter_lo, counter_hi)[0] >> 8) * 0x1p-24f;
}

}  // namespace lacuna
