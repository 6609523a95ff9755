// Log-probabilities of a prompt's own tokens, on demand. The host waits for each chunk: what is
// recorded is the host's.
#pragma once

#include <memory>

#include "core/device_memory.h"
#include "engine/sampler.h"
#include "model/deepseek_v32.h"

namespace lacuna {

class PromptScorer {
 public:
  // `rows_max`: of one chunk.
  static Result<std::unique_ptr<PromptScorer>> create(const Runtime* runtime, Device device,
                                                      void* stream, int64_t rows_max);

  // For rows [first_row, + count) of the last forward pass, whose successors are `next`: appends
  // log-probabilities and, if `num_top` > 0, the most likely tokens. `logits` [rows_max, V] is
  // scratch; `tap` sees it.
  Status score(OpRunner& run, DeepseekV32& model, TensorView logits, int64_t first_row,
               std::span<const int32_t> next, int32_t num_top, const Tap& tap,
               RequestRecord* record);
  // Asks for the workspace that a chunk of as many rows as `logits` has could need.
  Status measure(OpRunner& run, TensorView logits) const;
  int64_t num_waits() const { return num_waits_; }

 private:
  struct Lists {
    int32_t *rows, *next;
    float* logprobs;
    float* top_first;
    int32_t* top_ids;
    float* top_scores;
  };
  PromptScorer(const Runtime* runtime, Device device, void* stream, int64_t rows_max)
      : runtime_(runtime), device_(device), stream_(stream), rows_max_(rows_max) {}
  Lists carve(Workspace& arena) const;
  Lists device_lists() const;
  Status rate(OpRunner& run, TensorView logits, const Lists& lists, int32_t num_top) const;

  const Runtime* runtime_;
  Device device_;
  void* stream_;
  int64_t rows_max_;
  PinnedMemory host_;
  DeviceMemory memory_;  // none on the CPU
  int64_t inputs_bytes_ = 0;
  int64_t num_waits_ = 0;
};

}  // namespace lacuna
