// safetensors: what a good file gives, and that no bad one gets past the header.
#include "model/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace lacuna {
namespace {

std::string file_of(const std::string& header, const std::string& data) {
  const uint64_t size = header.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &size, 8);
  return file + header + data;
}

// Keeps the bytes at an aligned place of exactly their size, so that a sanitizer sees every read
// beyond them.
class Bytes {
 public:
  explicit Bytes(std::string_view text) : data_(text.begin(), text.end()) {}
  std::span<const std::byte> span() const {
    return {reinterpret_cast<const std::byte*>(data_.data()), data_.size()};
  }

 private:
  std::vector<char> data_;
};

std::string error_of(const std::string& file) {
  const Bytes bytes(file);
  const Result<SafetensorsFile> result = SafetensorsFile::parse(bytes.span(), "x.safetensors");
  return result.ok() ? "parsed" : result.status().message();
}

std::string make_dir(const std::string& name) {
  const std::string dir = testing::TempDir() + "lacuna_safetensors_test_" + name;
  std::filesystem::remove_all(dir);
  std::filesystem::create_directories(dir);
  return dir;
}
void write(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// A header padded with spaces, so that the data begins at a multiple of 8.
std::string padded(std::string header) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return header;
}

const char* const kTwo = R"({"__metadata__":{"format":"pt"},)"
                         R"("b":{"dtype":"BF16","shape":[2,3],"data_offsets":[8,20]},)"
                         R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return padded("{\"a\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
                ",\"data_offsets\":" + offsets + "}}");
}

TEST(Safetensors, GivesEveryTensorWithItsBytes) {
  const Bytes bytes(file_of(padded(kTwo), "01234567abcdefghijkl"));
  Result<SafetensorsFile> result = SafetensorsFile::parse(bytes.span(), "x");
  ASSERT_TRUE(result.ok()) << result.status().message();
  const SafetensorsEntry* before = result->find("b");
  const SafetensorsFile file = std::move(result).value();
  ASSERT_EQ(file.entries().size(), 2u);
  EXPECT_EQ(file.entries()[0].name, "a");
  const SafetensorsEntry* b = file.find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b, before);
  EXPECT_EQ(b->dtype, DType::kBFloat16);
  EXPECT_TRUE(b->dtype_known);
  EXPECT_TRUE(b->check_dtype().ok());
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(std::memcmp(b->data.data(), "abcdefghijkl", 12), 0);
  EXPECT_EQ(b->data.size(), 12u);
  EXPECT_EQ(file.find("c"), nullptr);
  EXPECT_EQ(file.find("__metadata__"), nullptr);
}

TEST(Safetensors, ScalarsAndEmptyTensorsAreFine) {
  const std::string header = padded(R"({"e":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]},)"
                                    R"("s":{"dtype":"I64","shape":[],"data_offsets":[0,8]},)"
                                    R"("t":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}})");
  const Bytes bytes(file_of(header, "12345678"));
  const Result<SafetensorsFile> file = SafetensorsFile::parse(bytes.span(), "x");
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->find("s")->data.size(), 8u);
  EXPECT_TRUE(file->find("e")->data.empty());
  EXPECT_EQ(error_of(file_of("{}", "")), "parsed");
}

TEST(Safetensors, EveryPrefixOfAGoodFileIsAnError) {
  const std::string whole = file_of(padded(kTwo), "01234567abcdefghijkl");
  ASSERT_EQ(error_of(whole), "parsed");
  for (size_t n = 0; n < whole.size(); ++n) {
    EXPECT_NE(error_of(whole.substr(0, n)), "parsed") << n;
  }
}

TEST(Safetensors, TruncationNamesBothSizes) {
  const std::string whole = file_of(padded(kTwo), "01234567abcdefghijkl");
  const size_t header = padded(kTwo).size() + 8;
  EXPECT_EQ(error_of(whole.substr(0, whole.size() - 5)),
            "x.safetensors: truncated: the header promises 20 bytes of data, the file has 15 after "
            "the " +
                std::to_string(header) + " bytes of the header");
  EXPECT_EQ(error_of(whole.substr(0, 40)), "x.safetensors: truncated: the header alone needs " +
                                               std::to_string(header) + " bytes, the file has 40");
  EXPECT_EQ(error_of("abc"), "x.safetensors: 3 bytes, too short for a safetensors file");
  EXPECT_EQ(error_of(whole + "!"),
            "x.safetensors: the header describes 20 bytes of data, the file has 21");
}

TEST(Safetensors, HostileHeadersAreErrors) {
  const auto expect = [](const std::string& header, const std::string& part) {
    const std::string error = error_of(file_of(header, "01234567"));
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_EQ(error.find('\n'), std::string::npos) << error;
    EXPECT_LT(error.size(), 500u);
  };
  expect(one("F32", "[2]", "[-8,0]"), "data_offsets \"[-8,0]\", expected [begin, end]");
  expect(one("F32", "[2]", "[8,0]"), "data_offsets \"[8,0]\"");
  expect(one("F32", "[2]", "[0]"), "data_offsets \"[0]\"");
  expect(one("F32", "[2]", "[0,8,16]"), "data_offsets \"[0,8,16]\"");
  expect(one("F32", "[2]", "[0.0,8.0]"), "data_offsets");
  expect(one("F32", "[2]", "[0,9223372036854775807]"), "truncated");
  expect(one("F32", "[2]", "[0,9223372036854775808]"), "data_offsets");
  expect(one("F32", "[2]", "[0,18446744073709551615]"), "data_offsets");
  expect(one("F32", "[2]", "[0,1e400]"), "not valid JSON");
  expect(one("F32", "[-2]", "[0,8]"), "shape \"[-2]\", expected sizes");
  expect(one("F32", "[9223372036854775808]", "[0,8]"), "shape");
  expect(one("F32", "[4294967296,4294967296]", "[0,8]"), "fits 63 bits");
  expect(one("F32", "[4611686018427387904]", "[0,8]"), "does not fill the 8 bytes");
  expect(one("F32", "[4611686018427387904,2,0]", "[0,0]"), "fits 63 bits");
  expect(one("F32", "[3]", "[0,8]"), "F32 of shape \"[3]\" does not fill the 8 bytes");
  expect(one("F4", "[3]", "[0,2]"), "F4 of shape \"[3]\" does not fill");
  expect(one("F32", "2", "[0,8]"), "expected an object with dtype, shape and data_offsets");
  expect(R"({"a":7})", "expected an object with dtype");
  expect(R"([1,2])", "expected an object");
  expect(R"({"a":)", "not valid JSON");
  expect(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
         R"("a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
         "duplicate key \"a\"");
  expect(R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},)"
         R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
         "tensor \"b\": its data begins at byte 4, but the tensor before it ends at 6; they "
         "overlap");
  expect(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
         R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
         "the bytes between have no owner");
  expect("{\"" + std::string(100000, 'n') + "\\n\":{}}", "...");
  expect(std::string(1000000, '['), "nested more than 32 deep");
  std::string deep;
  for (int i = 0; i < 100000; ++i) {
    deep += "{\"a\":";
  }
  expect(deep, "nested more than 32 deep");
  EXPECT_NE(error_of(std::string(8, '\xff')).find("more than the format's limit"),
            std::string::npos);
}

TEST(Safetensors, MisalignedDataIsNamed) {
  EXPECT_NE(error_of(file_of(one("F32", "[2]", "[0,8]") + " ", "01234567"))
                .find("tensor \"a\": its data begins at byte 65 of the file, not aligned to F32"),
            std::string::npos)
      << error_of(file_of(one("F32", "[2]", "[0,8]") + " ", "01234567"));
  EXPECT_EQ(error_of(file_of(one("U8", "[8]", "[0,8]") + " ", "01234567")), "parsed");
}

TEST(Safetensors, UnknownTypesAreAnErrorOfTheirUse) {
  for (const char* dtype : {"F64", "I128"}) {
    const Bytes bytes(file_of(one(dtype, "[1]", "[0,8]"), "01234567"));
    const Result<SafetensorsFile> file = SafetensorsFile::parse(bytes.span(), "x");
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(file->find("a")->check_dtype().message(),
              "tensor \"a\": dtype \"" + std::string(dtype) +
                  "\" is not supported; supported: F32, F16, BF16, F8_E4M3, I32, I64, U8");
  }
}

TEST(Checkpoint, OpensTheModelsOfTheTree) {
  const Result<Checkpoint> nano =
      Checkpoint::open(std::string(LACUNA_SOURCE_DIR) + "/models/dsa-nano");
  ASSERT_TRUE(nano.ok()) << nano.status().message();
  const SafetensorsEntry* embedding = nano->find("model.embed_tokens.weight");
  ASSERT_NE(embedding, nullptr);
  EXPECT_EQ(embedding->shape, (std::vector<int64_t>{288, 256}));
  EXPECT_EQ(embedding->dtype, DType::kBFloat16);
  EXPECT_EQ(nano->find("model.layers.1.mlp.gate.e_score_correction_bias")->dtype, DType::kFloat32);
  EXPECT_EQ(nano->find("model.layers.1.self_attn.indexer.wk.weight"), nullptr);
  EXPECT_EQ(nano->total_bytes(), 14277216);
  EXPECT_EQ(nano->names().front(), "lm_head.weight");
  nano->files()[0].file().will_need(embedding->data);
}

std::string shard(const std::string& name, char fill) {
  return file_of(padded("{\"" + name + R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})"),
                 std::string(4, fill));
}

TEST(Checkpoint, FollowsTheIndex) {
  const std::string dir = make_dir("index");
  write(dir + "/model-1.safetensors", shard("a", '1'));
  write(dir + "/model-2.safetensors", shard("b", '2'));
  write(dir + "/model.safetensors.index.json",
        R"({"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}})");
  Result<Checkpoint> opened = Checkpoint::open(dir);
  ASSERT_TRUE(opened.ok()) << opened.status().message();
  const Checkpoint checkpoint = std::move(opened).value();
  EXPECT_EQ(checkpoint.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(static_cast<char>(checkpoint.find("b")->data[0]), '2');
  EXPECT_EQ(checkpoint.total_bytes(), 8);

  std::filesystem::remove(dir + "/model-2.safetensors");
  EXPECT_EQ(Checkpoint::open(dir).status().message(),
            dir +
                "/model-2.safetensors: no such file, but model.safetensors.index.json places 1 "
                "tensors in it, \"b\" among them; the download is incomplete");
  write(dir + "/model-2.safetensors", shard("c", '2'));
  EXPECT_EQ(Checkpoint::open(dir).status().message(),
            dir +
                "/model-2.safetensors: no tensor \"b\", but model.safetensors.index.json places "
                "it there");
  for (const char* path : {"../model-1.safetensors", "/etc/passwd", "..", ""}) {
    write(dir + "/model.safetensors.index.json",
          std::string(R"({"weight_map":{"a":")") + path + "\"}}");
    EXPECT_NE(Checkpoint::open(dir).status().message().find("a file in the same folder"),
              std::string::npos)
        << path;
  }
  write(dir + "/model.safetensors.index.json", R"({"weight_map":{}})");
  EXPECT_NE(Checkpoint::open(dir).status().message().find("weight_map: an object"),
            std::string::npos);
}

TEST(Checkpoint, WithoutAnIndexTakesAllShards) {
  const std::string dir = make_dir("shards");
  write(dir + "/model-1.safetensors", shard("a", '1'));
  write(dir + "/model-2.safetensors", shard("b", '2'));
  write(dir + "/oracle.safetensors", "not a model");
  const Result<Checkpoint> checkpoint = Checkpoint::open(dir);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().message();
  EXPECT_EQ(checkpoint->names(), (std::vector<std::string>{"a", "b"}));
  write(dir + "/model-2.safetensors", shard("a", '2'));
  EXPECT_NE(Checkpoint::open(dir).status().message().find("is also in an earlier file"),
            std::string::npos);
}

TEST(Checkpoint, FoldersWithoutSafetensorsSayWhatTheyHold) {
  const std::string dir = make_dir("gguf");
  EXPECT_EQ(Checkpoint::open(dir).status().code(), StatusCode::kNotFound);
  write(dir + "/m.gguf", "GGUF");
  EXPECT_NE(Checkpoint::open(dir).status().message().find("only GGUF files"), std::string::npos);
  EXPECT_EQ(SafetensorsFile::open(dir).status().message(),
            dir + ": not a regular file but a folder");
  EXPECT_EQ(read_file(dir + "/m.gguf", 3).status().message(),
            dir + "/m.gguf: 4 bytes, more than the limit of 3");
  write(dir + "/empty.safetensors", "");
  EXPECT_NE(SafetensorsFile::open(dir + "/empty.safetensors").status().message().find("0 bytes"),
            std::string::npos);
}

}  // namespace
}  // namespace lacuna
