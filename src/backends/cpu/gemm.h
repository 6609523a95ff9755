// Matrix products of one thread: SIMD kernels for a few rows, where weights are read once and
// memory is the limit, and oneDNN's sgemm (wrapped here and nowhere else) for many. bf16 operands
// are widened exactly; sums are f32.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "lacuna/dtype.h"
#include "lacuna/status.h"

namespace lacuna::cpu {

// c[m, n] = a[m, k] b: b is [n, k] with k contiguous (b_columns_contiguous false: c = a b^T) or
// [k, n] with n contiguous. Strides between rows count elements. A bit of c depends on its own row
// of a and column of b alone in multiply_few_rows, not in multiply_many_rows.
struct Product {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const void* a = nullptr;  // f32 or bf16
  DType a_dtype = DType::kFloat32;
  int64_t a_stride = 0;
  const void* b = nullptr;  // f32 or bf16
  DType b_dtype = DType::kFloat32;
  int64_t b_stride = 0;
  bool b_columns_contiguous = false;
  void* c = nullptr;  // f32 or bf16
  DType c_dtype = DType::kFloat32;
  int64_t c_stride = 0;
};

// Up to here the SIMD kernels beat a GEMM, which has to transpose the weights first (measured on
// AVX-512 and on AVX2, K 256 to 4096).
inline constexpr int64_t kFewRows = 32;

// Floats of scratch that either function needs for a product of at most this size.
int64_t product_scratch(int64_t m, int64_t n, int64_t k);

// Meant for m <= kFewRows, right for any m.
void multiply_few_rows(const Product& product, float* scratch);

// multiply_few_rows in two steps, for callers who multiply the same rows by several pieces of b:
// copies the rows of a into m * k floats, widened and in the order in which the kernels read them.
// Pieces of kRowBlock rows, from the first one, may be packed apart.
inline constexpr int64_t kRowBlock = 8;
void pack_rows_of(const Product& product, float* to);
void multiply_packed_rows(const Product& product, const float* packed);

// Meant for more rows. Fails only if oneDNN does.
Status multiply_many_rows(const Product& product, float* scratch);

// One of the two, by m.
Status multiply(const Product& product, float* scratch);

// to[i] = widened from[i]; rows of `width` elements into a contiguous matrix.
void widen_rows(const void* from, DType dtype, int64_t stride, int64_t rows, int64_t width,
                float* to);

// Keeps the first failure of a parallel loop.
class FirstFailure {
 public:
  void note(Status status) {
    if (!status.ok() && !failed_.exchange(true)) {
      status_ = std::move(status);
    }
  }
  Status take() { return std::move(status_); }

 private:
  std::atomic<bool> failed_{false};
  Status status_;
};

}  // namespace lacuna::cpu
