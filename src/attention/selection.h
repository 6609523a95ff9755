// Where the key lists of a step come from. The indexer is the real source; the others are tools of
// tests and evaluations: lists of an oracle, or deliberate mistakes that show that a score can
// fall.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "core/device_handles.h"
#include "core/device_memory.h"
#include "lacuna/engine_types.h"
#include "lacuna/tensor.h"

namespace lacuna {

// Overwrites `positions` [T, W] (host memory, -1 tail) and `counts` [T] with lists that are not the
// indexer's: row t of layer `layer` sees visible_lengths[t] keys and gets at most k of them,
// ascending.
void choose_keys(const SelectionSource& source, int layer, int64_t k,
                 std::span<const int32_t> visible_lengths, TensorView positions, TensorView counts);

// Makes such lists on the host for a device with memory of its own. Each call waits until the lists
// of the call before have left the host.
class ListWriter {
 public:
  static Result<std::unique_ptr<ListWriter>> create(const Runtime* runtime, Device device,
                                                    void* stream, int64_t rows_max, int64_t width);
  // As choose_keys, into contiguous device tensors, ordered on the stream.
  Status write(const SelectionSource& source, int layer, int64_t k,
               std::span<const int32_t> visible_lengths, TensorView positions, TensorView counts);

 private:
  ListWriter() = default;

  const Runtime* runtime_ = nullptr;
  void* stream_ = nullptr;
  PinnedMemory positions_;
  PinnedMemory counts_;
  EventHandle copied_;
};

}  // namespace lacuna
