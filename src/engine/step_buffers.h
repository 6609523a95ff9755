// What goes to the device and comes back in a step. Every list of a step is written into one pinned
// buffer and copied at once; ids and log-probabilities come back the same way. The layout follows
// from the sizes of the lists alone, so that a graph captured for some sizes finds its inputs where
// it found them. There are two sides of pinned memory, used in turns: while a step is under way the
// next one is written. On the CPU host memory is device memory and nothing is copied.
#pragma once

#include <array>
#include <memory>

#include "attention/plan.h"
#include "core/device_handles.h"
#include "core/device_memory.h"
#include "core/workspace.h"
#include "engine/sampler.h"

namespace lacuna {

struct StepSizes {
  int64_t rows = 0;
  int64_t requests = 0;
  int64_t table_width = 0;
  int64_t draw_rows = 0;  // rows of logits
  int64_t mha_entries = 0;
  int64_t mha_bounds = 0;  // of cumulative lengths
  int64_t adjustments = 0;
};

// Sizes of a step's lists; edits of logits are those of the draw's first group.
StepSizes step_sizes(const Batch& batch, const AttentionPlan& plan, int64_t draw_rows,
                     int64_t adjustments);

struct StepTensors {
  BatchTensors batch;        // its token_ids are those that the host knows
  ConstTensorView sources;   // [T]: rows of the draw before
  TensorView picked_tokens;  // [T]: where known and drawn tokens come together
  DrawInputs draw;
};

class StepBuffers {
 public:
  static constexpr int kSides = 2;

  static Result<std::unique_ptr<StepBuffers>> create(const Runtime* runtime, Device device,
                                                     void* stream, const StepSizes& capacity);

  // Views of the device's buffers for lists of these sizes, which must fit the capacity.
  StepTensors tensors(const StepSizes& sizes) const;
  // For `rows` rows from `first_row` on and this many edits.
  DrawOutputs outputs(int64_t first_row, int64_t rows, int64_t adjustments) const;
  // The ids of the last draw.
  ConstTensorView drawn() const;
  int64_t adjustments_max() const { return capacity_.adjustments; }
  int64_t bytes() const;

  // Writes the lists into a side and sends them. `group`: the edits that go along.
  Status send(int side, const Batch& batch, const AttentionPlan& plan, const DrawLists& draw,
              const DrawGroup& group);
  // Sends the edits of another group in their place, when those before have left the host.
  Status send_adjustments(int side, const StepSizes& sizes, const DrawLists& draw,
                          const DrawGroup& group);
  // Sends the draw's results back; with the alternatives if there are some.
  Status fetch(int side, bool with_top);
  // Waits for them. In host memory.
  Result<DrawOutputs> await(int side);

 private:
  struct Lists {
    int64_t* slot_mapping;
    int32_t *token_ids, *sources, *positions, *request_ids, *visible_lengths, *logits_rows;
    int32_t *mha_request_ids, *mha_starts, *mha_lengths, *cu_seqlens_q, *cu_seqlens_k;
    float *temperature, *top_p, *min_p, *uniform;
    int32_t *top_k, *forced, *forced_sources;
    int32_t* block_table;
    int32_t *adjust_rows, *adjust_ids;
    float *adjust_repetition, *adjust_add;
  };
  struct Results {
    int32_t* ids;
    float* logprobs;
    float* top_first;
    int32_t* top_ids;
    float* top_scores;
  };
  struct Side {
    PinnedMemory inputs;
    PinnedMemory results;
    EventHandle sent;     // the inputs have left the host
    EventHandle fetched;  // the results are there
  };

  StepBuffers(const Runtime* runtime, Device device, void* stream, const StepSizes& capacity)
      : runtime_(runtime), device_(device), stream_(stream), capacity_(capacity) {}
  static Lists carve_lists(Workspace& arena, const StepSizes& sizes);
  Results carve_results(Workspace& arena) const;
  bool is_host() const { return device_.kind == DeviceKind::kCpu; }
  void* device_inputs() const;
  void* device_results() const;
  static void write_adjustments(const Lists& lists, const DrawLists& draw, const DrawGroup& group);

  const Runtime* runtime_;
  Device device_;
  void* stream_;
  StepSizes capacity_;
  int64_t inputs_bytes_ = 0;
  int64_t results_bytes_ = 0;
  int64_t results_bytes_without_top_ = 0;
  std::array<Side, kSides> sides_;
  DeviceMemory inputs_;
  DeviceMemory results_;
  DeviceMemory scratch_;  // picked tokens, saved logits
};

}  // namespace lacuna
