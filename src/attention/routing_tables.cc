// The upstream thresholds: vLLM pull requests 48770 (DeepSeek-V3.2) and 53785 (GLM-5).
#include "attention/routing_tables.h"

#include <array>

namespace lacuna {
namespace {

constexpr int64_t kK = 1024;

constexpr MaskedThreshold kV32FlashMla1[] = {{2048, 1536}, {4096, 4096}};
constexpr MaskedThreshold kV32FlashMla2[] = {{2048, 512}, {4096, 1024}, {8192, 4096}};
constexpr MaskedThreshold kV32FlashMla4[] = {
    {2048, 512}, {4096, 1024}, {8192, 1536}, {16384, 8192}};
constexpr MaskedThreshold kV32FlashMla8[] = {
    {2048, 512}, {4096, 512}, {8192, 1024}, {16384, 2048}, {32768, 16384}};
constexpr MaskedThreshold kV32FlashInfer8[] = {
    {2048, 512}, {4096, 1024}, {8192, 1024}, {16384, 2048}, {32768, 32768}};

constexpr MaskedThreshold kGlmFlashMla1[] = {{8 * kK, 0}};
constexpr MaskedThreshold kGlmFlashMla2[] = {{20 * kK, 0}};
constexpr MaskedThreshold kGlmFlashMla2Context[] = {{6 * kK, 4 * kK}, {10 * kK, 8 * kK}};
constexpr MaskedThreshold kGlmFlashMla4[] = {{48 * kK, 0}};
constexpr MaskedThreshold kGlmFlashMla4Context[] = {
    {8 * kK, 4 * kK}, {16 * kK, 8 * kK}, {24 * kK, 16 * kK}, {34 * kK, 32 * kK}};
constexpr MaskedThreshold kGlmFlashMla8[] = {{112 * kK, 0}};
constexpr MaskedThreshold kGlmFlashMla8Context[] = {
    {8 * kK, 4 * kK}, {16 * kK, 8 * kK}, {32 * kK, 16 * kK}, {48 * kK, 32 * kK}};
constexpr MaskedThreshold kGlmFlashInfer4[] = {{36 * kK, 0}};
constexpr MaskedThreshold kGlmFlashInfer4Context[] = {
    {12 * kK, 4 * kK}, {16 * kK, 8 * kK}, {24 * kK, 16 * kK}, {28 * kK, 24 * kK}};
constexpr MaskedThreshold kGlmFlashInfer8[] = {{64 * kK, 0}};
constexpr MaskedThreshold kGlmFlashInfer8Context[] = {
    {20 * kK, 4 * kK},  {24 * kK, 8 * kK},  {32 * kK, 16 * kK}, {48 * kK, 32 * kK},
    {56 * kK, 40 * kK}, {64 * kK, 48 * kK}, {72 * kK, 56 * kK}};

// DeepSeek-V3.2: 128 heads, 192 / 128; one list with and without context.
constexpr MaskedMhaTable v32(std::string_view backend, int tensor_parallel,
                             std::span<const MaskedThreshold> list) {
  return {backend, tensor_parallel, 128, 192, 128, list, list};
}

// GLM-5: 64 heads, 256 / 256, with a rope part or without.
constexpr MaskedMhaTable glm(std::string_view backend, int tensor_parallel,
                             std::span<const MaskedThreshold> pure,
                             std::span<const MaskedThreshold> context) {
  return {backend, tensor_parallel, 64, 256, 256, pure, context};
}

constexpr std::string_view kFlashMla = "FLASHMLA_SPARSE";
constexpr std::string_view kFlashInfer = "FLASHINFER_MLA_SPARSE";

constexpr std::array kUpstream = {
    v32(kFlashMla, 1, kV32FlashMla1),
    v32(kFlashMla, 2, kV32FlashMla2),
    v32(kFlashMla, 4, kV32FlashMla4),
    v32(kFlashMla, 8, kV32FlashMla8),
    v32(kFlashInfer, 8, kV32FlashInfer8),
    glm(kFlashMla, 1, kGlmFlashMla1, {}),
    glm(kFlashMla, 2, kGlmFlashMla2, kGlmFlashMla2Context),
    glm(kFlashMla, 4, kGlmFlashMla4, kGlmFlashMla4Context),
    glm(kFlashMla, 8, kGlmFlashMla8, kGlmFlashMla8Context),
    glm(kFlashInfer, 4, kGlmFlashInfer4, kGlmFlashInfer4Context),
    glm(kFlashInfer, 8, kGlmFlashInfer8, kGlmFlashInfer8Context),
};

}  // namespace

std::span<const MaskedMhaTable> upstream_masked_tables() { return kUpstream; }

const MaskedMhaTable* find_masked_table(std::span<const MaskedMhaTable> tables,
                                        std::string_view backend, int tensor_parallel,
                                        int64_t num_heads_total, int64_t d_qk, int64_t d_v) {
  for (const MaskedMhaTable& table : tables) {
    if (table.backend == backend && table.tensor_parallel == tensor_parallel &&
        table.num_heads_total == num_heads_total && table.d_qk == d_qk && table.d_v == d_v) {
      return &table;
    }
  }
  return nullptr;
}

bool masked_mha_pays(const MaskedMhaTable& table, int64_t query_len, int64_t seq_len,
                     bool has_context) {
  for (const MaskedThreshold& entry : has_context ? table.with_context : table.pure_prefill) {
    if (seq_len <= entry.max_seq) {
      return query_len >= entry.min_query;
    }
  }
  return false;
}

}  // namespace lacuna
