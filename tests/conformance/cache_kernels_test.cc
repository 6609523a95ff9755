// Every kernel of the cache operations by every case.
#include "tests/conformance/harness.h"
#include "tests/support/cache_cases.h"

namespace lacuna::testing {

LACUNA_CONFORMANCE(AppendKv, AppendKvProblem, AppendCase, append_kv_cases())
LACUNA_CONFORMANCE(AppendIndexKeys, AppendIndexKeysProblem, AppendCase, append_index_keys_cases())
LACUNA_CONFORMANCE(GatherKv, GatherKvProblem, GatherKvCase, gather_kv_cases())

}  // namespace lacuna::testing
