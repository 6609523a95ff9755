// Output files: whole or not there, and nothing left behind by a failure.
#include "core/output_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

namespace lacuna {
namespace {

namespace fs = std::filesystem;

class OutputFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lacuna_output_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const char* name) const { return (folder_ / name).string(); }
  static std::string text_of(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  int64_t num_files() const {
    return std::distance(fs::directory_iterator(folder_), fs::directory_iterator());
  }
  fs::path folder_;
};

TEST_F(OutputFileTest, AppearsWholeAtCommit) {
  std::ofstream(path("out")) << "old";
  Result<OutputFile> file = OutputFile::create(path("out"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  file->write("ab", 2);
  file->write("", 0);
  file->write("\0c", 2);
  EXPECT_EQ(text_of(path("out")), "old");
  ASSERT_TRUE(file->commit().ok());
  EXPECT_EQ(text_of(path("out")), std::string("ab\0c", 4));
  EXPECT_EQ(num_files(), 1);
}

TEST_F(OutputFileTest, WithoutACommitNothingChanges) {
  std::ofstream(path("old")) << "old";
  for (const char* name : {"old", "new"}) {
    Result<OutputFile> file = OutputFile::create(path(name));
    ASSERT_TRUE(file.ok());
    OutputFile moved = std::move(file).value();
    moved.write("new", 3);
  }
  EXPECT_EQ(text_of(path("old")), "old");
  EXPECT_EQ(num_files(), 1);
}

TEST_F(OutputFileTest, SaysWhyAPathCanNotBeWritten) {
  const Result<OutputFile> missing = OutputFile::create(path("missing") + "/out");
  ASSERT_FALSE(missing.ok());
  EXPECT_EQ(missing.status().code(), StatusCode::kIo);
  EXPECT_EQ(missing.status().message(),
            path("missing") + "/out: can not be written: No such file or directory");
  for (const std::string& name : {folder_.string(), std::string(), path("missing") + "/"}) {
    const Result<OutputFile> folder = OutputFile::create(name);
    ASSERT_FALSE(folder.ok());
    EXPECT_EQ(folder.status().message(),
              "\"" + name + "\": a folder, expected the name of a file to write");
  }
  EXPECT_EQ(num_files(), 0);
}

TEST_F(OutputFileTest, AFullDiskIsAnError) {
  if (!fs::exists("/dev/full")) {
    GTEST_SKIP() << "no /dev/full";
  }
  fs::create_symlink("/dev/full", path("link"));
  Result<OutputFile> file = OutputFile::create(path("link"));
  ASSERT_TRUE(file.ok());
  const std::string much(100000, 'x');
  file->write(much.data(), static_cast<int64_t>(much.size()));
  const Status status = file->commit();
  EXPECT_EQ(status.code(), StatusCode::kIo);
  EXPECT_EQ(status.message(), path("link") + ": can not be written: No space left on device");
  EXPECT_TRUE(fs::is_symlink(path("link")));
}

// Replacing /dev/stdout or /dev/null by a file, which root could, would break the machine.
TEST_F(OutputFileTest, LinksAndDevicesAreWrittenToAndStay) {
  std::ofstream(path("target")) << "old and longer";
  fs::create_symlink(path("target"), path("link"));
  Result<OutputFile> file = OutputFile::create(path("link"));
  ASSERT_TRUE(file.ok());
  file->write("new", 3);
  ASSERT_TRUE(file->commit().ok());
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(text_of(path("target")), "new");
  EXPECT_EQ(num_files(), 2);
  Result<OutputFile> null = OutputFile::create("/dev/null");
  ASSERT_TRUE(null.ok());
  null->write("new", 3);
  ASSERT_TRUE(null->commit().ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_FALSE(fs::exists("/dev/null.partial"));
}

}  // namespace
}  // namespace lacuna
