// Reading safetensors: one file (SafetensorsFile) and a model's set of shards (Checkpoint). Nothing
// is copied: entries point into read-only memory maps that live as long as their owner.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/file_map.h"
#include "lacuna/dtype.h"
#include "lacuna/status.h"

namespace lacuna {

// The format allows headers of 100 MB at most; its own readers refuse longer ones too.
inline constexpr int64_t kSafetensorsHeaderBytesMax = 100'000'000;

struct SafetensorsEntry {
  std::string name;
  std::string dtype_text;  // as written in the header: "BF16"
  // Whether `dtype` can name the type. Checkpoints may carry tensors that nobody uses, so an
  // unknown type is an error of its use, not of the file. When false, `dtype` is kUInt8.
  bool dtype_known = false;
  DType dtype = DType::kUInt8;
  std::vector<int64_t> shape;  // row-major; empty for a scalar
  std::span<const std::byte> data;

  // An error that names the tensor when its type is not one of DType's.
  Status check_dtype() const;
};

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  // `bytes` is a whole file and must outlive the result; `name` stands for the path in messages.
  static Result<SafetensorsFile> parse(std::span<const std::byte> bytes, std::string name);

  const std::string& name() const { return name_; }
  // In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  // Null when there is none. The pointer lives as long as the file object, moves included.
  const SafetensorsEntry* find(std::string_view name) const;
  const FileMap& file() const { return file_; }

 private:
  SafetensorsFile() = default;
  Status read(std::span<const std::byte> bytes);

  std::string name_;
  FileMap file_;  // empty after parse()
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, size_t> index_;  // name -> place in entries_
};

// The tensors of a model folder: those that model.safetensors.index.json lists, or without it those
// of model.safetensors, or without that of all model*.safetensors.
class Checkpoint {
 public:
  static Result<Checkpoint> open(const std::string& model_dir);

  // Null when there is none. The pointer lives as long as the checkpoint, moves included.
  const SafetensorsEntry* find(std::string_view name) const;
  std::vector<std::string> names() const;  // sorted
  int64_t total_bytes() const { return total_bytes_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }

 private:
  Checkpoint() = default;

  std::vector<SafetensorsFile> files_;
  std::unordered_map<std::string_view, const SafetensorsEntry*> index_;
  int64_t total_bytes_ = 0;
};

}  // namespace lacuna
