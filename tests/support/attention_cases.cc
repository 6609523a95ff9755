// Grids and data of the attention operations.
#include "tests/support/attention_cases.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>

#include "tests/reference/element.h"
#include "tests/support/compare.h"

namespace lacuna::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::string dtype_tag(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "f32";
    case DType::kFloat16:
      return "f16";
    case DType::kBFloat16:
      return "bf16";
    default:
      return std::string(dtype_name(dtype));
  }
}

std::string layout_tag(const KvLayout& layout) {
  switch (layout.format) {
    case KvFormat::kLatentBf16:
      return "bf16";
    case KvFormat::kLatentF32:
      return "f32";
    case KvFormat::kFp8DsMla:
      return "fp8";
    default:
      return std::string(kv_format_name(layout.format));
  }
}

const char* list_tag(ListPattern list) {
  switch (list) {
    case ListPattern::kShuffled:
      return "shuffled";
    case ListPattern::kAscending:
      return "ascending";
    case ListPattern::kModular:
      return "modular";
    case ListPattern::kHostile:
      return "hostile";
    case ListPattern::kEmptyRows:
      return "emptyrows";
  }
  return "";
}

int32_t clamp_i32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

std::vector<int32_t> starts_of(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> starts = {0};
  for (int32_t length : lengths) {
    starts.push_back(starts.back() + length);
  }
  return starts;
}

}  // namespace

Tolerance rounding_tolerance(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return {.abs = 1e-6, .rel = 0x1p-8};  // an ulp: half for the rounding, half for a tie
    case DType::kFloat16:
      return {.abs = 1e-6, .rel = 0x1p-10};
    default:
      // A few dozen float32 operations on values of order 1, and exponentials of differences of
      // LSE values up to about 10: 10 * 2^-24 each.
      return {.abs = 2e-6, .rel = 2e-6};
  }
}

// ---------------------------------------------------------------------------------- sparse_mla

std::vector<SparseMlaCase> sparse_mla_cases() {
  std::vector<SparseMlaCase> cases;
  const KvLayout kV32 = KvLayout::latent_bf16(512, 64);
  const KvLayout kNope = KvLayout::latent_bf16(512, 0);
  const KvLayout kFp8 = KvLayout::fp8_ds_mla();
  const KvLayout kFp8Nope = KvLayout::fp8_ds_mla(0);
  const auto add = [&](SparseMlaCase c, const std::string& extra = "") {
    const char* model = c.layout.latent != 512 ? "tiny" : c.layout.rope == 64 ? "v32" : "nope";
    c.seed = cases.size() + 1;
    if (!c.query_lens.empty()) {
      c.rows = std::accumulate(c.query_lens.begin(), c.query_lens.end(), int64_t{0}) +
               (c.padding_row ? 1 : 0);
    }
    c.name = std::string(model) + "_t" + std::to_string(c.rows) + "_h" + std::to_string(c.heads) +
             "_topk" + std::to_string(c.width) + "_" + layout_tag(c.layout) + "_" +
             list_tag(c.list) + (extra.empty() ? "" : "_" + extra);
    cases.push_back(std::move(c));
  };

  // Every head count that a tensor-parallel rank of a released model can have, and those between.
  for (const KvLayout& layout : {kV32, kNope, kFp8, kFp8Nope}) {
    for (int64_t heads :
         {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 112, 128}) {
      add({.rows = 2, .heads = heads, .width = 512, .layout = layout}, "heads");
    }
  }
  add({.rows = 3, .heads = 8, .width = 2048, .layout = kV32}, "full");
  add({.rows = 3, .heads = 16, .width = 2048, .layout = kFp8}, "full");
  add({.rows = 1, .heads = 128, .width = 2048, .layout = kV32}, "full");

  // Heads by list width: no holes.
  for (int64_t heads : {8, 16, 32, 64, 128}) {
    int n = 0;
    for (int64_t width :
         {1, 7, 63, 64, 65, 128, 192, 256, 512, 640, 1024, 1152, 2048, 2051, 2176, 8192, 8320}) {
      if (heads * width > 128 * 2176) {
        continue;  // the widest lists at few heads: the oracle's time
      }
      const KvLayout layouts[] = {kV32, kFp8, kNope};
      add({.rows = width <= 640 ? 2 : 1,
           .heads = heads,
           .width = width,
           .layout = layouts[n++ % 3],
           .counts = n % 2 == 0 ? CountPattern::kRagged : CountPattern::kAbsent},
          "cross");
    }
  }

  // Batches of requests through block tables; each row has its own pattern of positions.
  struct Batch {
    const char* name;
    std::vector<int32_t> seq, query;
    int64_t heads;
  };
  for (const Batch& batch : std::initializer_list<Batch>{
           {"mixed_small", {32, 40, 48, 56}, {1, 1, 5, 5}, 128},
           {"mixed_medium", {512, 1024, 2048, 512, 1024, 2048}, {1, 1, 1, 7, 7, 7}, 64},
           {"small_prefill", {32, 40}, {8, 8}, 64},
           {"medium_prefill", {256, 512, 1024, 2048}, {16, 16, 16, 16}, 32},
           {"single_prefill", {1024}, {64}, 32},
           {"large_q_prefill", {1024, 1024}, {64, 64}, 16},
           {"large_q_pure_prefill", {256, 256}, {256, 256}, 8}}) {
    for (const KvLayout& layout : {kV32, kFp8}) {
      add({.heads = batch.heads,
           .width = 128,
           .layout = layout,
           .block_size = layout == kV32 ? 32 : 64,
           .list = ListPattern::kModular,
           .seq_lens = batch.seq,
           .query_lens = batch.query,
           .uniform_data = true},
          batch.name);
    }
  }
  add({.heads = 16,
       .width = 128,
       .layout = kV32,
       .list = ListPattern::kModular,
       .seq_lens = {512, 1024, 2048, 512, 1024, 2048},
       .query_lens = {1, 1, 1, 7, 7, 7},
       .latent_scale = 3.0f,
       .rope_scale = 3.0f,
       .uniform_data = true},
      "scales");
  add({.heads = 8,
       .width = 96,
       .list = ListPattern::kHostile,
       .counts = CountPattern::kRagged,
       .seq_lens = {70, 131, 1, 64},
       .query_lens = {2, 3, 1, 4},
       .padding_row = true,
       .bad_blocks = true},
      "positions");
  add({.heads = 8,
       .width = 96,
       .layout = kFp8,
       .block_size = 16,
       .gap_rows = 3,
       .list = ListPattern::kHostile,
       .seq_lens = {70, 131, 1, 64},
       .query_lens = {1, 1, 1, 1},
       .padding_row = true,
       .bad_blocks = true,
       .count_stride = 2},
      "positions_gaps");

  // Valid lengths around tile edges, and hostile ones.
  for (const KvLayout& layout : {kV32, kFp8}) {
    add({.rows = 21, .heads = 16, .width = 2048, .layout = layout, .counts = CountPattern::kEdges},
        "edges");
    add({.rows = 6, .heads = 16, .width = 300, .layout = layout, .counts = CountPattern::kHostile},
        "hostilecounts");
    add({.rows = 7, .heads = 16, .width = 333, .layout = layout, .list = ListPattern::kHostile});
    add({.rows = 7,
         .heads = 16,
         .width = 333,
         .layout = layout,
         .gap_rows = 2,
         .list = ListPattern::kHostile,
         .counts = CountPattern::kRagged},
        "gaps");
    add({.rows = 7, .heads = 16, .width = 129, .layout = layout, .list = ListPattern::kEmptyRows});
    add({.rows = 7,
         .heads = 16,
         .width = 129,
         .layout = layout,
         .list = ListPattern::kEmptyRows,
         .sink = true},
        "sink");
  }
  add({.rows = 3, .heads = 8, .width = 0}, "nolist");
  add({.rows = 3,
       .heads = 8,
       .width = 2176,
       .layout = kNope,
       .counts = CountPattern::kEdges,
       .softmax_scale = 1.0 / 16},
      "kpool");
  add({.rows = 3,
       .heads = 8,
       .width = 2176,
       .layout = kFp8Nope,
       .counts = CountPattern::kEdges,
       .softmax_scale = 1.0 / 16},
      "kpool");

  for (CountPattern counts :
       {CountPattern::kRagged, CountPattern::kEdges, CountPattern::kHostile}) {
    add({.rows = 6, .heads = 8, .width = 700, .counts = counts, .give_count_max = true},
        "countmax" + std::to_string(static_cast<int>(counts)));
  }

  // More listed keys than tokens: duplicates.
  add({.rows = 3, .heads = 8, .width = 256, .tokens = 40}, "duplicates");
  // Block sizes of every engine, gaps between blocks, padded rows.
  for (int64_t block : {1, 2, 16, 32, 61, 64, 128, 256, 576, 640}) {
    add({.rows = 2,
         .heads = 8,
         .width = 200,
         .layout = block % 2 == 0 ? kV32 : kFp8,
         .block_size = block,
         .gap_rows = block % 3},
        "block" + std::to_string(block));
  }
  add({.rows = 2, .heads = 8, .width = 200, .row_pad_bytes = 64}, "rowpad");
  add({.rows = 2, .heads = 8, .width = 200, .layout = kFp8, .row_pad_bytes = 48}, "rowpad");

  // Unused output heads, strided views, unaligned bases.
  for (int64_t heads : {8, 16, 32}) {
    for (int64_t rows : {1, 8, 132}) {
      const bool large = rows == 132;
      add({.rows = rows,
           .heads = heads,
           .width = large ? 16 : 128,
           .counts = heads == 16 ? CountPattern::kRagged : CountPattern::kAbsent,
           .sink = heads == 32,
           .out_heads_wide = 64,
           .out_row_gap = heads == 16 ? 128 : 0},
          "wideout");
    }
  }
  // Cuts that depend on the number of SMs, 132 of a large Hopper: some rows more than SMs, and
  // splits of a row that are a cluster of three or four.
  struct Cut {
    const char* label;
    int64_t rows[4];
    int64_t widths[4];
  };
  for (const Cut& cut : {Cut{"lastwave", {133, 142, 150, 160}, {640, 1030, 333, 450}},
                         Cut{"clusters", {26, 36, 28, 32}, {450, 1030, 450, 192}}}) {
    add({.rows = cut.rows[0], .heads = 8, .width = cut.widths[0], .list = ListPattern::kHostile},
        cut.label);
    add({.rows = cut.rows[1],
         .heads = 5,
         .width = cut.widths[1],
         .counts = CountPattern::kHostile,
         .out_heads_wide = 8,
         .lse_head_major = true},
        cut.label);
    add({.rows = cut.rows[2],
         .heads = 24,
         .width = cut.widths[2],
         .layout = kNope,
         .counts = CountPattern::kRagged,
         .sink = true},
        cut.label);
    add({.rows = cut.rows[3], .heads = 16, .width = cut.widths[3], .list = ListPattern::kEmptyRows},
        cut.label);
  }
  for (const KvLayout& layout : {kV32, kFp8}) {
    add({.rows = 5,
         .heads = 16,
         .width = 200,
         .layout = layout,
         .counts = CountPattern::kRagged,
         .q_heads_wide = 64,
         .out_heads_wide = 64},
        "sliced");
    add({.rows = 5,
         .heads = 12,
         .width = 200,
         .layout = layout,
         .counts = CountPattern::kRagged,
         .q_heads_wide = 24,
         .index_row_gap = 8,
         .count_stride = 2,
         .lse_row_gap = 4},
        "strided");
    add({.rows = 5, .heads = 12, .width = 77, .layout = layout, .lse_head_major = true},
        "headmajor");
    add({.rows = 3, .heads = 7, .width = 77, .layout = layout, .offset = 1}, "unaligned");
    add({.rows = 3, .heads = 16, .width = 130, .layout = layout, .split_q = true}, "split");
    add({.rows = 3,
         .heads = 5,
         .width = 130,
         .layout = layout,
         .split_q = true,
         .q_heads_wide = 8,
         .offset = 3},
        "split_unaligned");
    add({.rows = 6, .heads = 16, .width = 130, .layout = layout, .sink = true}, "sink");
    add({.rows = 8, .heads = 16, .width = 130, .layout = layout, .rows_per_request = 4}, "mtp");
    add({.rows = 2,
         .heads = 16,
         .width = 1030,
         .layout = layout,
         .counts = CountPattern::kRagged,
         .batch_invariant = true},
        "invariant");
  }
  add({.rows = 3, .heads = 16, .width = 130, .layout = kNope, .split_q = true}, "split");
  add({.rows = 3, .heads = 16, .width = 130, .lse = false, .max_logits = false}, "nolse");
  // A scale that underflows to a subnormal float, and a small one: weights become uniform.
  add({.rows = 2, .heads = 8, .width = 100, .softmax_scale = 1e-20}, "scale1e20");
  add({.rows = 2, .heads = 8, .width = 100, .softmax_scale = 1e-39}, "scale1e39");
  add({.rows = 2, .heads = 8, .width = 100, .softmax_scale = -0.05}, "negativescale");
  // One key dominates: a spread of scores of several tens.
  add({.rows = 2, .heads = 8, .width = 1000, .softmax_scale = 1.0}, "spread");

  // Element types and odd widths.
  for (DType out : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
    for (DType q : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
      add({.rows = 2, .heads = 6, .width = 150, .q_dtype = q, .out_dtype = out},
          "q" + dtype_tag(q) + "_out" + dtype_tag(out));
    }
  }
  const KvLayout tiny_layouts[] = {KvLayout::latent_f32(512, 64), KvLayout::latent_f32(32, 8),
                                   KvLayout::latent_f32(33, 7), KvLayout::latent_f32(64, 0)};
  for (const KvLayout& layout : tiny_layouts) {
    add({.rows = 5,
         .heads = 6,
         .width = 333,
         .layout = layout,
         .q_dtype = DType::kFloat32,
         .out_dtype = DType::kFloat32,
         .list = ListPattern::kHostile,
         .counts = CountPattern::kRagged,
         .sink = true},
        "l" + std::to_string(layout.latent) + "r" + std::to_string(layout.rope));
  }
  add({.rows = 3, .heads = 3, .width = 50, .layout = KvLayout::latent_bf16(40, 12)}, "d52");
  add({.rows = 3, .heads = 3, .width = 50, .layout = KvLayout::latent_bf16(7, 5)}, "d12");
  add({.rows = 3,
       .heads = 3,
       .width = 50,
       .layout = KvLayout::latent_f32(96, 16),
       .latent_scale = 0.37f,
       .rope_scale = 1.7f},
      "scales");
  add({.rows = 3,
       .heads = 8,
       .width = 50,
       .layout = kFp8,
       .latent_scale = 0.37f,
       .rope_scale = 1.7f},
      "scales");
  return cases;
}

SparseMlaProblem::SparseMlaProblem(const SparseMlaCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  SparseMlaCase& c = case_;
  const int64_t latent = c.layout.latent;
  const int64_t rope = c.layout.rope;
  if (c.tokens == 0) {
    c.tokens = c.seq_lens.empty()
                   ? c.width + c.width / 4 + 8
                   : std::accumulate(c.seq_lens.begin(), c.seq_lens.end(), int64_t{0});
  }
  if (c.softmax_scale == 0) {
    c.softmax_scale = 1 / std::sqrt(static_cast<double>(latent + rope));
  }
  Random random(c.seed);

  // The query. Heads differ in sharpness, from nearly uniform weights to a dominant key.
  const int64_t q_heads = c.q_heads_wide == 0 ? c.heads : c.q_heads_wide;
  const auto query = [&](const char* name, int64_t width) {
    TestTensor q = buffers.tensor(name, Role::kInput, c.q_dtype, {c.rows, c.heads, width},
                                  {.strides = {q_heads * width, width, 1}, .offset = c.offset});
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        const float sharpness = c.uniform_data ? 1.0f : static_cast<float>(1 << (h % 3));
        for (int64_t i = 0; i < width; ++i) {
          q.set(c.uniform_data ? random.uniform() : sharpness * random.bell(), t, h, i);
        }
      }
    }
    return q;
  };
  if (c.split_q) {
    q_nope = query("q_nope", latent);
    if (rope > 0) {
      q_rope = query("q_rope", rope);
    }
  } else {
    q = query("q", latent + rope);
  }
  if (c.sink) {
    sink = buffers.tensor("sink", Role::kInput, DType::kFloat32, {c.heads});
    for (int64_t h = 0; h < c.heads; ++h) {
      sink.set(h % 4 == 2 ? -kInfinity : h % 4 == 3 ? kInfinity : 4 * random.bell(), h);
    }
  }
  const int64_t out_heads = c.out_heads_wide == 0 ? c.heads : c.out_heads_wide;
  out = buffers.tensor(
      "out", Role::kOutput, c.out_dtype, {c.rows, c.heads, latent},
      {.strides = {out_heads * latent + c.out_row_gap, latent, 1}, .offset = c.offset});
  const std::vector<int64_t> lse_strides = c.lse_head_major
                                               ? std::vector<int64_t>{1, c.rows}
                                               : std::vector<int64_t>{c.heads + c.lse_row_gap, 1};
  if (c.lse) {
    lse = buffers.tensor("lse", Role::kOutput, DType::kFloat32, {c.rows, c.heads},
                         {.strides = lse_strides});
  }
  if (c.max_logits) {
    max_logits = buffers.tensor("max_logits", Role::kOutput, DType::kFloat32, {c.rows, c.heads},
                                {.strides = lse_strides});
  }
  latent_scale = buffers.scale("latent_scale", c.latent_scale);
  rope_scale = buffers.scale("rope_scale", c.rope_scale);
  cache = buffers.cache("kv", Role::kInput, c.layout,
                        {.num_blocks = (c.tokens + c.block_size - 1) / c.block_size +
                                       static_cast<int64_t>(c.seq_lens.size()),
                         .block_size = c.block_size,
                         .gap_bytes = c.gap_rows * (c.layout.record_bytes() + c.row_pad_bytes),
                         .row_pad_bytes = c.row_pad_bytes});
  make_lists(random);
  make_cache(random);
}

void SparseMlaProblem::make_lists(Random& random) {
  const SparseMlaCase& c = case_;
  const bool positions = !c.seq_lens.empty();
  const KvCacheView kv = cache.view(Side::kHost);
  // Blocks of the cache in random order: a table deals them out, flat tokens go through them.
  std::vector<int32_t> blocks(kv.num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  random.shuffle(&blocks);

  std::vector<int32_t> requests(c.rows, 0);
  std::vector<int64_t> num_visible(c.rows, c.tokens);
  if (positions) {
    const int64_t num_requests = static_cast<int64_t>(c.seq_lens.size());
    const int64_t longest = *std::max_element(c.seq_lens.begin(), c.seq_lens.end());
    const int64_t columns = (longest + c.block_size - 1) / c.block_size;
    block_table = buffers.tensor("block_table", Role::kInput, DType::kInt32,
                                 {num_requests, columns}, {.strides = {columns + 3, 1}});
    block_table.fill([] { return -1; });
    int64_t next = 0;
    int64_t t = 0;
    for (int64_t r = 0; r < num_requests; ++r) {
      for (int64_t column = 0; column * c.block_size < c.seq_lens[r]; ++column) {
        const bool bad = c.bad_blocks && random.chance(0.2);
        block_table.set(
            !bad ? blocks[next++] : (random.chance(0.5) ? -1 : static_cast<double>(kv.num_blocks)),
            r, column);
      }
      for (int64_t i = 0; i < c.query_lens[r]; ++i, ++t) {
        requests[t] = static_cast<int32_t>(r);
        num_visible[t] = c.seq_lens[r] - c.query_lens[r] + i + 1;
      }
    }
    if (c.padding_row) {
      requests[t] = -1;
      num_visible[t] = c.width;
    }
    request_ids = buffers.ints("request_ids", requests, {.strides = {c.count_stride}});
  }

  indices = buffers.tensor("indices", Role::kInput, DType::kInt32, {c.rows, c.width},
                           {.strides = {c.width + c.index_row_gap, 1}, .offset = c.offset});
  std::vector<int32_t> counts;
  constexpr int32_t kEdges[] = {0,   1,   31,  32,  33,  63,   64,   65,   127,  128, 129,
                                255, 256, 257, 960, 961, 1023, 1024, 1025, 2048, 2051};
  const int32_t hostile[] = {-5,        INT32_MIN, clamp_i32(c.width + 3),
                             INT32_MAX, 0,         clamp_i32(c.width - 1)};
  for (int64_t t = 0; t < c.rows; ++t) {
    switch (c.counts) {
      case CountPattern::kAbsent:
        break;
      case CountPattern::kRagged:
        counts.push_back(static_cast<int32_t>(random.integer(0, c.width)));
        break;
      case CountPattern::kEdges:
        // The last row has the longest list that fits.
        counts.push_back(t + 1 == c.rows ? clamp_i32(std::min<int64_t>(c.width, 2051))
                                         : kEdges[t % std::ssize(kEdges)]);
        break;
      case CountPattern::kHostile:
        counts.push_back(hostile[t % std::ssize(hostile)]);
        break;
    }
    // Token n of this row, as an id.
    const auto id_of = [&](int64_t n) {
      return positions ? n : cache.row(blocks[n / c.block_size], n % c.block_size);
    };
    const int64_t n = num_visible[t];
    std::vector<int32_t> tokens(n);
    std::iota(tokens.begin(), tokens.end(), 0);
    if (c.list != ListPattern::kAscending && c.list != ListPattern::kModular) {
      random.shuffle(&tokens);
    }
    for (int64_t i = 0; i < c.width; ++i) {
      int64_t id = id_of(tokens[i % n]);
      if (c.list == ListPattern::kModular) {
        id = i < std::min<int64_t>(64, n) ? id_of((i + 7 * t) % n) : -1;
      } else if (c.list == ListPattern::kEmptyRows && t % 3 == 1) {
        id = -1;
      } else if (c.list == ListPattern::kHostile && random.chance(1.0 / 3)) {
        const int64_t bound = positions ? block_table.extent(1) * c.block_size : kv.num_rows();
        const int64_t choices[] = {
            -1,        id_of(tokens[0]),       bound, bound + random.integer(0, 1000), INT32_MAX,
            INT32_MIN, -kv.block_stride_rows()};
        id = choices[random.integer(0, std::ssize(choices) - 1)];
      }
      indices.set(static_cast<double>(id), t, i);
    }
  }
  if (!counts.empty()) {
    valid_counts = buffers.ints("valid_counts", counts, {.strides = {c.count_stride}});
  }
}

void SparseMlaProblem::make_cache(Random& random) {
  const SparseMlaCase& c = case_;
  const SparseMlaArgs host = args(Side::kHost);
  const KvCacheView& kv = host.kv;
  // Only the rows that a counted entry names get values; all others stay NaN.
  std::vector<bool> named(kv.num_slots(), false);
  for (int64_t t = 0; t < c.rows; ++t) {
    const int64_t count =
        std::clamp<int64_t>(reference::integer_or(host.valid_counts, t, c.width), 0, c.width);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = reference::integer(host.indices, t, i);
      reference::CachedPlace place;
      const bool found =
          host.block_table.empty()
              ? reference::find_row(kv, id, &place)
              : reference::find_position(kv, host.block_table,
                                         reference::integer(host.request_ids, t), id, &place);
      if (found) {
        named[place.block * kv.block_size + place.offset] = true;
      }
    }
  }
  std::vector<float> values(c.layout.d_qk());
  for (int64_t slot = 0; slot < kv.num_slots(); ++slot) {
    if (!named[slot]) {
      continue;
    }
    for (float& value : values) {
      value = c.uniform_data ? random.uniform() : random.bell();
    }
    cache.set_record(slot, values, slot % 2 == 0 ? Fp8ScaleRule::kPowerOfTwo : Fp8ScaleRule::kAmax);
  }
}

SparseMlaArgs SparseMlaProblem::args(Side side) const {
  SparseMlaArgs args;
  args.q = q.view(side);
  args.q_nope = q_nope.view(side);
  args.q_rope = q_rope.view(side);
  args.kv = cache.view(side);
  args.kv.latent_scale = latent_scale.view(side).as<float>();
  args.kv.rope_scale = rope_scale.view(side).as<float>();
  args.indices = indices.view(side);
  args.index_kind = case_.seq_lens.empty() ? IndexKind::kRows : IndexKind::kPositions;
  args.block_table = block_table.view(side);
  args.request_ids = request_ids.view(side);
  args.valid_counts = valid_counts.view(side);
  args.softmax_scale = case_.softmax_scale;
  args.sink = sink.view(side);
  args.out = out.view(side);
  args.lse = lse.view(side);
  args.max_logits = max_logits.view(side);
  args.rows_per_request = case_.rows_per_request;
  args.batch_invariant = case_.batch_invariant;
  if (case_.give_count_max) {
    args.valid_count_max = 0;
    for (int64_t t = 0; t < case_.rows; ++t) {
      args.valid_count_max =
          std::max(args.valid_count_max, static_cast<int64_t>(valid_counts.get(t)));
    }
  }
  return args;
}

const reference::AttentionResult& SparseMlaProblem::expected() {
  if (!expected_) {
    expected_ = reference::sparse_mla(args(Side::kHost));
  }
  return *expected_;
}

std::string SparseMlaProblem::verify() {
  const bool exact_inputs = case_.q_dtype == DType::kFloat32 &&
                            case_.out_dtype == DType::kFloat32 &&
                            case_.layout.format == KvFormat::kLatentF32;
  return compare_attention(out.result(), lse.result(), max_logits.result(), expected(),
                           case_.layout.d_qk(), exact_inputs);
}

// ----------------------------------------------------------------------------------------- mha

std::vector<MhaCase> mha_cases() {
  std::vector<MhaCase> cases;
  const auto add = [&](MhaCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_h" + std::to_string(c.heads) + "_d" + std::to_string(c.d_nope + c.d_rope) +
             "_" + dtype_tag(c.dtype) + "_out" + dtype_tag(c.out_dtype);
    cases.push_back(std::move(c));
  };
  add({.q_lens = {64, 128}, .k_lens = {64, 128}}, "dense_pure");
  add({.q_lens = {64, 32}, .k_lens = {128, 160}}, "dense_context");
  add({.q_lens = {64, 32}, .k_lens = {128, 160}, .split_k = true, .by_lengths = true},
      "dense_context_split");
  add({.q_lens = {256, 256}, .k_lens = {256, 256}, .mask_topk = 200}, "masked");
  add({.q_lens = {192, 128}, .k_lens = {256, 256}, .causal = false, .mask_topk = 100},
      "masked_chunk");
  // Keys of a chunk are bits key_start.. of the row's mask: any start, not only multiples of 32.
  add({.q_lens = {20, 40, 33, 7},
       .k_lens = {64, 96, 33, 40},
       .causal = false,
       .split_k = true,
       .mask_topk = 30,
       .key_start = {1, 31, 33, 95}},
      "masked_keystart");
  add({.q_lens = {20, 40, 33, 7},
       .k_lens = {64, 96, 33, 40},
       .mask_topk = 30,
       .key_start = {95, 33, 31, 1}},
      "masked_keystart_causal");
  // Empty sequences, one-token sequences and a long one; queries without keys.
  add({.q_lens = {0, 1, 129, 1, 400}, .k_lens = {0, 1, 129, 1, 400}, .heads = 2}, "ragged");
  add({.q_lens = {0, 5, 3, 0, 17}, .k_lens = {4, 0, 3, 0, 9}, .heads = 3}, "nokeys");
  add({.q_lens = {0, 5, 3, 0, 17}, .k_lens = {4, 0, 3, 0, 9}, .heads = 3, .causal = false},
      "nokeys_full");
  add({.q_lens = {33, 7}, .k_lens = {50, 70}, .heads = 3, .strided = true, .key_tail = 70},
      "strided");
  add({.q_lens = {33, 7},
       .k_lens = {50, 70},
       .heads = 3,
       .split_k = true,
       .mask_topk = 20,
       .strided = true},
      "strided_split_masked");
  add({.q_lens = {16, 1, 40},
       .k_lens = {16, 90, 41},
       .heads = 3,
       .d_nope = 192,
       .d_rope = 64,
       .d_v = 256,
       .out_dtype = DType::kBFloat16,
       .split_k = true},
      "glm");
  add({.q_lens = {16, 1, 40},
       .k_lens = {16, 90, 41},
       .heads = 3,
       .d_nope = 256,
       .d_rope = 0,
       .d_v = 256,
       .split_k = true},
      "nope");
  add({.q_lens = {17, 1, 40},
       .k_lens = {17, 90, 41},
       .heads = 4,
       .d_nope = 16,
       .d_rope = 8,
       .d_v = 16,
       .dtype = DType::kFloat32,
       .split_k = true},
      "tiny");
  add({.q_lens = {17, 1, 40},
       .k_lens = {17, 90, 41},
       .heads = 1,
       .d_nope = 13,
       .d_rope = 6,
       .d_v = 11,
       .dtype = DType::kFloat32,
       .mask_topk = 9},
      "odd");
  add({.q_lens = {3},
       .k_lens = {700},
       .heads = 2,
       .dtype = DType::kFloat32,
       .causal = false,
       .lse = false},
      "nolse");
  add({.q_lens = {3, 0, 50}, .k_lens = {90, 4, 50}, .heads = 2, .give_maxima = true}, "maxima");
  add({.q_lens = {3, 0, 50},
       .k_lens = {90, 4, 50},
       .heads = 2,
       .by_lengths = true,
       .mask_topk = 12,
       .give_maxima = true},
      "maxima_masked");
  add({.q_lens = {130}, .k_lens = {130}, .heads = 16, .out_dtype = DType::kBFloat16}, "heads");
  for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (bool split_k : {false, true}) {
      add({.q_lens = {70, 9},
           .k_lens = {200, 40},
           .heads = 2,
           .dtype = dtype,
           .split_k = split_k,
           .mask_topk = 30,
           .bad_keys = true},
          split_k ? "bad_keys_split" : "bad_keys");
    }
  }
  return cases;
}

MhaProblem::MhaProblem(const MhaCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const MhaCase& c = case_;
  Random random(c.seed);
  const std::vector<int32_t> starts_q = starts_of(c.q_lens);
  const std::vector<int32_t> starts_k = starts_of(c.k_lens);
  const int64_t num_q = starts_q.back();
  const int64_t num_keys = starts_k.back();
  const int64_t d_qk = c.d_nope + c.d_rope;
  const int64_t wide_heads = c.strided ? c.heads + 2 : c.heads;
  const int64_t gap = c.strided ? 8 : 0;
  const auto make = [&](const char* name, int64_t rows, int64_t filled, int64_t width) {
    TestTensor tensor = buffers.tensor(name, Role::kInput, c.dtype, {rows, c.heads, width},
                                       {.strides = {wide_heads * (width + gap), width + gap, 1}});
    for (int64_t t = 0; t < filled; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        for (int64_t i = 0; i < width; ++i) {
          tensor.set(random.bell(), t, h, i);
        }
      }
    }
    return tensor;
  };
  q = make("q", num_q, num_q, d_qk);
  const int64_t key_rows = num_keys + c.key_tail;
  if (c.split_k) {
    k_nope = make("k_nope", key_rows, num_keys, c.d_nope);
    if (c.d_rope > 0) {
      k_rope = buffers.tensor("k_rope", Role::kInput, c.dtype, {key_rows, c.d_rope},
                              {.strides = {c.d_rope + gap, 1}});
      for (int64_t t = 0; t < num_keys; ++t) {
        for (int64_t i = 0; i < c.d_rope; ++i) {
          k_rope.set(random.bell(), t, i);
        }
      }
    }
  } else {
    k = make("k", key_rows, num_keys, d_qk);
  }
  v = make("v", key_rows, num_keys, c.d_v);
  if (c.by_lengths) {
    lens_q = buffers.ints("seqlens_q", c.q_lens);
    lens_k = buffers.ints("seqlens_k", c.k_lens);
  } else {
    cu_q = buffers.ints("cu_seqlens_q", starts_q);
    cu_k = buffers.ints("cu_seqlens_k", starts_k);
  }
  for (int64_t t = 0; t < num_keys; ++t) {
    const float bad[] = {kNan, kInfinity, -kInfinity};
    TestTensor& keys = c.split_k ? k_nope : k;
    for (int64_t h = 0; is_bad_key(t) && h < c.heads; ++h) {
      keys.set(bad[t / 3 % 3], t, h, t % c.d_nope);
    }
  }
  if (c.mask_topk > 0) {
    make_mask(random);
  }
  if (!c.key_start.empty()) {
    key_start = buffers.ints("key_start", c.key_start);
  }
  out = buffers.tensor("out", Role::kOutput, c.out_dtype, {num_q, c.heads, c.d_v},
                       {.strides = {wide_heads * (c.d_v + gap), c.d_v + gap, 1}});
  if (c.lse) {
    lse = buffers.tensor("lse", Role::kOutput, DType::kFloat32, {num_q, c.heads},
                         {.strides = {wide_heads, 1}});
  }
}

void MhaProblem::make_mask(Random& random) {
  const MhaCase& c = case_;
  int64_t bits = 0;
  for (size_t b = 0; b < c.k_lens.size(); ++b) {
    bits = std::max<int64_t>(bits, c.k_lens[b] + (c.key_start.empty() ? 0 : c.key_start[b]));
  }
  const int64_t words = (bits + 31) / 32;
  const int64_t num_q = q.extent(0);
  // Words between `words` and the stride hold ones: they are not the row's.
  mask = buffers.tensor("mask", Role::kInput, DType::kInt32, {num_q, words},
                        {.strides = {(words + 3) / 4 * 4, 1}});
  int64_t t = 0;
  int64_t first_key = 0;
  for (size_t b = 0; b < c.q_lens.size(); first_key += c.k_lens[b++]) {
    const int64_t start = c.key_start.empty() ? 0 : c.key_start[b];
    for (int64_t i = 0; i < c.q_lens[b]; ++i, ++t) {
      // A random half outside the sequence's own keys; inside, mask_topk of the visible ones.
      std::vector<uint32_t> row(words);
      for (uint32_t& word : row) {
        word = random.bits();
      }
      std::vector<int32_t> keys(c.k_lens[b]);
      std::iota(keys.begin(), keys.end(), 0);
      random.shuffle(&keys);
      for (size_t n = 0; n < keys.size(); ++n) {
        const int64_t bit = start + keys[n];
        const uint32_t one = 1u << (bit & 31);
        // Every seventh row keeps nothing.
        const bool kept =
            static_cast<int64_t>(n) < c.mask_topk && t % 7 != 6 && !is_bad_key(first_key + keys[n]);
        row[bit >> 5] = kept ? row[bit >> 5] | one : row[bit >> 5] & ~one;
      }
      for (int64_t w = 0; w < words; ++w) {
        mask.set(static_cast<int32_t>(row[w]), t, w);
      }
    }
  }
}

MhaArgs MhaProblem::args(Side side) const {
  MhaArgs args;
  args.q = q.view(side);
  args.k = k.view(side);
  args.k_nope = k_nope.view(side);
  args.k_rope = k_rope.view(side);
  args.v = v.view(side);
  args.cu_seqlens_q = cu_q.view(side);
  args.cu_seqlens_k = cu_k.view(side);
  args.seqlens_q = lens_q.view(side);
  args.seqlens_k = lens_k.view(side);
  args.softmax_scale = 1 / std::sqrt(static_cast<double>(case_.d_nope + case_.d_rope));
  args.causal = case_.causal;
  args.mask = mask.view(side);
  args.key_start = key_start.view(side);
  if (case_.give_maxima) {
    args.seqlen_q_max = *std::max_element(case_.q_lens.begin(), case_.q_lens.end());
    args.seqlen_k_max = *std::max_element(case_.k_lens.begin(), case_.k_lens.end());
  }
  args.out = out.view(side);
  args.lse = lse.view(side);
  return args;
}

std::string MhaProblem::verify() {
  if (!expected_) {
    expected_ = reference::mha(args(Side::kHost));
  }
  return compare_attention(out.result(), lse.result(), {}, *expected_, case_.d_nope + case_.d_rope,
                           case_.dtype == DType::kFloat32 && case_.out_dtype == DType::kFloat32);
}

// ---------------------------------------------------------------------------------- build_mask

std::vector<BuildMaskCase> build_mask_cases() {
  std::vector<BuildMaskCase> cases;
  const auto add = [&](BuildMaskCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_w" + std::to_string(c.width) + "_keys" +
             std::to_string(c.key_count);
    cases.push_back(std::move(c));
  };
  for (int64_t keys : {1, 31, 32, 33, 127, 128, 129, 1000, 4096}) {
    add({.rows = 5, .width = 200, .key_count = keys, .counts = true}, "edge");
  }
  add({.rows = 1, .width = 1, .key_count = 1}, "one");
  add({.rows = 3, .width = 0, .key_count = 64}, "nolist");
  add({.rows = 3, .width = 64, .key_count = 0, .words = 3}, "nokeys");
  add({.rows = 4, .width = 100, .key_count = 90, .key_begin = {1, 31, 33, 95}}, "begin");
  add({.rows = 4, .width = 100, .key_count = 90, .key_begin = {0, INT32_MAX, -7, 64}},
      "begin_extremes");
  add({.rows = 7,
       .width = 100,
       .key_count = 250,
       .words = 11,
       .row_stride = 20,
       .index_row_gap = 8},
      "wide");
  add({.rows = 70, .width = 2048, .key_count = 5000, .counts = true}, "prefill");
  return cases;
}

BuildMaskProblem::BuildMaskProblem(const BuildMaskCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  BuildMaskCase& c = case_;
  Random random(c.seed);
  if (c.words == 0) {
    c.words = (c.key_count + 31) / 32;
  }
  if (c.row_stride == 0) {
    c.row_stride = (c.words + 3) / 4 * 4;
  }
  indices = buffers.tensor("indices", Role::kInput, DType::kInt32, {c.rows, c.width},
                           {.strides = {c.width + c.index_row_gap, 1}});
  for (int64_t t = 0; t < c.rows; ++t) {
    const int64_t begin = c.key_begin.empty() ? 0 : c.key_begin[t];
    for (int64_t i = 0; i < c.width; ++i) {
      const int64_t edge[] = {
          -1, begin - 1, begin, begin + c.key_count - 1, INT32_MIN, INT32_MAX, begin + c.key_count};
      indices.set(
          clamp_i32(random.chance(0.2) ? edge[random.integer(0, std::ssize(edge) - 1)]
                                       : begin + random.integer(0, c.key_count + c.key_count / 8)),
          t, i);
    }
  }
  if (c.counts) {
    std::vector<int32_t> counts;
    for (int64_t t = 0; t < c.rows; ++t) {
      counts.push_back(t % 5 == 1   ? -3
                       : t % 5 == 2 ? INT32_MAX
                                    : static_cast<int32_t>(random.integer(0, c.width)));
    }
    valid_counts = buffers.ints("valid_counts", counts, {.strides = {2}});
  }
  if (!c.key_begin.empty()) {
    key_begin = buffers.ints("key_begin", c.key_begin);
  }
  mask = buffers.tensor("mask", Role::kOutput, DType::kInt32, {c.rows, c.words},
                        {.strides = {c.row_stride, 1}, .whole_stride_writable = true});
}

BuildMaskArgs BuildMaskProblem::args(Side side) const {
  BuildMaskArgs args;
  args.indices = indices.view(side);
  args.valid_counts = valid_counts.view(side);
  args.key_begin = key_begin.view(side);
  args.key_count = case_.key_count;
  args.mask = mask.view(side);
  return args;
}

std::string BuildMaskProblem::verify() {
  // The padding words of every row are compared too.
  ConstTensorView whole = mask.result();
  whole.shape[1] = case_.row_stride;
  return compare("mask", whole, reference::build_mask(args(Side::kHost)));
}

// -------------------------------------------------------------------------------- merge_states

std::vector<MergeStatesCase> merge_states_cases() {
  std::vector<MergeStatesCase> cases;
  const auto add = [&](MergeStatesCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_n" + std::to_string(c.num_states) + "_t" + std::to_string(c.rows) + "_h" +
             std::to_string(c.heads) + "_d" + std::to_string(c.width) + "_" +
             dtype_tag(c.state_dtype) + "_out" + dtype_tag(c.out_dtype);
    cases.push_back(std::move(c));
  };
  for (int states : {1, 2, 3, 8, 64}) {
    add({.num_states = states}, "plain");
    add({.rows = 9, .num_states = states, .bad_lse = true}, "badlse");
    add({.rows = 9, .num_states = states, .base = LseBase::kTwo, .bad_lse = true}, "badlse_base2");
    add({.rows = 9, .num_states = states, .bad_lse = true, .in_place = true}, "inplace");
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    add({.state_dtype = dtype, .out_dtype = dtype, .bad_lse = true}, "half");
    add({.state_dtype = dtype, .out_dtype = DType::kFloat32, .bad_lse = true}, "half");
    add({.state_dtype = DType::kFloat32, .out_dtype = dtype, .bad_lse = true}, "half");
    add({.state_dtype = dtype, .out_dtype = dtype, .bad_lse = true, .in_place = true},
        "half_inplace");
  }
  for (int64_t width : {1, 7, 32, 48, 256, 512}) {
    add({.heads = 4, .width = width, .bad_lse = true}, "width");
  }
  add({.rows = 256, .heads = 16, .width = 64, .bad_lse = true}, "many");
  add({.rows = 5, .heads = 3, .bad_lse = true, .strided = true}, "strided");
  add({.rows = 5, .heads = 3, .bad_lse = true, .in_place = true, .strided = true},
      "strided_inplace");
  add({.rows = 5, .heads = 3, .bad_lse = true, .lse = false}, "nolse");
  return cases;
}

namespace {

// One LSE value; with `bad`, some of the three that read as -inf. Output of such a state: NaN.
float random_lse(Random& random, bool bad) {
  if (bad && random.chance(0.3)) {
    constexpr float kBad[] = {-kInfinity, -kInfinity, kInfinity, kNan};
    return kBad[random.integer(0, 3)];
  }
  return 4 * random.bell() + 3;
}

}  // namespace

MergeStatesProblem::MergeStatesProblem(const MergeStatesCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const MergeStatesCase& c = case_;
  Random random(c.seed);
  const int64_t heads = c.strided ? c.heads + 3 : c.heads;
  const int64_t width = c.strided ? c.width + 5 : c.width;
  const TensorOptions out_options{.strides = {heads * width, width, 1}};
  // Head-major LSE, as some kernels give it.
  const TensorOptions lse_options{.strides = c.strided ? std::vector<int64_t>{1, c.rows}
                                                       : std::vector<int64_t>{c.heads, 1}};
  for (int n = 0; n < c.num_states; ++n) {
    const Role role = c.in_place && n == 0 ? Role::kInOut : Role::kInput;
    const std::string name = "states[" + std::to_string(n) + "]";
    TestTensor state =
        buffers.tensor(name + ".out", role, c.state_dtype, {c.rows, c.heads, c.width}, out_options);
    TestTensor weight =
        buffers.tensor(name + ".lse", role, DType::kFloat32, {c.rows, c.heads}, lse_options);
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        // The first row is empty in every state.
        const float value = c.bad_lse && t == 0 ? -kInfinity : random_lse(random, c.bad_lse);
        weight.set(value, t, h);
        for (int64_t i = 0; i < c.width; ++i) {
          state.set(std::isfinite(value) ? random.bell() : kNan, t, h, i);
        }
      }
    }
    state_out.push_back(state);
    state_lse.push_back(weight);
  }
  if (c.in_place) {
    out = state_out[0];
    lse = state_lse[0];
    return;
  }
  out = buffers.tensor("out", Role::kOutput, c.out_dtype, {c.rows, c.heads, c.width}, out_options);
  if (c.lse) {
    lse = buffers.tensor("lse", Role::kOutput, DType::kFloat32, {c.rows, c.heads}, lse_options);
  }
}

MergeStatesArgs MergeStatesProblem::args(Side side) const {
  std::vector<PartialState>& views = views_[static_cast<int>(side)];
  views.clear();
  for (size_t n = 0; n < state_out.size(); ++n) {
    views.push_back({state_out[n].view(side), state_lse[n].view(side)});
  }
  MergeStatesArgs args;
  args.states = views;
  args.lse_base = case_.base;
  args.out = out.view(side);
  args.lse = lse.view(side);
  return args;
}

std::string MergeStatesProblem::verify() {
  const reference::MergedState expected = reference::merge_states(args(Side::kHost));
  std::string error =
      compare("out", out.result(), expected.out, rounding_tolerance(case_.out_dtype));
  if (error.empty() && !lse.empty()) {
    error = compare("lse", lse.result(), expected.lse, rounding_tolerance(DType::kFloat32));
  }
  return error;
}

// ------------------------------------------------------------------------------ rescale_by_lse

std::vector<RescaleByLseCase> rescale_by_lse_cases() {
  std::vector<RescaleByLseCase> cases;
  const auto add = [&](RescaleByLseCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_n" + std::to_string(c.ranks) + "_rank" + std::to_string(c.rank) + "_t" +
             std::to_string(c.rows) + "_h" + std::to_string(c.heads) + "_d" +
             std::to_string(c.width) + "_" + dtype_tag(c.dtype);
    cases.push_back(std::move(c));
  };
  for (int64_t ranks : {1, 2, 4, 8}) {
    for (LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
      add({.ranks = ranks,
           .rank = static_cast<int>(ranks) - 1,
           .rows = 9,
           .base = base,
           .bad_lse = true},
          base == LseBase::kTwo ? "base2" : "natural");
    }
  }
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    add({.ranks = 4, .rank = 1, .rows = 9, .dtype = dtype, .bad_lse = true}, "half");
  }
  for (int64_t width : {1, 7, 48, 512}) {
    add({.ranks = 2, .width = width, .bad_lse = true}, "width");
  }
  add({.ranks = 3, .rows = 5, .heads = 3, .bad_lse = true, .strided = true}, "strided");
  add({.ranks = 3, .rows = 5, .heads = 3, .bad_lse = true, .merged_lse = false}, "nolse");
  return cases;
}

RescaleByLseProblem::RescaleByLseProblem(const RescaleByLseCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const RescaleByLseCase& c = case_;
  Random random(c.seed);
  const int64_t heads = c.strided ? c.heads + 3 : c.heads;
  const int64_t width = c.strided ? c.width + 5 : c.width;
  lse =
      buffers.tensor("lse", Role::kInput, DType::kFloat32, {c.ranks, c.rows, c.heads},
                     {.strides = {c.rows * heads, c.strided ? 1 : heads, c.strided ? c.rows : 1}});
  for (int64_t n = 0; n < c.ranks; ++n) {
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t h = 0; h < c.heads; ++h) {
        lse.set(c.bad_lse && t == 0 ? -kInfinity : random_lse(random, c.bad_lse), n, t, h);
      }
    }
  }
  out = buffers.tensor("out", Role::kInOut, c.dtype, {c.rows, c.heads, c.width},
                       {.strides = {heads * width, width, 1}});
  for (int64_t t = 0; t < c.rows; ++t) {
    for (int64_t h = 0; h < c.heads; ++h) {
      const bool finite = std::isfinite(lse.get(c.rank, t, h));
      for (int64_t i = 0; i < c.width; ++i) {
        out.set(finite ? random.bell() : kNan, t, h, i);
      }
    }
  }
  if (c.merged_lse) {
    merged_lse = buffers.tensor("merged_lse", Role::kOutput, DType::kFloat32, {c.rows, c.heads},
                                {.strides = {heads, 1}});
  }
}

RescaleByLseArgs RescaleByLseProblem::args(Side side) const {
  RescaleByLseArgs args;
  args.out = out.view(side);
  args.lse = lse.view(side);
  args.rank = case_.rank;
  args.lse_base = case_.base;
  args.merged_lse = merged_lse.view(side);
  return args;
}

std::string RescaleByLseProblem::verify() {
  const reference::MergedState expected = reference::rescale_by_lse(args(Side::kHost));
  std::string error = compare("out", out.result(), expected.out, rounding_tolerance(case_.dtype));
  if (error.empty() && !merged_lse.empty()) {
    error = compare("merged_lse", merged_lse.result(), expected.lse,
                    rounding_tolerance(DType::kFloat32));
  }
  return error;
}

}  // namespace lacuna::testing
