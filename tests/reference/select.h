// What the oracles of top_k and select_keys share; defined in top_k.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "tests/reference/reference.h"

namespace lacuna::reference {

struct Candidate {
  int64_t id = 0;
  double score = 0;
};

// The k best by the selection order, or all of them; ascending by id.
std::vector<Candidate> choose(std::vector<Candidate> candidates, int64_t k, bool all);
// Pools become their positions, and the incomplete pool of `length` tokens is added.
void expand_pools(std::vector<Candidate>* chosen, int64_t length, int kpool);
// Writes the list of row t.
void emit(const SelectionOutputs& outputs, int64_t t, const std::vector<Candidate>& chosen,
          Selection* selection);
Selection empty_selection(const SelectionOutputs& outputs, int64_t num_rows, int64_t list_width);
// Fills selection->rows when the outputs ask for rows.
void translate_selection(const SelectionOutputs& outputs, Selection* selection);

}  // namespace lacuna::reference
