// Every kernel of the engine's own operations by every case; the matrix products apart.
#include "tests/conformance/harness.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {

LACUNA_CONFORMANCE(Embedding, EmbeddingProblem, EmbeddingCase, embedding_cases())
LACUNA_CONFORMANCE(RmsNorm, RmsNormProblem, NormCase, rms_norm_cases())
LACUNA_CONFORMANCE(LayerNorm, LayerNormProblem, NormCase, layer_norm_cases())
LACUNA_CONFORMANCE(SiluMul, SiluMulProblem, SiluMulCase, silu_mul_cases())
LACUNA_CONFORMANCE(Add, AddProblem, AddCase, add_cases())
LACUNA_CONFORMANCE(Rope, RopeProblem, RopeCase, rope_cases())
LACUNA_CONFORMANCE(MoeRoute, MoeRouteProblem, MoeRouteCase, moe_route_cases())
LACUNA_CONFORMANCE(AdjustLogits, AdjustLogitsProblem, AdjustLogitsCase, adjust_logits_cases())
LACUNA_CONFORMANCE(TokenLogprobs, TokenLogprobsProblem, TokenLogprobsCase, token_logprobs_cases())
LACUNA_CONFORMANCE(PickTokens, PickTokensProblem, PickTokensCase, pick_tokens_cases())
LACUNA_CONFORMANCE(Sample, SampleProblem, SampleCase, sample_cases())

}  // namespace lacuna::testing
