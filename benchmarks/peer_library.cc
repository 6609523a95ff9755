// Loads a peer and calls it.
#include "benchmarks/peer_library.h"

#include <dlfcn.h>

#include <cmath>
#include <limits>
#include <numbers>

namespace lacuna::bench {
namespace {

LacunaPeerShape shape_of(const SparseMlaArgs& args) {
  const KvLayout& layout = args.kv.layout;
  LacunaPeerShape shape = {};
  shape.rows = args.out.shape[0];
  shape.heads = args.out.shape[1];
  shape.d_qk = layout.d_qk();
  shape.d_v = layout.latent;
  shape.topk = args.indices.shape[1];
  shape.context = args.kv.num_rows();
  shape.row_bytes = args.kv.row_bytes;
  shape.kv_format = layout.format == KvFormat::kLatentBf16  ? LACUNA_PEER_KV_BF16
                    : layout.format == KvFormat::kLatentF32 ? LACUNA_PEER_KV_F32
                                                            : LACUNA_PEER_KV_FP8_DS_MLA;
  shape.device_kind = args.kv.device.kind == DeviceKind::kCuda ? LACUNA_PEER_CUDA : LACUNA_PEER_CPU;
  shape.device_index = args.kv.device.index;
  return shape;
}

}  // namespace

Result<Peer> Peer::load(const std::string& path) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return invalid_argument("peer: " + std::string(dlerror()));
  }
  std::shared_ptr<void> library(handle, dlclose);
  auto* entry = reinterpret_cast<const LacunaPeer* (*)()>(dlsym(handle, "lacuna_peer"));
  if (entry == nullptr) {
    return invalid_argument("peer: " + path +
                            " has no function lacuna_peer, expected the interface of "
                            "benchmarks/peer.h");
  }
  const LacunaPeer* peer = entry();
  if (peer == nullptr || peer->version != LACUNA_PEER_VERSION || peer->name == nullptr ||
      peer->run == nullptr || peer->supports == nullptr) {
    return invalid_argument("peer: " + path + " is of version " +
                            std::to_string(peer == nullptr ? 0 : peer->version) +
                            " or lacks a name, supports or run, expected version " +
                            std::to_string(LACUNA_PEER_VERSION));
  }
  if (peer->lse_base != LACUNA_PEER_LSE_NATURAL && peer->lse_base != LACUNA_PEER_LSE_BASE_TWO) {
    return invalid_argument("peer: lse_base " + std::to_string(peer->lse_base) +
                            ", expected 0 (natural) or 1 (base two)");
  }
  return Peer(std::move(library), peer);
}

Status Peer::supports(const SparseMlaArgs& args) const {
  const bool plain = !args.q.empty() && args.q.dtype == DType::kBFloat16 &&
                     args.q.is_contiguous() && args.indices.is_contiguous() &&
                     args.index_kind == IndexKind::kRows && args.valid_counts.empty() &&
                     args.sink.empty() && args.max_logits.empty() &&
                     args.out.dtype == DType::kBFloat16 && args.out.is_contiguous() &&
                     args.lse.is_contiguous() && args.kv.num_blocks == 1;
  if (!plain) {
    return unsupported(
        "peer: gets contiguous bf16 queries and outputs, lists of rows and a flat "
        "cache only");
  }
  const LacunaPeerShape shape = shape_of(args);
  const char* refusal = peer_->supports(&shape);
  return refusal == nullptr ? ok_status()
                            : unsupported("peer: " + std::string(name()) + ": " + refusal);
}

int64_t Peer::workspace_bytes(const SparseMlaArgs& args) const {
  const LacunaPeerShape shape = shape_of(args);
  return peer_->workspace_bytes == nullptr ? 0 : peer_->workspace_bytes(&shape);
}

Status Peer::run(const SparseMlaArgs& args, void* workspace, void* stream) const {
  const LacunaPeerShape shape = shape_of(args);
  LacunaPeerCall call = {};
  call.q = args.q.data;
  call.kv = args.kv.data;
  call.indices = args.indices.as<int32_t>();
  call.softmax_scale = static_cast<float>(args.softmax_scale);
  call.out = args.out.data;
  call.lse = args.lse.as<float>();
  call.workspace = workspace;
  call.stream = stream;
  const int code = peer_->run(&shape, &call);
  return code == 0 ? ok_status()
                   : internal_error("peer: " + std::string(name()) + " failed with code " +
                                    std::to_string(code));
}

bool Peer::is_empty_lse(float lse) const {
  const float empty = peer_->empty_row_lse;
  return std::isnan(empty) || lse == empty;
}

float Peer::convert_lse(float lse) const {
  if (lse == peer_->empty_row_lse) {
    return -std::numeric_limits<float>::infinity();
  }
  return peer_->lse_base == LACUNA_PEER_LSE_BASE_TWO ? lse * std::numbers::ln2_v<float> : lse;
}

}  // namespace lacuna::bench
