// The cut of cuda/sparse_mla_mma: what holds for every shape on every device, and where the splits
// of a row are a cluster.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backends/cuda/attention/sparse_mla.h"
#include "backends/cuda/backend.h"
#include "backends/cuda/extents.h"
#include "lacuna/attention.h"
#include "ops/dispatch.h"

namespace lacuna::cuda {
namespace {

// An H200: 132 SMs, of which 30 clusters of 4 or 15 of 8 get one each.
PlanShape h200(int64_t rows, int64_t keys, int64_t heads = 16) {
  return {.num_rows = rows,
          .list_width = keys,
          .count_max = keys,
          .num_heads = heads,
          .sm_count = 132,
          .batch_invariant = false,
          .clusters_of_4 = 30,
          .clusters_of_8 = 15};
}

int64_t cluster_of(const PlanShape& shape) { return plan_splits(shape, kPlanHeads).cluster; }

TEST(SparseMlaPlan, CoversEachKeyOnceAndRunsClustersAtOnce) {
  for (const int64_t sm_count : {16, 78, 132}) {
    for (const int64_t clusters_of_4 : {int64_t{0}, sm_count / 5, sm_count / 4}) {
      for (const int64_t rows : {1, 2, 7, 15, 16, 30, 31, 64, 132, 133, 700}) {
        for (const int64_t heads : {1, 8, 16, 17, 32, 128}) {
          for (const int64_t width : {0, 1, 32, 33, 128, 640, 2048, 8320, 100000}) {
            for (const int64_t count_max : {width, width / 3}) {
              const PlanShape shape = {.num_rows = rows,
                                       .list_width = width,
                                       .count_max = count_max,
                                       .num_heads = heads,
                                       .sm_count = sm_count,
                                       .batch_invariant = false,
                                       .clusters_of_4 = clusters_of_4,
                                       .clusters_of_8 = clusters_of_4 / 2};
              const SplitPlan plan = plan_splits(shape, kPlanHeads);
              SCOPED_TRACE(std::to_string(rows) + " rows of " + std::to_string(heads) +
                           " heads, width " + std::to_string(width) + ", counts to " +
                           std::to_string(count_max) + ", " + std::to_string(clusters_of_4) +
                           " clusters of 4 on " + std::to_string(sm_count) +
                           " SMs: " + describe_cut(plan.num_splits, plan.keys_per_split) +
                           ", cluster of " + std::to_string(plan.cluster));
              ASSERT_GE(plan.num_splits * plan.keys_per_split, count_max);
              ASSERT_EQ(plan.keys_per_split % kSplitKeys, 0);
              ASSERT_LE(plan.num_splits, kSplitsMax);
              ASSERT_TRUE(plan.block_heads == kPlanHeads || plan.block_heads == 8);
              const int64_t units = rows * ceil_div(heads, plan.block_heads);
              if (plan.cluster == 1) {
                // No split is empty.
                ASSERT_LT((plan.num_splits - 1) * plan.keys_per_split,
                          std::max<int64_t>(1, count_max));
                continue;
              }
              ASSERT_EQ(plan.num_splits, plan.cluster);
              ASSERT_TRUE(plan.cluster == 4 || plan.cluster == 8);
              ASSERT_LE(units, plan.cluster == 4 ? shape.clusters_of_4 : shape.clusters_of_8);
              ASSERT_EQ(plan_splits(shape, kPlanHeads / 2).cluster, 1) << "another kernel's";
            }
          }
        }
      }
    }
  }
}

// As measured: docs/kernels/cuda_sparse_mla.md.
TEST(SparseMlaPlan, TakesClustersWhereTheyWereFaster) {
  EXPECT_EQ(cluster_of(h200(1, 128)), 4);
  EXPECT_EQ(cluster_of(h200(30, 128)), 4);
  EXPECT_EQ(cluster_of(h200(1, 256)), 8);
  EXPECT_EQ(cluster_of(h200(8, 640)), 8);
  EXPECT_EQ(cluster_of(h200(15, 2048)), 8);
  EXPECT_EQ(cluster_of(h200(24, 640)), 4);
  EXPECT_EQ(cluster_of(h200(28, 1024)), 4);
  EXPECT_EQ(cluster_of(h200(7, 128, 32)), 4);
  EXPECT_EQ(cluster_of(h200(1, 640)), 1);
  EXPECT_EQ(cluster_of(h200(1, 2048)), 1);
  EXPECT_EQ(cluster_of(h200(8, 2048)), 1);
  EXPECT_EQ(cluster_of(h200(16, 1024)), 1);
  EXPECT_EQ(cluster_of(h200(30, 2048)), 1);
  EXPECT_EQ(cluster_of(h200(32, 128)), 1) << "30 clusters run at once";
  EXPECT_EQ(cluster_of(h200(1, 32)), 1) << "one tile";
}

TEST(SparseMlaPlan, GivesABlockEightHeadsWhereThatEndsSooner) {
  const auto block_heads = [](const PlanShape& shape) {
    return plan_splits(shape, kPlanHeads).block_heads;
  };
  EXPECT_EQ(block_heads(h200(1, 128)), 8);
  EXPECT_EQ(block_heads(h200(15, 128)), 8);
  EXPECT_EQ(block_heads(h200(7, 128, 32)), 8);
  EXPECT_EQ(block_heads(h200(1, 640)), 8) << "40 blocks, no cluster";
  EXPECT_EQ(block_heads(h200(16, 128)), kPlanHeads) << "32 clusters would not run at once";
  EXPECT_EQ(block_heads(h200(1, 2048)), kPlanHeads) << "128 blocks leave the next call no room";
  EXPECT_EQ(block_heads(h200(1, 128, 8)), kPlanHeads) << "nothing to save";
  EXPECT_EQ(block_heads(h200(64, 2048)), kPlanHeads);
}

TEST(SparseMlaPlan, TakesFewerClustersWhereTilesAreWidened) {
  for (const auto& [rows, keys, cluster] : {std::tuple(1, 128, 4), std::tuple(8, 640, 8),
                                            std::tuple(24, 384, 4), std::tuple(24, 640, 1)}) {
    PlanShape shape = h200(rows, keys);
    shape.fp8 = true;
    EXPECT_EQ(cluster_of(shape), cluster) << rows << " rows of " << keys;
  }
}

TEST(SparseMlaPlan, TakesNoClustersBatchInvariantOrWhereNoneAreKnown) {
  PlanShape shape = h200(1, 128);
  shape.batch_invariant = true;
  EXPECT_EQ(cluster_of(shape), 1);
  shape = h200(1, 128);
  shape.clusters_of_4 = 0;
  shape.clusters_of_8 = 0;
  EXPECT_EQ(cluster_of(shape), 1);
}

// The address is never followed.
std::string detail(const DeviceInfo& device, int64_t rows, int64_t topk) {
  alignas(64) static char nowhere[64];
  auto state = std::make_shared<ContextState>();
  state->devices.push_back(device);
  state->backends = {&kBackend};
  const Context context = Context::from_state(std::move(state));
  const SparseMlaArgs args = {
      .q = make_view<const void>(nowhere, DType::kBFloat16, {rows, 16, 576}, device.device),
      .kv = flat_rows(nowhere, KvLayout::latent_bf16(512, 64), 100000, device.device),
      .indices = make_view<const void>(nowhere, DType::kInt32, {rows, topk}, device.device),
      .softmax_scale = 0.05,
      .out = make_view<void>(nowhere, DType::kBFloat16, {rows, 16, 512}, device.device)};
  return explain(context, args).detail;
}

TEST(SparseMlaPlan, SaysWhetherSplitsAreJoinedInClusters) {
  DeviceInfo device = {.device = {DeviceKind::kCuda, 0},
                       .name = "NVIDIA H200",
                       .sm_count = 132,
                       .compute_capability = 90,
                       .smem_optin_bytes = 227 * 1024,
                       .clusters_max = [](int, int blocks) -> int64_t { return 120 / blocks; }};
  EXPECT_EQ(detail(device, 1, 128),
            "splits of 32 keys, 4 a row, joined in clusters, 8 heads a block, on 132 SMs");
  EXPECT_EQ(detail(device, 8, 640), "splits of 96 keys, 8 a row, joined in clusters, on 132 SMs");
  EXPECT_EQ(detail(device, 64, 2048),
            "splits of 1024 keys, 2 a row, joined in clusters, on 132 SMs");
  device.clusters_max = nullptr;
  EXPECT_EQ(detail(device, 1, 128), "splits of 32 keys, 4 a row, 8 heads a block, on 132 SMs");
}

}  // namespace
}  // namespace lacuna::cuda
