// See gemm.h. A few rows: dot products or axpys with a tile of rows and columns in registers. Many
// rows: operands that sgemm can not take as they are go through scratch.
#include "backends/cpu/gemm.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <string>

#include "backends/cpu/ranges.h"
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE float scalar_float(const T& from) {
  return to_float(from);
}

// c[i, j] = a row i . b row j for kM rows of a and kN of b: one vector accumulator each, so that
// the order of a sum does not depend on the tile.
template <int kM, int kN, class B, class C>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT a, int64_t a_stride, const B* HWY_RESTRICT b,
                         int64_t b_stride, int64_t k, C* HWY_RESTRICT c, int64_t c_stride) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> acc[kM][kN];
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      acc[i][j] = hn::Zero(d);
    }
  }
  int64_t p = 0;
  for (; p + lanes <= k; p += lanes) {
    hn::Vec<decltype(d)> av[kM];
    for (int i = 0; i < kM; ++i) {
      av[i] = hn::LoadU(d, a + i * a_stride + p);
    }
    for (int j = 0; j < kN; ++j) {
      const auto bv = load_float(d, b + j * b_stride + p);
      for (int i = 0; i < kM; ++i) {
        acc[i][j] = hn::MulAdd(av[i], bv, acc[i][j]);
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      float sum = hn::GetLane(hn::SumOfLanes(d, acc[i][j]));
      for (int64_t q = p; q < k; ++q) {
        sum += a[i * a_stride + q] * scalar_float(b[j * b_stride + q]);
      }
      store_scalar(sum, c + i * c_stride + j);
    }
  }
}

// All columns for kM rows.
template <int kM, class B, class C>
void dot_rows(const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t n, int64_t k,
              C* c, int64_t c_stride) {
  // Accumulators that the register file holds, and enough of them to hide the latency of FMA.
  constexpr int kWide = HWY_TARGET <= HWY_AVX3 ? (kM == 1 ? 8 : 16 / kM) : 8 / kM;
  int64_t j = 0;
  for (; j + kWide <= n; j += kWide) {
    dot_tile<kM, kWide>(a, a_stride, b + j * b_stride, b_stride, k, c + j, c_stride);
  }
  for (; j < n; ++j) {
    dot_tile<kM, 1>(a, a_stride, b + j * b_stride, b_stride, k, c + j, c_stride);
  }
}

// c[i, 0 .. kV * lanes) = sum over p of a[i, p] b[p, ...].
template <int kM, int kV, class B, class C>
HWY_INLINE void axpy_tile(const float* HWY_RESTRICT a, int64_t a_stride, const B* HWY_RESTRICT b,
                          int64_t b_stride, int64_t k, C* HWY_RESTRICT c, int64_t c_stride) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  hn::Vec<decltype(d)> acc[kM][kV];
  for (int i = 0; i < kM; ++i) {
    for (int v = 0; v < kV; ++v) {
      acc[i][v] = hn::Zero(d);
    }
  }
  for (int64_t p = 0; p < k; ++p) {
    hn::Vec<decltype(d)> bv[kV];
    for (int v = 0; v < kV; ++v) {
      bv[v] = load_float(d, b + p * b_stride + v * lanes);
    }
    for (int i = 0; i < kM; ++i) {
      const auto av = hn::Set(d, a[i * a_stride + p]);
      for (int v = 0; v < kV; ++v) {
        acc[i][v] = hn::MulAdd(av, bv[v], acc[i][v]);
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    for (int v = 0; v < kV; ++v) {
      store_float(acc[i][v], d, c + i * c_stride + v * lanes);
    }
  }
}

template <int kM, class B, class C>
void axpy_rows(const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t n, int64_t k,
               C* c, int64_t c_stride) {
  const hn::ScalableTag<float> d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kWide = HWY_TARGET <= HWY_AVX3 ? (kM == 1 ? 8 : 16 / kM) : 8 / kM;
  int64_t j = 0;
  for (; j + kWide * lanes <= n; j += kWide * lanes) {
    axpy_tile<kM, kWide>(a, a_stride, b + j, b_stride, k, c + j, c_stride);
  }
  for (; j + lanes <= n; j += lanes) {
    axpy_tile<kM, 1>(a, a_stride, b + j, b_stride, k, c + j, c_stride);
  }
  for (; j < n; ++j) {
    for (int i = 0; i < kM; ++i) {
      float sum = 0;
      for (int64_t p = 0; p < k; ++p) {
        sum += a[i * a_stride + p] * scalar_float(b[p * b_stride + j]);
      }
      store_scalar(sum, c + i * c_stride + j);
    }
  }
}

template <int kM, class B, class C>
void few_rows_block(const Product& product, const float* a, int64_t a_stride, int64_t row) {
  C* c = static_cast<C*>(product.c) + row * product.c_stride;
  const B* b = static_cast<const B*>(product.b);
  if (product.b_columns_contiguous) {
    axpy_rows<kM>(a, a_stride, b, product.b_stride, product.n, product.k, c, product.c_stride);
  } else {
    dot_rows<kM>(a, a_stride, b, product.b_stride, product.n, product.k, c, product.c_stride);
  }
}

template <class B, class C>
void few_rows_typed(const Product& product, const float* a, int64_t a_stride) {
  int64_t row = 0;
  for (; row + 4 <= product.m; row += 4) {
    few_rows_block<4, B, C>(product, a + row * a_stride, a_stride, row);
  }
  for (; row + 2 <= product.m; row += 2) {
    few_rows_block<2, B, C>(product, a + row * a_stride, a_stride, row);
  }
  if (row < product.m) {
    few_rows_block<1, B, C>(product, a + row * a_stride, a_stride, row);
  }
}

// `a` is f32 here, whatever product.a is.
void few_rows(const Product& product, const float* a, int64_t a_stride) {
  const bool bf16_c = product.c_dtype == DType::kBFloat16;
  if (product.b_dtype == DType::kBFloat16) {
    bf16_c ? few_rows_typed<Bf16, Bf16>(product, a, a_stride)
           : few_rows_typed<Bf16, float>(product, a, a_stride);
  } else {
    bf16_c ? few_rows_typed<float, Bf16>(product, a, a_stride)
           : few_rows_typed<float, float>(product, a, a_stride);
  }
}

void widen_matrix(const void* from, DType dtype, int64_t stride, int64_t rows, int64_t width,
                  float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    if (dtype == DType::kBFloat16) {
      widen(static_cast<const Bf16*>(from) + r * stride, width, to + r * width);
    } else {
      widen(static_cast<const float*>(from) + r * stride, width, to + r * width);
    }
  }
}

#if HWY_TARGET != HWY_SCALAR
// to[i, j] = from[j, i] for four rows and four columns.
template <class T>
HWY_INLINE void transpose_4x4(const T* HWY_RESTRICT from, int64_t stride, float* HWY_RESTRICT to,
                              int64_t to_stride) {
  const hn::Full128<float> d;
  const auto a = load_float(d, from);
  const auto b = load_float(d, from + stride);
  const auto c = load_float(d, from + 2 * stride);
  const auto e = load_float(d, from + 3 * stride);
  const auto ac_low = hn::InterleaveLower(d, a, c);  // a0 c0 a1 c1
  const auto be_low = hn::InterleaveLower(d, b, e);
  const auto ac_high = hn::InterleaveUpper(d, a, c);
  const auto be_high = hn::InterleaveUpper(d, b, e);
  hn::StoreU(hn::InterleaveLower(d, ac_low, be_low), d, to);  // a0 b0 c0 e0
  hn::StoreU(hn::InterleaveUpper(d, ac_low, be_low), d, to + to_stride);
  hn::StoreU(hn::InterleaveLower(d, ac_high, be_high), d, to + 2 * to_stride);
  hn::StoreU(hn::InterleaveUpper(d, ac_high, be_high), d, to + 3 * to_stride);
}
#endif

// to[i, j] = from[j, i], widened; `to` is [width, rows], contiguous. oneDNN's own transposition
// costs up to ten times as much when rows are a power of two apart. Eight rows at a time: more
// would compete for the ways of one set of the cache then.
template <class T>
void transpose_typed(const T* from, int64_t stride, int64_t rows, int64_t width, float* to) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  for (; r + 8 <= rows; r += 8) {
    const T* row = from + r * stride;
    int64_t i = 0;
    for (; i + 4 <= width; i += 4) {
      transpose_4x4(row + i, stride, to + i * rows + r, rows);
      transpose_4x4(row + 4 * stride + i, stride, to + i * rows + r + 4, rows);
    }
    for (; i < width; ++i) {
      for (int64_t j = 0; j < 8; ++j) {
        to[i * rows + r + j] = to_float(row[j * stride + i]);
      }
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      to[i * rows + r] = to_float(from[r * stride + i]);
    }
  }
}

void transpose_matrix(const void* from, DType dtype, int64_t stride, int64_t rows, int64_t width,
                      float* to) {
  if (dtype == DType::kBFloat16) {
    transpose_typed(static_cast<const Bf16*>(from), stride, rows, width, to);
  } else {
    transpose_typed(static_cast<const float*>(from), stride, rows, width, to);
  }
}

void narrow_matrix(const float* from, int64_t rows, int64_t width, void* to, DType dtype,
                   int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    if (dtype == DType::kBFloat16) {
      narrow(from + r * width, width, static_cast<Bf16*>(to) + r * stride);
    } else {
      narrow(from + r * width, width, static_cast<float*>(to) + r * stride);
    }
  }
}

}  // namespace lacuna::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lacuna::cpu {
namespace {

HWY_EXPORT(few_rows);
HWY_EXPORT(widen_matrix);
HWY_EXPORT(transpose_matrix);
HWY_EXPORT(narrow_matrix);

// Threads come from our pool, so each call of oneDNN must stay on the thread that makes it.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOpenMpThread() { omp_set_num_threads(before_); }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  int before_;
};

struct Operand {
  const float* data;
  int64_t stride;
};

// f32 rows that do not overlap (BLAS wants stride >= width) are used as they are; the rest goes to
// scratch, from where it takes.
Operand as_blas_operand(const void* data, DType dtype, int64_t stride, int64_t rows, int64_t width,
                        float** scratch) {
  if (dtype == DType::kFloat32 && (stride >= width || rows <= 1)) {
    return {static_cast<const float*>(data), std::max(stride, width)};
  }
  float* to = *scratch;
  *scratch += round_up(rows * width, 16);
  HWY_DYNAMIC_DISPATCH(widen_matrix)(data, dtype, stride, rows, width, to);
  return {to, width};
}

}  // namespace

int64_t product_scratch(int64_t m, int64_t n, int64_t k) {
  return round_up(m * k, 16) + round_up(n * k, 16) + round_up(m * n, 16);
}

void widen_rows(const void* from, DType dtype, int64_t stride, int64_t rows, int64_t width,
                float* to) {
  HWY_DYNAMIC_DISPATCH(widen_matrix)(from, dtype, stride, rows, width, to);
}

void multiply_few_rows(const Product& product, float* scratch) {
  if (product.a_dtype == DType::kFloat32) {
    HWY_DYNAMIC_DISPATCH(few_rows)
    (product, static_cast<const float*>(product.a), product.a_stride);
    return;
  }
  HWY_DYNAMIC_DISPATCH(widen_matrix)
  (product.a, product.a_dtype, product.a_stride, product.m, product.k, scratch);
  HWY_DYNAMIC_DISPATCH(few_rows)(product, scratch, product.k);
}

Status multiply(const Product& product, float* scratch) {
  if (product.m > kFewRows) {
    return multiply_many_rows(product, scratch);
  }
  multiply_few_rows(product, scratch);
  return ok_status();
}

Status multiply_many_rows(const Product& product, float* scratch) {
  const int64_t m = product.m;
  const int64_t n = product.n;
  const int64_t k = product.k;
  if (m == 0 || n == 0) {
    return ok_status();
  }
  if (k == 0) {
    multiply_few_rows(product, scratch);  // writes zeros
    return ok_status();
  }
  const Operand a = as_blas_operand(product.a, product.a_dtype, product.a_stride, m, k, &scratch);
  Operand b;  // [k, n]
  if (product.b_columns_contiguous) {
    b = as_blas_operand(product.b, product.b_dtype, product.b_stride, k, n, &scratch);
  } else {
    HWY_DYNAMIC_DISPATCH(transpose_matrix)
    (product.b, product.b_dtype, product.b_stride, n, k, scratch);
    b = {scratch, n};
    scratch += round_up(n * k, 16);
  }
  const bool direct = product.c_dtype == DType::kFloat32 && (product.c_stride >= n || m == 1);
  float* c = direct ? static_cast<float*>(product.c) : scratch;
  const int64_t c_stride = direct ? std::max(product.c_stride, n) : n;
  dnnl_status_t status;
  {
    const OneOpenMpThread one_thread;
    status =
        dnnl_sgemm('N', 'N', m, n, k, 1.0f, a.data, a.stride, b.data, b.stride, 0.0f, c, c_stride);
  }
  if (status != dnnl_success) {
    return internal_error("oneDNN: sgemm of [" + std::to_string(m) + ", " + std::to_string(k) +
                          "] by [" + std::to_string(k) + ", " + std::to_string(n) +
                          "] failed with status " + std::to_string(static_cast<int>(status)));
  }
  if (!direct) {
    HWY_DYNAMIC_DISPATCH(narrow_matrix)(c, m, n, product.c, product.c_dtype, product.c_stride);
  }
  return ok_status();
}

}  // namespace lacuna::cpu
#endif  // HWY_ONCE
