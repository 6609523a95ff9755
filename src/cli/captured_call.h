// A sparse_mla call that an engine made, kept on the host, and its replays on kernels: how far each
// is from the oracle, and whether it gives the engine's own bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ops/backend.h"
#include "tests/reference/reference.h"

namespace lacuna::cli {

struct Replay {
  std::string refusal;       // not empty: the kernel does not run this call, and says why
  double max_abs = 0;        // of the output's errors
  double rel_frobenius = 0;  // norm of the output's error over the norm of the oracle's output
  double lse_error = 0;      // largest; rows without keys must have -inf
  bool bit_equal = false;    // to the engine's output
  std::string error;         // not empty: beyond the conformance suite's bounds; the first that is
};

// The largest error so far; NaN once there was one.
void grow(double* largest, double error);

class CapturedCall {
 public:
  // Copies inputs and output from the device of `runtime`, which has run the call, and asks the
  // oracle.
  static Result<CapturedCall> copy(const SparseMlaArgs& args, const Runtime* runtime);

  int64_t num_rows() const { return args_.out.shape[0]; }
  int64_t num_keys() const;  // that the rows attend over, summed

  // Runs a kernel on copies of the inputs, and waits for it.
  Result<Replay> replay(const Context& context, const DeviceInfo& device, const Runtime* runtime,
                        const std::string& kernel) const;

 private:
  CapturedCall() = default;

  SparseMlaArgs args_;  // views of the images
  std::vector<std::vector<char>> images_;
  reference::AttentionResult expected_;
};

}  // namespace lacuna::cli
