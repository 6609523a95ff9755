// Wrong arguments of the engine's own operations: one at a time, each named by the error.
#include "tests/conformance/arguments.h"
#include "tests/support/model_cases.h"

namespace lacuna::testing {
namespace {

constexpr unsigned kAll = 7;
constexpr unsigned kNone = 0;

template <class Problem, class Case, class Change>
void fuzz_case(const Case& test_case, Change&& change) {
  for (const TestDevice& where : devices_of(conformance_context())) {
    Problem problem(test_case, where);
    problem.buffers.upload();  // the fuzz begins with a valid call
    ArgumentFuzz<typename Problem::Args> fuzz(&problem.buffers, problem.args(Side::kDevice));
    fuzz.common();
    change(fuzz);
  }
}

TEST(EmbeddingArguments, WrongOnesAreNamed) {
  fuzz_case<EmbeddingProblem>(EmbeddingCase{}, [](auto& fuzz) {
    fuzz.tensor({"ids", kAll, false}, LACUNA_FIELD(ids));
    fuzz.tensor({"table", kNone, true}, LACUNA_FIELD(table));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
  });
}

TEST(RmsNormArguments, WrongOnesAreNamed) {
  fuzz_case<RmsNormProblem>(NormCase{.add = true}, [](auto& fuzz) {
    fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
    fuzz.tensor({"add", kAll, true}, LACUNA_FIELD(add));
    fuzz.tensor({"weight", kAll, true}, LACUNA_FIELD(weight));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
  });
}

TEST(LayerNormArguments, WrongOnesAreNamed) {
  fuzz_case<LayerNormProblem>(NormCase{}, [](auto& fuzz) {
    fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
    fuzz.tensor({"weight", kAll, true}, LACUNA_FIELD(weight));
    fuzz.tensor({"bias", kAll, true}, LACUNA_FIELD(bias));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
    fuzz.expect_error("bias of another dtype", "bias",
                      [](auto* args) { args->bias.dtype = DType::kFloat32; });
  });
}

TEST(SiluMulArguments, WrongOnesAreNamed) {
  fuzz_case<SiluMulProblem>(SiluMulCase{}, [](auto& fuzz) {
    fuzz.tensor({"gate", kAll, true}, LACUNA_FIELD(gate));
    fuzz.tensor({"up", kAll, true}, LACUNA_FIELD(up));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
  });
}

TEST(AddArguments, WrongOnesAreNamed) {
  fuzz_case<AddProblem>(AddCase{}, [](auto& fuzz) {
    fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
  });
}

TEST(RopeArguments, WrongOnesAreNamed) {
  fuzz_case<RopeProblem>(RopeCase{.width = 70}, [](auto& fuzz) {
    fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
    fuzz.tensor({"positions", kAll, false}, LACUNA_FIELD(positions));
    fuzz.tensor({"cos_table", 1, true}, LACUNA_FIELD(cos_table));
    fuzz.tensor({"sin_table", kAll, true}, LACUNA_FIELD(sin_table));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
    for (int64_t offset : {int64_t{-1}, int64_t{7}, int64_t{71}, INT64_MAX}) {
      fuzz.expect_error("offset " + std::to_string(offset), "cos_table",
                        [offset](auto* args) { args->offset = offset; });
    }
  });
}

TEST(MoeRouteArguments, WrongOnesAreNamed) {
  fuzz_case<MoeRouteProblem>(
      MoeRouteCase{.experts = 16, .num_groups = 4, .groups_kept = 2}, [](auto& fuzz) {
        fuzz.tensor({"logits", kAll, true}, LACUNA_FIELD(logits));
        fuzz.tensor({"bias", kAll, true}, LACUNA_FIELD(bias));
        fuzz.tensor({"ids", kAll, true}, LACUNA_FIELD(ids));
        fuzz.tensor({"weights", kAll, true}, LACUNA_FIELD(weights));
        for (int groups : {-1, 0, 3, 16}) {
          fuzz.expect_error(std::to_string(groups) + " groups", "num_groups",
                            [groups](auto* args) { args->num_groups = groups; });
        }
        for (int kept : {-1, 0, 5}) {
          fuzz.expect_error(std::to_string(kept) + " groups kept", "num_groups",
                            [kept](auto* args) { args->groups_kept = kept; });
        }
      });
}

TEST(AdjustLogitsArguments, WrongOnesAreNamed) {
  fuzz_case<AdjustLogitsProblem>(AdjustLogitsCase{}, [](auto& fuzz) {
    fuzz.tensor({"logits", kNone, true}, LACUNA_FIELD(logits));
    fuzz.tensor({"rows", kAll, false}, LACUNA_FIELD(rows));
    fuzz.tensor({"ids", kAll, false}, LACUNA_FIELD(ids));
    fuzz.tensor({"repetition", kAll, false}, LACUNA_FIELD(repetition));
    fuzz.tensor({"add", kAll, false}, LACUNA_FIELD(add));
    fuzz.tensor({"saved", kAll, false}, LACUNA_FIELD(saved));
  });
}

TEST(PickTokensArguments, WrongOnesAreNamed) {
  fuzz_case<PickTokensProblem>(PickTokensCase{}, [](auto& fuzz) {
    fuzz.tensor({"given", kAll, false}, LACUNA_FIELD(given));
    fuzz.tensor({"sources", kAll, false}, LACUNA_FIELD(sources));
    fuzz.tensor({"drawn", kNone, false}, LACUNA_FIELD(drawn));
    fuzz.tensor({"out", kAll, false}, LACUNA_FIELD(out));
  });
}

TEST(TokenLogprobsArguments, WrongOnesAreNamed) {
  fuzz_case<TokenLogprobsProblem>(TokenLogprobsCase{}, [](auto& fuzz) {
    fuzz.tensor({"logits", 1, true}, LACUNA_FIELD(logits));
    fuzz.tensor({"ids", kAll, false}, LACUNA_FIELD(ids));
    fuzz.tensor({"out", kAll, false}, LACUNA_FIELD(out));
  });
}

TEST(SampleArguments, WrongOnesAreNamed) {
  fuzz_case<SampleProblem>(SampleCase{.rows = {{}, {}, {}}}, [](auto& fuzz) {
    fuzz.tensor({"logits", 1, true}, LACUNA_FIELD(logits));
    fuzz.tensor({"temperature", kAll, false}, LACUNA_FIELD(temperature));
    fuzz.tensor({"top_k", kAll, false}, LACUNA_FIELD(top_k));
    fuzz.tensor({"top_p", kAll, false}, LACUNA_FIELD(top_p));
    fuzz.tensor({"min_p", kAll, false}, LACUNA_FIELD(min_p));
    fuzz.tensor({"uniform", kAll, false}, LACUNA_FIELD(uniform));
    fuzz.tensor({"ids", kAll, false}, LACUNA_FIELD(ids));
    fuzz.tensor({"logprobs", kAll, false}, LACUNA_FIELD(logprobs));
    fuzz.expect_error("no vocabulary", "logits", [](auto* args) { args->logits.shape[1] = 0; });
  });
}

TEST(LinearArguments, WrongOnesAreNamed) {
  fuzz_case<LinearProblem>(LinearCase{.rows = 3, .columns = 8, .depth = 16}, [](auto& fuzz) {
    fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
    fuzz.tensor({"weight", kAll, true}, LACUNA_FIELD(weight));
    fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
  });
}

TEST(HeadLinearArguments, WrongOnesAreNamed) {
  fuzz_case<HeadLinearProblem>(
      HeadLinearCase{.rows = 3, .columns = 8, .depth = 16}, [](auto& fuzz) {
        fuzz.tensor({"x", kAll, true}, LACUNA_FIELD(x));
        fuzz.tensor({"weight", kAll, false}, LACUNA_FIELD(weight));
        fuzz.tensor({"out", kAll, true}, LACUNA_FIELD(out));
        fuzz.expect_error("weight without a contiguous dimension", "weight",
                          [](auto* args) { args->weight.strides[2] = 2; });
      });
}

}  // namespace
}  // namespace lacuna::testing
