// The CPU's memory: aligned, and resident from the start.
#include "backends/cpu/runtime.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

namespace lacuna::cpu {
namespace {

int64_t num_resident_pages(void* data, int64_t bytes) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> pages(static_cast<size_t>((bytes + page - 1) / page));
  EXPECT_EQ(mincore(data, static_cast<size_t>(bytes), pages.data()), 0);
  return std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return (p & 1) != 0; });
}

TEST(CpuRuntime, MemoryIsAlignedAndResidentBeforeItIsUsed) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  // Less than a huge page, a few of them and a rest, and the share of more than one thread.
  for (const int64_t bytes :
       {int64_t{1}, 40 * page, (int64_t{33} << 20) + 5, int64_t{1200} << 20}) {
    const Result<void*> data = kRuntime.allocate(0, bytes);
    ASSERT_TRUE(data.ok()) << data.status().message();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(*data) % 256, 0u);
    EXPECT_EQ(num_resident_pages(*data, bytes), (bytes + page - 1) / page) << bytes << " bytes";
    kRuntime.free(0, *data);
  }
}

TEST(CpuRuntime, AbsurdSizesAreRefused) {
  EXPECT_EQ(kRuntime.allocate(0, -1).status().code(), StatusCode::kInvalidArgument);
  const Result<void*> none = kRuntime.allocate(0, 0);
  ASSERT_TRUE(none.ok());
  EXPECT_EQ(*none, nullptr);
  EXPECT_EQ(kRuntime.allocate(0, int64_t{1} << 55).status().code(), StatusCode::kOutOfMemory);
}

}  // namespace
}  // namespace lacuna::cpu
