// Index groups: a leader layer, whose indexer chooses the keys and whose list is translated to
// cache rows once, and the follower layers that reuse both.
#pragma once

#include <vector>

#include "lacuna/kv_cache.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

class ListWriter;
class PagedKvCache;

// All that the translation of a layer's list depends on, besides the list.
struct GroupMember {
  int layer = -1;
  KvCacheView latent;
  // Known from the first step on; absent while caches are laid out.
  ConstTensorView block_table;
  ConstTensorView request_ids;
};

class IndexGroup {
 public:
  explicit IndexGroup(const GroupMember& leader) : leader_(leader), layers_{leader.layer} {}

  // Refused, with what differs, unless the leader's rows are the layer's rows too.
  Status join(const GroupMember& follower);

  int leader() const { return leader_.layer; }
  const std::vector<int>& layers() const { return layers_; }  // the leader first

 private:
  GroupMember leader_;
  std::vector<int> layers_;
};

// A layer with an indexer leads; those after it that have none follow. The first must lead.
Result<std::vector<IndexGroup>> form_index_groups(const std::vector<bool>& layer_has_indexer,
                                                  const PagedKvCache& cache);

// What a group shares within a step: filled by the leader.
struct IndexLists {
  int leader = -1;       // layer that filled them; -1: none yet in this step
  TensorView positions;  // [num_list_rows, W] int32, ascending, -1 tail
  TensorView counts;     // [num_list_rows] int32
  TensorView rows;       // [num_mqa_rows, W] int32: the lists as rows of the latent caches
  TensorView mask;       // [rows of the masked lane, words] int32; empty without that lane
  // How lists that are not the indexer's reach the device; null: they are written in place.
  ListWriter* writer = nullptr;
};

}  // namespace lacuna
