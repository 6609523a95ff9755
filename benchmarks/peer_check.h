// Holds a peer against the oracle before its time is believed.
#pragma once

#include <cstdint>

#include "benchmarks/peer_library.h"
#include "ops/backend.h"

namespace lacuna::bench {

// Runs the peer on small problems of these heads and this cache layout (one with lists that end
// early, one with rows that have no keys) on a device of the context, and compares outputs and
// converted LSE with the oracle. The error says what differs.
Status check_peer(const Context& context, const DeviceInfo& device, const Peer& peer,
                  const KvLayout& layout, int64_t heads, int64_t topk);

}  // namespace lacuna::bench
