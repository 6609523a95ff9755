// Exact selection from rows of scores, as top_k and select_keys share it.
#pragma once

#include <cstdint>

#include "backends/cuda/device/addressing.h"
#include "backends/cuda/device/strided.h"
#include "core/workspace.h"
#include "ops/backend.h"

namespace lacuna::cuda {

// SelectionOutputs on the device; an absent one has a null pointer.
struct SelectOutputs {
  Strided2<int32_t> indices;
  Strided2<int32_t> rows;
  Strided2<float> scores;
  int64_t indices_width = 0;
  int64_t rows_width = 0;
  int64_t scores_width = 0;
  Strided1<int32_t> counts;
  Strided1<const int32_t> request_ids;
  PositionsToRows positions_to_rows;
  Strided2<int32_t> mask;
  int64_t mask_words = 0;   // that hold bits
  int64_t mask_stride = 0;  // words to zero: readers take masks in vectors
};

struct SelectParams {
  const void* logits = nullptr;  // [T, C]
  DType dtype = DType::kFloat32;
  int64_t logits_row_stride = 0;
  int64_t num_rows = 0;
  int64_t num_columns = 0;
  Strided1<const int32_t> row_starts;
  Strided1<const int32_t> lengths;      // tokens
  Strided1<const int32_t> padding_ids;  // rows with a negative one select nothing
  int64_t length_max = 0;               // tokens
  Strided2<const int32_t> candidate_ids;
  int64_t k = 0;
  int32_t kpool = 1;
  SelectOutputs outputs;
};

SelectOutputs select_outputs(const SelectionOutputs& outputs);

// Takes the scratch that `num_rows` rows need; grows with rows, columns and k.
struct SelectScratch {
  uint32_t* split_rows = nullptr;  // state of rows that several blocks share
  uint64_t* sorted = nullptr;  // candidates by id, when a block's shared memory does not hold them
};
SelectScratch take_select_scratch(Workspace& workspace, int64_t num_rows, int64_t num_columns,
                                  int64_t k, bool candidate_ids, const DeviceInfo& device);

// Writes every output of every row.
Status select_rows(const SelectParams& params, const SelectScratch& scratch,
                   const DeviceInfo& device, const Launch& where);

}  // namespace lacuna::cuda
