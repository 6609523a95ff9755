// Which kernel sparse_mla takes on which device and why, over made-up devices: no GPU is asked. And
// where that differs from the rule of vLLM's native kernel for few heads.
#include <gtest/gtest.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backends/cuda/backend.h"
#include "backends/sm90/attention/split_kv.h"
#include "backends/sm90/backend.h"
#include "ops/backend.h"
#include "ops/dispatch.h"

namespace lacuna {
namespace {

constexpr const char* kSmallHead = "sm90/sparse_mla_small_head";
constexpr const char* kPortable = "cuda/sparse_mla_mma";
constexpr Device kGpu = {DeviceKind::kCuda, 0};

DeviceInfo gpu(const std::string& name, int sm_count, int compute_capability = 90) {
  return {.device = kGpu,
          .name = name,
          .memory_bytes = int64_t{80} << 30,
          .sm_count = sm_count,
          .compute_capability = compute_capability,
          .smem_optin_bytes = 227 * 1024,
          .l2_bytes = 50 << 20};
}

const std::vector<DeviceInfo> kHoppers = {gpu("NVIDIA H20", 78),
                                          gpu("NVIDIA H100 80GB HBM3", 132),
                                          gpu("NVIDIA H200", 132),
                                          gpu("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16),
                                          gpu("NVIDIA H200 MIG 3g.71gb", 60),
                                          gpu("NVIDIA H20", 39),
                                          gpu("NVIDIA unknown", 100)};
const DeviceInfo kBlackwell = gpu("NVIDIA B200", 148, 100);

Context context_of(const DeviceInfo& device) {
  auto state = std::make_shared<ContextState>();
  state->devices.push_back(device);
  state->backends = {&sm90::kBackend, &cuda::kBackend};
  return Context::from_state(std::move(state));
}

struct Shape {
  int64_t rows;
  int64_t heads;
  int64_t rope = 64;
  int64_t topk = 2048;
};

// The address is never followed.
SparseMlaArgs args_of(const Shape& shape) {
  alignas(64) static char nowhere[64];
  return {.q = make_view<const void>(nowhere, DType::kBFloat16,
                                     {shape.rows, shape.heads, 512 + shape.rope}, kGpu),
          .kv = flat_rows(nowhere, KvLayout::latent_bf16(512, shape.rope), 100000, kGpu),
          .indices = make_view<const void>(nowhere, DType::kInt32, {shape.rows, shape.topk}, kGpu),
          .softmax_scale = 0.05,
          .out = make_view<void>(nowhere, DType::kBFloat16, {shape.rows, shape.heads, 512}, kGpu)};
}

std::vector<int64_t> rows_around(int64_t sm_count) {
  return {0, 1, sm_count, sm_count + 1, 2 * sm_count, 2 * sm_count + 1};
}

// Why a kernel was not taken; empty: it was not asked, or was taken.
std::string refusal_of(const Explanation& explanation, const std::string& kernel) {
  for (const KernelRefusal& refusal : explanation.refusals) {
    if (refusal.kernel == kernel) {
      return refusal.reason;
    }
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Sm90Dispatch, TakesTheSmallHeadKernelWhereItPays) {
  for (const DeviceInfo& device : kHoppers) {
    const Context context = context_of(device);
    for (const int64_t rope : {64, 0}) {
      for (const int64_t heads : {5, 8, 16, 32}) {
        for (const int64_t rows : rows_around(device.sm_count)) {
          const Explanation explanation = explain(context, args_of({rows, heads, rope}));
          SCOPED_TRACE(device.name + ": " + std::to_string(rows) + " rows of " +
                       std::to_string(heads) + " heads: " + explanation.kernel + ", " +
                       explanation.detail);
          ASSERT_TRUE(explanation.status.ok()) << explanation.status.message();
          EXPECT_TRUE(explanation.preferred);
          const bool pays =
              sm90::prefers_small_head({rows, 2048, 2048, heads, device.sm_count, false});
          EXPECT_EQ(explanation.kernel, pays ? kSmallHead : kPortable);
          EXPECT_EQ(refusal_of(explanation, kSmallHead),
                    pays ? "" : "can run, but does not pay here");
          EXPECT_TRUE(
              contains(explanation.detail, "on " + std::to_string(device.sm_count) + " SMs"));
          // On every Hopper, as soon as rows fill it.
          EXPECT_TRUE(pays || rows < device.sm_count);
        }
      }
    }
  }
}

TEST(Sm90Dispatch, SaysWhyTheSmallHeadKernelIsRefused) {
  for (const DeviceInfo& device : kHoppers) {
    const Context context = context_of(device);
    for (const int64_t heads : {33, 64}) {
      for (const int64_t rows : rows_around(device.sm_count)) {
        const Explanation explanation = explain(context, args_of({rows, heads}));
        EXPECT_EQ(explanation.kernel, kPortable);
        EXPECT_EQ(refusal_of(explanation, kSmallHead),
                  "q: " + std::to_string(heads) + " heads, expected at most 32");
      }
    }
  }
  DeviceInfo small = kHoppers[0];
  small.smem_optin_bytes = 99 * 1024;
  EXPECT_TRUE(contains(refusal_of(explain(context_of(small), args_of({64, 16})), kSmallHead),
                       "this GPU gives a block 101376 bytes of shared memory, needs "));
}

TEST(Sm90Dispatch, ALaterGpuTakesThePortableKernelAndSaysSo) {
  const Context context = context_of(kBlackwell);
  for (const int64_t rope : {64, 0}) {
    for (const int64_t heads : {5, 8, 16, 32, 33, 64}) {
      for (const int64_t rows : rows_around(kBlackwell.sm_count)) {
        const Explanation explanation = explain(context, args_of({rows, heads, rope}));
        ASSERT_TRUE(explanation.status.ok()) << explanation.status.message();
        EXPECT_EQ(explanation.kernel, kPortable);
        EXPECT_TRUE(explanation.preferred);
        EXPECT_EQ(refusal_of(explanation, kSmallHead),
                  "sm90 does not run on NVIDIA B200 (compute capability 10.0)");
        EXPECT_TRUE(contains(explanation.detail, "on 148 SMs")) << explanation.detail;
      }
    }
  }
  SparseMlaArgs forced = args_of({64, 16});
  forced.kernel = kSmallHead;
  EXPECT_TRUE(
      contains(explain(context, forced).status.message(), "sm90 does not run on NVIDIA B200"));
}

TEST(Sm90Dispatch, TellsTheModeAndWhy) {
  const auto detail = [](const DeviceInfo& device, const Shape& shape,
                         const std::function<void(SparseMlaArgs&)>& change = {}) {
    SparseMlaArgs args = args_of(shape);
    args.kernel = kSmallHead;
    if (change) {
      change(args);
    }
    return explain(context_of(device), args).detail;
  };
  const DeviceInfo& h200 = kHoppers[2];
  const std::string one_row = detail(h200, {1, 16});
  EXPECT_TRUE(one_row.starts_with("splits of ")) << one_row;
  EXPECT_TRUE(contains(one_row, " a row, on 132 SMs: rows alone do not fill the SMs")) << one_row;
  EXPECT_TRUE(contains(detail(h200, {64, 16}), ", 2 a row, joined in clusters, on 132 SMs: "));
  EXPECT_EQ(detail(h200, {132, 16}), "whole rows, on 132 SMs: whole rows fill the SMs");
  EXPECT_EQ(
      detail(h200, {2119, 16}),
      "whole rows but the last 7, in 112 runs of 128 keys, on 132 SMs: whole rows leave a part "
      "of the last wave idle");
  EXPECT_EQ(detail(h200, {1, 16, 64, 64}), "whole rows, on 132 SMs: a list is one tile");
  EXPECT_EQ(detail(h200, {132, 16}, [](SparseMlaArgs& args) { args.batch_invariant = true; }),
            "splits of 256 keys, 8 a row, on 132 SMs: batch_invariant: by the list width alone");
  EXPECT_EQ(
      detail(h200, {132, 16},
             [](SparseMlaArgs& args) {
               args.schedule = make_view<const void>(args.q.data, DType::kInt32, {4096, 4}, kGpu);
             }),
      "a schedule of at most 264 tasks, on 132 SMs");
  DeviceInfo tuned = h200;
  tuned.tuning = std::make_shared<const Tuning>(
      Tuning{.sparse_mla_splits = {{.heads = 16, .rows = 1, .keys = 2048, .splits = 4}}});
  EXPECT_EQ(detail(tuned, {1, 16}),
            "splits of 512 keys, 4 a row, on 132 SMs: from the device's tuning table");
  // The rows of a slice fill it, and not the whole GPU.
  EXPECT_EQ(detail(kHoppers[3], {16, 16}), "whole rows, on 16 SMs: whole rows fill the SMs");
  EXPECT_TRUE(detail(h200, {16, 16}).starts_with("splits of "));
}

TEST(Sm90Dispatch, DecidesWithoutReadingTheCounts) {
  // An address that would end the process.
  const auto* unreadable = reinterpret_cast<const int32_t*>(uintptr_t{64});
  for (const DeviceInfo& device : kHoppers) {
    const Context context = context_of(device);
    for (const int64_t rows : {1, 16, 133}) {
      const Explanation plain = explain(context, args_of({rows, 16}));
      SparseMlaArgs args = args_of({rows, 16});
      args.valid_counts = view_of(unreadable, {rows}, kGpu);
      const Explanation counted = explain(context, args);
      EXPECT_EQ(counted.kernel, plain.kernel);
      EXPECT_EQ(counted.detail, plain.detail);
    }
  }
}

TEST(Sm90Dispatch, KeepsTheKernelOfABatchInvariantRow) {
  for (const DeviceInfo& device : kHoppers) {
    const Context context = context_of(device);
    SparseMlaArgs first = args_of({1, 16});
    first.batch_invariant = true;
    const Explanation expected = explain(context, first);
    for (const int64_t rows : rows_around(device.sm_count)) {
      SparseMlaArgs args = args_of({rows, 16});
      args.batch_invariant = true;
      EXPECT_EQ(explain(context, args).kernel, expected.kernel) << rows;
      EXPECT_EQ(explain(context, args).detail, expected.detail) << rows;
    }
  }
}

// Whichever kernels the two calls take.
TEST(Sm90Dispatch, AWorkspaceHoldsAnySmallerCall) {
  std::vector<DeviceInfo> devices = kHoppers;
  devices.push_back(kBlackwell);
  for (const DeviceInfo& device : devices) {
    const Context context = context_of(device);
    const auto bytes = [&](const Shape& shape) {
      const Result<int64_t> needed = workspace_bytes(context, args_of(shape));
      EXPECT_TRUE(needed.ok()) << needed.status().message();
      return needed.ok() ? *needed : 0;
    };
    for (const int64_t topk : {64, 128, 2048, 8320}) {
      for (const int64_t heads : {1, 5, 8, 9, 16, 17, 32, 33, 64}) {
        for (int64_t rows = 0; rows < 40; ++rows) {
          ASSERT_LE(bytes({rows, heads, 64, topk}), bytes({rows + 1, heads, 64, topk}))
              << device.name << ", " << rows << " rows of " << heads << " heads, topk " << topk;
          if (heads != 32) {  // beyond 32 another kernel has less to keep
            ASSERT_LE(bytes({rows, heads, 64, topk}), bytes({rows, heads + 1, 64, topk}))
                << device.name << ", " << rows << " rows of " << heads << " heads, topk " << topk;
          }
        }
      }
    }
  }
}

TEST(Sm90Dispatch, NeverAsksForTheName) {
  for (const DeviceInfo& device : kHoppers) {
    DeviceInfo renamed = device;
    renamed.name = "another";
    for (const int64_t heads : {8, 16, 32}) {
      for (const int64_t rows : rows_around(device.sm_count)) {
        const Explanation ours = explain(context_of(device), args_of({rows, heads}));
        const Explanation other = explain(context_of(renamed), args_of({rows, heads}));
        EXPECT_EQ(ours.kernel, other.kernel);
        EXPECT_EQ(ours.detail, other.detail);
      }
    }
  }
}

// vLLM #67468 on top of #67175, bf16 on sm_90: whether its native kernel runs, instead of one whose
// heads are padded to 64. 8 and 16 heads: for every batch on two full devices known by name and SM
// count, elsewhere for more rows than SMs; 32 heads: for more than two rows an SM; others: never.
bool upstream_is_native(const DeviceInfo& device, int64_t heads, int64_t rows) {
  const bool listed = (device.name == "NVIDIA H20" && device.sm_count == 78) ||
                      (device.name == "NVIDIA H100 80GB HBM3" && device.sm_count == 132);
  switch (heads) {
    case 8:
    case 16:
      return rows > (listed ? 0 : device.sm_count);
    case 32:
      return rows > 2 * device.sm_count;
    default:
      return false;
  }
}

// The least number of rows that takes the native kernel, which all larger ones take; -1: none.
int64_t rows_from(int64_t rows_max, const std::function<bool(int64_t rows)>& is_native) {
  int64_t from = -1;
  for (int64_t rows = 0; rows <= rows_max; ++rows) {
    const bool native = is_native(rows);
    EXPECT_TRUE(native || from < 0) << "not at " << rows << " rows, though at fewer";
    from = native && from < 0 ? rows : from;
  }
  return from;
}

TEST(Sm90Dispatch, DiffersFromUpstreamAsThisTableSays) {
  struct Line {
    const char* name;
    int sm_count;
    // Rows from which the kernel without padded heads runs; -1: never.
    int64_t upstream[4];  // 5, 8, 16 and 32 heads
  };
  const std::vector<Line> table = {
      {"NVIDIA H20", 78, {-1, 1, 1, 157}},
      {"NVIDIA H100 80GB HBM3", 132, {-1, 1, 1, 265}},
      {"NVIDIA H200", 132, {-1, 133, 133, 265}},
      {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16, {-1, 17, 17, 33}},
      {"NVIDIA H200 MIG 3g.71gb", 60, {-1, 61, 61, 121}},
      {"NVIDIA H20", 39, {-1, 40, 40, 79}},  // the name alone does not do
      {"NVIDIA unknown", 100, {-1, 101, 101, 201}},
  };
  ASSERT_EQ(table.size(), kHoppers.size());
  constexpr int64_t kHeads[4] = {5, 8, 16, 32};
  std::printf(
      "rows from which a kernel without padded heads runs (-1: never)\n%-34s %4s %6s %9s %5s\n",
      "device", "SMs", "heads", "upstream", "ours");
  for (const Line& line : table) {
    const DeviceInfo device = gpu(line.name, line.sm_count);
    const Context context = context_of(device);
    for (int i = 0; i < 4; ++i) {
      const int64_t heads = kHeads[i];
      const int64_t rows_max = 2 * line.sm_count + 1;
      const int64_t upstream = rows_from(
          rows_max, [&](int64_t rows) { return upstream_is_native(device, heads, rows); });
      // Both of our kernels take heads as they are; this is the one for few heads.
      const int64_t ours = rows_from(rows_max, [&](int64_t rows) {
        return explain(context, args_of({rows, heads})).kernel == kSmallHead;
      });
      std::printf("%-34s %4d %6d %9d %5d\n", line.name, line.sm_count, static_cast<int>(heads),
                  static_cast<int>(upstream), static_cast<int>(ours));
      EXPECT_EQ(upstream, line.upstream[i]) << line.name << ", " << heads << " heads";
      // Ours: one number for these heads, whatever the device is called.
      EXPECT_EQ(
          ours, rows_from(rows_max, [&](int64_t rows) {
            return sm90::prefers_small_head({rows, 2048, 2048, heads, device.sm_count, false});
          }));
      EXPECT_GE(ours, 0);
      EXPECT_LE(ours, line.sm_count);
    }
  }
}

}  // namespace
}  // namespace lacuna
