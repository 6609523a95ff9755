// Collects the intermediate tensors of an engine's steps, row by row, under the names that oracle
// files use ("hidden.2", "topk.0", "logits"): for comparison with a reference, in tests and in
// `lacuna logits`.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/output_file.h"
#include "lacuna/engine_types.h"
#include "lacuna/status.h"

namespace lacuna {

struct RecordedTensor {
  bool integers = false;      // which of the two lists is used
  std::vector<float> floats;  // row-major [rows, width]
  std::vector<int32_t> ints;
  int64_t width = 0;  // all dimensions after the first, flattened

  int64_t rows() const {
    return width == 0 ? 0 : static_cast<int64_t>(integers ? ints.size() : floats.size()) / width;
  }
};

class Recorder {
 public:
  Tap tap();
  const std::map<std::string, RecordedTensor>& tensors() const { return tensors_; }
  const RecordedTensor* find(const std::string& name) const;
  void clear() { tensors_.clear(); }

 private:
  void add(std::string_view name, int layer, const ConstTensorView& tensor);
  std::map<std::string, RecordedTensor> tensors_;
};

// Writes what was recorded as a safetensors file (F32 and I32, two dimensions).
Status write_safetensors(OutputFile file, const std::map<std::string, RecordedTensor>& tensors);

}  // namespace lacuna
