// Batch: the rows of one step, made by the scheduler and const below it. Requests come decode
// first; a request's rows lie together, in order of position. Host data; BatchTensors is its image
// on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "lacuna/tensor.h"

namespace lacuna {

struct Batch {
  // One entry a row.
  std::vector<int32_t> token_ids;
  std::vector<int32_t> positions;
  std::vector<int32_t> request_ids;      // row -> index of its request in this batch
  std::vector<int32_t> visible_lengths;  // position + 1: keys that the row may see
  std::vector<int64_t> slot_mapping;
  // Where token_ids is -1, the row of the step before that draws the token; else -1. Empty: the
  // host knows every token.
  std::vector<int32_t> token_sources;
  // One entry a request.
  std::vector<int32_t> query_starts;  // [R + 1], rows
  std::vector<int32_t> seq_lens;      // [R], cached tokens after this step
  int num_decodes = 0;                // leading requests that decode
  // [R, table_width], -1 beyond a request's blocks.
  std::vector<int32_t> block_table;
  int64_t table_width = 0;
  // Rows whose logits are wanted, ascending.
  std::vector<int32_t> logits_rows;

  int64_t num_rows() const { return static_cast<int64_t>(token_ids.size()); }
  int64_t num_requests() const { return static_cast<int64_t>(seq_lens.size()); }
  int64_t num_decode_rows() const { return query_starts.empty() ? 0 : query_starts[num_decodes]; }

  void clear();
};

// What operations take of a batch and of its plan's lists.
struct BatchTensors {
  ConstTensorView token_ids;        // [T] int32
  ConstTensorView positions;        // [T] int32
  ConstTensorView request_ids;      // [T] int32
  ConstTensorView visible_lengths;  // [T] int32
  ConstTensorView slot_mapping;     // [T] int64
  ConstTensorView block_table;      // [R, table_width] int32
  ConstTensorView logits_rows;      // [L] int32
  // The lists of AttentionPlan's MHA pieces.
  ConstTensorView mha_request_ids;
  ConstTensorView mha_starts;
  ConstTensorView mha_lengths;
  ConstTensorView cu_seqlens_q;
  ConstTensorView cu_seqlens_k;
};

struct AttentionPlan;

// The image of a batch and its plan on the CPU, where host data is device data.
BatchTensors host_tensors(const Batch& batch, const AttentionPlan& plan);

}  // namespace lacuna
