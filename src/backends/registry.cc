// The explicit, ordered list of backends; builds a Context.
#include "backends/cpu/backend.h"
#include "core/check.h"
#include "ops/backend.h"
#include "ops/dispatch.h"
#ifdef LACUNA_HAVE_CUDA
#include "backends/cuda/backend.h"
#include "backends/sm90/backend.h"
#endif

namespace lacuna {

Result<Context> Context::create(const ContextOptions& options) {
  if (options.num_threads < 0 || options.num_threads > 1024) {
    return invalid_argument("num_threads: " + std::to_string(options.num_threads) +
                            ", expected 0 (one per core) to 1024");
  }
  auto state = std::make_shared<ContextState>();
  state->thread_pool = std::make_unique<ThreadPool>(options.num_threads);
  state->devices.push_back(cpu::device_info(state->thread_pool.get()));
#ifdef LACUNA_HAVE_CUDA
  if (options.use_cuda) {
    for (DeviceInfo& device : cuda::devices(&state->cuda_status)) {
      state->devices.push_back(std::move(device));
    }
  } else {
    state->cuda_status = "the GPUs were not asked for (use_cuda)";
  }
  // Listed even where no GPU can run them, so that one can be told what there is.
  state->backends.push_back(&sm90::kBackend);
  state->backends.push_back(&cuda::kBackend);
#else
  state->cuda_status = "this build has no CUDA code";
#endif
  state->backends.push_back(&cpu::kBackend);
  if (!options.tuning_file.empty()) {
    LACUNA_ASSIGN_OR_RETURN(Tuning tuning, read_tuning(options.tuning_file));
    LACUNA_RETURN_IF_ERROR(give_tuning(std::move(tuning), options.tuning_file, *state));
  }
  return Context(std::move(state));
}

}  // namespace lacuna
