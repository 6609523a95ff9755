// What lies in a model folder, and the message when the wanted file does not: people point at GGUF
// files, PyTorch pickles and single safetensors files, and should read what to do instead.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

struct ModelDir {
  std::string root;
  std::vector<std::string> names;  // of files and links in the folder, sorted; not recursive

  bool has(std::string_view name) const;
  bool has_suffix(std::string_view suffix) const;
  std::string path(std::string_view name) const { return root + "/" + std::string(name); }
  // Why `wanted` can not be found here.
  Status missing(const std::string& wanted) const;
};

Result<ModelDir> list_model_dir(const std::string& model_dir);

}  // namespace lacuna
