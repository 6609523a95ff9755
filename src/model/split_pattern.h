// Cuts text along matches of a regular expression, as the Split steps of tokenizer.json ask for.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/status.h"

namespace lacuna {

// What becomes of a match: Hugging Face's names.
enum class SplitBehavior : uint8_t {
  kIsolated,            // a part of its own
  kRemoved,             // left out
  kMergedWithPrevious,  // the end of the part before it
  kMergedWithNext,      // the beginning of the part after it
  kContiguous,          // neighbouring matches are one part
};

struct SplitPatternState;  // split_pattern.cc
struct SplitScratchState;

// Memory of a match in progress: one per thread at a time, for any pattern.
class SplitScratch {
 public:
  SplitScratch();
  SplitScratch(const SplitScratch&) = delete;
  SplitScratch& operator=(const SplitScratch&) = delete;
  ~SplitScratch();

 private:
  friend class SplitPattern;
  std::unique_ptr<SplitScratchState> state_;
};

// Immutable, cheap to copy, safe to share between threads.
class SplitPattern {
 public:
  // `regex` is written for Oniguruma, which Hugging Face tokenizers uses; where its syntax means
  // something else to PCRE2 it is translated or refused. `invert`: what lies between matches is
  // treated as the match, and the other way round.
  static Result<SplitPattern> compile(std::string_view regex, SplitBehavior behavior, bool invert);
  // Matches the text itself.
  static Result<SplitPattern> compile_text(std::string_view text, SplitBehavior behavior,
                                           bool invert);

  // Appends the parts of `text`, none of them empty, in order. `text` must be UTF-8. Fails when a
  // match takes more steps than any sensible pattern needs.
  Status split(std::string_view text, SplitScratch* scratch,
               std::vector<std::string_view>* parts) const;

 private:
  explicit SplitPattern(std::shared_ptr<const SplitPatternState> state)
      : state_(std::move(state)) {}
  std::shared_ptr<const SplitPatternState> state_;
};

}  // namespace lacuna
