// Where masked MHA pays: measured thresholds as data. A device that was measured adds its own
// tables; the upstream ones (vLLM, measured on Blackwell with upstream's kernels) are the initial
// data for a device that has a masked lane and was not measured.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace lacuna {

// One step of a list: up to max_seq keys, masked MHA pays from min_query rows on.
struct MaskedThreshold {
  int64_t max_seq = 0;
  int64_t min_query = 0;
};

struct MaskedMhaTable {
  // Key: the family of kernels it was measured on, the shard, and the un-absorbed dimensions.
  std::string_view backend;
  int tensor_parallel = 1;
  int64_t num_heads_total = 0;  // over all ranks
  int64_t d_qk = 0;
  int64_t d_v = 0;
  // Ascending in max_seq.
  std::span<const MaskedThreshold> pure_prefill;
  std::span<const MaskedThreshold> with_context;  // some request has earlier tokens
};

std::span<const MaskedMhaTable> upstream_masked_tables();

// Null when there is no entry: then masked MHA never pays.
const MaskedMhaTable* find_masked_table(std::span<const MaskedMhaTable> tables,
                                        std::string_view backend, int tensor_parallel,
                                        int64_t num_heads_total, int64_t d_qk, int64_t d_v);

// The first entry with seq_len <= max_seq decides; none: no. Lengths are maxima over the prefill
// requests of a step.
bool masked_mha_pays(const MaskedMhaTable& table, int64_t query_len, int64_t seq_len,
                     bool has_context);

}  // namespace lacuna
