// Lists a model folder once; names instead of stat calls keep the messages complete.
#include "model/model_dir.h"

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace lacuna {
namespace {

constexpr const char* kWhatLoads =
    "what loads: a folder with config.json, tokenizer.json and *.safetensors as published on "
    "Hugging Face";

}  // namespace

bool ModelDir::has(std::string_view name) const {
  return std::binary_search(names.begin(), names.end(), name);
}

bool ModelDir::has_suffix(std::string_view suffix) const {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.ends_with(suffix); });
}

Status ModelDir::missing(const std::string& wanted) const {
  const std::string where = root + ": no " + wanted;
  if (has_suffix(".safetensors")) {
    return not_found(where + "; " + kWhatLoads);
  }
  if (has_suffix(".gguf")) {
    return unsupported(where + ", only GGUF files, which are not supported; " + kWhatLoads);
  }
  if (has_suffix(".bin") || has_suffix(".pt") || has_suffix(".pth")) {
    return unsupported(where + ", only PyTorch files, which are not supported; " + kWhatLoads);
  }
  return not_found(where + "; " + kWhatLoads);
}

Result<ModelDir> list_model_dir(const std::string& model_dir) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(model_dir, error);
  if (status.type() == fs::file_type::not_found) {
    return not_found(model_dir + ": no such folder; " + kWhatLoads);
  }
  if (error) {
    return io_error(model_dir + ": " + error.message());
  }
  if (status.type() != fs::file_type::directory) {
    if (model_dir.ends_with(".gguf")) {
      return unsupported(model_dir + ": GGUF files are not supported; " + kWhatLoads);
    }
    return invalid_argument(model_dir + ": a file, expected the model's folder; " + kWhatLoads);
  }
  ModelDir dir;
  dir.root = model_dir;
  while (dir.root.size() > 1 && dir.root.back() == '/') {
    dir.root.pop_back();
  }
  fs::directory_iterator at(model_dir, error);
  for (; !error && at != fs::directory_iterator(); at.increment(error)) {
    dir.names.push_back(at->path().filename().string());
  }
  if (error) {
    return io_error(model_dir + ": " + error.message());
  }
  std::sort(dir.names.begin(), dir.names.end());
  return dir;
}

}  // namespace lacuna
