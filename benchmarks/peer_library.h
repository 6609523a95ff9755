// A peer of the attention kernels in a shared library: see peer.h. Its results are converted to our
// conventions and compared with the oracle before it is measured.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "benchmarks/peer.h"
#include "lacuna/attention.h"

namespace lacuna::bench {

class Peer {
 public:
  static Result<Peer> load(const std::string& path);

  const char* name() const { return peer_->name; }
  // Of the arguments a peer gets the fused bf16 query, the cache as flat rows, the lists, the scale
  // and bf16 outputs with lse; anything else is refused.
  Status supports(const SparseMlaArgs& args) const;
  int64_t workspace_bytes(const SparseMlaArgs& args) const;
  // `args.lse` receives what the peer writes: convert_lse makes it ours.
  Status run(const SparseMlaArgs& args, void* workspace, void* stream) const;
  // The natural logarithm, -inf for a row without keys.
  float convert_lse(float lse) const;
  // What the peer says of a row without keys.
  bool is_empty_lse(float lse) const;

 private:
  Peer(std::shared_ptr<void> library, const LacunaPeer* peer)
      : library_(std::move(library)), peer_(peer) {}

  std::shared_ptr<void> library_;
  const LacunaPeer* peer_;
};

}  // namespace lacuna::bench
