// cuBLASLt, looked for when the first GEMM is asked about: it is half a gigabyte that a program
// without GPU work should neither need nor load.
#pragma once

#include <cublasLt.h>

#include "lacuna/status.h"

namespace lacuna::cuda {

struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulAlgoGetHeuristic) find_algorithms;
  decltype(&cublasLtMatmulDescInit_internal) init_product;
  decltype(&cublasLtMatmulDescSetAttribute) set_product;
  decltype(&cublasLtMatrixLayoutInit_internal) init_layout;
  decltype(&cublasLtMatrixLayoutSetAttribute) set_layout;
  decltype(&cublasLtMatmulPreferenceInit_internal) init_preference;
  decltype(&cublasLtMatmulPreferenceSetAttribute) set_preference;
};

// The same answer for the whole life of the process.
const Result<CublasLt>& load_cublaslt();

// A handle on the device: made once each, never destroyed.
Result<cublasLtHandle_t> cublaslt_handle(int device_idx);

}  // namespace lacuna::cuda
