// Promises of the cache operations that one call cannot show.
#include <cmath>
#include <limits>

#include "tests/conformance/harness.h"
#include "tests/reference/element.h"
#include "tests/support/cache_cases.h"
#include "tests/support/compare.h"
#include "tests/support/host_map.h"
#include "tests/support/random.h"

namespace lacuna::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

const Context& context() { return conformance_context(); }

// What append stores, gather reads: exactly in the wide formats, within half a step in FP8. The
// rope key of an FP8 row keeps 16 bits whatever its range.
TEST(CacheRoundTrip, GatherReadsWhatAppendStored) {
  for (const KernelOnDevice& append : kernels_of<AppendKvArgs>(context())) {
    for (const KernelOnDevice& gather : kernels_of<GatherKvArgs>(context())) {
      if (!(append.where.device == gather.where.device)) {
        continue;
      }
      for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::latent_f32(512, 64),
                                     KvLayout::fp8_ds_mla()}) {
        BufferSet buffers(append.where);
        Random random(3);
        TestTensor latent = buffers.tensor("latent", Role::kInput, DType::kFloat32, {64, 512});
        TestTensor rope = buffers.tensor("rope", Role::kInput, DType::kFloat32, {64, 64});
        latent.fill([&] { return 0.5 * (2 * random.uniform() - 1); });
        rope.fill([&] { return 700.0 * (2 * random.uniform() - 1); });
        TestTensor slots = buffers.tensor("slots", Role::kInput, DType::kInt64, {64});
        for (int64_t i = 0; i < 64; ++i) {
          slots.set(static_cast<double>(i), i);
        }
        TestCache cache =
            buffers.cache("kv", Role::kInOut, layout, {.num_blocks = 4, .block_size = 16});
        TestTensor table = buffers.tensor("table", Role::kInput, DType::kInt32, {1, 4});
        for (int64_t b = 0; b < 4; ++b) {
          table.set(static_cast<double>(b), 0, b);
        }
        TestTensor zero = buffers.ints("zero", {0});
        TestTensor length = buffers.ints("length", {64});
        TestTensor out = buffers.tensor("out", Role::kOutput, DType::kFloat32, {64, 576});
        buffers.upload();
        const KvCacheView kv = cache.view(Side::kDevice);
        const AppendKvArgs store{.latent = latent.view(Side::kDevice),
                                 .rope = rope.view(Side::kDevice),
                                 .slot_mapping = slots.view(Side::kDevice),
                                 .kv = kv,
                                 .kernel = append.name};
        const Status stored = call_with_workspace(context(), store, append.where);
        GatherKvArgs read{.kv = kv,
                          .block_table = table.view(Side::kDevice),
                          .request_ids = zero.view(Side::kDevice),
                          .starts = zero.view(Side::kDevice),
                          .lengths = length.view(Side::kDevice),
                          .out_starts = zero.view(Side::kDevice),
                          .out = out.view(Side::kDevice),
                          .kernel = gather.name};
        if (stored.code() == StatusCode::kUnsupported || !explain(context(), read).status.ok()) {
          continue;
        }
        ASSERT_TRUE(stored.ok()) << stored.message();
        ASSERT_TRUE(call_with_workspace(context(), read, gather.where).ok());
        buffers.download();
        for (int64_t t = 0; t < 64; ++t) {
          for (int64_t i = 0; i < 576; ++i) {
            const double wanted = i < 512 ? latent.get(t, i) : rope.get(t, i - 512);
            double tolerance = 0;
            if (layout.format == KvFormat::kLatentBf16 || i >= 512) {
              tolerance = std::fabs(wanted) * 0x1p-8;
            } else if (layout.format == KvFormat::kFp8DsMla) {
              // Three mantissa bits; and amax 0.5 gives scale 2^-9, whose subnormal step is 2^-18.
              tolerance = std::max(std::fabs(wanted) * 0x1p-4, 0x1p-19);
            }
            if (layout.format == KvFormat::kLatentF32) {
              tolerance = 0;
            }
            ASSERT_NEAR(reference::element(out.result(), t, i), wanted, tolerance)
                << kv_format_name(layout.format) << " " << t << ", " << i;
          }
        }
      }
    }
  }
}

// NaN and infinities: stored as they are where the format has them; in FP8 they spoil no group but
// their own.
TEST(AppendKvContract, NanAndInfinityStayInTheirPlace) {
  for (const KernelOnDevice& kernel : kernels_of<AppendKvArgs>(context())) {
    for (const KvLayout& layout :
         {KvLayout::latent_bf16(512, 64), KvLayout::latent_f32(512, 64), KvLayout::fp8_ds_mla()}) {
      const AppendCase test_case{.name = "special",
                                 .rows = 4,
                                 .layout = layout,
                                 .dtype = DType::kFloat32,
                                 .hostile_slots = false};
      AppendKvProblem problem(test_case, kernel.where);
      problem.latent.set(kNan, 0, 3);
      problem.latent.set(kInfinity, 1, 130);
      problem.latent.set(-kInfinity, 2, 511);
      problem.latent.set(-kInfinity, 3, 0);
      problem.latent.set(kNan, 3, 1);
      problem.rope.set(kNan, 0, 5);
      problem.rope.set(-kInfinity, 1, 63);
      AppendKvArgs args = problem.args(Side::kDevice);
      args.kernel = kernel.name;
      if (!explain(context(), args).status.ok()) {
        continue;
      }
      problem.buffers.upload();
      ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
      problem.buffers.download();
      EXPECT_EQ(problem.buffers.untouched_error(), "");
      if (layout.format != KvFormat::kFp8DsMla) {
        EXPECT_EQ(problem.verify(), "") << kernel.name;
        continue;
      }
      std::vector<uint8_t> expected = problem.cache.buffer().image;
      AppendKvArgs host = problem.args(Side::kHost);
      host.kv.data = expected.data();
      reference::append_kv(host);
      std::vector<double> wanted, stored;
      for (int64_t t = 0; t < 4; ++t) {
        const int64_t slot = reference::integer(host.slot_mapping, t);
        reference::read_cached_row(host.kv, slot / 64, slot % 64, &wanted);
        reference::read_cached_row(problem.cache.result(), slot / 64, slot % 64, &stored);
        const int64_t spoiled = t == 1 ? 1 : t == 2 ? 3 : 0;
        for (int64_t i = 0; i < 576; ++i) {
          if (i < 512 && i / 128 == spoiled) {
            continue;
          }
          EXPECT_TRUE(stored[i] == wanted[i] || (std::isnan(stored[i]) && std::isnan(wanted[i])))
              << "row " << t << ", column " << i << ": " << stored[i] << ", expected " << wanted[i];
        }
      }
    }
  }
}

// dim^-0.5 of 128 is not a power of two: equal within a step of the format.
TEST(AppendIndexKeysContract, HadamardOfTheReleasedWidth) {
  for (const KernelOnDevice& kernel : kernels_of<AppendIndexKeysArgs>(context())) {
    for (const KvLayout& layout :
         {KvLayout::index_fp8(), KvLayout::index_bf16(128), KvLayout::index_f32(128)}) {
      for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        const AppendCase test_case{.name = "hadamard128",
                                   .rows = 20,
                                   .layout = layout,
                                   .dtype = dtype,
                                   .hostile_slots = false};
        AppendIndexKeysProblem problem(test_case, kernel.where);
        AppendIndexKeysArgs args = problem.args(Side::kDevice);
        args.hadamard = true;
        args.kernel = kernel.name;
        if (!explain(context(), args).status.ok()) {
          continue;
        }
        problem.buffers.upload();
        ASSERT_TRUE(call_with_workspace(context(), args, kernel.where).ok());
        problem.buffers.download();
        EXPECT_EQ(problem.buffers.untouched_error(), "");
        std::vector<uint8_t> expected = problem.cache.buffer().image;
        AppendIndexKeysArgs host = problem.args(Side::kHost);
        host.hadamard = true;
        host.kv.data = expected.data();
        reference::append_index_keys(host);
        std::vector<double> wanted, stored;
        for (int64_t t = 0; t < test_case.rows; ++t) {
          const int64_t slot = reference::integer(host.slot_mapping, t);
          reference::read_cached_row(host.kv, slot / 64, slot % 64, &wanted);
          reference::read_cached_row(problem.cache.result(), slot / 64, slot % 64, &stored);
          for (int64_t i = 0; i < 128; ++i) {
            // One step of the format (a value near the middle of two may round either way), and
            // the float32 error of a sum of 128 terms of order 1. FP8: amax is below 8 here, so
            // the scale is at most 2^-5 and a subnormal step at most 2^-14.
            const double step = layout.format == KvFormat::kIndexFp8    ? 0x1p-3
                                : layout.format == KvFormat::kIndexBf16 ? 0x1p-7
                                                                        : 0;
            EXPECT_NEAR(stored[i], wanted[i],
                        std::fabs(wanted[i]) * step + 0x1p-14 * (step != 0) + 4e-6)
                << kv_format_name(layout.format) << " row " << t << ", column " << i;
          }
        }
      }
    }
  }
}

// Slots and rows whose offsets pass 2^31 elements and 2^32 bytes.
TEST(CacheOffsets, BeyondTwoToThe31) {
  for (const KvLayout& layout : {KvLayout::latent_bf16(512, 64), KvLayout::fp8_ds_mla()}) {
    constexpr int64_t kBlock = 64;
    const int64_t block_bytes = kBlock * layout.record_bytes();
    const int64_t num_blocks = (int64_t{5} << 30) / block_bytes;
    for (const KernelOnDevice& kernel : kernels_of<GatherKvArgs>(context())) {
      if (kernel.where.device.kind != DeviceKind::kCpu) {
        continue;
      }
      HostMap map(num_blocks * block_bytes);
      const KvCacheView kv = paged_rows(map.data(), layout, num_blocks, kBlock);
      const std::vector<int32_t> blocks = {static_cast<int32_t>(num_blocks - 1), 1};
      std::vector<int64_t> slots;
      for (int32_t block : blocks) {
        map.allow(block * block_bytes, block_bytes);
        for (int64_t o = 0; o < kBlock; ++o) {
          slots.push_back(block * kBlock + o);
        }
      }
      Random random(1);
      std::vector<float> latent(128 * 512), rope(128 * 64);
      for (float& value : latent) {
        value = random.bell();
      }
      for (float& value : rope) {
        value = random.bell();
      }
      const AppendKvArgs append{.latent = view_of<float>(latent.data(), {128, 512}),
                                .rope = view_of<float>(rope.data(), {128, 64}),
                                .slot_mapping = view_of<int64_t>(slots.data(), {128}),
                                .kv = kv};
      ASSERT_TRUE(call_with_workspace(context(), append, kernel.where).ok());

      constexpr int64_t kStride = (int64_t{1} << 25) + 64;  // 70 rows pass 2^31 elements
      HostMap out_map(4 * 128 * kStride);
      TensorView out = make_view<void>(out_map.data(), DType::kFloat32, {128, 576});
      out.strides[0] = kStride;
      for (int64_t t = 0; t < 128; ++t) {
        out_map.allow(4 * t * kStride, 4 * 576);
      }
      const int32_t zero = 0, length = 128;
      GatherKvArgs args{.kv = kv,
                        .block_table = view_of<int32_t>(blocks.data(), {1, 2}),
                        .request_ids = view_of<int32_t>(&zero, {1}),
                        .starts = view_of<int32_t>(&zero, {1}),
                        .lengths = view_of<int32_t>(&length, {1}),
                        .out_starts = view_of<int32_t>(&zero, {1}),
                        .out = out,
                        .kernel = kernel.name};
      const Status status = call_with_workspace(context(), args, kernel.where);
      ASSERT_TRUE(status.ok()) << status.message();
      EXPECT_EQ(compare("out", out, reference::gather_kv(args).rows, {.abs = 0, .rel = 0x1p-23}),
                "")
          << kernel.name;
    }
  }
}

TEST(CacheContract, NothingToDoSucceedsWithNullPointers) {
  for (const TestDevice& where : devices_of(context())) {
    const Device device = where.device;
    AppendKvArgs append;
    append.latent = make_view<void>(nullptr, DType::kFloat32, {0, 512}, device);
    append.rope = make_view<void>(nullptr, DType::kFloat32, {0, 64}, device);
    append.slot_mapping = make_view<void>(nullptr, DType::kInt64, {0}, device);
    append.kv = paged_rows(nullptr, KvLayout::fp8_ds_mla(), 0, 64, device);
    EXPECT_TRUE(append_kv(context(), append).ok());

    AppendIndexKeysArgs keys;
    keys.keys = make_view<void>(nullptr, DType::kFloat32, {0, 128}, device);
    keys.slot_mapping = append.slot_mapping;
    keys.kv = paged_rows(nullptr, KvLayout::index_fp8(), 0, 64, device);
    EXPECT_TRUE(append_index_keys(context(), keys).ok());

    GatherKvArgs gather;
    gather.kv = append.kv;
    gather.block_table = make_view<void>(nullptr, DType::kInt32, {0, 0}, device);
    const TensorView none = make_view<void>(nullptr, DType::kInt32, {0}, device);
    gather.request_ids = gather.starts = gather.lengths = gather.out_starts = none;
    gather.out = make_view<void>(nullptr, DType::kBFloat16, {0, 576}, device);
    EXPECT_TRUE(gather_kv(context(), gather).ok());
  }
}

// An empty cache takes nothing: every slot is beyond it.
TEST(CacheContract, AnEmptyCacheSkipsEverySlot) {
  for (const TestDevice& where : devices_of(context())) {
    BufferSet buffers(where);
    TestTensor latent = buffers.tensor("latent", Role::kInput, DType::kFloat32, {3, 512});
    TestTensor rope = buffers.tensor("rope", Role::kInput, DType::kFloat32, {3, 64});
    TestTensor slots = buffers.tensor("slots", Role::kInput, DType::kInt64, {3});
    for (int64_t i = 0; i < 3; ++i) {
      slots.set(static_cast<double>(i), i);
    }
    buffers.upload();
    const Status status = append_kv(
        context(), {.latent = latent.view(Side::kDevice),
                    .rope = rope.view(Side::kDevice),
                    .slot_mapping = slots.view(Side::kDevice),
                    .kv = paged_rows(nullptr, KvLayout::fp8_ds_mla(), 0, 64, where.device)});
    EXPECT_TRUE(status.ok()) << status.message();
  }
}

}  // namespace
}  // namespace lacuna::testing
