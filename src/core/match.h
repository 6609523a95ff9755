// Symbolic shape checks that read like the documentation: a Dim binds to the first extent it meets
// and must agree with every later one.
//
//   Dim t("T"), h("H"), d("d_qk");
//   LACUNA_RETURN_IF_ERROR(match(q, "q").shape({&t, &h, &d}).dtypes({kBf16, kF32}).status());
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "lacuna/kv_cache.h"
#include "lacuna/status.h"
#include "lacuna/tensor.h"

namespace lacuna {

// "[2, 3, 4]"
std::string shape_string(const ConstTensorView& tensor);

class Dim {
 public:
  explicit Dim(const char* name) : name_(name) {}
  Dim(const char* name, int64_t value, const char* source)
      : name_(name), value_(value), source_(source) {}
  bool bound() const { return value_ >= 0; }
  int64_t value() const { return value_; }

 private:
  friend class Match;
  const char* name_;
  int64_t value_ = -1;
  std::string source_;  // the argument that bound it
};

class Match {
 public:
  Match(const ConstTensorView& tensor, const char* name) : tensor_(tensor), name_(name) {}

  Match& shape(std::initializer_list<Dim*> dims);
  Match& dtypes(std::initializer_list<DType> allowed);
  Match& last_contiguous();
  Match& contiguous();
  Match& device(Device device);
  // Data may be null only when the tensor has no elements.
  const Status& status();

 private:
  void fail(std::string message);
  const ConstTensorView& tensor_;
  const char* name_;
  Status status_;
};

inline Match match(const ConstTensorView& tensor, const char* name) { return {tensor, name}; }

// A cache view whose numbers fit together; `name` is the argument's.
Status check_cache(const KvCacheView& kv, const char* name);

// Row ids are int32: a cache must not have more than 2^31 rows, gaps between its blocks counted.
Status check_row_ids(int64_t num_blocks, int64_t block_size, int64_t block_stride_rows,
                     const char* name);

// A bit mask [rows, words] of int32 whose row stride is a whole number of 16-byte loads.
Status check_bit_mask(const ConstTensorView& mask, const char* name, Dim& rows);

// [rows] int32, which may be absent unless it is required.
Status check_row_ints(const ConstTensorView& tensor, const char* name, Dim& rows, bool required);

// The device all present tensors share; an error names the one that differs.
struct NamedTensor {
  const ConstTensorView& tensor;
  const char* name;
};
Status check_devices(Device device, std::initializer_list<NamedTensor> tensors);

}  // namespace lacuna
