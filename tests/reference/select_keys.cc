// Oracle of select_keys: index_logits over everything, then the selection.
#include <algorithm>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/reference/select.h"

namespace lacuna::reference {

Selection select_keys(const SelectKeysArgs& args, IndexLogits* logits) {
  const int64_t num_rows = args.q.shape[0];
  // Columns: as many keys (pools) as the longest row sees.
  int64_t num_columns = 0;
  std::vector<int32_t> visible(num_rows);
  for (int64_t t = 0; t < num_rows; ++t) {
    const bool padding = integer(args.request_ids, t) < 0;
    const int64_t length = padding ? 0 : std::max<int64_t>(integer(args.visible_lengths, t), 0);
    visible[t] = static_cast<int32_t>(length / args.kpool);
    num_columns = std::max<int64_t>(num_columns, visible[t]);
  }
  IndexLogitsArgs scoring;
  scoring.q = args.q;
  scoring.head_weights = args.head_weights;
  scoring.keys = args.keys;
  scoring.request_ids = args.request_ids;
  scoring.visible_lengths = view_of(visible.data(), {num_rows});
  scoring.block_table = args.block_table;
  scoring.key_starts = args.key_starts;
  scoring.logits = make_view<void>(nullptr, DType::kFloat32, {num_rows, num_columns});
  const IndexLogits scored = index_logits(scoring);

  SelectionOutputs outputs = args.outputs;
  if (outputs.request_ids.empty()) {
    outputs.request_ids = args.request_ids;
  }
  Selection selection = empty_selection(outputs, num_rows, selection_width(args.k, args.kpool));
  for (int64_t t = 0; t < num_rows; ++t) {
    std::vector<Candidate> candidates;
    for (int64_t j = 0; j < visible[t]; ++j) {
      candidates.push_back({j, scored.logits[t * num_columns + j]});
    }
    const bool padding = integer(args.request_ids, t) < 0;
    const int64_t length = padding ? 0 : std::max<int64_t>(integer(args.visible_lengths, t), 0);
    std::vector<Candidate> chosen =
        choose(std::move(candidates), args.k / args.kpool, length <= args.k);
    expand_pools(&chosen, length, args.kpool);
    emit(outputs, t, chosen, &selection);
  }
  translate_selection(outputs, &selection);
  if (logits != nullptr) {
    *logits = scored;
  }
  return selection;
}

}  // namespace lacuna::reference
