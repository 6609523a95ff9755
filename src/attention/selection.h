// Where the key lists of a step come from. The indexer is the real source; the others are tools of
// tests and evaluations: lists of an oracle, or deliberate mistakes that show that a score can
// fall.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "lacuna/engine_types.h"
#include "lacuna/tensor.h"

namespace lacuna {

// Overwrites `positions` [T, W] (host memory, -1 tail) and `counts` [T] with lists that are not the
// indexer's: row t of layer `layer` sees visible_lengths[t] keys and gets at most k of them,
// ascending.
void choose_keys(const SelectionSource& source, int layer, int64_t k,
                 std::span<const int32_t> visible_lengths, TensorView positions, TensorView counts);

}  // namespace lacuna
