// Regular expressions by PCRE2, compiled to machine code where it can.
#include "model/split_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <optional>

#include "core/check.h"
#include "model/utf8.h"

namespace lacuna {

struct SplitPatternState {
  pcre2_code* code = nullptr;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;

  SplitPatternState() = default;
  SplitPatternState(const SplitPatternState&) = delete;
  SplitPatternState& operator=(const SplitPatternState&) = delete;
  ~SplitPatternState() { pcre2_code_free(code); }
};

struct SplitScratchState {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* jit_stack = nullptr;  // made when the machine stack was too small once

  ~SplitScratchState() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(jit_stack);
  }
};

namespace {

constexpr size_t kPatternBytesMax = size_t{1} << 16;
// Steps of one match. Sensible patterns need a few for each character that they match.
constexpr uint32_t kMatchStepsMax = 10'000'000;
constexpr uint32_t kHeapKiBMax = 64 << 10;
constexpr size_t kJitStackMin = size_t{64} << 10;
constexpr size_t kJitStackMax = size_t{4} << 20;

// Oniguruma's \w and \s, spelled out because PCRE2's differ: \w has no marks, \s has U+180E.
constexpr std::string_view kWord = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}";
constexpr std::string_view kSpace = "\\p{White_Space}";
constexpr std::string_view kNoSpace = "\\P{White_Space}";

Status refuse(const std::string& what) { return unsupported(what + " is not supported"); }

// The same expression for PCRE2.
Result<std::string> translate(std::string_view regex) {
  std::string out;
  bool in_class = false;
  size_t class_begin = 0;
  for (size_t i = 0; i < regex.size(); ++i) {
    const char c = regex[i];
    if (c == '\\' && i + 1 < regex.size()) {
      const char escaped = regex[++i];
      switch (escaped) {
        case 's':
          out += kSpace;
          break;
        case 'S':
          out += kNoSpace;
          break;
        case 'w':
          out += in_class ? std::string(kWord) : "[" + std::string(kWord) + "]";
          break;
        case 'W':
          if (in_class) {
            return refuse("\\W within brackets");
          }
          out += "[^" + std::string(kWord) + "]";
          break;
        case 'h':  // a hexadecimal digit there, a space here
          out += in_class ? "0-9a-fA-F" : "[0-9a-fA-F]";
          break;
        case 'u':
          if (i + 4 >= regex.size()) {
            return refuse("\\u without four digits");
          }
          out += "\\x{" + std::string(regex.substr(i + 1, 4)) + "}";
          i += 4;
          break;
        case 'H':
        case 'C':
        case 'G':
        case 'K':
        case 'Q':
        case 'E':
        case 'N':
        case 'O':
        case 'R':
        case 'X':
        case 'y':
        case 'Y':
          return refuse(std::string("\\") + escaped);
        case 'p':
        case 'P': {
          const size_t close = regex.find('}', i);
          if (i + 1 >= regex.size() || regex[i + 1] != '{' || close == std::string_view::npos) {
            return refuse("\\p without braces");
          }
          out += "\\" + std::string(regex.substr(i, close + 1 - i));
          i = close;
          break;
        }
        default:
          out += {'\\', escaped};
      }
      continue;
    }
    if (in_class) {
      if (c == '[' && regex.substr(i, 2) != "[:") {
        return refuse("a bracket within brackets");
      }
      if (regex.substr(i, 2) == "&&") {
        return refuse("&& within brackets");
      }
      if (c == '[') {  // [:name:]
        const size_t close = regex.find(":]", i);
        if (close == std::string_view::npos) {
          return refuse("[: without :]");
        }
        out += regex.substr(i, close + 2 - i);
        i = close + 1;
        continue;
      }
      in_class = c != ']' || i == class_begin;
    } else if (c == '[') {
      in_class = true;
      class_begin = i + 1 + (regex.substr(i + 1, 1) == "^");
      if (class_begin > i + 1) {
        out += "[^";
        ++i;
        continue;
      }
    } else if (c == '}' && regex.substr(i, 2) == "}+") {
      return refuse("+ after {}");  // possessive here, a second repeat there
    } else if (regex.substr(i, 2) == "(*") {
      return refuse("(*");
    }
    out += c;
  }
  return out;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool plain = (c & 0x80) != 0 || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
                       (c >= 'A' && c <= 'Z') || static_cast<unsigned char>(c) < 0x20;
    if (!plain) {
      out += '\\';
    }
    out += c;
  }
  return out;
}

Result<std::shared_ptr<SplitPatternState>> build(const std::string& pattern, SplitBehavior behavior,
                                                 bool invert) {
  if (pattern.size() > kPatternBytesMax) {
    return refuse("an expression of more than 64 KiB");
  }
  auto state = std::make_shared<SplitPatternState>();
  state->behavior = behavior;
  state->invert = invert;
  int error = 0;
  PCRE2_SIZE at = 0;
  // Oniguruma's ^ and $ always match at line ends too.
  state->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C,
                              &error, &at, nullptr);
  if (state->code == nullptr) {
    PCRE2_UCHAR message[128] = {};
    (void)pcre2_get_error_message(error, message, sizeof(message));
    return unsupported("PCRE2 says: " + std::string(reinterpret_cast<const char*>(message)) +
                       " (at byte " + std::to_string(at) + ")");
  }
  // Without machine code (no such CPU, no executable memory) the interpreter runs.
  (void)pcre2_jit_compile(state->code, PCRE2_JIT_COMPLETE);
  return state;
}

struct Span {
  size_t begin;
  size_t end;
};

// The next match from `from` on; none at the end. `code` and `scratch` as PCRE2 wants them.
Result<std::optional<Span>> next_match(const pcre2_code* code, SplitScratchState* scratch,
                                       std::string_view text, size_t from) {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int count = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, scratch->match,
                          scratch->context);
  if (count == PCRE2_ERROR_JIT_STACKLIMIT && scratch->jit_stack == nullptr) {
    scratch->jit_stack = pcre2_jit_stack_create(kJitStackMin, kJitStackMax, nullptr);
    pcre2_jit_stack_assign(scratch->context, nullptr, scratch->jit_stack);
    count = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, scratch->match,
                        scratch->context);
  }
  if (count == PCRE2_ERROR_JIT_STACKLIMIT) {
    count = pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                        scratch->match, scratch->context);
  }
  if (count == PCRE2_ERROR_NOMATCH) {
    return std::optional<Span>();
  }
  if (count < 0) {
    PCRE2_UCHAR message[128] = {};
    (void)pcre2_get_error_message(count, message, sizeof(message));
    return invalid_argument("text: the tokenizer's regular expression gave up (" +
                            std::string(reinterpret_cast<const char*>(message)) + ")");
  }
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(scratch->match);
  return std::optional(Span{bounds[0], bounds[1]});
}

// A stretch of the text, matched or between matches.
struct Piece {
  size_t begin;
  size_t end;
  bool is_match;
};

void append_parts(std::string_view text, SplitBehavior behavior, const std::vector<Piece>& pieces,
                  std::vector<std::string_view>* parts) {
  std::vector<Span> spans;
  bool previous = false;
  switch (behavior) {
    case SplitBehavior::kIsolated:
    case SplitBehavior::kRemoved:
      for (const Piece& piece : pieces) {
        if (behavior == SplitBehavior::kIsolated || !piece.is_match) {
          spans.push_back({piece.begin, piece.end});
        }
      }
      break;
    case SplitBehavior::kContiguous:
      for (const Piece& piece : pieces) {
        if (!spans.empty() && piece.is_match == previous) {
          spans.back().end = piece.end;
        } else {
          spans.push_back({piece.begin, piece.end});
        }
        previous = piece.is_match;
      }
      break;
    case SplitBehavior::kMergedWithPrevious:
      for (const Piece& piece : pieces) {
        if (piece.is_match && !previous && !spans.empty()) {
          spans.back().end = piece.end;
        } else {
          spans.push_back({piece.begin, piece.end});
        }
        previous = piece.is_match;
      }
      break;
    case SplitBehavior::kMergedWithNext: {
      std::vector<Span> reversed;
      for (size_t i = pieces.size(); i-- > 0;) {
        if (pieces[i].is_match && !previous && !reversed.empty()) {
          reversed.back().begin = pieces[i].begin;
        } else {
          reversed.push_back({pieces[i].begin, pieces[i].end});
        }
        previous = pieces[i].is_match;
      }
      spans.assign(reversed.rbegin(), reversed.rend());
      break;
    }
  }
  for (const Span& span : spans) {
    if (span.begin < span.end) {
      parts->push_back(text.substr(span.begin, span.end - span.begin));
    }
  }
}

}  // namespace

SplitScratch::SplitScratch() : state_(std::make_unique<SplitScratchState>()) {
  LACUNA_CHECK(state_->match != nullptr && state_->context != nullptr);
  pcre2_set_match_limit(state_->context, kMatchStepsMax);
  pcre2_set_heap_limit(state_->context, kHeapKiBMax);
}
SplitScratch::~SplitScratch() = default;

Result<SplitPattern> SplitPattern::compile(std::string_view regex, SplitBehavior behavior,
                                           bool invert) {
  LACUNA_ASSIGN_OR_RETURN(const std::string pattern, translate(regex));
  LACUNA_ASSIGN_OR_RETURN(std::shared_ptr<SplitPatternState> state,
                          build(pattern, behavior, invert));
  return SplitPattern(std::move(state));
}

Result<SplitPattern> SplitPattern::compile_text(std::string_view text, SplitBehavior behavior,
                                                bool invert) {
  LACUNA_ASSIGN_OR_RETURN(std::shared_ptr<SplitPatternState> state,
                          build(escaped(text), behavior, invert));
  return SplitPattern(std::move(state));
}

Status SplitPattern::split(std::string_view text, SplitScratch* scratch,
                           std::vector<std::string_view>* parts) const {
  const SplitPatternState& state = *state_;
  const bool isolated = state.behavior == SplitBehavior::kIsolated;
  std::vector<Piece> pieces;
  // Isolated parts, by far the most common, need no second look.
  const auto add = [&](size_t begin, size_t end, bool is_match) {
    if (isolated) {
      if (begin < end) {
        parts->push_back(text.substr(begin, end - begin));
      }
    } else {
      pieces.push_back({begin, end, is_match != state.invert});
    }
  };
  size_t done = 0;
  for (size_t from = 0; from <= text.size();) {
    LACUNA_ASSIGN_OR_RETURN(const std::optional<Span> match,
                            next_match(state.code, scratch->state_.get(), text, from));
    if (!match.has_value()) {
      break;
    }
    if (match->end < match->begin || match->begin < done) {
      break;  // \K in a lookaround can do this; it is refused, but the end must come anyway
    }
    if (match->begin == match->end && match->begin == done && from > 0 && done == from) {
      // An empty match right after the last one counts for nothing.
      if (from == text.size()) {
        break;
      }
      from += utf8_step(text, from).length;
      continue;
    }
    if (done < match->begin) {
      add(done, match->begin, false);
    }
    add(match->begin, match->end, true);
    done = match->end;
    from = match->end;
    if (match->begin == match->end) {
      if (from == text.size()) {
        break;
      }
      from += utf8_step(text, from).length;
    }
  }
  if (done < text.size()) {
    add(done, text.size(), false);
  }
  if (!isolated) {
    append_parts(text, state.behavior, pieces, parts);
  }
  return ok_status();
}

}  // namespace lacuna
