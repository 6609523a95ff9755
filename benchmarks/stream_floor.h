// The floor under an operation that reads its input once, in order: a kernel that reads so many
// bytes and does nothing with them, in several shapes of which the fastest counts.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/backend.h"

namespace lacuna::bench {

// One shape of the stream.
struct StreamShape {
  bool long_batches = false;  // eight loads of 16 bytes a thread in flight instead of four
  int64_t blocks_per_sm = 1;  // at most; fewer when there is too little to read
};

std::vector<StreamShape> stream_shapes();

// Enqueues one read of `bytes` (rounded down to 16) at `data`, which is aligned to 16.
Status read_stream(const void* data, int64_t bytes, const StreamShape& shape,
                   const DeviceInfo& device, void* stream);

}  // namespace lacuna::bench
