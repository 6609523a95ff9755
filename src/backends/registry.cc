// The explicit, ordered list of backends; builds a Context.
#include "backends/cpu/backend.h"
#include "ops/backend.h"

namespace lacuna {

Result<Context> Context::create(const ContextOptions& options) {
  if (options.num_threads < 0 || options.num_threads > 1024) {
    return invalid_argument("num_threads: " + std::to_string(options.num_threads) +
                            ", expected 0 (one per core) to 1024");
  }
  auto state = std::make_shared<ContextState>();
  state->thread_pool = std::make_unique<ThreadPool>(options.num_threads);
  state->devices.push_back(cpu::device_info(state->thread_pool.get()));
  state->backends = {&cpu::kBackend};
  return Context(std::move(state));
}

}  // namespace lacuna
