// Every kernel of the attention operations by every case.
#include "tests/conformance/harness.h"
#include "tests/support/attention_cases.h"

namespace lacuna::testing {

LACUNA_CONFORMANCE(SparseMla, SparseMlaProblem, SparseMlaCase, sparse_mla_cases())
LACUNA_CONFORMANCE(Mha, MhaProblem, MhaCase, mha_cases())
LACUNA_CONFORMANCE(BuildMask, BuildMaskProblem, BuildMaskCase, build_mask_cases())
LACUNA_CONFORMANCE(MergeStates, MergeStatesProblem, MergeStatesCase, merge_states_cases())
LACUNA_CONFORMANCE(RescaleByLse, RescaleByLseProblem, RescaleByLseCase, rescale_by_lse_cases())

}  // namespace lacuna::testing
