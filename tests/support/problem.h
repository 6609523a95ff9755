// What the problem of every operation has beside its tensors, its arguments and its verdict.
#pragma once

#include "tests/support/buffer_set.h"

namespace lacuna::testing {

template <class ArgsType, class CaseType>
class BasicProblem {
 public:
  using Args = ArgsType;

  BufferSet buffers;

 protected:
  BasicProblem(const CaseType& test_case, const TestDevice& where)
      : buffers(where), case_(test_case) {}

  CaseType case_;
};

}  // namespace lacuna::testing
