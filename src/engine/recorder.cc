// Copies tap tensors out, any strides and any float type.
#include "engine/recorder.h"

#include <cstring>

#include "core/check.h"

namespace lacuna {
namespace {

float float_at(const ConstTensorView& tensor, int64_t offset) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      return tensor.as<float>()[offset];
    case DType::kBFloat16:
      return to_float(tensor.as<Bf16>()[offset]);
    case DType::kFloat16:
      return to_float(tensor.as<Fp16>()[offset]);
    default:
      LACUNA_CHECK(false);
  }
}

}  // namespace

Tap Recorder::tap() {
  return [this](std::string_view name, int layer, const ConstTensorView& tensor) {
    add(name, layer, tensor);
  };
}

const RecordedTensor* Recorder::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

void Recorder::add(std::string_view name, int layer, const ConstTensorView& tensor) {
  std::string key(name);
  if (layer >= 0) {
    key += "." + std::to_string(layer);
  }
  RecordedTensor& record = tensors_[key];
  record.integers = tensor.dtype == DType::kInt32;
  record.width = tensor.rank == 0 || tensor.shape[0] == 0 ? record.width
                                                          : tensor.num_elements() / tensor.shape[0];
  const int64_t count = tensor.num_elements();
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    for (int d = tensor.rank - 1; d >= 0; --d) {
      offset += rest % tensor.shape[d] * tensor.strides[d];
      rest /= tensor.shape[d];
    }
    if (record.integers) {
      record.ints.push_back(tensor.as<int32_t>()[offset]);
    } else {
      record.floats.push_back(float_at(tensor, offset));
    }
  }
}

Status write_safetensors(OutputFile file, const std::map<std::string, RecordedTensor>& tensors) {
  std::string header = "{";
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    const int64_t bytes = 4 * tensor.rows() * tensor.width;
    header += (header.size() > 1 ? "," : "") + ("\"" + name + "\":{\"dtype\":\"") +
              (tensor.integers ? "I32" : "F32") + "\",\"shape\":[" + std::to_string(tensor.rows()) +
              "," + std::to_string(tensor.width) + "],\"data_offsets\":[" + std::to_string(offset) +
              "," + std::to_string(offset + bytes) + "]}";
    offset += bytes;
  }
  header += "}";
  while (header.size() % 8 != 0) {
    header += ' ';
  }
  const uint64_t header_bytes = header.size();
  char length[8];
  std::memcpy(length, &header_bytes, sizeof(length));
  file.write(length, sizeof(length));
  file.write(header.data(), static_cast<int64_t>(header.size()));
  for (const auto& [name, tensor] : tensors) {
    const void* data = tensor.integers ? static_cast<const void*>(tensor.ints.data())
                                       : static_cast<const void*>(tensor.floats.data());
    file.write(data, 4 * tensor.rows() * tensor.width);
  }
  return file.commit();
}

}  // namespace lacuna
