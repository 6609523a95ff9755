// The bump allocator: sizing and carving are one code and must agree to the byte.
#include "core/workspace.h"

#include <gtest/gtest.h>

#include <vector>

#include "lacuna/dtype.h"

namespace lacuna {
namespace {

struct Parts {
  float* scores;
  Bf16* keys;
  int64_t* rows;
  char* nothing;
};

Parts carve(Workspace& workspace, int64_t n) {
  Parts parts;
  parts.scores = workspace.take<float>(n);
  parts.keys = workspace.take<Bf16>(3 * n + 1);
  parts.nothing = workspace.take<char>(0);
  parts.rows = workspace.take<int64_t>(n / 2);
  return parts;
}

TEST(Workspace, CountsExactlyWhatItCarves) {
  for (const int64_t n : {0, 1, 15, 16, 17, 1000}) {
    Workspace counter;
    EXPECT_TRUE(counter.counting());
    EXPECT_EQ(carve(counter, n).scores, nullptr);
    std::vector<char> memory(counter.used_bytes() + 1);
    Workspace workspace(memory.data(), counter.used_bytes());
    EXPECT_FALSE(workspace.counting());
    carve(workspace, n);
    EXPECT_EQ(workspace.used_bytes(), counter.used_bytes()) << n;
  }
}

TEST(Workspace, AlignsPartsAndKeepsThemApart) {
  alignas(64) char memory[1024];
  Workspace workspace(memory, sizeof(memory));
  const Parts parts = carve(workspace, 17);
  EXPECT_EQ(reinterpret_cast<char*>(parts.scores), memory);
  EXPECT_EQ(reinterpret_cast<char*>(parts.keys), memory + 128);  // 17 * 4 = 68
  EXPECT_EQ(parts.nothing, memory + 256);                        // 52 * 2 = 104
  EXPECT_EQ(reinterpret_cast<char*>(parts.rows), memory + 256);  // nothing takes no space
  EXPECT_EQ(workspace.used_bytes(), 256 + 64);                   // 8 * 8 = 64
}

TEST(WorkspaceDeathTest, AbortsBeyondItsEnd) {
  alignas(64) char memory[128];
  Workspace workspace(memory, sizeof(memory));
  workspace.take<char>(128);
  EXPECT_DEATH(workspace.take<char>(1), "does not hold");
}

}  // namespace
}  // namespace lacuna
