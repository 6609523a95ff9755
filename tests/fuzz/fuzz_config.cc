// Any bytes as config.json: a one-line error, or numbers on which the formulas work.
#include <cmath>
#include <cstdint>
#include <string_view>

#include "core/check.h"
#include "model/config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const lacuna::Result<lacuna::ModelConfig> config =
      lacuna::parse_config(std::string_view(reinterpret_cast<const char*>(data), size));
  if (!config.ok()) {
    LACUNA_CHECK(config.status().message().find('\n') == std::string::npos);
    return 0;
  }
  LACUNA_CHECK(std::isfinite(lacuna::attention_scale(*config)));
  LACUNA_CHECK(lacuna::attention_scale(*config) > 0);
  for (const double frequency : lacuna::rope_frequencies(*config)) {
    LACUNA_CHECK(frequency > 0 && frequency <= 1);
  }
  const auto layers = static_cast<size_t>(config->num_hidden_layers);
  LACUNA_CHECK(config->layer_is_moe.size() == layers);
  LACUNA_CHECK(config->layer_has_indexer.size() == layers);
  LACUNA_CHECK(config->layer_has_indexer.front());
  LACUNA_CHECK(config->n_routed_experts % config->n_group == 0);
  for (const int32_t id : config->eos_token_ids) {
    LACUNA_CHECK(id >= 0 && id < config->vocab_size);
  }
  return 0;
}
