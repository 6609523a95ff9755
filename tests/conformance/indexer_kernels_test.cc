// Every kernel of the indexer's operations by every case.
#include "tests/conformance/harness.h"
#include "tests/support/indexer_cases.h"

namespace lacuna::testing {

LACUNA_CONFORMANCE(TranslateIndices, TranslateProblem, TranslateCase, translate_cases())
LACUNA_CONFORMANCE(IndexLogits, IndexLogitsProblem, IndexLogitsCase, index_logits_cases())
LACUNA_CONFORMANCE(TopK, TopKProblem, TopKCase, top_k_cases())
LACUNA_CONFORMANCE(SelectKeys, SelectKeysProblem, SelectKeysCase, select_keys_cases())

}  // namespace lacuna::testing
