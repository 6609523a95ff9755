// Every kernel of the matrix products by every case.
#include "tests/conformance/harness.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {

LACUNA_CONFORMANCE(Linear, LinearProblem, LinearCase, linear_cases())
LACUNA_CONFORMANCE(HeadLinear, HeadLinearProblem, HeadLinearCase, head_linear_cases())
LACUNA_CONFORMANCE(MoeExperts, MoeExpertsProblem, MoeExpertsCase, moe_experts_cases())

}  // namespace lacuna::testing
