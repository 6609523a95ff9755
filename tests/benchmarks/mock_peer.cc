// A peer for tests: plain loops on the host, base-two LSE, and an LSE of +inf where a row has no
// keys. Built a second time with LACUNA_MOCK_WRONG_BASE it says that its LSE is natural.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "benchmarks/peer.h"

namespace {

float from_bf16(const char* at) {
  uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t round_to_bf16(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

const char* supports(const LacunaPeerShape* shape) {
  if (shape->device_kind != LACUNA_PEER_CPU) {
    return "runs on the host only";
  }
  return shape->kv_format == LACUNA_PEER_KV_BF16 ? nullptr : "reads bf16 caches only";
}

int run(const LacunaPeerShape* shape, const LacunaPeerCall* call) {
  const auto* q = static_cast<const char*>(call->q);
  const auto* kv = static_cast<const char*>(call->kv);
  auto* out = static_cast<uint16_t*>(call->out);
  for (int64_t pair = 0; pair < shape->rows * shape->heads; ++pair) {
    const int32_t* list = call->indices + pair / shape->heads * shape->topk;
    std::vector<double> sums(shape->d_v, 0.0);
    double total = 0;
    for (int64_t i = 0; i < shape->topk; ++i) {
      if (list[i] < 0 || list[i] >= shape->context) {
        continue;
      }
      const char* key = kv + list[i] * shape->row_bytes;
      double score = 0;
      for (int64_t d = 0; d < shape->d_qk; ++d) {
        score += static_cast<double>(from_bf16(q + 2 * (pair * shape->d_qk + d))) *
                 from_bf16(key + 2 * d);
      }
      const double weight = std::exp2(score * call->softmax_scale * 1.4426950408889634);
      total += weight;
      for (int64_t d = 0; d < shape->d_v; ++d) {
        sums[d] += weight * from_bf16(key + 2 * d);
      }
    }
    for (int64_t d = 0; d < shape->d_v; ++d) {
      out[pair * shape->d_v + d] =
          total == 0 ? 0 : round_to_bf16(static_cast<float>(sums[d] / total));
    }
    call->lse[pair] =
        total == 0 ? std::numeric_limits<float>::infinity() : static_cast<float>(std::log2(total));
  }
  return 0;
}

#ifdef LACUNA_MOCK_WRONG_BASE
constexpr int32_t kBase = LACUNA_PEER_LSE_NATURAL;
#else
constexpr int32_t kBase = LACUNA_PEER_LSE_BASE_TWO;
#endif

const LacunaPeer kPeer = {LACUNA_PEER_VERSION,
                          "mock",
                          kBase,
                          std::numeric_limits<float>::infinity(),
                          supports,
                          nullptr,
                          run};

}  // namespace

extern "C" const LacunaPeer* lacuna_peer(void) { return &kPeer; }
