// See cublaslt.h.
#include "backends/cuda/model/cublaslt.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "backends/cuda/cuda_status.h"

namespace lacuna::cuda {
namespace {

// The version whose header this file was compiled with: descriptors are laid out by it.
#define LACUNA_TEXT_OF(x) #x
#define LACUNA_TEXT(x) LACUNA_TEXT_OF(x)
constexpr const char* kLibrary = "libcublasLt.so." LACUNA_TEXT(CUBLAS_VER_MAJOR);

Result<CublasLt> open() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    return unsupported(std::string(kLibrary) + " was not found (" +
                       (reason == nullptr ? "no reason given" : reason) +
                       "); the CUDA toolkit or LD_LIBRARY_PATH would provide it");
  }
  CublasLt functions = {};
  std::string missing;
  const auto find = [&](auto* function, const char* name) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) {
      missing = name;
    }
  };
  find(&functions.create, "cublasLtCreate");
  find(&functions.matmul, "cublasLtMatmul");
  find(&functions.find_algorithms, "cublasLtMatmulAlgoGetHeuristic");
  find(&functions.init_product, "cublasLtMatmulDescInit_internal");
  find(&functions.set_product, "cublasLtMatmulDescSetAttribute");
  find(&functions.init_layout, "cublasLtMatrixLayoutInit_internal");
  find(&functions.set_layout, "cublasLtMatrixLayoutSetAttribute");
  find(&functions.init_preference, "cublasLtMatmulPreferenceInit_internal");
  find(&functions.set_preference, "cublasLtMatmulPreferenceSetAttribute");
  if (!missing.empty()) {
    return unsupported(std::string(kLibrary) + " has no function " + missing);
  }
  return functions;
}

}  // namespace

const Result<CublasLt>& load_cublaslt() {
  static const Result<CublasLt> functions = open();
  return functions;
}

Result<cublasLtHandle_t> cublaslt_handle(int device_idx) {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  const Result<CublasLt>& lt = load_cublaslt();
  if (!lt.ok()) {
    return lt.status();
  }
  const std::lock_guard lock(mutex);
  const auto found = handles.find(device_idx);
  if (found != handles.end()) {
    return found->second;
  }
  LACUNA_RETURN_IF_ERROR(cuda_status(cudaSetDevice(device_idx), "cublasLtCreate"));
  cublasLtHandle_t handle = nullptr;
  const cublasStatus_t status = lt->create(&handle);
  if (status != CUBLAS_STATUS_SUCCESS) {
    return internal_error("cublasLtCreate: cuBLAS status " + std::to_string(status));
  }
  handles.emplace(device_idx, handle);
  return handle;
}

}  // namespace lacuna::cuda
