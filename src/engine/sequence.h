// Sequence: a request in the engine's hands, with its tokens and its blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/text_stream.h"
#include "kvcache/block_table.h"
#include "lacuna/engine.h"

namespace lacuna {

struct Sequence {
  Sequence(int64_t id_in, Request request_in, const std::optional<Tokenizer>& tokenizer,
           BlockPool* pool, int64_t block_size)
      : id(id_in),
        request(std::move(request_in)),
        tokens(request.prompt),
        blocks(pool, block_size),
        text(tokenizer, request.sampling.stop, request.sampling.include_stop_in_text,
             request.sampling.skip_special_tokens) {}

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_prompt() const { return static_cast<int64_t>(request.prompt.size()); }
  int64_t num_generated() const { return num_tokens() - num_prompt(); }
  // The next step computes the last token only, and the prompt is done.
  bool is_decoding() const {
    return num_computed >= num_prompt() && num_computed + 1 == num_tokens();
  }

  int64_t id;
  Request request;
  std::vector<int32_t> tokens;  // prompt, then generated
  int64_t num_computed = 0;     // leading tokens whose keys are cached
  int64_t num_cached = 0;       // of the prompt, found in the prefix cache
  BlockTable blocks;
  TextStream text;
  RequestRecord record;
  bool cancelled = false;
};

}  // namespace lacuna
