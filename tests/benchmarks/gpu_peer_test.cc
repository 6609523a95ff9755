// A peer whose kernel runs on the GPU, on the device pointers and the stream that it is given.
#include <gtest/gtest.h>

#include "benchmarks/peer_check.h"
#include "core/check.h"
#include "ops/dispatch.h"

namespace lacuna::bench {
namespace {

TEST(GpuPeer, OfBaseTwoAgreesWithTheOracle) {
  Result<Context> made = Context::create({.num_threads = 1});
  LACUNA_CHECK(made.ok());
  const ContextState& state = made.value().state();
  const DeviceInfo* gpu = find_device(state, {DeviceKind::kCuda, 0});
  if (gpu == nullptr) {
    GTEST_SKIP() << "no GPU: " << state.cuda_status;
  }
  const Result<Peer> peer = Peer::load(LACUNA_CUDA_PEER);
  ASSERT_TRUE(peer.ok()) << peer.status().message();
  for (const int64_t topk : {48, 200}) {
    const Status status =
        check_peer(made.value(), *gpu, *peer, KvLayout::latent_bf16(512, 64), 3, topk);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  const Status refusal = check_peer(made.value(), *gpu, *peer, KvLayout::fp8_ds_mla(), 3, 48);
  EXPECT_NE(refusal.message().find("reads bf16 caches only"), std::string::npos)
      << refusal.message();
}

}  // namespace
}  // namespace lacuna::bench
