// Grids and data of the cache operations.
#include "tests/support/cache_cases.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tests/reference/element.h"
#include "tests/reference/reference.h"
#include "tests/support/compare.h"

namespace lacuna::testing {
namespace {

std::string append_name(const AppendCase& c, const std::string& name) {
  std::string text = name + "_" + std::string(kv_format_name(c.layout.format)) + "_d" +
                     std::to_string(c.layout.latent) + "r" + std::to_string(c.layout.rope) +
                     (c.dtype == DType::kFloat32 ? "_f32in" : "_bf16in") + "_block" +
                     std::to_string(c.block_size);
  return text + (c.scale_rule == Fp8ScaleRule::kAmax ? "_amax" : "");
}

TestTensor make_slots(const AppendCase& c, BufferSet* buffers, Random* random) {
  const int64_t num_slots = c.num_blocks * c.block_size;
  std::vector<int64_t> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  random->shuffle(&slots);
  TestTensor mapping = buffers->tensor("slot_mapping", Role::kInput, c.slot_dtype, {c.rows},
                                       {.strides = {c.strided ? 3 : 1}});
  // In 64 bits also what is negative or small only when cut to 32.
  const double wide[] = {-4294967295.0, 4294967296.0 * 3, 9e18, -9e18};
  const double narrow[] = {-1, INT32_MIN, INT32_MAX, static_cast<double>(num_slots)};
  for (int64_t t = 0; t < c.rows; ++t) {
    const bool skipped = c.hostile_slots && t % 4 == 1;
    const bool use_wide = c.slot_dtype == DType::kInt64 && t % 8 == 5;
    mapping.set(!skipped   ? static_cast<double>(slots[t])
                : use_wide ? wide[random->integer(0, 3)]
                           : narrow[random->integer(0, 3)],
                t);
  }
  return mapping;
}

// Fills row t of an input. With scale edges the largest magnitude of each group of 128 is one of
// the values at which the scale rules change.
void fill_input(const AppendCase& c, TestTensor* tensor, Random* random) {
  const float edges[] = {0.0f, 1e-30f, 1e-4f * 448, 447.9f,     448.0f, 448.1f,
                         1e4f, 1e-4f,  0.5f,        2.0f * 448, 3.5f,   1e30f};
  const int64_t width = tensor->extent(1);
  int n = 0;
  for (int64_t t = 0; t < tensor->extent(0); ++t) {
    float amax = 1;
    for (int64_t i = 0; i < width; ++i) {
      if (i % kFp8DsMlaScaleBlock == 0) {
        amax = edges[n++ % 12];
      }
      const float value =
          c.hadamard      ? static_cast<float>(random->integer(-8, 8))
          : c.scale_edges ? amax * (i % kFp8DsMlaScaleBlock == 5 ? 1.0f : 2 * random->uniform() - 1)
                          : random->bell();
      tensor->set(value, t, i);
    }
  }
}

// Whether the elements that byte `i` belongs to are both NaN: which one a NaN is stored as is the
// processor's choice (CUDA writes 7fff where x86 keeps the payload).
bool both_nan(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, size_t i,
              const KvLayout& layout) {
  const auto is_nan = [&](const std::vector<uint8_t>& bytes) {
    switch (layout.format) {
      case KvFormat::kLatentBf16:
      case KvFormat::kIndexBf16: {
        Bf16 value;
        std::memcpy(&value, bytes.data() + i / 2 * 2, 2);
        return std::isnan(to_float(value));
      }
      case KvFormat::kLatentF32:
      case KvFormat::kIndexF32: {
        float value;
        std::memcpy(&value, bytes.data() + i / 4 * 4, 4);
        return std::isnan(value);
      }
      default:
        return false;
    }
  };
  return is_nan(a) && is_nan(b);
}

// Every byte of the cache, gaps included.
std::string compare_caches(const TestBuffer& expected_image, const std::vector<uint8_t>& expected,
                           const KvCacheView& kv) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected_image.result[i] != expected[i] &&
        !both_nan(expected_image.result, expected, i, kv.layout)) {
      const int64_t at = static_cast<int64_t>(i);
      return "kv: byte " + std::to_string(at % kv.block_stride_bytes) + " of block " +
             std::to_string(at / kv.block_stride_bytes) + " is " +
             std::to_string(expected_image.result[i]) + ", expected " + std::to_string(expected[i]);
    }
  }
  return {};
}

}  // namespace

// ----------------------------------------------------------------------------------- append_kv

std::vector<AppendCase> append_kv_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](AppendCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = append_name(c, name);
    cases.push_back(std::move(c));
  };
  const KvLayout layouts[] = {KvLayout::latent_bf16(512, 64), KvLayout::latent_bf16(512, 0),
                              KvLayout::latent_f32(512, 64),  KvLayout::fp8_ds_mla(),
                              KvLayout::fp8_ds_mla(0),        KvLayout::latent_bf16(33, 7),
                              KvLayout::latent_f32(20, 0)};
  for (const KvLayout& layout : layouts) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      add({.layout = layout, .dtype = dtype}, "plain");
      add({.layout = layout, .dtype = dtype, .scale_rule = Fp8ScaleRule::kAmax}, "plain");
    }
    for (int64_t block : {1, 2, 16, 61, 640}) {
      add({.layout = layout,
           .slot_dtype = DType::kInt32,
           .num_blocks = 640 / block,
           .block_size = block,
           .gap_bytes = 2 * layout.record_bytes()},
          "block");
    }
    add({.layout = layout, .dtype = DType::kFloat32, .row_pad_bytes = 16, .strided = true},
        "strided");
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (Fp8ScaleRule rule : {Fp8ScaleRule::kPowerOfTwo, Fp8ScaleRule::kAmax}) {
      add({.rows = 12,
           .layout = KvLayout::fp8_ds_mla(),
           .dtype = dtype,
           .scale_rule = rule,
           .hostile_slots = false,
           .scale_edges = true},
          "scale_edges");
    }
  }
  add({.rows = 200, .layout = KvLayout::fp8_ds_mla()}, "many");
  return cases;
}

AppendKvProblem::AppendKvProblem(const AppendCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const AppendCase& c = case_;
  Random random(c.seed);
  const int64_t gap = c.strided ? 11 : 0;
  latent = buffers.tensor("latent", Role::kInput, c.dtype, {c.rows, c.layout.latent},
                          {.strides = {c.layout.latent + gap, 1}});
  fill_input(c, &latent, &random);
  if (c.layout.rope > 0) {
    rope = buffers.tensor("rope", Role::kInput, c.dtype, {c.rows, c.layout.rope},
                          {.strides = {c.layout.rope + gap, 1}});
    // Far beyond the latent's range: the two never share a scale.
    rope.fill([&] { return 700 * random.bell(); });
  }
  slot_mapping = make_slots(c, &buffers, &random);
  cache = buffers.cache("kv", Role::kInOut, c.layout,
                        {.num_blocks = c.num_blocks,
                         .block_size = c.block_size,
                         .gap_bytes = c.gap_bytes,
                         .row_pad_bytes = c.row_pad_bytes});
}

AppendKvArgs AppendKvProblem::args(Side side) const {
  AppendKvArgs args;
  args.latent = latent.view(side);
  args.rope = rope.view(side);
  args.slot_mapping = slot_mapping.view(side);
  args.kv = cache.view(side);
  args.scale_rule = case_.scale_rule;
  return args;
}

std::string AppendKvProblem::verify() {
  std::vector<uint8_t> expected = cache.buffer().image;
  AppendKvArgs host = args(Side::kHost);
  host.kv.data = expected.data();
  reference::append_kv(host);
  return compare_caches(cache.buffer(), expected, host.kv);
}

// --------------------------------------------------------------------------- append_index_keys

std::vector<AppendCase> append_index_keys_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](AppendCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = append_name(c, name);
    cases.push_back(std::move(c));
  };
  const KvLayout layouts[] = {KvLayout::index_fp8(),    KvLayout::index_bf16(128),
                              KvLayout::index_f32(128), KvLayout::index_fp8(64),
                              KvLayout::index_bf16(33), KvLayout::index_f32(7)};
  for (const KvLayout& layout : layouts) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      add({.layout = layout, .dtype = dtype}, "plain");
      add({.layout = layout, .dtype = dtype, .scale_rule = Fp8ScaleRule::kAmax}, "plain");
    }
    for (int64_t block : {1, 2, 16, 61, 256}) {
      add({.layout = layout,
           .slot_dtype = DType::kInt32,
           .num_blocks = 512 / block,
           .block_size = block,
           .gap_bytes = 2 * layout.record_bytes()},
          "block");
    }
    add({.layout = layout, .dtype = DType::kFloat32, .strided = true}, "strided");
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (Fp8ScaleRule rule : {Fp8ScaleRule::kPowerOfTwo, Fp8ScaleRule::kAmax}) {
      add({.rows = 12,
           .layout = KvLayout::index_fp8(),
           .dtype = dtype,
           .scale_rule = rule,
           .hostile_slots = false,
           .scale_edges = true},
          "scale_edges");
    }
  }
  // dim^-0.5 is a power of two at these widths, and the sums are integers: exact.
  for (int64_t dim : {1, 4, 16, 64, 256}) {
    for (const KvLayout& layout :
         {KvLayout::index_fp8(dim), KvLayout::index_bf16(dim), KvLayout::index_f32(dim)}) {
      add({.layout = layout, .dtype = DType::kFloat32, .hadamard = true}, "hadamard");
      add({.layout = layout, .dtype = DType::kBFloat16, .hadamard = true}, "hadamard");
    }
  }
  return cases;
}

AppendIndexKeysProblem::AppendIndexKeysProblem(const AppendCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const AppendCase& c = case_;
  Random random(c.seed);
  keys = buffers.tensor("keys", Role::kInput, c.dtype, {c.rows, c.layout.latent},
                        {.strides = {c.layout.latent + (c.strided ? 11 : 0), 1}});
  fill_input(c, &keys, &random);
  slot_mapping = make_slots(c, &buffers, &random);
  cache = buffers.cache(
      "kv", Role::kInOut, c.layout,
      {.num_blocks = c.num_blocks, .block_size = c.block_size, .gap_bytes = c.gap_bytes});
}

AppendIndexKeysArgs AppendIndexKeysProblem::args(Side side) const {
  AppendIndexKeysArgs args;
  args.keys = keys.view(side);
  args.slot_mapping = slot_mapping.view(side);
  args.kv = cache.view(side);
  args.scale_rule = case_.scale_rule;
  args.hadamard = case_.hadamard;
  return args;
}

std::string AppendIndexKeysProblem::verify() {
  std::vector<uint8_t> expected = cache.buffer().image;
  AppendIndexKeysArgs host = args(Side::kHost);
  host.kv.data = expected.data();
  reference::append_index_keys(host);
  return compare_caches(cache.buffer(), expected, host.kv);
}

// ----------------------------------------------------------------------------------- gather_kv

std::vector<GatherKvCase> gather_kv_cases() {
  std::vector<GatherKvCase> cases;
  const auto add = [&](GatherKvCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_" + std::string(kv_format_name(c.layout.format)) + "_d" +
             std::to_string(c.layout.d_qk()) + "_block" + std::to_string(c.block_size) +
             (c.out_dtype == DType::kFloat32 ? "_outf32" : "_outbf16");
    cases.push_back(std::move(c));
  };
  const KvLayout layouts[] = {KvLayout::latent_bf16(512, 64), KvLayout::latent_bf16(512, 0),
                              KvLayout::latent_f32(512, 64),  KvLayout::fp8_ds_mla(),
                              KvLayout::fp8_ds_mla(0),        KvLayout::latent_bf16(33, 7),
                              KvLayout::latent_f32(20, 0)};
  for (const KvLayout& layout : layouts) {
    for (DType out : {DType::kBFloat16, DType::kFloat32}) {
      add({.layout = layout, .out_dtype = out}, "plain");
      add({.layout = layout,
           .out_dtype = out,
           .gap_rows = 2,
           .requests = {2, 0, 1, 0, 7, -1, 1},
           .starts = {0, 37, 60, 0, 0, 0, 63},
           .lengths = {1, 40, 30, 0, 5, 5, -4},
           .bad_blocks = true},
          "ranges");
    }
  }
  for (int64_t block : {1, 2, 16, 61, 64, 640}) {
    add({.layout = block % 2 == 0 ? KvLayout::fp8_ds_mla() : KvLayout::latent_bf16(512, 64),
         .block_size = block,
         .gap_rows = block % 3},
        "block");
  }
  // The output ends in the middle of the second range.
  add({.out_rows = 120}, "short_output");
  add({.layout = KvLayout::fp8_ds_mla(), .out_dtype = DType::kFloat32, .strided = true}, "strided");
  add({.out_dtype = DType::kFloat32, .latent_scale = 0.37f, .rope_scale = 1.7f}, "scales");
  add({.layout = KvLayout::fp8_ds_mla(), .latent_scale = 0.37f, .rope_scale = 1.7f}, "scales");
  add({.requests = {}, .starts = {}, .lengths = {}, .out_rows = 5}, "noranges");
  return cases;
}

GatherKvProblem::GatherKvProblem(const GatherKvCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const GatherKvCase& c = case_;
  Random random(c.seed);
  const int64_t num_requests = static_cast<int64_t>(c.seq_lens.size());
  const int64_t columns =
      (*std::max_element(c.seq_lens.begin(), c.seq_lens.end()) + c.block_size - 1) / c.block_size;
  int64_t num_blocks = 1;
  for (int32_t length : c.seq_lens) {
    num_blocks += (length + c.block_size - 1) / c.block_size;
  }
  cache = buffers.cache("kv", Role::kInput, c.layout,
                        {.num_blocks = num_blocks,
                         .block_size = c.block_size,
                         .gap_bytes = c.gap_rows * c.layout.record_bytes()});
  std::vector<int32_t> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  random.shuffle(&blocks);
  block_table = buffers.tensor("block_table", Role::kInput, DType::kInt32, {num_requests, columns},
                               {.strides = {columns + 1, 1}});
  block_table.fill([] { return -1; });
  std::vector<float> values(c.layout.d_qk());
  int64_t next = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    for (int64_t column = 0; column * c.block_size < c.seq_lens[r]; ++column) {
      if (c.bad_blocks && random.chance(0.3)) {
        block_table.set(random.chance(0.5) ? -1 : static_cast<double>(num_blocks), r, column);
        continue;
      }
      const int64_t block = blocks[next++];
      block_table.set(static_cast<double>(block), r, column);
      for (int64_t o = 0; o < c.block_size; ++o) {
        for (float& value : values) {
          value = random.bell();
        }
        if (column * c.block_size + o < c.seq_lens[r]) {
          cache.set_record(block * c.block_size + o, values,
                           o % 2 == 0 ? Fp8ScaleRule::kPowerOfTwo : Fp8ScaleRule::kAmax);
        }
      }
    }
  }
  request_ids = buffers.ints("request_ids", c.requests);
  starts = buffers.ints("starts", c.starts);
  lengths = buffers.ints("lengths", c.lengths);
  std::vector<int32_t> rows;
  int32_t next_row = 1;
  for (int32_t length : c.lengths) {
    rows.push_back(next_row);
    next_row += std::max(length, 0) + static_cast<int32_t>(c.out_gap);
  }
  out_starts = buffers.ints("out_starts", rows);
  out = buffers.tensor("out", Role::kOutput, c.out_dtype,
                       {c.out_rows != 0 ? c.out_rows : next_row, c.layout.d_qk()},
                       {.strides = {c.layout.d_qk() + (c.strided ? 9 : 0), 1}});
  latent_scale = buffers.scale("latent_scale", c.latent_scale);
  rope_scale = buffers.scale("rope_scale", c.rope_scale);
}

GatherKvArgs GatherKvProblem::args(Side side) const {
  GatherKvArgs args;
  args.kv = cache.view(side);
  args.kv.latent_scale = latent_scale.view(side).as<float>();
  args.kv.rope_scale = rope_scale.view(side).as<float>();
  args.block_table = block_table.view(side);
  args.request_ids = request_ids.view(side);
  args.starts = starts.view(side);
  args.lengths = lengths.view(side);
  args.out_starts = out_starts.view(side);
  args.out = out.view(side);
  return args;
}

std::string GatherKvProblem::verify() {
  const GatherKvArgs host = args(Side::kHost);
  const reference::GatheredRows expected = reference::gather_kv(host);
  const int64_t width = out.extent(1);
  std::vector<double> values = expected.rows;
  for (size_t i = 0; i < values.size(); ++i) {
    if (!expected.written[i / width]) {
      // The poison that was there.
      values[i] = reference::element(host.out, static_cast<int64_t>(i) / width,
                                     static_cast<int64_t>(i) % width);
    } else if (case_.out_dtype == DType::kBFloat16) {
      values[i] = to_float(to_bf16(static_cast<float>(values[i])));
    } else {
      values[i] = static_cast<float>(values[i]);
    }
  }
  // One product of two floats is rounded once, so the value is known to the bit. With per-tensor
  // scales there are two products, in either order.
  const bool exact = case_.latent_scale == 0 && case_.rope_scale == 0;
  const double ulp = case_.out_dtype == DType::kBFloat16 ? 0x1p-7 : 0x1p-22;
  return compare("out", out.result(), values, {.abs = 0, .rel = exact ? 0 : ulp});
}

}  // namespace lacuna::testing
