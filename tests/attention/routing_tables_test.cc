// The upstream thresholds at every edge, as published.
#include "attention/routing_tables.h"

#include <gtest/gtest.h>

#include <string_view>
#include <tuple>
#include <vector>

namespace lacuna {
namespace {

constexpr int64_t kK = 1024;

struct Model {
  int64_t heads;
  int64_t d_qk;
  int64_t d_v;
};
constexpr Model kV32 = {128, 192, 128};
constexpr Model kGlm = {64, 256, 256};

const MaskedMhaTable* table(std::string_view backend, int tp, const Model& model) {
  return find_masked_table(upstream_masked_tables(), backend, tp, model.heads, model.d_qk,
                           model.d_v);
}

bool pays(std::string_view backend, int tp, const Model& model, int64_t query, int64_t seq,
          bool context) {
  const MaskedMhaTable* found = table(backend, tp, model);
  return found != nullptr && masked_mha_pays(*found, query, seq, context);
}

struct Published {
  std::string_view backend;
  int tp;
  Model model;
  std::vector<MaskedThreshold> pure;
  std::vector<MaskedThreshold> context;
};

// Typed anew from the publication, not from the source of the tables.
const std::vector<Published>& published() {
  static const auto* const kList = [] {
    const auto v32 = [](std::string_view backend, int tp, std::vector<MaskedThreshold> list) {
      return Published{backend, tp, kV32, list, list};
    };
    const std::string_view mla = "FLASHMLA_SPARSE";
    const std::string_view infer = "FLASHINFER_MLA_SPARSE";
    return new std::vector<Published>{
        v32(mla, 1, {{2048, 1536}, {4096, 4096}}),
        v32(mla, 2, {{2048, 512}, {4096, 1024}, {8192, 4096}}),
        v32(mla, 4, {{2048, 512}, {4096, 1024}, {8192, 1536}, {16384, 8192}}),
        v32(mla, 8, {{2048, 512}, {4096, 512}, {8192, 1024}, {16384, 2048}, {32768, 16384}}),
        v32(infer, 8, {{2048, 512}, {4096, 1024}, {8192, 1024}, {16384, 2048}, {32768, 32768}}),
        {mla, 1, kGlm, {{8192, 0}}, {}},
        {mla, 2, kGlm, {{20480, 0}}, {{6144, 4096}, {10240, 8192}}},
        {mla, 4, kGlm, {{49152, 0}}, {{8192, 4096}, {16384, 8192}, {24576, 16384}, {34816, 32768}}},
        {mla,
         8,
         kGlm,
         {{114688, 0}},
         {{8192, 4096}, {16384, 8192}, {32768, 16384}, {49152, 32768}}},
        {infer,
         4,
         kGlm,
         {{36864, 0}},
         {{12288, 4096}, {16384, 8192}, {24576, 16384}, {28672, 24576}}},
        {infer,
         8,
         kGlm,
         {{65536, 0}},
         {{20480, 4096},
          {24576, 8192},
          {32768, 16384},
          {49152, 32768},
          {57344, 40960},
          {65536, 49152},
          {73728, 57344}}}};
  }();
  return *kList;
}

// At each edge and one beside it, in both directions.
TEST(UpstreamTables, EveryEdgeIsWhereItWasPublished) {
  EXPECT_EQ(upstream_masked_tables().size(), published().size());
  for (const Published& entry : published()) {
    SCOPED_TRACE(std::string(entry.backend) + " TP" + std::to_string(entry.tp) + ", " +
                 std::to_string(entry.model.heads) + " heads");
    for (const bool context : {false, true}) {
      const std::vector<MaskedThreshold>& list = context ? entry.context : entry.pure;
      const auto asked = [&](int64_t query, int64_t seq) {
        return pays(entry.backend, entry.tp, entry.model, query, seq, context);
      };
      if (list.empty()) {
        for (const int64_t seq : {int64_t{1}, 2 * kK, 8 * kK, 200 * kK}) {
          EXPECT_FALSE(asked(seq, seq));
        }
        continue;
      }
      for (size_t i = 0; i < list.size(); ++i) {
        const auto [max_seq, min_query] = list[i];
        const int64_t first_seq = i == 0 ? 1 : list[i - 1].max_seq + 1;
        for (const int64_t seq : {first_seq, max_seq - 1, max_seq}) {
          EXPECT_TRUE(asked(min_query, seq)) << min_query << ", " << seq;
          EXPECT_TRUE(asked(min_query + 1, seq)) << min_query << ", " << seq;
          if (min_query > 0) {
            EXPECT_FALSE(asked(min_query - 1, seq)) << min_query << ", " << seq;
          }
        }
        // One key more is the next entry's, or nobody's.
        const bool is_last = i + 1 == list.size();
        EXPECT_EQ(asked(min_query, max_seq + 1), !is_last && min_query >= list[i + 1].min_query);
        EXPECT_EQ(asked(1 << 30, max_seq + 1), !is_last);
      }
    }
  }
}

TEST(UpstreamTables, ThePublishedTestBoundaries) {
  EXPECT_TRUE(pays("FLASHMLA_SPARSE", 4, kGlm, 32768, 34 * kK, true));
  EXPECT_FALSE(pays("FLASHMLA_SPARSE", 4, kGlm, 32768, 36 * kK, true));
  EXPECT_FALSE(pays("FLASHINFER_MLA_SPARSE", 8, kGlm, 63 * kK, 79 * kK, true));
}

TEST(UpstreamTables, WhatWasNotMeasuredHasNoTable) {
  EXPECT_EQ(table("FLASHMLA_SPARSE", 3, kGlm), nullptr);
  EXPECT_EQ(table("FLASHMLA_SPARSE", 16, kV32), nullptr);
  EXPECT_EQ(table("FLASHINFER_MLA_SPARSE", 1, kGlm), nullptr);
  EXPECT_EQ(table("FLASHINFER_MLA_SPARSE", 4, kV32), nullptr);
  EXPECT_EQ(table("cpu", 1, kV32), nullptr);
  EXPECT_EQ(table("FLASHMLA_SPARSE", 1, {128, 256, 256}), nullptr);
  EXPECT_EQ(table("FLASHMLA_SPARSE", 1, {64, 192, 128}), nullptr);
  EXPECT_EQ(table("FLASHMLA_SPARSE", 1, {64, 256, 128}), nullptr);
}

TEST(UpstreamTables, ListsAscend) {
  for (const MaskedMhaTable& entry : upstream_masked_tables()) {
    for (const auto& list : {entry.pure_prefill, entry.with_context}) {
      for (size_t i = 1; i < list.size(); ++i) {
        EXPECT_GT(list[i].max_seq, list[i - 1].max_seq);
      }
    }
  }
}

}  // namespace
}  // namespace lacuna
