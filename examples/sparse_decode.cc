// Sparse MLA decode in one call: four new tokens attend to the rows that an indexer has chosen, out
// of a paged bf16 cache with DeepSeek-V3.2's widths.
#include <lacuna/lacuna.h>

#include <cstdio>
#include <random>
#include <vector>

using namespace lacuna;

struct alignas(64) CacheLine {
  char bytes[64];
};

int fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

int main() {
  constexpr int64_t kTokens = 4, kHeads = 16, kListed = 256, kBlocks = 32, kBlockSize = 64;
  const KvLayout layout = KvLayout::latent_bf16(512, 64);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto random_values = [&](int64_t count) {
    std::vector<Bf16> values(count);
    for (Bf16& value : values) {
      value = to_bf16(normal(random));
    }
    return values;
  };
  std::vector<Bf16> cache = random_values(kBlocks * kBlockSize * layout.d_qk());
  const std::vector<Bf16> q = random_values(kTokens * kHeads * layout.d_qk());
  std::vector<int32_t> rows(kTokens * kListed);
  for (int32_t& row : rows) {
    row = static_cast<int32_t>(random() % (kBlocks * kBlockSize));
  }
  std::vector<float> out(kTokens * kHeads * layout.latent);

  SparseMlaArgs args;
  args.q = view_of(q.data(), {kTokens, kHeads, layout.d_qk()});
  args.kv = paged_rows(cache.data(), layout, kBlocks, kBlockSize);
  args.indices = view_of(rows.data(), {kTokens, kListed});
  args.softmax_scale = 0.0417;  // 1 / sqrt(576)
  args.out = view_of(out.data(), {kTokens, kHeads, layout.latent});

  const Result<Context> context = Context::create();
  if (!context.ok()) {
    return fail(context.status());
  }
  const Result<int64_t> bytes = workspace_bytes(*context, args);
  if (!bytes.ok()) {
    return fail(bytes.status());
  }
  std::vector<CacheLine> workspace((*bytes + 63) / 64);
  const Status status = sparse_mla(*context, args, {nullptr, workspace.data(), *bytes});
  if (!status.ok()) {
    return fail(status);
  }
  std::printf("%s: out[0, 0, 0..2] = %.4f %.4f %.4f\n", explain(*context, args).kernel.c_str(),
              out[0], out[1], out[2]);
}
