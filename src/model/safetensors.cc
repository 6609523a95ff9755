// A safetensors file is a little-endian uint64 n, n bytes of JSON that describe the tensors, and
// the data. The header is hostile until proven otherwise: every number is checked before use.
#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "core/check.h"
#include "model/json.h"
#include "model/model_dir.h"

namespace lacuna {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

constexpr int64_t kPrefixBytes = 8;  // the header's length
constexpr int64_t kIndexBytesMax = kSafetensorsHeaderBytesMax;
constexpr const char* kIndexName = "model.safetensors.index.json";

// The element types of the format. Types without a DType are listed so that their sizes are checked
// all the same.
struct FileDType {
  const char* text;
  int bits;
  bool known;
  DType dtype;
};
constexpr FileDType kFileDTypes[] = {
    {"F32", 32, true, DType::kFloat32},   {"F16", 16, true, DType::kFloat16},
    {"BF16", 16, true, DType::kBFloat16}, {"F8_E4M3", 8, true, DType::kFloat8E4M3},
    {"I32", 32, true, DType::kInt32},     {"I64", 64, true, DType::kInt64},
    {"U8", 8, true, DType::kUInt8},       {"F64", 64, false, DType::kUInt8},
    {"C64", 64, false, DType::kUInt8},    {"U64", 64, false, DType::kUInt8},
    {"U32", 32, false, DType::kUInt8},    {"U16", 16, false, DType::kUInt8},
    {"I16", 16, false, DType::kUInt8},    {"I8", 8, false, DType::kUInt8},
    {"BOOL", 8, false, DType::kUInt8},    {"F8_E5M2", 8, false, DType::kUInt8},
    {"F8_E8M0", 8, false, DType::kUInt8}, {"F6_E2M3", 6, false, DType::kUInt8},
    {"F6_E3M2", 6, false, DType::kUInt8}, {"F4", 4, false, DType::kUInt8},
};

const FileDType* find_dtype(std::string_view text) {
  for (const FileDType& dtype : kFileDTypes) {
    if (text == dtype.text) {
      return &dtype;
    }
  }
  return nullptr;
}

bool read_size(const Json& value, int64_t* size) {
  if (!value.is_number_unsigned()) {
    return false;
  }
  const uint64_t number = value.get<uint64_t>();
  *size = static_cast<int64_t>(number);
  return number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
}

std::string list_text(const Json& list) {
  constexpr size_t kShownMax = 8;
  return list.is_array() && list.size() <= kShownMax &&
                 std::none_of(list.begin(), list.end(),
                              [](const Json& item) { return item.is_structured(); })
             ? quote_text(list.dump())
             : describe(list);
}

struct Extent {
  int64_t begin = 0;
  int64_t end = 0;
};

// Fills all of `entry` but the data, and `extent` with where the header says that lies.
Status read_entry(const std::string& where, const Json& value, int64_t data_bytes,
                  SafetensorsEntry* entry, Extent* extent) {
  const Json* dtype = find_member(value, "dtype");
  const Json* shape = find_member(value, "shape");
  const Json* offsets = find_member(value, "data_offsets");
  if (dtype == nullptr || !dtype->is_string() || shape == nullptr || !shape->is_array() ||
      offsets == nullptr || !offsets->is_array()) {
    return data_loss(where + ": expected an object with dtype, shape and data_offsets");
  }
  entry->dtype_text = dtype->get<std::string>();

  int64_t elements = 1;
  for (const Json& extent_json : *shape) {
    int64_t size = 0;
    if (!read_size(extent_json, &size) || __builtin_mul_overflow(elements, size, &elements)) {
      return data_loss(where + ": shape " + list_text(*shape) +
                       ", expected sizes of 0 or more whose product fits 63 bits");
    }
    entry->shape.push_back(size);
  }

  if (offsets->size() != 2 || !read_size((*offsets)[0], &extent->begin) ||
      !read_size((*offsets)[1], &extent->end) || extent->begin > extent->end) {
    return data_loss(where + ": data_offsets " + list_text(*offsets) +
                     ", expected [begin, end] with 0 <= begin <= end");
  }
  if (extent->end > data_bytes) {
    return data_loss(where + ": its data ends at byte " + std::to_string(extent->end) +
                     " of the data, but the file has only " + std::to_string(data_bytes) +
                     " there; the file is truncated or its header wrong");
  }

  const FileDType* known = find_dtype(entry->dtype_text);
  if (known == nullptr) {
    return ok_status();  // of unknown width, so the size says nothing
  }
  entry->dtype_known = known->known;
  entry->dtype = known->dtype;
  int64_t bits = 0;
  if (__builtin_mul_overflow(elements, int64_t{known->bits}, &bits) || bits % 8 != 0 ||
      bits / 8 != extent->end - extent->begin) {
    return data_loss(where + ": " + entry->dtype_text + " of shape " + list_text(*shape) +
                     " does not fill the " + std::to_string(extent->end - extent->begin) +
                     " bytes of its data_offsets");
  }
  return ok_status();
}

// An index entry must name a file of this folder, not a path out of it.
bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

using ShardTensors = std::map<std::string, std::vector<std::string>>;  // shard -> tensor names

Result<ShardTensors> read_index(const ModelDir& dir) {
  const std::string path = dir.path(kIndexName);
  LACUNA_ASSIGN_OR_RETURN(const std::string text, read_file(path, kIndexBytesMax));
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(text, path));
  const Json* weight_map = find_member(root, "weight_map");
  if (weight_map == nullptr || !weight_map->is_object() || weight_map->empty()) {
    return data_loss(path + ": weight_map: " +
                     (weight_map == nullptr ? std::string("missing") : describe(*weight_map)) +
                     ", expected an object from tensor names to file names");
  }
  ShardTensors shards;
  for (const auto& [name, shard] : weight_map->items()) {
    if (!shard.is_string() || !is_plain_name(shard.get_ref<const std::string&>())) {
      return data_loss(path + ": weight_map: tensor " + quote_text(name) + " is in " +
                       describe(shard) + ", expected the name of a file in the same folder");
    }
    shards[shard.get_ref<const std::string&>()].push_back(name);
  }
  return shards;
}

}  // namespace

Status SafetensorsEntry::check_dtype() const {
  if (dtype_known) {
    return ok_status();
  }
  return unsupported("tensor " + quote_text(name) + ": dtype " + quote_text(dtype_text) +
                     " is not supported; supported: F32, F16, BF16, F8_E4M3, I32, I64, U8");
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  file.name_ = path;
  LACUNA_ASSIGN_OR_RETURN(file.file_, FileMap::open(path));
  LACUNA_RETURN_IF_ERROR(file.read(file.file_.bytes()));
  return file;
}

Result<SafetensorsFile> SafetensorsFile::parse(std::span<const std::byte> bytes, std::string name) {
  SafetensorsFile file;
  file.name_ = std::move(name);
  LACUNA_RETURN_IF_ERROR(file.read(bytes));
  return file;
}

Status SafetensorsFile::read(std::span<const std::byte> bytes) {
  const int64_t file_bytes = static_cast<int64_t>(bytes.size());
  if (file_bytes < kPrefixBytes) {
    return data_loss(name_ + ": " + std::to_string(file_bytes) +
                     " bytes, too short for a safetensors file");
  }
  uint64_t header_bytes_raw = 0;
  std::memcpy(&header_bytes_raw, bytes.data(), kPrefixBytes);
  if (header_bytes_raw > static_cast<uint64_t>(kSafetensorsHeaderBytesMax)) {
    return data_loss(name_ + ": a header of " + std::to_string(header_bytes_raw) +
                     " bytes, more than the format's limit of " +
                     std::to_string(kSafetensorsHeaderBytesMax) + "; not a safetensors file?");
  }
  const int64_t header_bytes = static_cast<int64_t>(header_bytes_raw);
  const int64_t data_begin = kPrefixBytes + header_bytes;
  if (data_begin > file_bytes) {
    return data_loss(name_ + ": truncated: the header alone needs " + std::to_string(data_begin) +
                     " bytes, the file has " + std::to_string(file_bytes));
  }
  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kPrefixBytes,
                                static_cast<size_t>(header_bytes));
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(header, name_ + ": header"));
  if (!root.is_object()) {
    return data_loss(name_ + ": header: " + describe(root) + ", expected an object");
  }

  // A truncated file is the likeliest fault, so it is told before any single tensor is judged.
  const int64_t data_bytes = file_bytes - data_begin;
  int64_t promised_bytes = 0;
  for (const auto& [name, value] : root.items()) {
    const Json* offsets = find_member(value, "data_offsets");
    int64_t end = 0;
    if (name != "__metadata__" && offsets != nullptr && offsets->is_array() &&
        offsets->size() == 2 && read_size((*offsets)[1], &end)) {
      promised_bytes = std::max(promised_bytes, end);
    }
  }
  if (promised_bytes > data_bytes) {
    // Both numbers count data: adding the header could overflow a hostile one.
    return data_loss(name_ + ": truncated: the header promises " + std::to_string(promised_bytes) +
                     " bytes of data, the file has " + std::to_string(data_bytes) + " after the " +
                     std::to_string(data_begin) + " bytes of the header");
  }

  std::vector<std::pair<Extent, SafetensorsEntry>> found;
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      continue;
    }
    auto& [extent, entry] = found.emplace_back();
    entry.name = name;
    LACUNA_RETURN_IF_ERROR(
        read_entry(name_ + ": tensor " + quote_text(name), value, data_bytes, &entry, &extent));
  }
  // Empty tensors share their place with the next one, hence the second key.
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first.begin, a.first.end) < std::pair(b.first.begin, b.first.end);
  });

  int64_t next = 0;  // the format leaves no byte without an owner
  for (auto& [extent, entry] : found) {
    const std::string where = name_ + ": tensor " + quote_text(entry.name);
    if (extent.begin != next) {
      return data_loss(
          where + ": its data begins at byte " + std::to_string(extent.begin) +
          ", but the tensor before it ends at " + std::to_string(next) +
          (extent.begin < next ? "; they overlap" : "; the bytes between have no owner"));
    }
    next = extent.end;
    const int64_t alignment = entry.dtype_known ? size_bytes(entry.dtype) : 1;
    if ((data_begin + extent.begin) % alignment != 0) {
      return unsupported(where + ": its data begins at byte " +
                         std::to_string(data_begin + extent.begin) +
                         " of the file, not aligned to " + entry.dtype_text +
                         "; saving it again with the safetensors package aligns it");
    }
    entry.data = bytes.subspan(static_cast<size_t>(data_begin + extent.begin),
                               static_cast<size_t>(extent.end - extent.begin));
  }
  if (next != data_bytes) {
    return data_loss(name_ + ": the header describes " + std::to_string(next) +
                     " bytes of data, the file has " + std::to_string(data_bytes));
  }

  entries_.reserve(found.size());
  for (auto& [extent, entry] : found) {
    entries_.push_back(std::move(entry));
  }
  index_.reserve(entries_.size());
  for (size_t i = 0; i < entries_.size(); ++i) {
    index_.emplace(entries_[i].name, i);
  }
  return ok_status();
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : &entries_[at->second];
}

Result<Checkpoint> Checkpoint::open(const std::string& model_dir) {
  LACUNA_ASSIGN_OR_RETURN(const ModelDir dir, list_model_dir(model_dir));
  const bool indexed = dir.has(kIndexName);
  ShardTensors shards;
  if (indexed) {
    LACUNA_ASSIGN_OR_RETURN(shards, read_index(dir));
  } else if (dir.has("model.safetensors")) {
    shards["model.safetensors"];
  } else {
    for (const std::string& name : dir.names) {
      if (name.starts_with("model") && name.ends_with(".safetensors")) {
        shards[name];
      }
    }
  }
  if (shards.empty()) {
    return dir.missing("model*.safetensors");
  }

  Checkpoint checkpoint;
  for (const auto& [shard, tensors] : shards) {
    if (!dir.has(shard)) {
      return not_found(dir.path(shard) + ": no such file, but " + kIndexName + " places " +
                       std::to_string(tensors.size()) + " tensors in it, " +
                       quote_text(tensors.front()) + " among them; the download is incomplete");
    }
    LACUNA_ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(dir.path(shard)));
    // Entries stay where they are when the file object moves.
    const auto add = [&](const SafetensorsEntry& entry) {
      checkpoint.total_bytes_ += static_cast<int64_t>(entry.data.size());
      return checkpoint.index_.emplace(entry.name, &entry).second;
    };
    if (indexed) {
      for (const std::string& name : tensors) {
        const SafetensorsEntry* entry = file.find(name);
        if (entry == nullptr) {
          return data_loss(file.name() + ": no tensor " + quote_text(name) + ", but " + kIndexName +
                           " places it there");
        }
        add(*entry);
      }
    } else {
      for (const SafetensorsEntry& entry : file.entries()) {
        if (!add(entry)) {
          return data_loss(file.name() + ": tensor " + quote_text(entry.name) +
                           " is also in an earlier file of the folder, and there is no " +
                           kIndexName + " to tell which one counts");
        }
      }
    }
    checkpoint.files_.push_back(std::move(file));
  }
  return checkpoint;
}

const SafetensorsEntry* Checkpoint::find(std::string_view name) const {
  const auto at = index_.find(name);
  return at == index_.end() ? nullptr : at->second;
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(index_.size());
  for (const auto& [name, entry] : index_) {
    names.emplace_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace lacuna
