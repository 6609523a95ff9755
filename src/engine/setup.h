// What an engine is made of, from its options: device, cache layouts, number of blocks, routing.
#pragma once

#include "attention/mode.h"
#include "kvcache/paged_kv_cache.h"
#include "lacuna/engine.h"
#include "model/config.h"
#include "ops/backend.h"
#include "ops/op_runner.h"

namespace lacuna {

// Options with every automatic number filled in; refused when one makes no sense.
Result<EngineOptions> resolve_options(const EngineOptions& options, const ModelConfig& config);

// The device that the options name.
Result<const DeviceInfo*> choose_device(const ContextState& state, const EngineOptions& options);
const Runtime* runtime_of(const ContextState& state, DeviceKind kind);
// "AMD EPYC, AVX3, 2 threads"
std::string describe_device(const DeviceInfo& device);

Result<KvLayout> latent_layout(const ModelConfig& config, const EngineOptions& options);
Result<KvLayout> index_layout(const ModelConfig& config, const EngineOptions& options);
// `weight_bytes`: what the device's memory holds besides the cache.
Result<int64_t> count_blocks(const EngineOptions& options, const PagedKvCacheOptions& cache,
                             const DeviceInfo& device, int64_t weight_bytes);
// What routes a step, and with it the sizes of the MHA lanes' buffers. `rows_max`: of a step.
Result<RoutingLimits> routing_limits(const ModelConfig& config, const EngineOptions& options,
                                     int64_t rows_max);
// A forced kernel must exist on the device, and under the name of its operation.
Status check_forced_kernels(const ContextState& state, DeviceKind kind,
                            const ForcedKernels& kernels);

}  // namespace lacuna
