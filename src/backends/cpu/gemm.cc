// See gemm.h. A few rows: dot products or axpys with a tile of rows and columns in registers. Many
// rows: operands that sgemm can not take as they are go through scratch.
#include "backends/cpu/gemm.h"

#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "backends/cpu/ranges.h"
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/gemm.cc"
#include "hwy/foreach_target.h"
// foreach_target.h must come first.
#include "backends/cpu/pairs-inl.h"
#include "backends/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lacuna::cpu::HWY_NAMESPACE {

template <class T>
HWY_INLINE float scalar_float(const T& from) {
  return to_float(from);
}

// Rows of a that are multiplied together. With the columns of a tile they are the accumulators that
// the register file holds: enough of them to hide the latency of FMA, and many rows to a column,
// because each column has to be widened.
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3;
constexpr int kBlockRows = kManyRegisters ? 8 : 4;
static_assert(kRowBlock % kBlockRows == 0);

// Columns that all blocks of rows go over before the next ones: half of L1.
constexpr int64_t kPanelBytes = int64_t{16} << 10;
// How far ahead columns are asked for.
constexpr int64_t kPrefetchBytes = 4096;

constexpr int tile_columns(int rows) { return rows == 1 ? 8 : (kManyRegisters ? 16 : 8) / rows; }
constexpr int tile_pairs(int rows) { return rows == 1 ? 4 : (kManyRegisters ? 8 : 4) / rows; }

// Calls body.operator()<kM>(row) over blocks of rows. Their cut depends on m alone.
template <class Body>
HWY_INLINE void for_row_blocks(int64_t m, Body&& body) {
  int64_t row = 0;
  for (; row + kBlockRows <= m; row += kBlockRows) {
    body.template operator()<kBlockRows>(row);
  }
  if constexpr (kBlockRows > 4) {
    if (row + 4 <= m) {
      body.template operator()<4>(row);
      row += 4;
    }
  }
  if (row + 2 <= m) {
    body.template operator()<2>(row);
    row += 2;
  }
  if (row < m) {
    body.template operator()<1>(row);
  }
}

// Rows of a as dot_tile reads them: for each pair of vectors, the first ones of all kM rows and
// then the second ones, in the order of load_pair(const B*); then what is no whole pair, row after
// row. kM * k floats.
template <int kM, class A, class B>
void pack_rows(const A* HWY_RESTRICT a, int64_t a_stride, int64_t k, float* HWY_RESTRICT to) {
  const FloatTag d;
  int64_t p = 0;
  for (; p + kPair <= k; p += kPair) {
    for (int i = 0; i < kM; ++i) {
      FloatVec first, second;
      if constexpr (std::is_same_v<A, B>) {
        load_pair(a + i * a_stride + p, first, second);
      } else if constexpr (std::is_same_v<B, Bf16>) {
        hn::LoadInterleaved2(d, a + i * a_stride + p, first, second);
      } else {
        first = load_float(d, a + i * a_stride + p);
        second = load_float(d, a + i * a_stride + p + kLanes);
      }
      hn::StoreU(first, d, to + i * kLanes);
      hn::StoreU(second, d, to + (kM + i) * kLanes);
    }
    to += kM * kPair;
  }
  for (int i = 0; i < kM; ++i) {
    for (int64_t q = p; q < k; ++q) {
      *to++ = to_float(a[i * a_stride + q]);
    }
  }
}

template <class A, class B>
void pack_all_rows(const A* a, int64_t a_stride, int64_t m, int64_t k, float* to) {
  for_row_blocks(m, [&]<int kM>(int64_t row) {
    pack_rows<kM, A, B>(a + row * a_stride, a_stride, k, to + row * k);
  });
}

// Writes kN sums of each of kM rows.
template <int kM, int kN>
HWY_INLINE void store_tile(const float* HWY_RESTRICT sums, float* HWY_RESTRICT c,
                           int64_t c_stride) {
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
    std::memcpy(c + i * c_stride, sums + i * kN, kN * sizeof(float));
  }
}

template <int kM, int kN>
HWY_INLINE void store_tile(const float* HWY_RESTRICT sums, Bf16* HWY_RESTRICT c, int64_t c_stride) {
  Bf16 rounded[kM * kN];
  narrow(sums, kM * kN, rounded);
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
    std::memcpy(c + i * c_stride, rounded + i * kN, kN * sizeof(Bf16));
  }
}

// c[i, j] = a row i . b row j for kM packed rows of a and kN of b: one vector accumulator each, so
// that the order of a sum does not depend on the tile.
template <int kM, int kN, class B, class C>
HWY_INLINE void dot_tile(const float* HWY_RESTRICT a, const B* HWY_RESTRICT b, int64_t b_stride,
                         int64_t k, C* HWY_RESTRICT c, int64_t c_stride) {
  const FloatTag d;
  FloatVec acc[kM][kN];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) {
      acc[i][j] = hn::Zero(d);
    }
  }
  int64_t p = 0;
  for (; p + kPair <= k; p += kPair) {
    FloatVec first[kN], second[kN];
#pragma GCC unroll 8
    for (int j = 0; j < kN; ++j) {
      load_pair(b + j * b_stride + p, first[j], second[j]);
      __builtin_prefetch(reinterpret_cast<const char*>(b + j * b_stride + p) + kPrefetchBytes);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const FloatVec av = hn::LoadU(d, a + i * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) {
        acc[i][j] = hn::MulAdd(av, first[j], acc[i][j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const FloatVec av = hn::LoadU(d, a + (kM + i) * kLanes);
#pragma GCC unroll 8
      for (int j = 0; j < kN; ++j) {
        acc[i][j] = hn::MulAdd(av, second[j], acc[i][j]);
      }
    }
    a += kM * kPair;
  }
  // Four sums at once; the last group may be short.
  constexpr int kSums = kM * kN;
  float sums[(kSums + 3) / 4 * 4];
  const auto accumulator = [&](int n)
                               HWY_ATTR { return n < kSums ? acc[n / kN][n % kN] : hn::Zero(d); };
#pragma GCC unroll 16
  for (int n = 0; n < kSums; n += 4) {
    store_sums(accumulator(n), accumulator(n + 1), accumulator(n + 2), accumulator(n + 3), 1.0f,
               sums + n);
  }
  const int64_t rest = k - p;
  if (rest == 0) {
    store_tile<kM, kN>(sums, c, c_stride);
    return;
  }
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      float sum = sums[i * kN + j];
      for (int64_t q = 0; q < rest; ++q) {
        sum += a[i * rest + q] * scalar_float(b[j * b_stride + p + q]);
      }
      store_scalar(sum, c + i * c_stride + j);
    }
  }
}

// All columns for kM packed rows.
template <int kM, class B, class C>
void dot_rows(const float* a, const B* b, int64_t b_stride, int64_t n, int64_t k, C* c,
              int64_t c_stride) {
  constexpr int kWide = tile_columns(kM);
  int64_t j = 0;
  for (; j + kWide <= n; j += kWide) {
    dot_tile<kM, kWide>(a, b + j * b_stride, b_stride, k, c + j, c_stride);
  }
  for (; j < n; ++j) {
    dot_tile<kM, 1>(a, b + j * b_stride, b_stride, k, c + j, c_stride);
  }
}

// c[i, 0 .. kP * kPair) = sum over p of a[i, p] b[p, ...].
template <int kM, int kP, class B, class C>
HWY_INLINE void axpy_tile(const float* HWY_RESTRICT a, int64_t a_stride, const B* HWY_RESTRICT b,
                          int64_t b_stride, int64_t k, C* HWY_RESTRICT c, int64_t c_stride) {
  const FloatTag d;
  FloatVec acc[kM][2 * kP];
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kP; ++v) {
      acc[i][v] = hn::Zero(d);
    }
  }
  for (int64_t p = 0; p < k; ++p) {
    FloatVec bv[2 * kP];
#pragma GCC unroll 4
    for (int v = 0; v < kP; ++v) {
      load_pair(b + p * b_stride + v * kPair, bv[2 * v], bv[2 * v + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kM; ++i) {
      const FloatVec av = hn::Set(d, a[i * a_stride + p]);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * kP; ++v) {
        acc[i][v] = hn::MulAdd(av, bv[v], acc[i][v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kM; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kP; ++v) {
      store_pair<std::is_same_v<B, Bf16>>(acc[i][2 * v], acc[i][2 * v + 1],
                                          c + i * c_stride + v * kPair);
    }
  }
}

template <int kM, class B, class C>
void axpy_rows(const float* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t n, int64_t k,
               C* c, int64_t c_stride) {
  constexpr int kWide = tile_pairs(kM);
  int64_t j = 0;
  for (; j + kWide * kPair <= n; j += kWide * kPair) {
    axpy_tile<kM, kWide>(a, a_stride, b + j, b_stride, k, c + j, c_stride);
  }
  for (; j + kPair <= n; j += kPair) {
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

template <class B, class C>
void few_rows_typed(const Product& product, const float* a) {
  const B* b = static_cast<const B*>(product.b);
  C* c = static_cast<C*>(product.c);
  const int64_t n = product.n;
  const int64_t k = product.k;
  if (product.b_columns_contiguous) {
    for_row_blocks(product.m, [&]<int kM>(int64_t row) {
      axpy_rows<kM>(a + row * k, k, b, product.b_stride, n, k, c + row * product.c_stride,
                    product.c_stride);
    });
    return;
  }
  // The next block of rows finds the columns in L1.
  const int64_t column_bytes = std::max<int64_t>(1, k * static_cast<int64_t>(sizeof(B)));
  const int64_t step = std::max<int64_t>(8, kPanelBytes / column_bytes / 8 * 8);
  for (int64_t column = 0; column < n; column += step) {
    const int64_t count = std::min(step, n - column);
    for_row_blocks(product.m, [&]<int kM>(int64_t row) {
      dot_rows<kM>(a + row * k, b + column * product.b_stride, product.b_stride, count, k,
                   c + row * product.c_stride + column, product.c_stride);
    });
  }
}

// `a` is what pack_few_rows made of product.a.
void few_rows(const Product& product, const float* a) {
  const bool bf16_c = product.c_dtype == DType::kBFloat16;
  if (product.b_dtype == DType::kBFloat16) {
    bf16_c ? few_rows_typed<Bf16, Bf16>(product, a) : few_rows_typed<Bf16, float>(product, a);
  } else {
    bf16_c ? few_rows_typed<float, Bf16>(product, a) : few_rows_typed<float, float>(product, a);
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

// The rows of product.a as few_rows takes them.
void pack_few_rows(const Product& product, float* to) {
  const int64_t m = product.m;
  const int64_t k = product.k;
  const bool bf16_b = product.b_dtype == DType::kBFloat16;
  if (product.b_columns_contiguous) {
    widen_matrix(product.a, product.a_dtype, product.a_stride, m, k, to);
  } else if (product.a_dtype == DType::kFloat32) {
    const float* a = static_cast<const float*>(product.a);
    bf16_b ? pack_all_rows<float, Bf16>(a, product.a_stride, m, k, to)
           : pack_all_rows<float, float>(a, product.a_stride, m, k, to);
  } else {
    const Bf16* a = static_cast<const Bf16*>(product.a);
    bf16_b ? pack_all_rows<Bf16, Bf16>(a, product.a_stride, m, k, to)
           : pack_all_rows<Bf16, float>(a, product.a_stride, m, k, to);
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
HWY_EXPORT(pack_few_rows);
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

void pack_rows_of(const Product& product, float* to) {
  HWY_DYNAMIC_DISPATCH(pack_few_rows)(product, to);
}

void multiply_packed_rows(const Product& product, const float* packed) {
  HWY_DYNAMIC_DISPATCH(few_rows)(product, packed);
}

void multiply_few_rows(const Product& product, float* scratch) {
  pack_rows_of(product, scratch);
  multiply_packed_rows(product, scratch);
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
