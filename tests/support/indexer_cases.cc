// Grids and data of the indexer's operations.
#include "tests/support/indexer_cases.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>

#include "tests/reference/element.h"
#include "tests/support/compare.h"

namespace lacuna::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace

// --------------------------------------------------------------------------- translate_indices

std::vector<TranslateCase> translate_cases() {
  std::vector<TranslateCase> cases;
  const auto add = [&](TranslateCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.rows) + "_w" + std::to_string(c.width) + "_block" +
             std::to_string(c.block_size);
    cases.push_back(std::move(c));
  };
  for (int64_t block : {16, 64, 128}) {
    for (int64_t width : {128, 256, 384, 512}) {
      add({.width = width, .block_size = block}, "plain");
    }
  }
  add({.width = 384, .counts = false}, "nocounts");
  for (int64_t block : {1, 2, 61, 640}) {
    add({.width = 100, .block_size = block, .block_stride_rows = block + 5}, "stride");
  }
  for (int64_t width : {0, 1, 2051, 2176}) {
    add({.width = width}, "width");
    add({.width = width, .valid_counts = true, .compact = true}, "compact");
  }
  add({.rows = 1, .width = 33, .requests = 1, .num_blocks = 1}, "one");
  add({.rows = 132, .width = 640}, "many");
  add({.width = 300, .valid_counts = true}, "counts");
  add({.width = 300, .workspace = true}, "workspace");
  add({.width = 300, .valid_counts = true, .compact = true, .workspace = true},
      "workspace_compact");
  add({.width = 300, .compact = true, .in_place = true}, "inplace_compact");
  add({.width = 300, .in_place = true}, "inplace");
  add({.width = 300, .in_place = true, .strided = true}, "inplace_strided");
  add({.width = 301, .valid_counts = true, .strided = true}, "strided");
  for (int size : {1, 2, 4}) {
    for (int interleave : {1, 2, 4}) {
      for (int64_t width : {384, 1024}) {
        for (bool compact : {false, true}) {
          add({.width = width,
               .block_size = 64,
               .dcp = {.size = size, .rank = size - 1, .interleave = interleave},
               .compact = compact},
              "dcp" + std::to_string(size) + "x" + std::to_string(interleave) +
                  (compact ? "_compact" : ""));
        }
      }
    }
  }
  return cases;
}

TranslateProblem::TranslateProblem(const TranslateCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const TranslateCase& c = case_;
  Random random(c.seed);
  const int64_t columns = 7;
  // Ids reach past the table, and past it once more for the other ranks' positions.
  const int64_t bound = columns * c.block_size * c.dcp.size;
  const Role role = c.in_place ? Role::kInOut : Role::kInput;
  indices = buffers.tensor("indices", role, DType::kInt32, {c.rows, c.width},
                           {.strides = {c.width + (c.strided ? 8 : 0), 1}});
  for (int64_t t = 0; t < c.rows; ++t) {
    bool run_of_none = false;
    for (int64_t i = 0; i < c.width; ++i) {
      run_of_none = random.chance(0.1) ? !run_of_none : run_of_none;
      const int64_t edge[] = {bound, bound - 1, INT32_MAX, INT32_MIN, 0};
      indices.set(
          static_cast<double>(run_of_none && random.chance(0.7) ? -1
                              : random.chance(0.1) ? edge[random.integer(0, std::ssize(edge) - 1)]
                                                   : random.integer(0, bound + bound / 8)),
          t, i);
    }
  }
  if (c.workspace) {
    // INT32_MAX plus a start is no row: keep ids small there.
    for (int64_t t = 0; t < c.rows; ++t) {
      for (int64_t i = 0; i < c.width; ++i) {
        indices.set(std::min(indices.get(t, i), 1e6), t, i);
      }
    }
  }
  const TensorOptions by_row{.strides = {c.strided ? 2 : 1}};
  std::vector<int32_t> requests;
  for (int64_t t = 0; t < c.rows; ++t) {
    // A padding row, and a request that does not exist.
    requests.push_back(!c.workspace && t % 8 == 5   ? -1
                       : !c.workspace && t % 8 == 6 ? static_cast<int32_t>(c.requests)
                                                    : static_cast<int32_t>(t % c.requests));
  }
  request_ids = buffers.ints("request_ids", requests, by_row);
  block_table = buffers.tensor("block_table", Role::kInput, DType::kInt32, {c.requests, columns},
                               {.strides = {columns + (c.strided ? 3 : 0), 1}});
  block_table.fill([&] {
    const double bad[] = {-1, INT32_MIN, static_cast<double>(c.num_blocks), INT32_MAX};
    return random.chance(0.2) ? bad[random.integer(0, 3)]
                              : static_cast<double>(random.integer(0, c.num_blocks - 1));
  });
  if (c.valid_counts) {
    std::vector<int32_t> counts;
    for (int64_t t = 0; t < c.rows; ++t) {
      counts.push_back(t % 6 == 1   ? -2
                       : t % 6 == 2 ? INT32_MAX
                                    : static_cast<int32_t>(random.integer(0, c.width)));
    }
    valid_counts = buffers.ints("valid_counts", counts, by_row);
  }
  if (c.workspace) {
    std::vector<int32_t> ids;
    for (int64_t t = 0; t < c.rows; ++t) {
      ids.push_back(t % 2 == 0 ? static_cast<int32_t>(t % 3) : -1);
    }
    workspace_ids = buffers.ints("workspace_ids", ids, by_row);
    workspace_starts = buffers.ints("workspace_starts", {0, 1000, 123456}, by_row);
  }
  rows = c.in_place ? indices
                    : buffers.tensor("rows", Role::kOutput, DType::kInt32, {c.rows, c.width},
                                     {.strides = {c.width + (c.strided ? 5 : 0), 1}});
  if (c.counts) {
    counts = buffers.tensor("counts", Role::kOutput, DType::kInt32, {c.rows},
                            {.strides = {c.strided ? 3 : 1}});
  }
}

TranslateIndicesArgs TranslateProblem::args(Side side) const {
  TranslateIndicesArgs args;
  args.indices = indices.view(side);
  args.request_ids = request_ids.view(side);
  args.block_table = block_table.view(side);
  args.valid_counts = valid_counts.view(side);
  args.num_blocks = case_.num_blocks;
  args.block_size = case_.block_size;
  args.block_stride_rows = case_.block_stride_rows;
  args.dcp = case_.dcp;
  args.compact = case_.compact;
  args.workspace_ids = workspace_ids.view(side);
  args.workspace_starts = workspace_starts.view(side);
  args.rows = rows.view(side);
  args.counts = counts.view(side);
  return args;
}

std::string TranslateProblem::verify() {
  const reference::TranslatedRows expected = reference::translate_indices(args(Side::kHost));
  std::string error = compare("rows", rows.result(), expected.rows);
  if (error.empty() && !counts.empty()) {
    error = compare("counts", counts.result(), expected.counts);
  }
  return error;
}

// ------------------------------------------------------------------------------------- scoring

namespace {

ScoringTensors make_scoring(const ScoringCase& c, BufferSet* buffers, Random* random) {
  ScoringTensors s;
  const int64_t dim = c.layout.latent;
  const int64_t num_requests = static_cast<int64_t>(c.lengths.size());
  s.num_rows = num_requests * c.rows_per_request + (c.padding_row ? 1 : 0);
  s.length_max = *std::max_element(c.lengths.begin(), c.lengths.end());

  std::vector<int32_t> requests, visible;
  for (int64_t r = 0; r < num_requests; ++r) {
    for (int64_t n = 0; n < c.rows_per_request; ++n) {
      requests.push_back(static_cast<int32_t>(r));
      visible.push_back(
          static_cast<int32_t>(std::max<int64_t>(c.lengths[r] - c.rows_per_request + n + 1, 0)));
    }
  }
  if (c.padding_row) {
    requests.push_back(-1);
    visible.push_back(static_cast<int32_t>(s.length_max));
  }
  const TensorOptions by_row{.strides = {c.strided ? 2 : 1}};
  s.request_ids = buffers->ints("request_ids", requests, by_row);
  s.visible_lengths = buffers->ints("visible_lengths", visible, by_row);

  const int64_t wide = c.strided ? c.heads + 2 : c.heads;
  s.q = buffers->tensor("q", Role::kInput, c.q_dtype, {s.num_rows, c.heads, dim},
                        {.strides = {wide * dim, dim, 1}});
  s.head_weights = buffers->tensor("head_weights", Role::kInput, DType::kFloat32,
                                   {s.num_rows, c.heads}, {.strides = {wide, 1}});
  s.q.fill(
      [&] { return c.integers ? static_cast<double>(random->integer(-1, 1)) : random->bell(); });
  // Both signs: a model's weights have both, and then the order is not that of the dot products.
  s.head_weights.fill([&] {
    return c.integers ? static_cast<double>(random->integer(-2, 4)) / 4
                      : random->bell() / std::sqrt(static_cast<double>(c.heads * dim));
  });

  // The keys: as many as tokens, or pools.
  const auto keys_of = [&](int32_t tokens) { return tokens / c.kpool; };
  const int64_t columns =
      (keys_of(static_cast<int32_t>(s.length_max)) + c.block_size - 1) / c.block_size + 1;
  int64_t num_blocks = 1;
  int64_t block_size = c.block_size;
  if (c.ragged) {
    block_size = 3;  // rows before the first request's
    for (int32_t length : c.lengths) {
      block_size += keys_of(length);
    }
    block_size = (block_size + 3) / 4 * 4;  // planar scales stay aligned
  } else {
    for (int32_t length : c.lengths) {
      num_blocks += (keys_of(length) + c.block_size - 1) / c.block_size;
    }
  }
  s.keys = buffers->cache("keys", Role::kInput, c.layout,
                          {.num_blocks = num_blocks,
                           .block_size = block_size,
                           .gap_bytes = c.ragged ? 0 : c.gap_rows * c.layout.record_bytes()});
  std::vector<int32_t> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  // A stream of its own: the same keys at the same positions whatever the block size.
  Random key_random(random->bits());
  random->shuffle(&blocks);
  std::vector<float> key(dim);
  int64_t num_keys = 0;
  const auto fill_key = [&](int64_t slot) {
    for (float& value : key) {
      value = c.integers ? static_cast<float>(key_random.integer(-2, 2)) : key_random.bell();
    }
    const bool power_of_two = c.integers || num_keys++ % 2 == 0;
    s.keys.set_record(slot, key, power_of_two ? Fp8ScaleRule::kPowerOfTwo : Fp8ScaleRule::kAmax);
  };
  if (c.ragged) {
    std::vector<int32_t> starts;
    int32_t start = 3;
    for (int32_t length : c.lengths) {
      starts.push_back(start);
      for (int32_t j = 0; j < keys_of(length); ++j) {
        fill_key(start + j);
      }
      start += keys_of(length);
    }
    s.key_starts = buffers->ints("key_starts", starts);
    return s;
  }
  s.block_table = buffers->tensor("block_table", Role::kInput, DType::kInt32,
                                  {num_requests, columns}, {.strides = {columns + 2, 1}});
  s.block_table.fill([] { return -1; });
  int64_t next = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    for (int64_t column = 0; column * c.block_size < keys_of(c.lengths[r]); ++column) {
      if (c.bad_blocks && random->chance(0.3)) {
        s.block_table.set(random->chance(0.5) ? -1 : static_cast<double>(num_blocks), r, column);
        continue;
      }
      const int64_t block = blocks[next++];
      s.block_table.set(static_cast<double>(block), r, column);
      for (int64_t o = 0; o < c.block_size; ++o) {
        // Rows past the end of the sequence stay NaN.
        if (column * c.block_size + o < keys_of(c.lengths[r])) {
          fill_key(block * c.block_size + o);
        }
      }
    }
  }
  return s;
}

template <class Args>
void set_scoring(const ScoringTensors& s, const ScoringCase& c, Side side, Args* args) {
  args->q = s.q.view(side);
  args->head_weights = s.head_weights.view(side);
  args->keys = s.keys.view(side);
  args->request_ids = s.request_ids.view(side);
  args->visible_lengths = s.visible_lengths.view(side);
  args->block_table = s.block_table.view(side);
  args->key_starts = s.key_starts.view(side);
  args->next_n = static_cast<int>(c.rows_per_request);
}

// Rounding errors of a score in float32, per unit of reference::IndexLogits::scale: a dot product
// of dim terms in at least eight chains, then a sum over heads.
double score_error(const ScoringCase& c) {
  return (static_cast<double>(c.layout.latent) / 8 + static_cast<double>(c.heads) + 8) * 0x1p-24;
}

std::string scoring_tag(const ScoringCase& c) {
  std::string tag = "_r" + std::to_string(c.lengths.size()) + "_n" +
                    std::to_string(c.rows_per_request) + "_h" + std::to_string(c.heads) + "_d" +
                    std::to_string(c.layout.latent);
  switch (c.layout.format) {
    case KvFormat::kIndexF32:
      tag += "_f32";
      break;
    case KvFormat::kIndexBf16:
      tag += "_bf16";
      break;
    default:
      tag += "_fp8";
  }
  tag += c.q_dtype == DType::kFloat32    ? "_qf32"
         : c.q_dtype == DType::kBFloat16 ? "_qbf16"
                                         : "_qfp8";
  return tag;
}

struct ScoringVariant {
  const char* name;
  ScoringCase scoring;
};

// What both operations are tried with.
std::vector<ScoringVariant> scoring_variants() {
  const KvLayout kFp8 = KvLayout::index_fp8();
  const KvLayout kBf16 = KvLayout::index_bf16(128);
  const KvLayout kF32 = KvLayout::index_f32(128);
  std::vector<ScoringVariant> variants;
  for (int64_t next_n : {1, 2, 4}) {
    for (const KvLayout& layout : {kFp8, kBf16, kF32}) {
      variants.push_back({"mtp",
                          {.lengths = {300, 77},
                           .rows_per_request = next_n,
                           .heads = 32,
                           .layout = layout,
                           .q_dtype = layout == kFp8   ? DType::kFloat8E4M3
                                      : layout == kF32 ? DType::kFloat32
                                                       : DType::kBFloat16}});
    }
  }
  for (DType q : {DType::kFloat32, DType::kBFloat16, DType::kFloat8E4M3}) {
    for (const KvLayout& layout : {kFp8, kBf16, kF32}) {
      variants.push_back(
          {"types", {.lengths = {90, 5}, .heads = 4, .layout = layout, .q_dtype = q}});
      variants.push_back(
          {"ragged",
           {.lengths = {90, 0, 5}, .heads = 4, .layout = layout, .q_dtype = q, .ragged = true}});
    }
  }
  for (int64_t block : {1, 2, 16, 61, 64, 128, 256, 640}) {
    variants.push_back({"block",
                        {.lengths = {200, 64, 1},
                         .layout = block % 4 == 0 ? kFp8 : kBf16,
                         .block_size = block,
                         .gap_rows = block % 3}});
  }
  for (const KvLayout& layout : {kFp8, kF32}) {
    variants.push_back({"hostile",
                        {.lengths = {500, 0, 33, 1, 255, 256, 257},
                         .rows_per_request = 2,
                         .heads = 3,
                         .layout = layout,
                         .block_size = 16,
                         .gap_rows = 1,
                         .bad_blocks = true,
                         .padding_row = true,
                         .strided = true}});
  }
  for (int64_t dim : {1, 8, 20, 36, 64, 100, 256}) {
    variants.push_back({"dim",
                        {.lengths = {70, 129},
                         .heads = 5,
                         .layout = dim == 64      ? KvLayout::index_fp8(dim)
                                   : dim % 8 == 4 ? KvLayout::index_f32(dim)
                                                  : KvLayout::index_bf16(dim),
                         .q_dtype = DType::kFloat32}});
  }
  for (int64_t heads : {1, 2, 7, 64}) {
    variants.push_back({"heads", {.lengths = {150}, .heads = heads, .layout = kFp8}});
  }
  variants.push_back(
      {"long", {.lengths = {5000, 4097}, .heads = 4, .layout = KvLayout::index_bf16(32)}});
  return variants;
}

}  // namespace

// -------------------------------------------------------------------------------- index_logits

std::vector<IndexLogitsCase> index_logits_cases() {
  std::vector<IndexLogitsCase> cases;
  const auto add = [&](IndexLogitsCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + scoring_tag(c.scoring) + "_" + std::to_string(c.seed);
    cases.push_back(std::move(c));
  };
  for (const ScoringVariant& variant : scoring_variants()) {
    add({.scoring = variant.scoring}, variant.name);
  }
  const ScoringCase plain{.lengths = {130, 64, 7, 0, 31}, .layout = KvLayout::index_fp8()};
  ScoringCase integers = plain;
  integers.integers = true;
  add({.scoring = integers}, "integers");
  add({.scoring = plain, .logits_dtype = DType::kBFloat16}, "bf16logits");
  add({.scoring = plain, .extra_columns = 13}, "morecolumns");
  add({.scoring = plain, .extra_columns = -50}, "fewercolumns");
  add({.scoring = plain, .hostile_lengths = true}, "hostilelengths");
  ScoringCase strided = plain;
  strided.strided = true;
  add({.scoring = strided, .extra_columns = 3}, "strided");
  add({.scoring = plain, .scratch_bytes_max = 64}, "smallscratch");
  return cases;
}

IndexLogitsProblem::IndexLogitsProblem(const IndexLogitsCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const IndexLogitsCase& c = case_;
  Random random(c.seed);
  tensors = make_scoring(c.scoring, &buffers, &random);
  if (c.hostile_lengths) {
    // Keys past a request's end are NaN in its last block, so only lengths that the data has, and
    // those that see nothing. INT32_MAX sees every column.
    const int32_t lengths[] = {INT32_MAX, -1, INT32_MIN, 0, 30};
    for (int64_t t = 0; t < tensors.num_rows; ++t) {
      tensors.visible_lengths.set(lengths[t % std::ssize(lengths)], t);
    }
  }
  const int64_t columns = tensors.length_max + c.extra_columns;
  logits = buffers.tensor("logits", Role::kOutput, c.logits_dtype, {tensors.num_rows, columns},
                          {.strides = {columns + (c.scoring.strided ? 5 : 0), 1}});
}

IndexLogitsArgs IndexLogitsProblem::args(Side side) const {
  IndexLogitsArgs args;
  set_scoring(tensors, case_.scoring, side, &args);
  args.scratch_bytes_max = case_.scratch_bytes_max;
  args.logits = logits.view(side);
  return args;
}

std::string IndexLogitsProblem::verify() {
  const reference::IndexLogits expected = reference::index_logits(args(Side::kHost));
  std::vector<double> slack = expected.scale;
  for (double& value : slack) {
    value = case_.scoring.integers ? 0 : value * score_error(case_.scoring);
  }
  const bool rounds = case_.logits_dtype == DType::kBFloat16;
  std::string error =
      compare("logits", logits.result(), expected.logits, {.abs = 0, .rel = 0}, slack);
  if (!error.empty() && rounds) {
    // The rounding to bf16 comes on top of the float32 error.
    for (size_t i = 0; i < slack.size(); ++i) {
      slack[i] += std::isfinite(expected.logits[i]) ? std::fabs(expected.logits[i]) * 0x1p-8 : 0;
    }
    error = compare("logits", logits.result(), expected.logits, {.abs = 0, .rel = 0}, slack);
  }
  return error;
}

// --------------------------------------------------------------------------------------- top_k

std::vector<TopKCase> top_k_cases() {
  std::vector<TopKCase> cases;
  const auto add = [&](TopKCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name = name + "_t" + std::to_string(c.lengths.size()) + "_k" + std::to_string(c.k) + "_len" +
             std::to_string(*std::max_element(c.lengths.begin(), c.lengths.end())) +
             (c.dtype == DType::kFloat32 ? "_f32" : "_bf16") + "_" + std::to_string(c.seed);
    cases.push_back(std::move(c));
  };
  struct Family {
    const char* name;
    ScoreFamily family;
  };
  const Family families[] = {{"random", ScoreFamily::kRandom},
                             {"samelowbits", ScoreFamily::kSameLowBits},
                             {"samehighbits", ScoreFamily::kSameHighBits},
                             {"ascending", ScoreFamily::kAscending},
                             {"descending", ScoreFamily::kDescending},
                             {"allequal", ScoreFamily::kAllEqual},
                             {"manyties", ScoreFamily::kManyTies},
                             {"halftied", ScoreFamily::kHalfTied},
                             {"special", ScoreFamily::kSpecial},
                             {"allnan", ScoreFamily::kAllNan},
                             {"signedzeros", ScoreFamily::kSignedZeros}};
  for (const Family& family : families) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      add({.lengths = {0, 1, 5, 63, 64, 65, 500, 1000, -3, 1001},
           .k = 64,
           .dtype = dtype,
           .family = family.family,
           .mask = true},
          family.name);
      add({.lengths = {3000, 2049, 2047},
           .k = 2048,
           .dtype = dtype,
           .family = family.family,
           .row_starts = true,
           .rows = true},
          family.name);
    }
    add({.lengths = {900, 64, 65, 10},
         .columns = 1000,
         .k = 64,
         .family = family.family,
         .candidate_ids = true},
        std::string(family.name) + "_ids");
  }
  // Lengths around k: the tail is -1 whatever was there.
  add({.lengths = {0, 1, 5, 2047, 2048, 2049, 2050, 2055, 2063, INT32_MAX, INT32_MIN},
       .columns = 2100,
       .k = 2048,
       .family = ScoreFamily::kManyTies},
      "aroundk");
  add({.lengths = {INT32_MAX, 300, 17}, .columns = 400, .k = 64, .row_starts = true, .mask = false},
      "clamped");
  for (int64_t k : {1, 2, 3, 31, 32, 33, 127, 512, 1024}) {
    add({.lengths = {1500, 1023, 33}, .k = k, .family = ScoreFamily::kManyTies}, "k");
  }
  // k above the width of the logits.
  add({.lengths = {100, 100, 100}, .k = 2048, .absent_lengths = true}, "wide");
  add({.lengths = {7}, .columns = 7, .k = 3000}, "wide");
  add({.lengths = {1, 1}, .k = 1, .absent_lengths = true}, "one");
  add({.lengths = {8000, 12289, 20000}, .k = 2048}, "long");
  add({.lengths = {210000}, .k = 2048, .family = ScoreFamily::kHalfTied}, "verylong");
  // Rows that a kernel may share out, beside rows that it may not: ties on both sides of every cut.
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (ScoreFamily family : {ScoreFamily::kManyTies, ScoreFamily::kAllEqual,
                               ScoreFamily::kSpecial, ScoreFamily::kAllNan}) {
      add({.lengths = {40000, 16384, 16383, 100, 65536},
           .k = 2048,
           .dtype = dtype,
           .family = family,
           .row_starts = true,
           .rows = true,
           .mask = true},
          "longmixed");
    }
  }
  add({.lengths = {200003, 70000},
       .k = 2048,
       .kpool = 4,
       .family = ScoreFamily::kManyTies,
       .scores = false,
       .mask = true},
      "longkpool");
  add({.lengths = {40000, 500},
       .k = 512,
       .family = ScoreFamily::kHalfTied,
       .indices = false,
       .scores = false,
       .counts = false,
       .mask = true},
      "longonlymask");
  add({.lengths = {9000, 5000},
       .columns = 9000,
       .k = 6000,
       .family = ScoreFamily::kManyTies,
       .candidate_ids = true},
      "manychosen_ids");
  std::vector<int32_t> every(132);
  std::iota(every.begin(), every.end(), 1);
  add({.lengths = every, .k = 64, .family = ScoreFamily::kManyTies}, "everylength");
  // Each output alone.
  add({.lengths = {300, 20}, .k = 32, .scores = false, .counts = false}, "onlyindices");
  add({.lengths = {300, 20}, .k = 32, .indices = false, .scores = false, .rows = true}, "onlyrows");
  add({.lengths = {300, 20},
       .k = 32,
       .indices = false,
       .scores = false,
       .counts = false,
       .mask = true},
      "onlymask");
  add({.lengths = {300, 20}, .k = 32, .mask = true, .mask_words = 3}, "shortmask");
  add({.lengths = {300, 20, 77, 15},
       .k = 32,
       .row_starts = true,
       .rows = true,
       .mask = true,
       .extra_width = 96,
       .strided = true},
      "strided");
  // Pools of four positions, with an incomplete one at the end.
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    add({.lengths = {0, 1, 3, 4, 63, 64, 128, 129, 131, 400, 403},
         .k = 64,
         .kpool = 4,
         .dtype = dtype,
         .family = ScoreFamily::kManyTies,
         .scores = false,
         .rows = true,
         .mask = true},
        "kpool");
  }
  add({.lengths = {9001, 8192, 2048},
       .k = 2048,
       .kpool = 4,
       .scores = false,
       .extra_width = 2176 - 2051},
      "kpool");
  add({.lengths = {400, 300}, .k = 64, .kpool = 4, .absent_lengths = true, .scores = false},
      "kpool_nolengths");
  return cases;
}

namespace {

float score_of(ScoreFamily family, int64_t j, int64_t n, Random* random) {
  switch (family) {
    case ScoreFamily::kRandom:
      return random->bell();
    case ScoreFamily::kSameLowBits:
      return std::bit_cast<float>((std::bit_cast<uint32_t>(random->bell()) & ~0x3ffu) | 0x155u);
    case ScoreFamily::kSameHighBits:
      // Eleven low bits: bf16 sees ties only.
      return std::bit_cast<float>(std::bit_cast<uint32_t>(1.0f) | (random->bits() & 0x7ffu));
    case ScoreFamily::kAscending:
      return static_cast<float>(j - n / 2);
    case ScoreFamily::kDescending:
      return static_cast<float>(n / 2 - j);
    case ScoreFamily::kAllEqual:
      return 1.5f;
    case ScoreFamily::kManyTies:
      return static_cast<float>(random->integer(-4, 3));
    case ScoreFamily::kHalfTied:
      return random->chance(0.5) ? 0.0f : random->bell();
    case ScoreFamily::kSpecial: {
      const float values[] = {kNan,
                              -kNan,
                              kInfinity,
                              -kInfinity,
                              -kInfinity,
                              0.0f,
                              -0.0f,
                              1e-45f,
                              -1e-45f,
                              std::numeric_limits<float>::max(),
                              std::numeric_limits<float>::lowest(),
                              1.0f};
      return values[random->integer(0, std::ssize(values) - 1)];
    }
    case ScoreFamily::kSignedZeros:
      return random->chance(0.04) ? random->bell() : random->chance(0.5) ? 0.0f : -0.0f;
    case ScoreFamily::kAllNan:
      return kNan;
  }
  return 0;
}

// Indices, scores, counts, rows and mask for `rows` rows.
void make_outputs(BufferSet* buffers, SelectionTensors* s, int64_t num_rows, int64_t width,
                  bool strided) {
  const TensorOptions list{.strides = {width + (strided ? 8 : 0), 1}};
  s->indices =
      buffers->tensor("outputs.indices", Role::kOutput, DType::kInt32, {num_rows, width}, list);
  s->scores =
      buffers->tensor("outputs.scores", Role::kOutput, DType::kFloat32, {num_rows, width}, list);
  s->rows = buffers->tensor("outputs.rows", Role::kOutput, DType::kInt32, {num_rows, width}, list);
  s->counts = buffers->tensor("outputs.counts", Role::kOutput, DType::kInt32, {num_rows},
                              {.strides = {strided ? 2 : 1}});
}

void make_mask_output(BufferSet* buffers, SelectionTensors* s, int64_t num_rows, int64_t words) {
  s->mask = buffers->tensor("outputs.mask", Role::kOutput, DType::kInt32, {num_rows, words},
                            {.strides = {(words + 3) / 4 * 4, 1}, .whole_stride_writable = true});
}

}  // namespace

SelectionOutputs SelectionTensors::outputs(Side side) const {
  SelectionOutputs outputs;
  outputs.indices = indices.view(side);
  outputs.scores = scores.view(side);
  outputs.counts = counts.view(side);
  outputs.rows = rows.view(side);
  outputs.request_ids = request_ids.view(side);
  outputs.block_table = block_table.view(side);
  outputs.num_blocks = num_blocks;
  outputs.block_size = block_size;
  outputs.block_stride_rows = block_stride_rows;
  outputs.mask = mask.view(side);
  return outputs;
}

std::string SelectionTensors::verify(const reference::Selection& expected) const {
  std::string error;
  if (!indices.empty()) {
    error = compare("outputs.indices", indices.result(), expected.indices);
  }
  if (error.empty() && !counts.empty()) {
    error = compare("outputs.counts", counts.result(), expected.counts);
  }
  if (error.empty() && !scores.empty()) {
    error = compare("outputs.scores", scores.result(), expected.scores, Tolerance{});
  }
  if (error.empty() && !rows.empty()) {
    error = compare("outputs.rows", rows.result(), expected.rows);
  }
  if (error.empty() && !mask.empty()) {
    ConstTensorView whole = mask.result();
    whole.shape[1] = whole.strides[0];
    error = compare("outputs.mask", whole, expected.mask);
  }
  return error;
}

TopKProblem::TopKProblem(const TopKCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  TopKCase& c = case_;
  Random random(c.seed);
  const int64_t num_rows = static_cast<int64_t>(c.lengths.size());
  std::vector<int32_t> starts(num_rows, 0);
  const int64_t longest = *std::max_element(c.lengths.begin(), c.lengths.end()) / c.kpool;
  if (c.row_starts) {
    for (int32_t& start : starts) {
      start = static_cast<int32_t>(random.integer(0, 50));
    }
  }
  if (c.columns == 0) {
    c.columns = longest + (c.row_starts ? 70 : 0);
  }
  logits = buffers.tensor("logits", Role::kInput, c.dtype, {num_rows, c.columns},
                          {.strides = {c.columns + (c.strided ? 3 : 0), 1}});
  for (int64_t t = 0; t < num_rows; ++t) {
    const int64_t length =
        c.absent_lengths ? c.columns : std::clamp<int64_t>(c.lengths[t] / c.kpool, 0, c.columns);
    for (int64_t j = 0; j < c.columns; ++j) {
      const int64_t position = j - starts[t];
      // Outside the row's range: what would win, or spoil a comparison.
      logits.set(position >= 0 && position < length ? score_of(c.family, position, length, &random)
                 : j % 2 == 0                       ? kInfinity
                                                    : kNan,
                 t, j);
    }
  }
  if (c.row_starts) {
    row_starts = buffers.ints("row_starts", starts, {.strides = {c.strided ? 2 : 1}});
  }
  if (!c.absent_lengths) {
    lengths = buffers.ints("lengths", c.lengths, {.strides = {c.strided ? 2 : 1}});
  }
  if (c.candidate_ids) {
    candidate_ids =
        buffers.tensor("candidate_ids", Role::kInput, DType::kInt32, {num_rows, c.columns});
    for (int64_t t = 0; t < num_rows; ++t) {
      std::vector<int32_t> ids(c.columns);
      std::iota(ids.begin(), ids.end(), 17);
      random.shuffle(&ids);
      for (int64_t j = 0; j < c.columns; ++j) {
        candidate_ids.set(random.chance(0.2) ? -1 - j % 3 : 3.0 * ids[j], t, j);
      }
    }
  }
  const int64_t width = selection_width(c.k, c.kpool) + c.extra_width;
  make_outputs(&buffers, &selection, num_rows, width, c.strided);
  if (c.rows) {
    std::vector<int32_t> requests;
    for (int64_t t = 0; t < num_rows; ++t) {
      requests.push_back(t % 5 == 4 ? -1 : static_cast<int32_t>(t % 2));
    }
    selection.block_size = 16;
    selection.block_stride_rows = 19;
    selection.num_blocks = 40;
    const int64_t columns = (longest * c.kpool + 15) / 16 - 1;  // the last positions have no block
    selection.request_ids = buffers.ints("outputs.request_ids", requests);
    selection.block_table = buffers.tensor("outputs.block_table", Role::kInput, DType::kInt32,
                                           {2, std::max<int64_t>(columns, 1)});
    selection.block_table.fill(
        [&] { return static_cast<double>(random.integer(-1, selection.num_blocks)); });
  }
  if (c.mask) {
    const int64_t bits = longest * c.kpool + c.kpool;
    make_mask_output(&buffers, &selection, num_rows,
                     c.mask_words != 0 ? c.mask_words : (bits + 31) / 32);
  }
  // Not asked for: absent from the arguments.
  selection.indices = c.indices ? selection.indices : TestTensor();
  selection.scores = c.scores ? selection.scores : TestTensor();
  selection.counts = c.counts ? selection.counts : TestTensor();
  selection.rows = c.rows ? selection.rows : TestTensor();
}

TopKArgs TopKProblem::args(Side side) const {
  TopKArgs args;
  args.logits = logits.view(side);
  args.row_starts = row_starts.view(side);
  args.lengths = lengths.view(side);
  args.candidate_ids = candidate_ids.view(side);
  args.k = case_.k;
  args.kpool = case_.kpool;
  args.outputs = selection.outputs(side);
  return args;
}

std::string TopKProblem::verify() { return selection.verify(reference::top_k(args(Side::kHost))); }

// --------------------------------------------------------------------------------- select_keys

std::vector<SelectKeysCase> select_keys_cases() {
  std::vector<SelectKeysCase> cases;
  const auto add = [&](SelectKeysCase c, const std::string& name) {
    c.seed = cases.size() + 1;
    c.name =
        name + scoring_tag(c.scoring) + "_k" + std::to_string(c.k) + "_" + std::to_string(c.seed);
    cases.push_back(std::move(c));
  };
  for (const ScoringVariant& variant : scoring_variants()) {
    for (bool integers : {false, true}) {
      ScoringCase scoring = variant.scoring;
      scoring.integers = integers;
      add({.scoring = scoring, .rows = !scoring.ragged, .give_length_max = !integers},
          std::string(variant.name) + (integers ? "_integers" : ""));
    }
  }
  ScoringCase scoring{
      .lengths = {700, 64, 31, 0, 33}, .layout = KvLayout::index_fp8(), .integers = true};
  add({.scoring = scoring, .k = 64, .scores = true}, "scores");
  add({.scoring = scoring, .k = 64, .rows = false, .mask = false}, "onlyindices");
  add({.scoring = scoring, .k = 64, .logits_bytes_max = 1}, "chunked");
  add({.scoring = scoring, .k = 64, .logits_bytes_max = 3000}, "chunked");
  add({.scoring = scoring, .k = 2048}, "identity");
  for (bool integers : {false, true}) {
    scoring.integers = integers;
    scoring.lengths = {700, 64, 31, 0, 33, 259};
    scoring.kpool = 4;
    add({.scoring = scoring, .k = 64, .rows = false}, "kpool");
  }
  ScoringCase large{.lengths = {2500, 2048, 2049},
                    .heads = 8,
                    .layout = KvLayout::index_fp8(64),
                    .integers = true};
  add({.scoring = large, .k = 2048}, "full");
  large.lengths = {20000, 17001};
  large.rows_per_request = 2;
  add({.scoring = large, .k = 2048}, "long_full");
  return cases;
}

SelectKeysProblem::SelectKeysProblem(const SelectKeysCase& test_case, const TestDevice& where)
    : BasicProblem(test_case, where) {
  const SelectKeysCase& c = case_;
  Random random(c.seed);
  tensors = make_scoring(c.scoring, &buffers, &random);
  const int kpool = static_cast<int>(c.scoring.kpool);
  make_outputs(&buffers, &selection, tensors.num_rows, selection_width(c.k, kpool),
               c.scoring.strided);
  if (c.mask) {
    make_mask_output(&buffers, &selection, tensors.num_rows, (tensors.length_max + 31) / 32);
  }
  if (c.rows) {
    // The latent cache has its own table and block size; request ids default to the scoring ones.
    selection.block_size = 24;
    selection.num_blocks = 1000;
    selection.block_table = buffers.tensor(
        "outputs.block_table", Role::kInput, DType::kInt32,
        {static_cast<int64_t>(c.scoring.lengths.size()), (tensors.length_max + 23) / 24});
    selection.block_table.fill(
        [&] { return static_cast<double>(random.integer(-1, selection.num_blocks)); });
  }
  selection.scores = c.scores ? selection.scores : TestTensor();
  selection.rows = c.rows ? selection.rows : TestTensor();
}

SelectKeysArgs SelectKeysProblem::args(Side side) const {
  SelectKeysArgs args;
  set_scoring(tensors, case_.scoring, side, &args);
  args.visible_length_max = case_.give_length_max ? tensors.length_max : -1;
  args.logits_bytes_max = case_.logits_bytes_max;
  args.k = case_.k;
  args.kpool = static_cast<int>(case_.scoring.kpool);
  args.outputs = selection.outputs(side);
  return args;
}

std::string SelectKeysProblem::verify() {
  if (!case_.scoring.integers) {
    return verify_by_margin();
  }
  reference::Selection expected = reference::select_keys(args(Side::kHost));
  if (!selection.scores.empty()) {
    // Rows that are not scored have no scores to compare: take what is there.
    for (int64_t t = 0; t < tensors.num_rows; ++t) {
      if (tensors.visible_lengths.get(t) <= static_cast<double>(case_.k)) {
        for (int64_t i = 0; i < expected.counts[t]; ++i) {
          expected.scores[t * expected.width + i] =
              reference::element(selection.scores.result(), t, i);
        }
      }
    }
  }
  return selection.verify(expected);
}

std::string SelectKeysProblem::verify_by_margin() {
  const SelectKeysArgs host = args(Side::kHost);
  reference::IndexLogits logits;
  reference::Selection expected = reference::select_keys(host, &logits);
  const int64_t columns = static_cast<int64_t>(logits.logits.size()) / tensors.num_rows;
  const int64_t kpool = case_.scoring.kpool;
  const ConstTensorView list = selection.indices.result();
  for (int64_t t = 0; t < tensors.num_rows; ++t) {
    const int64_t length =
        tensors.request_ids.get(t) < 0 ? 0 : static_cast<int64_t>(tensors.visible_lengths.get(t));
    // Pools stand for their positions: judge the pools, and demand the positions exactly.
    std::vector<double> scores, margin;
    for (int64_t p = 0; p < length; ++p) {
      // A pool's positions share its score; the incomplete tail beats everything.
      const int64_t pool = p / kpool;
      const bool tail = pool >= length / kpool;
      scores.push_back(tail ? kInfinity : logits.logits[t * columns + pool]);
      margin.push_back(tail ? 0 : logits.scale[t * columns + pool] * score_error(case_.scoring));
    }
    std::vector<int32_t> entries;
    for (int64_t i = 0; i < list.shape[1]; ++i) {
      entries.push_back(static_cast<int32_t>(reference::integer(list, t, i)));
    }
    const int64_t count = reference::integer(selection.counts.result(), t);
    const int64_t wanted = length <= case_.k ? length : case_.k + length % kpool;
    const std::string error =
        check_selection_by_margin(entries, count, scores, length, wanted, margin);
    if (!error.empty()) {
      return "outputs.indices, row " + std::to_string(t) + ": " + error;
    }
    for (int64_t i = 0; i < count; i += kpool) {
      if (entries[i] / kpool != entries[std::min(i + kpool, count) - 1] / kpool) {
        return "outputs.indices, row " + std::to_string(t) + ": a pool is not whole at entry " +
               std::to_string(i);
      }
    }
    std::copy(entries.begin(), entries.end(), expected.indices.begin() + t * expected.width);
  }
  // Rows and mask must say what the list says.
  TranslateIndicesArgs translate;
  translate.indices = view_of(expected.indices.data(), {tensors.num_rows, expected.width});
  translate.request_ids = host.request_ids;
  translate.block_table = host.outputs.block_table;
  translate.num_blocks = host.outputs.num_blocks;
  translate.block_size = host.outputs.block_size;
  if (!selection.rows.empty()) {
    expected.rows = reference::translate_indices(translate).rows;
  }
  if (!selection.mask.empty()) {
    BuildMaskArgs mask;
    mask.indices = translate.indices;
    mask.key_count = 32 * host.outputs.mask.shape[1];
    mask.mask = host.outputs.mask;
    expected.mask = reference::build_mask(mask);
  }
  return selection.verify(expected);
}

}  // namespace lacuna::testing
