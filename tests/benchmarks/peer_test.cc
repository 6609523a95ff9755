// A peer in a shared library is loaded, converted to our conventions and held against the oracle.
#include <gtest/gtest.h>

#include <limits>

#include "benchmarks/peer_check.h"
#include "core/check.h"
#include "ops/dispatch.h"

namespace lacuna::bench {
namespace {

const Context& context() {
  static const Context made = [] {
    Result<Context> result = Context::create({.num_threads = 1, .use_cuda = false});
    LACUNA_CHECK(result.ok());
    return std::move(result).value();
  }();
  return made;
}

Status check(const std::string& library, const KvLayout& layout) {
  const Result<Peer> peer = Peer::load(library);
  if (!peer.ok()) {
    return peer.status();
  }
  const DeviceInfo& cpu = *find_device(context().state(), {DeviceKind::kCpu, 0});
  return check_peer(context(), cpu, *peer, layout, 3, 48);
}

TEST(Peer, OfBaseTwoAgreesWithTheOracle) {
  const Status status = check(LACUNA_MOCK_PEER, KvLayout::latent_bf16(512, 64));
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(Peer, ThatSaysAWrongBaseIsFound) {
  const Status status = check(LACUNA_MOCK_WRONG_PEER, KvLayout::latent_bf16(512, 64));
  EXPECT_NE(status.message().find("lse"), std::string::npos) << status.message();
}

TEST(Peer, RefusalIsTold) {
  const Status status = check(LACUNA_MOCK_PEER, KvLayout::fp8_ds_mla());
  EXPECT_NE(status.message().find("reads bf16 caches only"), std::string::npos) << status.message();
}

TEST(Peer, ConvertsItsLse) {
  const Result<Peer> peer = Peer::load(LACUNA_MOCK_PEER);
  ASSERT_TRUE(peer.ok()) << peer.status().message();
  EXPECT_FLOAT_EQ(peer->convert_lse(3.0f), 2.0794415f);
  EXPECT_EQ(peer->convert_lse(std::numeric_limits<float>::infinity()),
            -std::numeric_limits<float>::infinity());
}

TEST(Peer, ThatIsNoLibraryIsRefused) {
  EXPECT_NE(Peer::load("/nowhere/libpeer.so").status().message().find("peer"), std::string::npos);
  EXPECT_NE(Peer::load(LACUNA_OTHER_LIBRARY).status().message().find("lacuna_peer"),
            std::string::npos);
}

}  // namespace
}  // namespace lacuna::bench
