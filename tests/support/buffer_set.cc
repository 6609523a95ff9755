// Host images, device copies and the bytes between them.
#include "tests/support/buffer_set.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"
#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/support/poison.h"

namespace lacuna::testing {
namespace {

template <class T>
void store(char* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

void encode(DType dtype, double value, char* at) {
  switch (dtype) {
    case DType::kFloat32:
      return store(at, static_cast<float>(value));
    case DType::kFloat16:
      return store(at, to_fp16(static_cast<float>(value)));
    case DType::kBFloat16:
      return store(at, to_bf16(static_cast<float>(value)));
    case DType::kFloat8E4M3:
      return store(at, to_fp8_e4m3(static_cast<float>(value)));
    case DType::kInt32:
      return store(at, static_cast<int32_t>(value));
    case DType::kInt64:
      return store(at, static_cast<int64_t>(value));
    case DType::kUInt8:
      return store(at, static_cast<uint8_t>(value));
  }
}

template <class Visit>
void for_each_element(const TensorView& layout, Visit&& visit) {
  for (int64_t i = 0; i < layout.shape[0]; ++i) {
    for (int64_t j = 0; j < (layout.rank > 1 ? layout.shape[1] : 1); ++j) {
      for (int64_t k = 0; k < (layout.rank > 2 ? layout.shape[2] : 1); ++k) {
        visit(i * layout.strides[0] + j * layout.strides[1] + k * layout.strides[2]);
      }
    }
  }
}

}  // namespace

TensorView TestTensor::view(Side side) const {
  if (buffer_ == nullptr) {
    return {};
  }
  TensorView view = layout_;
  char* base =
      side == Side::kHost ? reinterpret_cast<char*>(buffer_->image.data()) : buffer_->device.data();
  view.data = base + offset_bytes_;
  if (side == Side::kHost) {
    view.device = Device{};
  }
  return view;
}

ConstTensorView TestTensor::result() const {
  if (buffer_ == nullptr) {
    return {};
  }
  TensorView view = layout_;
  view.device = Device{};
  view.data = buffer_->result.data() + offset_bytes_;
  return view;
}

void TestTensor::set(double value, int64_t i, int64_t j, int64_t k) {
  const ConstTensorView view = this->view(Side::kHost);
  encode(view.dtype, value, const_cast<char*>(reference::element_address(view, i, j, k)));
}

double TestTensor::get(int64_t i, int64_t j, int64_t k) const {
  return reference::element(view(Side::kHost), i, j, k);
}

KvCacheView TestCache::view(Side side) const {
  KvCacheView view = layout_;
  view.data =
      side == Side::kHost ? reinterpret_cast<char*>(buffer_->image.data()) : buffer_->device.data();
  if (side == Side::kHost) {
    view.device = Device{};
  }
  return view;
}

KvCacheView TestCache::result() const {
  KvCacheView view = layout_;
  view.device = Device{};
  view.data = buffer_->result.data();
  return view;
}

void TestCache::set_record(int64_t slot, const std::vector<float>& values, Fp8ScaleRule rule) {
  const KvLayout& layout = layout_.layout;
  LACUNA_CHECK(static_cast<int64_t>(values.size()) == layout.d_qk());
  const ConstTensorView slots = view_of(const_cast<const int64_t*>(&slot), {1});
  if (layout.is_index()) {
    reference::append_index_keys({.keys = view_of(values.data(), {1, layout.latent}),
                                  .slot_mapping = slots,
                                  .kv = view(Side::kHost),
                                  .scale_rule = rule});
    return;
  }
  AppendKvArgs args{.latent = view_of(values.data(), {1, layout.latent}),
                    .slot_mapping = slots,
                    .kv = view(Side::kHost),
                    .scale_rule = rule};
  if (layout.rope > 0) {
    args.rope = view_of(values.data() + layout.latent, {1, layout.rope});
  }
  reference::append_kv(args);
}

TestBuffer& BufferSet::add(const std::string& name, Role role, int64_t size_bytes) {
  TestBuffer& buffer = buffers_.emplace_back();
  buffer.name = name;
  buffer.role = role;
  buffer.image.assign(size_bytes, role == Role::kOutput ? kPoisonByte : kNanByte);
  buffer.device = DeviceBuffer(where_, size_bytes);
  return buffer;
}

TestTensor BufferSet::tensor(const std::string& name, Role role, DType dtype,
                             std::initializer_list<int64_t> shape, const TensorOptions& options) {
  TestTensor tensor;
  tensor.layout_ = make_view<void>(nullptr, dtype, shape, where_.device);
  if (!options.strides.empty()) {
    LACUNA_CHECK(options.strides.size() == shape.size());
    std::copy(options.strides.begin(), options.strides.end(), tensor.layout_.strides.begin());
  }
  const TensorView& layout = tensor.layout_;
  int64_t elements = 0;
  for_each_element(layout, [&](int64_t at) { elements = std::max(elements, at + 1); });
  // The padding of the last row belongs to the buffer too.
  elements = std::max(elements, layout.shape[0] * layout.strides[0]) + options.offset;
  const int64_t element_bytes = size_bytes(dtype);
  tensor.offset_bytes_ = options.offset * element_bytes;
  TestBuffer& buffer = add(name, role, elements * element_bytes);
  tensor.buffer_ = &buffer;
  if (role != Role::kInput && !layout.is_contiguous() && !options.whole_stride_writable) {
    buffer.writable.assign(buffer.image.size(), false);
    for_each_element(layout, [&](int64_t at) {
      for (int64_t byte = 0; byte < element_bytes; ++byte) {
        buffer.writable[tensor.offset_bytes_ + at * element_bytes + byte] = true;
      }
    });
  } else if (role != Role::kInput && options.offset > 0) {
    buffer.writable.assign(buffer.image.size(), true);
    std::fill_n(buffer.writable.begin(), tensor.offset_bytes_, false);
  }
  return tensor;
}

TestTensor BufferSet::ints(const std::string& name, const std::vector<int32_t>& values,
                           const TensorOptions& options) {
  TestTensor tensor = this->tensor(name, Role::kInput, DType::kInt32,
                                   {static_cast<int64_t>(values.size())}, options);
  for (size_t i = 0; i < values.size(); ++i) {
    tensor.set(values[i], static_cast<int64_t>(i));
  }
  return tensor;
}

TestTensor BufferSet::scale(const std::string& name, float value) {
  TestTensor scale;
  if (value != 0) {
    scale = tensor(name, Role::kInput, DType::kFloat32, {1});
    scale.set(value, 0);
  }
  return scale;
}

TestCache BufferSet::cache(const std::string& name, Role role, KvLayout layout,
                           const CacheOptions& options) {
  TestCache cache;
  cache.layout_ = {.data = nullptr,
                   .device = where_.device,
                   .layout = layout,
                   .num_blocks = options.num_blocks,
                   .block_size = options.block_size,
                   .block_stride_bytes = 0,
                   .row_bytes = layout.record_bytes() + options.row_pad_bytes};
  cache.layout_.block_stride_bytes =
      options.block_size * cache.layout_.row_bytes + options.gap_bytes;
  cache.buffer_ = &add(name, role, options.num_blocks * cache.layout_.block_stride_bytes);
  return cache;
}

void BufferSet::upload() {
  for (TestBuffer& buffer : buffers_) {
    buffer.device.write(buffer.image);
  }
}

void BufferSet::download() {
  for (TestBuffer& buffer : buffers_) {
    buffer.result = buffer.device.read();
  }
}

std::string BufferSet::untouched_error() const {
  for (const TestBuffer& buffer : buffers_) {
    const std::string canary = buffer.device.canary_error();
    if (!canary.empty()) {
      return buffer.name + ": " + canary;
    }
    if (buffer.role != Role::kInput && buffer.writable.empty()) {
      continue;
    }
    if (buffer.image == buffer.result) {
      continue;
    }
    for (size_t i = 0; i < buffer.image.size(); ++i) {
      const bool may_change = buffer.role != Role::kInput && buffer.writable[i];
      if (!may_change && buffer.image[i] != buffer.result[i]) {
        return buffer.name + ": byte " + std::to_string(i) + " of " +
               std::to_string(buffer.image.size()) + " was changed from " +
               std::to_string(buffer.image[i]) + " to " + std::to_string(buffer.result[i]) +
               ", but does not belong to the call";
      }
    }
  }
  return {};
}

bool BufferSet::unchanged() const {
  return std::all_of(buffers_.begin(), buffers_.end(), [](const TestBuffer& buffer) {
    return buffer.image == buffer.result && buffer.device.canary_error().empty();
  });
}

std::vector<std::vector<uint8_t>> BufferSet::output_bytes() const {
  std::vector<std::vector<uint8_t>> bytes;
  for (const TestBuffer& buffer : buffers_) {
    if (buffer.role != Role::kInput) {
      bytes.push_back(buffer.result);
    }
  }
  return bytes;
}

}  // namespace lacuna::testing
