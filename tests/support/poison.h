// The byte patterns that show who touched what. Bytes that nobody may read are NaN in every float
// format; bytes that a kernel must write, or must leave alone, hold a pattern first.
#pragma once

#include <cstdint>

namespace lacuna::testing {

// Around every buffer: one step of any row or block stride in use lands inside.
inline constexpr int64_t kCanaryBytes = 64 * 1024;
inline constexpr uint8_t kCanaryByte = 0xC7;

// All ones is NaN in f32, f16, bf16 and e4m3, and -1 as an integer: what may not be read.
inline constexpr uint8_t kNanByte = 0xFF;

// Outputs before a call. Not -1, which is a legal result; as f32 about -1.3e16, as bf16 -2.5e16.
inline constexpr uint8_t kPoisonByte = 0xDA;

// Two fills of the workspace: NaN, and small numbers.
inline constexpr uint8_t kWorkspaceFills[] = {0xFF, 0x01};

}  // namespace lacuna::testing
