// The messages of shape checks.
#include "core/match.h"

#include <algorithm>

#include <cstdint>

#include "core/check.h"

namespace lacuna {
namespace {

std::string device_string(Device device) {
  return device.kind == DeviceKind::kCpu ? std::string("cpu")
                                         : "cuda:" + std::to_string(device.index);
}

}  // namespace

std::string shape_string(const ConstTensorView& tensor) {
  if (tensor.empty()) {
    return "absent";
  }
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(tensor.shape[i]);
  }
  return text + "]";
}

void Match::fail(std::string message) {
  if (status_.ok()) {
    status_ = invalid_argument(std::string(name_) + ": " + std::move(message));
  }
}

Match& Match::shape(std::initializer_list<Dim*> dims) {
  const int rank = static_cast<int>(dims.size());
  if (tensor_.rank != rank) {
    std::string wanted = "[";
    for (const Dim* dim : dims) {
      wanted += (wanted.size() > 1 ? ", " : "") + std::string(dim->name_);
    }
    fail("shape " + shape_string(tensor_) + ", expected " + wanted + "] (rank " +
         std::to_string(rank) + ")");
    return *this;
  }
  int i = 0;
  for (Dim* dim : dims) {
    const int64_t extent = tensor_.shape[i++];
    if (extent < 0) {
      fail("negative extent in shape " + shape_string(tensor_));
    } else if (!dim->bound()) {
      dim->value_ = extent;
      dim->source_ = name_;
    } else if (dim->value_ != extent) {
      fail("extent " + std::to_string(extent) + " in dimension " + std::to_string(i - 1) + " of " +
           shape_string(tensor_) + ", expected " + dim->name_ + " = " +
           std::to_string(dim->value_) + " as in " + dim->source_);
    }
  }
  if (tensor_.data == nullptr && tensor_.num_elements() > 0) {
    fail("null data for shape " + shape_string(tensor_));
  }
  const int64_t element_bytes = size_bytes(tensor_.dtype);  // 0 for a code that is no dtype
  if (element_bytes > 1 && reinterpret_cast<uintptr_t>(tensor_.data) % element_bytes != 0) {
    fail("data is not aligned to its element, " + std::to_string(element_bytes) + " bytes");
  }
  return *this;
}

Match& Match::dtypes(std::initializer_list<DType> allowed) {
  std::string names;
  for (DType dtype : allowed) {
    if (tensor_.dtype == dtype) {
      return *this;
    }
    names += (names.empty() ? "" : " or ") + std::string(dtype_name(dtype));
  }
  fail("dtype " + std::string(dtype_name(tensor_.dtype)) + ", expected " + names);
  return *this;
}

Match& Match::last_contiguous() {
  const int last = tensor_.rank - 1;
  if (last >= 0 && tensor_.shape[last] > 1 && tensor_.strides[last] != 1) {
    fail("stride " + std::to_string(tensor_.strides[last]) +
         " in the last dimension, expected 1 (other dimensions may have any stride)");
  }
  return *this;
}

Match& Match::contiguous() {
  if (!tensor_.is_contiguous()) {
    fail("shape " + shape_string(tensor_) + " is not contiguous, expected row-major contiguous");
  }
  return *this;
}

Match& Match::device(Device device) {
  if (!(tensor_.device == device)) {
    fail("on " + device_string(tensor_.device) + ", expected " + device_string(device));
  }
  return *this;
}

const Status& Match::status() { return status_; }

Status check_cache(const KvCacheView& kv, const char* name) {
  const std::string who(name);
  if (kv.num_blocks < 0 || kv.block_size < 0) {
    return invalid_argument(who + ": num_blocks " + std::to_string(kv.num_blocks) +
                            " and block_size " + std::to_string(kv.block_size) +
                            " must not be negative");
  }
  if (kv.num_blocks > 0 && kv.block_size > 0 && kv.data == nullptr) {
    return invalid_argument(who + ": null data for " + std::to_string(kv.num_blocks) + " blocks");
  }
  if (kv.layout.latent <= 0 || kv.layout.rope < 0) {
    return invalid_argument(who + ": layout widths latent " + std::to_string(kv.layout.latent) +
                            ", rope " + std::to_string(kv.layout.rope) +
                            "; latent must be positive and rope not negative");
  }
  if (kv.layout.format == KvFormat::kFp8DsMla &&
      (kv.layout.latent != kFp8DsMlaLatent ||
       (kv.layout.rope != kFp8DsMlaRope && kv.layout.rope != 0))) {
    return invalid_argument(who + ": fp8_ds_mla holds latent 512 and rope 64 or 0, given latent " +
                            std::to_string(kv.layout.latent) + ", rope " +
                            std::to_string(kv.layout.rope));
  }
  const int64_t record = kv.layout.record_bytes();
  if (kv.row_bytes < record) {
    return invalid_argument(who + ": row_bytes " + std::to_string(kv.row_bytes) +
                            " is less than the " + std::to_string(record) + " bytes of a " +
                            std::string(kv_format_name(kv.layout.format)) + " record");
  }
  if (kv.layout.is_planar() && kv.row_bytes != record) {
    return invalid_argument(who + ": row_bytes " + std::to_string(kv.row_bytes) +
                            " of a planar layout must be its record size " +
                            std::to_string(record));
  }
  // The widest element of a record: its address must be a multiple of its size in every row.
  const int64_t alignment =
      kv.layout.format == KvFormat::kLatentBf16 || kv.layout.format == KvFormat::kIndexBf16 ? 2 : 4;
  if (reinterpret_cast<uintptr_t>(kv.data) % alignment != 0 ||
      (kv.num_blocks > 1 && kv.block_stride_bytes % alignment != 0) ||
      (!kv.layout.is_planar() && kv.row_bytes % alignment != 0)) {
    return invalid_argument(who + ": data, block_stride_bytes " +
                            std::to_string(kv.block_stride_bytes) + " and row_bytes " +
                            std::to_string(kv.row_bytes) + " must be multiples of " +
                            std::to_string(alignment) + " in a " +
                            std::string(kv_format_name(kv.layout.format)) + " cache");
  }
  if (kv.num_blocks > 1 && kv.block_stride_bytes < kv.block_size * kv.row_bytes) {
    return invalid_argument(
        who + ": block_stride_bytes " + std::to_string(kv.block_stride_bytes) +
        " is less than block_size * row_bytes = " + std::to_string(kv.block_size * kv.row_bytes));
  }
  if (kv.layout.format == KvFormat::kIndexFp8 && (kv.block_size * kv.layout.latent) % 4 != 0) {
    return invalid_argument(
        who + ": block_size * dim = " + std::to_string(kv.block_size * kv.layout.latent) +
        " leaves the float32 scales of index_fp8 unaligned, expected a multiple of 4");
  }
  return ok_status();
}

Status check_row_ids(int64_t num_blocks, int64_t block_size, int64_t block_stride_rows,
                     const char* name) {
  constexpr int64_t kRowsMax = int64_t{1} << 31;
  if (num_blocks > 0 &&
      (block_size > kRowsMax || block_stride_rows > kRowsMax ||
       (num_blocks - 1) > (kRowsMax - block_size) / std::max<int64_t>(1, block_stride_rows))) {
    return invalid_argument(std::string(name) + ": " + std::to_string(num_blocks) + " blocks of " +
                            std::to_string(block_stride_rows) +
                            " rows go beyond the 2^31 rows that int32 ids can name");
  }
  return ok_status();
}

Status check_bit_mask(const ConstTensorView& mask, const char* name, Dim& rows) {
  Dim words("words");
  LACUNA_RETURN_IF_ERROR(
      match(mask, name).shape({&rows, &words}).dtypes({DType::kInt32}).last_contiguous().status());
  // Checked for one row too: builders zero the whole stride.
  if (mask.shape[0] > 0 && (mask.strides[0] % 4 != 0 || mask.strides[0] < mask.shape[1])) {
    return invalid_argument(std::string(name) + ": row stride " + std::to_string(mask.strides[0]) +
                            " words, expected a multiple of 4 of at least " +
                            std::to_string(mask.shape[1]));
  }
  return ok_status();
}

Status check_row_ints(const ConstTensorView& tensor, const char* name, Dim& rows, bool required) {
  if (tensor.empty() && !required) {
    return ok_status();
  }
  return match(tensor, name).shape({&rows}).dtypes({DType::kInt32}).status();
}

Status check_devices(Device device, std::initializer_list<NamedTensor> tensors) {
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.empty()) {
      LACUNA_RETURN_IF_ERROR(match(named.tensor, named.name).device(device).status());
    }
  }
  return ok_status();
}

}  // namespace lacuna
