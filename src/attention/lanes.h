// The lanes of one layer's attention, from projected queries to head outputs: select (leader
// layers), sparse MQA, dense and masked MHA. Host code over operations; the model gives the tensors
// and the buffers.
#pragma once

#include "attention/batch.h"
#include "attention/index_group.h"
#include "attention/plan.h"
#include "attention/selection.h"
#include "kvcache/paged_kv_cache.h"
#include "ops/op_runner.h"

namespace lacuna {

// What a leader layer's indexer needs to choose keys.
struct IndexerInputs {
  ConstTensorView q;             // [num_list_rows, Hi, dim], roped
  ConstTensorView head_weights;  // [num_list_rows, Hi] f32, all scales folded in
};

// Fills the group's lists for `layer`: scored top-k, or the identity when no row sees more than k
// keys; the rows of the masked lane get their mask. `latent` is the leader's latent cache: members
// of the group have the same blocks and strides, so one translation serves all.
Status select_group_keys(OpRunner& run, const AttentionPlan& plan, const Batch& batch,
                         const BatchTensors& tensors, const IndexerInputs& inputs,
                         const KvCacheView& index_keys, const KvCacheView& latent,
                         const SelectionSource& source, int layer, int64_t k, IndexLists* lists);

struct MqaInputs {
  ConstTensorView q_nope;  // [num_mqa_rows, H, latent], absorbed
  ConstTensorView q_rope;  // [num_mqa_rows, H, rope]
  double softmax_scale = 0;
  TensorView out;  // [num_mqa_rows, H, latent]
};

Status sparse_mqa_lane(OpRunner& run, const AttentionPlan& plan, const KvCacheView& latent,
                       const IndexLists& lists, const MqaInputs& inputs);

struct MhaInputs {
  ConstTensorView q;     // [num_mha_rows, H, nope + rope], roped
  ConstTensorView kv_b;  // [H * (nope + v), latent]: W_UK over W_UV of each head
  ConstTensorView mask;  // [num_mha_rows, words] int32, bit = position; empty: every key counts
  int64_t qk_nope_head_dim = 0;
  int64_t v_head_dim = 0;
  double softmax_scale = 0;
  // Scratch, at least as large as the plan needs.
  TensorView keys;     // [num_mha_keys, latent + rope]: gathered rows
  TensorView keys_up;  // [num_mha_keys, H * (nope + v)]: un-absorbed keys and values
  // Only when there are several pieces: the state so far, and that of the piece at hand.
  TensorView merged_out;  // [num_mha_rows, H, v] f32
  TensorView merged_lse;  // [num_mha_rows, H] f32
  TensorView piece_out;
  TensorView piece_lse;
  TensorView out;  // [num_mha_rows, H, v]
};

// Dense MHA, or masked MHA with a mask: the plan's pieces in order, joined by their LSE.
Status mha_lane(OpRunner& run, const AttentionPlan& plan, const BatchTensors& tensors,
                const KvCacheView& latent, const MhaInputs& inputs);

}  // namespace lacuna
