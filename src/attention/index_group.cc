// Who may share a leader's rows.
#include "attention/index_group.h"

#include <string>

#include "core/check.h"
#include "kvcache/paged_kv_cache.h"

namespace lacuna {
namespace {

Status refuse(const GroupMember& leader, const GroupMember& follower, const std::string& what,
              const std::string& ours, const std::string& theirs) {
  return invalid_argument("index group: layer " + std::to_string(follower.layer) + " has " + what +
                          " " + ours + ", its leader " + std::to_string(leader.layer) + " has " +
                          theirs + "; rows of one are not rows of the other");
}

std::string shape_text(const ConstTensorView& tensor) {
  if (tensor.empty()) {
    return "(none)";
  }
  std::string text = "[";
  for (int d = 0; d < tensor.rank; ++d) {
    text += (d == 0 ? "" : ", ") + std::to_string(tensor.shape[d]);
  }
  return text + "]";
}

// The same memory under the same shape and strides.
Status expect_same_tensor(const GroupMember& leader, const GroupMember& follower,
                          const std::string& what, const ConstTensorView& ours,
                          const ConstTensorView& theirs) {
  if (shape_text(ours) != shape_text(theirs)) {
    return refuse(leader, follower, what, shape_text(ours), shape_text(theirs));
  }
  bool same = ours.data == theirs.data && ours.dtype == theirs.dtype;
  for (int d = 0; d < ours.rank; ++d) {
    same = same && ours.strides[d] == theirs.strides[d];
  }
  if (!same) {
    return invalid_argument("index group: layer " + std::to_string(follower.layer) + " has " +
                            what + " of another address, type or stride than its leader " +
                            std::to_string(leader.layer) +
                            "; rows of one are not rows of the other");
  }
  return ok_status();
}

}  // namespace

Status IndexGroup::join(const GroupMember& follower) {
  const KvCacheView& ours = follower.latent;
  const KvCacheView& theirs = leader_.latent;
  const struct {
    const char* what;
    int64_t ours;
    int64_t theirs;
  } numbers[] = {{"block_size", ours.block_size, theirs.block_size},
                 {"num_blocks", ours.num_blocks, theirs.num_blocks},
                 {"block_stride_rows", ours.block_stride_rows(), theirs.block_stride_rows()}};
  for (const auto& number : numbers) {
    if (number.ours != number.theirs) {
      return refuse(leader_, follower, number.what, std::to_string(number.ours),
                    std::to_string(number.theirs));
    }
  }
  LACUNA_RETURN_IF_ERROR(expect_same_tensor(leader_, follower, "block_table", follower.block_table,
                                            leader_.block_table));
  LACUNA_RETURN_IF_ERROR(expect_same_tensor(leader_, follower, "request_ids", follower.request_ids,
                                            leader_.request_ids));
  layers_.push_back(follower.layer);
  return ok_status();
}

Result<std::vector<IndexGroup>> form_index_groups(const std::vector<bool>& layer_has_indexer,
                                                  const PagedKvCache& cache) {
  std::vector<IndexGroup> groups;
  for (int layer = 0; layer < static_cast<int>(layer_has_indexer.size()); ++layer) {
    const GroupMember member = {.layer = layer, .latent = cache.latent(layer)};
    if (layer_has_indexer[layer]) {
      groups.emplace_back(member);
    } else if (groups.empty()) {
      return invalid_argument("index group: layer " + std::to_string(layer) +
                              " has no indexer and no layer before it has one; the first layer "
                              "must lead");
    } else {
      LACUNA_RETURN_IF_ERROR(groups.back().join(member));
    }
  }
  return groups;
}

}  // namespace lacuna
