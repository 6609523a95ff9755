// The tensors and caches of one call: a host image of each (what the oracle reads), the same bytes
// on the device under test, and after the call what came back. It knows which bytes a kernel may
// write, and says so when another one changed.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <string>
#include <vector>

#include "lacuna/kv_cache.h"
#include "tests/support/device_buffer.h"

namespace lacuna::testing {

enum class Side { kHost, kDevice };
enum class Role {
  kInput,   // must come back unchanged; gaps hold NaN
  kOutput,  // poisoned before each call; only the view may change
  kInOut,   // has an image, and the view may change
};

struct TestBuffer {
  std::string name;
  Role role = Role::kInput;
  std::vector<uint8_t> image;   // before the call
  std::vector<uint8_t> result;  // after it
  std::vector<bool> writable;   // a byte each; empty: all of an output, none of an input
  DeviceBuffer device;
};

// Strides in elements; empty: contiguous. `offset` elements lie before the first.
struct TensorOptions {
  std::vector<int64_t> strides = {};
  int64_t offset = 0;
  // The padding of the outermost stride may be written too (bit masks).
  bool whole_stride_writable = false;
};

// A handle: the buffer lives in its BufferSet. Default-constructed: an absent tensor.
class TestTensor {
 public:
  TestTensor() = default;

  bool empty() const { return buffer_ == nullptr; }
  TensorView view(Side side) const;
  // Host view of what the call left.
  ConstTensorView result() const;
  int64_t extent(int dim) const { return layout_.shape[dim]; }

  // Writes the image; the value is rounded to the dtype.
  void set(double value, int64_t i, int64_t j = 0, int64_t k = 0);
  // Reads the image.
  double get(int64_t i, int64_t j = 0, int64_t k = 0) const;
  // Calls value() for each element of the image in row-major order.
  template <class Value>
  void fill(Value&& value) {
    for (int64_t i = 0; i < layout_.shape[0]; ++i) {
      for (int64_t j = 0; j < (layout_.rank > 1 ? layout_.shape[1] : 1); ++j) {
        for (int64_t k = 0; k < (layout_.rank > 2 ? layout_.shape[2] : 1); ++k) {
          set(value(), i, j, k);
        }
      }
    }
  }

 private:
  friend class BufferSet;
  TestBuffer* buffer_ = nullptr;
  TensorView layout_;  // data is null
  int64_t offset_bytes_ = 0;
};

struct CacheOptions {
  int64_t num_blocks = 1;
  int64_t block_size = 64;
  int64_t gap_bytes = 0;      // between blocks, never touched
  int64_t row_pad_bytes = 0;  // after each record, never touched
};

// A cache whose bytes are all NaN until a record is written.
class TestCache {
 public:
  bool empty() const { return buffer_ == nullptr; }
  KvCacheView view(Side side) const;
  // A host view of what the call left.
  KvCacheView result() const;
  const TestBuffer& buffer() const { return *buffer_; }
  // Rows from one block to the next; the gap must be a whole number of rows.
  int64_t row(int64_t block, int64_t offset) const {
    return block * layout_.block_stride_rows() + offset;
  }
  // Writes the record of a slot (values: latent | rope) into the image, as the layout stores it.
  void set_record(int64_t slot, const std::vector<float>& values,
                  Fp8ScaleRule rule = Fp8ScaleRule::kPowerOfTwo);

 private:
  friend class BufferSet;
  TestBuffer* buffer_ = nullptr;
  KvCacheView layout_;  // data is null
};

class BufferSet {
 public:
  explicit BufferSet(const TestDevice& where) : where_(where) {}
  BufferSet(const BufferSet&) = delete;
  BufferSet& operator=(const BufferSet&) = delete;

  TestTensor tensor(const std::string& name, Role role, DType dtype,
                    std::initializer_list<int64_t> shape, const TensorOptions& options = {});
  // Input of int32 values.
  TestTensor ints(const std::string& name, const std::vector<int32_t>& values,
                  const TensorOptions& options = {});
  // Input of one float, a cache's per-tensor scale; absent when `value` is 0.
  TestTensor scale(const std::string& name, float value);
  TestCache cache(const std::string& name, Role role, KvLayout layout, const CacheOptions& options);

  // Images to the device; outputs are poison and canaries whole again.
  void upload();
  // What the device holds now becomes the results.
  void download();
  // Empty when only writable bytes changed since upload; otherwise the buffer and the byte.
  std::string untouched_error() const;
  // Whether nothing at all changed since upload.
  bool unchanged() const;
  // All results that a kernel may write, for comparing two runs bit for bit.
  std::vector<std::vector<uint8_t>> output_bytes() const;

  const TestDevice& where() const { return where_; }

 private:
  TestBuffer& add(const std::string& name, Role role, int64_t size_bytes);

  TestDevice where_;
  std::deque<TestBuffer> buffers_;  // handles point into it
};

}  // namespace lacuna::testing
