// Oracle of top_k: sorts all candidates of a row by (score descending, id ascending).
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/reference/select.h"

namespace lacuna::reference {

std::vector<Candidate> choose(std::vector<Candidate> candidates, int64_t k, bool all) {
  if (!all) {
    std::erase_if(candidates, [](const Candidate& c) { return std::isnan(c.score); });
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
    candidates.resize(std::min<size_t>(candidates.size(), k));
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  return candidates;
}

void expand_pools(std::vector<Candidate>* chosen, int64_t length, int kpool) {
  if (kpool == 1) {
    return;
  }
  std::vector<Candidate> positions;
  for (const Candidate& pool : *chosen) {
    for (int i = 0; i < kpool; ++i) {
      positions.push_back({pool.id * kpool + i, pool.score});
    }
  }
  for (int64_t p = length / kpool * kpool; p < length; ++p) {
    positions.push_back({p, std::numeric_limits<double>::quiet_NaN()});
  }
  *chosen = std::move(positions);
}

void emit(const SelectionOutputs& outputs, int64_t t, const std::vector<Candidate>& chosen,
          Selection* selection) {
  const int64_t width = selection->width;
  for (size_t c = 0; c < chosen.size(); ++c) {
    selection->indices[t * width + c] = static_cast<int32_t>(chosen[c].id);
    selection->scores[t * width + c] = chosen[c].score;
    if (!outputs.mask.empty() && chosen[c].id < 32 * outputs.mask.shape[1]) {
      selection->mask[t * outputs.mask.strides[0] + (chosen[c].id >> 5)] |=
          static_cast<int32_t>(1u << (chosen[c].id & 31));
    }
  }
  selection->counts[t] = static_cast<int32_t>(chosen.size());
}

Selection empty_selection(const SelectionOutputs& outputs, int64_t num_rows, int64_t list_width) {
  Selection selection;
  for (const TensorView* list : {&outputs.indices, &outputs.rows, &outputs.scores}) {
    selection.width = std::max(selection.width, list->empty() ? 0 : list->shape[1]);
  }
  selection.width = std::max(selection.width, list_width);
  selection.indices.assign(num_rows * selection.width, -1);
  selection.scores.assign(num_rows * selection.width, -std::numeric_limits<double>::infinity());
  selection.counts.assign(num_rows, 0);
  if (!outputs.mask.empty()) {
    selection.mask.assign(num_rows * outputs.mask.strides[0], 0);
  }
  return selection;
}

void translate_selection(const SelectionOutputs& outputs, Selection* selection) {
  if (outputs.rows.empty()) {
    return;
  }
  const int64_t num_rows = static_cast<int64_t>(selection->counts.size());
  TranslateIndicesArgs args;
  args.indices = view_of(selection->indices.data(), {num_rows, selection->width});
  args.request_ids = outputs.request_ids;
  args.block_table = outputs.block_table;
  args.num_blocks = outputs.num_blocks;
  args.block_size = outputs.block_size;
  args.block_stride_rows = outputs.block_stride_rows;
  selection->rows = translate_indices(args).rows;
}

Selection top_k(const TopKArgs& args) {
  const int64_t num_rows = args.logits.shape[0];
  const int64_t num_columns = args.logits.shape[1];
  Selection selection =
      empty_selection(args.outputs, num_rows, selection_width(args.k, args.kpool));
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t start = integer_or(args.row_starts, t, 0);
    const int64_t columns = std::max<int64_t>(num_columns - start, 0);
    // The incomplete pool at the end has no column.
    const int64_t length = std::clamp<int64_t>(integer_or(args.lengths, t, columns * args.kpool), 0,
                                               columns * args.kpool + args.kpool - 1);
    std::vector<Candidate> candidates;
    for (int64_t j = 0; j < length / args.kpool; ++j) {
      const int64_t id = args.candidate_ids.empty() ? j : integer(args.candidate_ids, t, start + j);
      if (id >= 0) {
        candidates.push_back({id, element(args.logits, t, start + j)});
      }
    }
    std::vector<Candidate> chosen =
        choose(std::move(candidates), args.k / args.kpool, length <= args.k);
    expand_pools(&chosen, length, args.kpool);
    emit(args.outputs, t, chosen, &selection);
  }
  translate_selection(args.outputs, &selection);
  return selection;
}

}  // namespace lacuna::reference
