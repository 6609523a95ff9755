// Fills core's Runtime with the CUDA runtime's calls. A null stream is the legacy default stream.
#include "backends/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <string>

#include "backends/cuda/cuda_status.h"

namespace lacuna::cuda {
namespace {

std::atomic<bool> sync_forbidden{false};
std::atomic<int64_t> num_allocations{0};
std::atomic<int64_t> num_synchronizations{0};
std::atomic<int64_t> num_graph_launches{0};

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t as_event(void* event) { return static_cast<cudaEvent_t>(event); }

Status check_sync(const char* what) {
  if (sync_forbidden.load(std::memory_order_relaxed)) {
    return internal_error(std::string(what) + ": refused, the step must not make the host wait");
  }
  return ok_status();
}

Result<void*> allocate(int device_idx, int64_t bytes) {
  if (bytes < 0) {
    return invalid_argument("allocate: " + std::to_string(bytes) + " bytes");
  }
  if (bytes == 0) {
    return static_cast<void*>(nullptr);
  }
  LACUNA_RETURN_IF_ERROR(check_sync("allocate"));
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device_idx), "allocate"));
  void* data = nullptr;
  const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(bytes));
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    return out_of_memory("allocate: " + std::to_string(bytes) + " bytes on cuda:" +
                         std::to_string(device_idx) + ", of which " + std::to_string(free_bytes) +
                         " of " + std::to_string(total_bytes) + " are free");
  }
  LACUNA_RETURN_IF_ERROR(cuda_status(error, "allocate"));
  return data;
}

Result<void*> allocate_pinned(int64_t bytes) {
  if (bytes < 0) {
    return invalid_argument("allocate_pinned: " + std::to_string(bytes) + " bytes");
  }
  if (bytes == 0) {
    return static_cast<void*>(nullptr);
  }
  LACUNA_RETURN_IF_ERROR(check_sync("allocate_pinned"));
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  void* data = nullptr;
  LACUNA_RETURN_IF_ERROR(cuda_status(
      cudaHostAlloc(&data, static_cast<size_t>(bytes), cudaHostAllocPortable), "allocate_pinned"));
  return data;
}

bool is_pageable(const void* data) {
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    cudaGetLastError();
    return true;
  }
  return attributes.type == cudaMemoryTypeUnregistered;
}

Status copy(void* to, const void* from, int64_t bytes, void* stream) {
  if (bytes <= 0) {
    return ok_status();
  }
  if (sync_forbidden.load(std::memory_order_relaxed) && (is_pageable(to) || is_pageable(from))) {
    return check_sync("copy of pageable memory");
  }
  return cuda_status(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, as_stream(stream)),
      "copy");
}

Status synchronize(int device_idx, void* stream) {
  LACUNA_RETURN_IF_ERROR(check_sync("synchronize"));
  num_synchronizations.fetch_add(1, std::memory_order_relaxed);
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device_idx), "synchronize"));
  return cuda_status(cudaStreamSynchronize(as_stream(stream)), "synchronize");
}

Result<void*> create_stream(int device_idx) {
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device_idx), "create_stream"));
  cudaStream_t stream = nullptr;
  LACUNA_RETURN_IF_ERROR(
      cuda_status(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create_stream"));
  return static_cast<void*>(stream);
}

Result<void*> create_event(int device_idx) {
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device_idx), "create_event"));
  cudaEvent_t event = nullptr;
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaEventCreate(&event), "create_event"));
  return static_cast<void*>(event);
}

Result<double> elapsed_ms(void* from, void* to) {
  float ms = 0;
  LACUNA_RETURN_IF_ERROR(
      cuda_status(cudaEventElapsedTime(&ms, as_event(from), as_event(to)), "elapsed_ms"));
  return static_cast<double>(ms);
}

Status begin_capture(void* stream) {
  // Other threads of the process may allocate while this one captures.
  return cuda_status(cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeThreadLocal),
                     "begin_capture");
}

Result<void*> end_capture(void* stream) {
  cudaGraph_t graph = nullptr;
  LACUNA_RETURN_IF_ERROR(
      cuda_status(cudaStreamEndCapture(as_stream(stream), &graph), "end_capture"));
  cudaGraphExec_t exec = nullptr;
  Status status = cuda_status(cudaGraphInstantiate(&exec, graph, 0), "end_capture");
  cudaGraphDestroy(graph);
  if (status.ok()) {
    // The upload now, so that the first launch costs no more than the others.
    status = cuda_status(cudaGraphUpload(exec, as_stream(stream)), "end_capture");
  }
  LACUNA_RETURN_IF_ERROR(status);
  return static_cast<void*>(exec);
}

Status launch_graph(void* graph, void* stream) {
  num_graph_launches.fetch_add(1, std::memory_order_relaxed);
  return cuda_status(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream)),
                     "launch_graph");
}

}  // namespace

const Runtime kRuntime = {
    .name = "cuda",
    .allocate = allocate,
    .free =
        [](int device_idx, void* data) {
          cudaSetDevice(device_idx);
          cudaFree(data);
        },
    .allocate_pinned = allocate_pinned,
    .free_pinned = [](void* data) { cudaFreeHost(data); },
    .register_host =
        [](void* data, int64_t bytes) {
          return cuda_status(
              cudaHostRegister(data, static_cast<size_t>(bytes), cudaHostRegisterPortable),
              "register_host");
        },
    .unregister_host = [](void* data) { cudaHostUnregister(data); },
    .copy = copy,
    .fill_bytes =
        [](void* to, int value, int64_t bytes, void* stream) {
          return bytes <= 0 ? ok_status()
                            : cuda_status(cudaMemsetAsync(to, value, static_cast<size_t>(bytes),
                                                          as_stream(stream)),
                                          "fill_bytes");
        },
    .create_stream = create_stream,
    .destroy_stream = [](void* stream) { cudaStreamDestroy(as_stream(stream)); },
    .synchronize = synchronize,
    .create_event = create_event,
    .destroy_event = [](void* event) { cudaEventDestroy(as_event(event)); },
    .record_event =
        [](void* event, void* stream) {
          return cuda_status(cudaEventRecord(as_event(event), as_stream(stream)), "record_event");
        },
    .wait_event =
        [](void* stream, void* event) {
          return cuda_status(cudaStreamWaitEvent(as_stream(stream), as_event(event), 0),
                             "wait_event");
        },
    .await_event =
        [](void* event) {
          return cuda_status(cudaEventSynchronize(as_event(event)), "await_event");
        },
    .elapsed_ms = elapsed_ms,
    .begin_capture = begin_capture,
    .end_capture = end_capture,
    .launch_graph = launch_graph,
    .destroy_graph = [](void* graph) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); },
    .forbid_sync =
        [](bool forbidden) { sync_forbidden.store(forbidden, std::memory_order_relaxed); },
    .counters =
        [] {
          return RuntimeCounters{
              .allocations = num_allocations.load(std::memory_order_relaxed),
              .synchronizations = num_synchronizations.load(std::memory_order_relaxed),
              .graph_launches = num_graph_launches.load(std::memory_order_relaxed)};
        },
};

}  // namespace lacuna::cuda
