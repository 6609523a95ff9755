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
  int64_t num_known() const { return num_tokens() - num_unknown; }
  // The next step computes the last token only, and the prompt is done.
  bool is_decoding() const {
    return num_computed >= num_prompt() && num_computed + 1 == num_tokens();
  }

  int64_t id;
  Request request;
  std::vector<int32_t> tokens;  // prompt, then generated
  // The last `num_unknown` tokens are drawn by steps that were launched and are not known yet: they
  // stand as -1, or as the token that is forced there.
  int64_t num_unknown = 0;
  int32_t drawn_row = -1;     // row of the newest launched step's draw that holds the last token
  int64_t num_in_flight = 0;  // steps launched and not known yet that have rows of this sequence
  bool ends = false;          // whatever its last token is, nothing comes after it
  int64_t num_computed = 0;   // leading tokens whose keys are cached, by launched steps too
  int64_t num_cached = 0;     // of the prompt, found in the prefix cache
  BlockTable blocks;
  TextStream text;
  RequestRecord record;
  bool cancelled = false;
  bool has_left = false;  // finished or cancelled; here until no step has rows of it
};

}  // namespace lacuna
