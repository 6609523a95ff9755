// Byte-level BPE. encode(): added tokens are cut out of the text, the pieces between are split by
// the pre-tokenizer, and in each split the pair of neighbours whose merge has the lowest rank is
// joined until no merge applies.
#include "model/tokenizer.h"

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <queue>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/file_map.h"
#include "model/json.h"
#include "model/model_dir.h"
#include "model/split_pattern.h"
#include "model/unicode_number.h"
#include "model/utf8.h"

namespace lacuna {
namespace {

constexpr int64_t kTokenizerBytesMax = int64_t{256} << 20;
// Known vocabularies end below 2^18. The tables are as long as the largest id.
constexpr int64_t kIdMax = (int64_t{1} << 21) - 1;
constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// The byte-level alphabet: every byte has a printable character. Printable Latin-1 bytes stand for
// themselves, the others for U+0100 and up in order (GPT-2's table, which all such files use).
constexpr std::array<char32_t, 256> make_byte_alphabet() {
  std::array<char32_t, 256> alphabet = {};
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    alphabet[byte] = printable ? static_cast<char32_t>(byte) : next++;
  }
  return alphabet;
}
constexpr std::array<char32_t, 256> kByteAlphabet = make_byte_alphabet();

// The inverse; -1 for characters outside the alphabet, which ends at U+0143.
constexpr std::array<int16_t, 0x144> make_alphabet_bytes() {
  std::array<int16_t, 0x144> bytes = {};
  for (int16_t& byte : bytes) {
    byte = -1;
  }
  for (int byte = 0; byte < 256; ++byte) {
    bytes[kByteAlphabet[byte]] = static_cast<int16_t>(byte);
  }
  return bytes;
}
constexpr std::array<int16_t, 0x144> kAlphabetBytes = make_alphabet_bytes();

// The bytes that a vocabulary entry stands for. An entry with a character outside the alphabet is
// a special token that stands in the vocabulary literally.
std::string entry_bytes(std::string_view entry) {
  std::string bytes;
  for (size_t at = 0; at < entry.size();) {
    const Utf8Step step = utf8_step(entry, at);
    if (step.kind != Utf8Step::Kind::kCharacter || step.code_point >= kAlphabetBytes.size() ||
        kAlphabetBytes[step.code_point] < 0) {
      return std::string(entry);
    }
    bytes += static_cast<char>(kAlphabetBytes[step.code_point]);
    at += step.length;
  }
  return bytes;
}

// Appends complete characters of `bytes`, U+FFFD for broken ones; returns where an unfinished
// character begins, or bytes.size().
size_t append_complete(std::string_view bytes, std::string* out) {
  size_t at = 0;
  while (at < bytes.size()) {
    const Utf8Step step = utf8_step(bytes, at);
    if (step.kind == Utf8Step::Kind::kIncomplete) {
      return at;
    }
    *out += step.kind == Utf8Step::Kind::kCharacter ? bytes.substr(at, step.length) : kReplacement;
    at += step.length;
  }
  return at;
}

// \p{N}, Isolated: each number a part. By hand because it knows newer numbers than PCRE2 does.
void split_isolated_numbers(std::string_view text, std::vector<std::string_view>* parts) {
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    if (is_unicode_number(step.code_point)) {
      if (begin < at) {
        parts->push_back(text.substr(begin, at - begin));
      }
      parts->push_back(text.substr(at, step.length));
      begin = at + step.length;
    }
    at += step.length;
  }
  if (begin < text.size()) {
    parts->push_back(text.substr(begin));
  }
}

constexpr std::string_view kNumberRegex = "\\p{N}";
// What ByteLevel splits by itself (GPT-2's expression).
constexpr const char* kByteLevelRegex =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// One step of the pre-tokenizer.
struct SplitStep {
  enum class Kind : uint8_t { kPattern, kNumbers, kPrefixSpace };
  Kind kind = Kind::kPattern;
  std::optional<SplitPattern> pattern;
};

// Finds the longest added token at a place of the text: a trie over bytes.
class AddedTokenTrie {
 public:
  void insert(std::string_view content, int32_t id) {
    uint32_t node = 0;
    starts_[static_cast<unsigned char>(content.front())] = true;
    for (const char c : content) {
      const auto [edge, inserted] =
          edges_.emplace(edge_key(node, c), static_cast<uint32_t>(ids_.size()));
      node = edge->second;
      if (inserted) {
        ids_.push_back(-1);
      }
    }
    ids_[node] = id;
  }

  bool empty() const { return ids_.size() == 1; }

  struct Match {
    int32_t id = -1;
    size_t length = 0;
  };
  Match longest(std::string_view text, size_t at) const {
    Match match;
    if (!starts_[static_cast<unsigned char>(text[at])]) {
      return match;
    }
    uint32_t node = 0;
    for (size_t i = at; i < text.size(); ++i) {
      const auto edge = edges_.find(edge_key(node, text[i]));
      if (edge == edges_.end()) {
        break;
      }
      node = edge->second;
      if (ids_[node] >= 0) {
        match = {ids_[node], i + 1 - at};
      }
    }
    return match;
  }

 private:
  static uint64_t edge_key(uint32_t node, char c) {
    return uint64_t{node} << 8 | static_cast<unsigned char>(c);
  }

  std::array<bool, 256> starts_ = {};
  std::unordered_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> ids_ = {-1};  // per node; -1: no token ends here
};

struct Merge {
  int32_t rank;
  int32_t id;  // of the joined token
};

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

// Pairs of tokens to merges: open addressing, at most half full.
class MergeTable {
 public:
  void reserve(size_t count) {
    size_t size = 16;
    while (size < 2 * count) {
      size *= 2;
    }
    slots_.assign(size, {});
    shift_ = 64 - static_cast<int>(__builtin_ctzll(size));
  }
  bool empty() const { return count_ == 0; }
  // Of a pair that is set twice the later merge counts. At most as many as were reserved.
  void set(uint64_t pair, Merge merge) {
    Slot& slot = slots_[place(pair)];
    count_ += slot.pair == kNoPair;
    slot = {pair, merge};
  }
  const Merge* find(uint64_t pair) const {
    const Slot& slot = slots_[place(pair)];
    return slot.pair == pair ? &slot.merge : nullptr;
  }

 private:
  static constexpr uint64_t kNoPair = ~uint64_t{0};  // ids are not negative
  struct Slot {
    uint64_t pair = kNoPair;
    Merge merge = {};
  };
  size_t place(uint64_t pair) const {
    size_t at = static_cast<size_t>((pair * 0x9E3779B97F4A7C15u) >> shift_);
    while (slots_[at].pair != pair && slots_[at].pair != kNoPair) {
      at = (at + 1) & (slots_.size() - 1);
    }
    return at;
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);
  int shift_ = 60;
  size_t count_ = 0;
};

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

// Words that were encoded lately. Shared by all threads, so it is cut into parts with a lock each;
// a part that is full starts anew.
class WordCache {
 public:
  static constexpr size_t kWordBytesMax = 64;

  bool find(std::string_view word, std::vector<int32_t>* out) {
    Part& part = part_of(word);
    const std::lock_guard lock(part.mutex);
    const auto at = part.words.find(word);
    if (at == part.words.end()) {
      return false;
    }
    out->insert(out->end(), at->second.begin(), at->second.end());
    return true;
  }
  void add(std::string_view word, const int32_t* begin, const int32_t* end) {
    Part& part = part_of(word);
    const std::lock_guard lock(part.mutex);
    if (part.words.size() >= kPartWordsMax) {
      part.words.clear();
    }
    part.words.emplace(std::string(word), std::vector<int32_t>(begin, end));
  }

 private:
  static constexpr size_t kPartWordsMax = 2048;
  struct Part {
    std::mutex mutex;
    std::unordered_map<std::string, std::vector<int32_t>, TextHash, std::equal_to<>> words;
  };
  Part& part_of(std::string_view word) {
    return parts_[TextHash()(word) >> 7 & (parts_.size() - 1)];
  }
  std::array<Part, 32> parts_;
};

// Where a token's bytes lie in TokenizerState::pool.
struct Token {
  uint32_t offset = 0;
  uint32_t length = 0;
  bool exists = false;
  bool special = false;
  // Of an added token: it counts only between characters that are no word's; white space before or
  // after it belongs to it.
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
};

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

size_t character_before(std::string_view text, size_t at) {
  do {
    --at;
  } while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

}  // namespace

struct TokenizerState {
  std::string pool;
  std::vector<Token> tokens;  // by id
  std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>> ids;
  // Only when whole words may skip merges.
  std::unordered_map<std::string, int32_t, TextHash, std::equal_to<>> ids_by_bytes;
  std::array<int32_t, 256> byte_ids = {};  // -1: the byte has no token
  MergeTable merges;
  std::vector<SplitStep> splits;
  std::vector<int32_t> ids_before;  // what the post-processor adds to a text
  std::vector<int32_t> ids_after;
  std::optional<SplitPattern> word_character;  // only when a token is a single_word
  mutable WordCache cache;
  // Two passes, as the file's `normalized` flag asks: tokens of the second are looked for only in
  // what the first leaves.
  std::array<AddedTokenTrie, 2> added;

  template <class Where>
  Status add_token(int64_t id, std::string_view bytes, const Where& where);
  Status encode_piece(std::string_view piece, SplitScratch* scratch,
                      std::vector<int32_t>* out) const;
  Status encode_word(std::string_view word, std::vector<int32_t>* out) const;
  Status merge_word(std::string_view word, std::vector<int32_t>* out) const;
  void merge_short(size_t first, std::vector<int32_t>* out) const;
  Status encode_pass(size_t pass, std::string_view text, SplitScratch* scratch,
                     std::vector<int32_t>* out) const;
  Result<bool> is_word_character(std::string_view text, size_t at, SplitScratch* scratch) const;
};

template <class Where>
Status TokenizerState::add_token(int64_t id, std::string_view bytes, const Where& where) {
  if (static_cast<size_t>(id) >= tokens.size()) {
    tokens.resize(static_cast<size_t>(id) + 1);
  }
  Token& token = tokens[static_cast<size_t>(id)];
  if (token.exists) {
    return data_loss(where() + ": id " + std::to_string(id) + " belongs to another token already");
  }
  token.offset = static_cast<uint32_t>(pool.size());
  token.length = static_cast<uint32_t>(bytes.size());
  token.exists = true;
  pool += bytes;
  return ok_status();
}

Result<bool> TokenizerState::is_word_character(std::string_view text, size_t at,
                                               SplitScratch* scratch) const {
  std::vector<std::string_view> parts;
  LACUNA_RETURN_IF_ERROR(
      word_character->split(text.substr(at, utf8_step(text, at).length), scratch, &parts));
  return parts.empty();  // what matches is removed
}

Status TokenizerState::encode_pass(size_t pass, std::string_view text, SplitScratch* scratch,
                                   std::vector<int32_t>* out) const {
  while (pass < added.size() && added[pass].empty()) {
    ++pass;
  }
  if (pass == added.size()) {
    return encode_piece(text, scratch, out);
  }
  size_t begin = 0;
  for (size_t at = 0; at < text.size();) {
    const AddedTokenTrie::Match match = added[pass].longest(text, at);
    if (match.id < 0) {
      ++at;
      continue;
    }
    const Token& token = tokens[static_cast<size_t>(match.id)];
    size_t from = at;
    size_t to = at + match.length;
    if (token.single_word) {
      bool within_word = false;
      if (from > 0) {
        LACUNA_ASSIGN_OR_RETURN(within_word,
                                is_word_character(text, character_before(text, from), scratch));
      }
      if (!within_word && to < text.size()) {
        LACUNA_ASSIGN_OR_RETURN(within_word, is_word_character(text, to, scratch));
      }
      if (within_word) {
        at = to;
        continue;
      }
    }
    while (token.lstrip && from > begin) {
      const size_t before = character_before(text, from);
      if (!is_white_space(utf8_step(text, before).code_point)) {
        break;
      }
      from = before;
    }
    while (token.rstrip && to < text.size()) {
      const Utf8Step step = utf8_step(text, to);
      if (!is_white_space(step.code_point)) {
        break;
      }
      to += step.length;
    }
    if (begin < from) {
      LACUNA_RETURN_IF_ERROR(encode_pass(pass + 1, text.substr(begin, from - begin), scratch, out));
    }
    out->push_back(match.id);
    at = to;
    begin = to;
  }
  return begin < text.size() ? encode_pass(pass + 1, text.substr(begin), scratch, out)
                             : ok_status();
}

Status TokenizerState::encode_piece(std::string_view piece, SplitScratch* scratch,
                                    std::vector<int32_t>* out) const {
  std::vector<std::string_view> parts = {piece};
  std::deque<std::string> prefixed;
  for (const SplitStep& step : splits) {
    std::vector<std::string_view> finer;
    finer.reserve(parts.size() + 16);
    for (const std::string_view part : parts) {
      switch (step.kind) {
        case SplitStep::Kind::kNumbers:
          split_isolated_numbers(part, &finer);
          break;
        case SplitStep::Kind::kPattern:
          LACUNA_RETURN_IF_ERROR(step.pattern->split(part, scratch, &finer));
          break;
        case SplitStep::Kind::kPrefixSpace:
          finer.push_back(part.starts_with(' ') ? part
                                                : prefixed.emplace_back(" " + std::string(part)));
          break;
      }
    }
    parts = std::move(finer);
  }
  for (const std::string_view part : parts) {
    LACUNA_RETURN_IF_ERROR(encode_word(part, out));
  }
  return ok_status();
}

Status TokenizerState::encode_word(std::string_view word, std::vector<int32_t>* out) const {
  if (!ids_by_bytes.empty()) {
    const auto whole = ids_by_bytes.find(word);
    if (whole != ids_by_bytes.end()) {
      out->push_back(whole->second);
      return ok_status();
    }
  }
  if (word.size() > WordCache::kWordBytesMax || word.size() < 2) {
    return merge_word(word, out);
  }
  if (cache.find(word, out)) {
    return ok_status();
  }
  const size_t first = out->size();
  LACUNA_RETURN_IF_ERROR(merge_word(word, out));
  cache.add(word, out->data() + first, out->data() + out->size());
  return ok_status();
}

// A few symbols are merged fastest by looking at all of them each time.
void TokenizerState::merge_short(size_t first, std::vector<int32_t>* out) const {
  std::array<Merge, WordCache::kWordBytesMax> next;  // of symbol i and i + 1
  constexpr Merge kNone = {INT32_MAX, -1};
  int32_t* ids = out->data() + first;
  size_t count = out->size() - first;
  const auto lookup = [&](size_t i) {
    const Merge* merge = merges.find(pair_key(ids[i], ids[i + 1]));
    return merge == nullptr ? kNone : *merge;
  };
  for (size_t i = 0; i + 1 < count; ++i) {
    next[i] = lookup(i);
  }
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; ++i) {
      best = next[i].rank < next[best].rank ? i : best;
    }
    if (next[best].id < 0) {
      break;
    }
    ids[best] = next[best].id;
    --count;
    for (size_t i = best + 1; i < count; ++i) {
      ids[i] = ids[i + 1];
      next[i - 1] = next[i];
    }
    if (best + 1 < count) {
      next[best] = lookup(best);
    }
    if (best > 0) {
      next[best - 1] = lookup(best - 1);
    }
  }
  out->resize(first + count);
}

Status TokenizerState::merge_word(std::string_view word, std::vector<int32_t>* out) const {
  const size_t first = out->size();
  for (const char c : word) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte_ids[byte] < 0) {
      return unsupported("text: byte " + std::to_string(byte) + " has no token in tokenizer.json");
    }
    out->push_back(byte_ids[byte]);
  }
  if (merges.empty()) {
    return ok_status();
  }
  if (word.size() <= WordCache::kWordBytesMax) {
    merge_short(first, out);
    return ok_status();
  }

  // A doubly linked list of tokens in an array; a token that was joined to its left neighbour has
  // id -1. The queue holds candidate merges, of which those that no longer fit are skipped.
  struct Symbol {
    int32_t id;
    int32_t previous;
    int32_t next;
  };
  const int32_t count = static_cast<int32_t>(out->size() - first);
  std::vector<Symbol> symbols(static_cast<size_t>(count));
  for (int32_t i = 0; i < count; ++i) {
    symbols[i] = {(*out)[first + i], i - 1, i + 1 < count ? i + 1 : -1};
  }
  struct Candidate {
    int32_t rank;
    int32_t at;  // the left symbol
    int32_t id;
    uint64_t pair;
  };
  // Lowest rank first, then leftmost.
  const auto later = [](const Candidate& a, const Candidate& b) {
    return std::pair(a.rank, a.at) > std::pair(b.rank, b.at);
  };
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> queue(later);
  const auto offer = [&](int32_t at) {
    if (at < 0 || symbols[at].next < 0) {
      return;
    }
    const uint64_t pair = pair_key(symbols[at].id, symbols[symbols[at].next].id);
    if (const Merge* merge = merges.find(pair)) {
      queue.push({merge->rank, at, merge->id, pair});
    }
  };
  for (int32_t i = 0; i + 1 < count; ++i) {
    offer(i);
  }
  while (!queue.empty()) {
    const Candidate best = queue.top();
    queue.pop();
    Symbol& left = symbols[best.at];
    if (left.id < 0 || left.next < 0 || pair_key(left.id, symbols[left.next].id) != best.pair) {
      continue;
    }
    Symbol& right = symbols[left.next];
    left.id = best.id;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) {
      symbols[left.next].previous = best.at;
    }
    offer(left.previous);
    offer(best.at);
  }
  out->resize(first);
  for (int32_t at = 0; at >= 0; at = symbols[at].next) {
    out->push_back(symbols[at].id);
  }
  return ok_status();
}

namespace {

constexpr const char* kWhere = "tokenizer.json: ";

Status refusal(const std::string& field, const std::string& found, const std::string& supported) {
  return unsupported(kWhere + field + " " + found +
                     " is not supported yet; supported: " + supported);
}

Status malformed(const std::string& field, const std::string& message) {
  return data_loss(kWhere + field + ": " + message);
}

std::string type_of(const Json& object) {
  const Json* type = find_member(object, "type");
  return type == nullptr ? describe(object) + " without a type" : describe(*type);
}

bool has_type(const Json& object, const char* type) {
  const Json* member = find_member(object, "type");
  return member != nullptr && *member == type;
}

// Reads a flag; a value that is neither absent nor a boolean counts as set, which the callers
// refuse or treat as the demanding case.
bool flag(const Json& object, const char* name, bool fallback) {
  const Json* member = find_member(object, name);
  return member == nullptr ? fallback : *member != false;
}

bool is_empty_text(const Json* value) { return value == nullptr || *value == ""; }

// `field` is a text, or a function that makes one when it is needed.
template <class Field>
Result<int64_t> read_id(const Json& value, const Field& field) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(kIdMax)) {
    const std::string problem =
        describe(value) + ", expected an id in 0.." + std::to_string(kIdMax);
    if constexpr (std::is_invocable_v<Field>) {
      return malformed(field(), problem);
    } else {
      return malformed(field, problem);
    }
  }
  return static_cast<int64_t>(value.get<uint64_t>());
}

Status read_normalizer(const Json& root) {
  const Json* normalizer = find_member(root, "normalizer");
  if (normalizer == nullptr) {
    return ok_status();
  }
  if (has_type(*normalizer, "Sequence")) {
    const Json* parts = find_member(*normalizer, "normalizers");
    if (parts != nullptr && parts->is_array() && parts->empty()) {
      return ok_status();
    }
  }
  return refusal("normalizer", type_of(*normalizer), "null");
}

Result<SplitBehavior> read_behavior(const Json& split) {
  static constexpr std::pair<const char*, SplitBehavior> kNames[] = {
      {"Isolated", SplitBehavior::kIsolated},
      {"Removed", SplitBehavior::kRemoved},
      {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
      {"MergedWithNext", SplitBehavior::kMergedWithNext},
      {"Contiguous", SplitBehavior::kContiguous}};
  const Json* behavior = find_member(split, "behavior");
  for (const auto& [name, value] : kNames) {
    if (behavior != nullptr && *behavior == name) {
      return value;
    }
  }
  return refusal("pre_tokenizer Split behavior",
                 behavior == nullptr ? "(none)" : describe(*behavior),
                 "Isolated, Removed, MergedWithPrevious, MergedWithNext, Contiguous");
}

Status add_pattern(Result<SplitPattern> pattern, const std::string& shown, TokenizerState* state) {
  if (!pattern.ok()) {
    return unsupported(kWhere + ("pre_tokenizer regex " + shown) + ": " +
                       pattern.status().message());
  }
  state->splits.push_back({SplitStep::Kind::kPattern, std::move(pattern).value()});
  return ok_status();
}

Status read_split(const Json& split, TokenizerState* state) {
  LACUNA_ASSIGN_OR_RETURN(const SplitBehavior behavior, read_behavior(split));
  const bool invert = flag(split, "invert", false);
  const Json* pattern = find_member(split, "pattern");
  const Json* regex = pattern == nullptr ? nullptr : find_member(*pattern, "Regex");
  const Json* text = pattern == nullptr ? nullptr : find_member(*pattern, "String");
  if (regex != nullptr && regex->is_string()) {
    const std::string& source = regex->get_ref<const std::string&>();
    if (source == kNumberRegex && behavior == SplitBehavior::kIsolated && !invert) {
      state->splits.push_back({SplitStep::Kind::kNumbers, std::nullopt});
      return ok_status();
    }
    return add_pattern(SplitPattern::compile(source, behavior, invert), describe(*regex), state);
  }
  if (text != nullptr && text->is_string() && !text->get_ref<const std::string&>().empty()) {
    return add_pattern(
        SplitPattern::compile_text(text->get_ref<const std::string&>(), behavior, invert),
        describe(*text), state);
  }
  return refusal("pre_tokenizer Split pattern", pattern == nullptr ? "(none)" : describe(*pattern),
                 "{\"Regex\": \"...\"}, {\"String\": \"...\"}");
}

Status read_pre_tokenizer(const Json& root, TokenizerState* state) {
  constexpr const char* kSupported =
      "ByteLevel, alone or last in a Sequence after Split and Digits";
  const Json* pre_tokenizer = find_member(root, "pre_tokenizer");
  if (pre_tokenizer == nullptr) {
    return refusal("pre_tokenizer", "null", kSupported);
  }
  std::vector<const Json*> steps = {pre_tokenizer};
  if (has_type(*pre_tokenizer, "Sequence")) {
    const Json* parts = find_member(*pre_tokenizer, "pretokenizers");
    if (parts == nullptr || !parts->is_array() || parts->empty()) {
      return malformed("pre_tokenizer", "a Sequence without pretokenizers");
    }
    steps.clear();
    for (const Json& part : *parts) {
      steps.push_back(&part);
    }
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    const Json& step = *steps[i];
    const bool last = i + 1 == steps.size();
    if (has_type(step, "Split") && !last) {
      LACUNA_RETURN_IF_ERROR(read_split(step, state));
    } else if (has_type(step, "Digits") && !last) {
      const bool individual = flag(step, "individual_digits", false);
      LACUNA_RETURN_IF_ERROR(add_pattern(
          SplitPattern::compile(kNumberRegex,
                                individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous,
                                /*invert=*/false),
          std::string(kNumberRegex), state));
    } else if (has_type(step, "ByteLevel") && last) {
      if (flag(step, "add_prefix_space", true)) {
        state->splits.push_back({SplitStep::Kind::kPrefixSpace, std::nullopt});
      }
      if (flag(step, "use_regex", true)) {
        LACUNA_RETURN_IF_ERROR(add_pattern(
            SplitPattern::compile(kByteLevelRegex, SplitBehavior::kIsolated, /*invert=*/false),
            kByteLevelRegex, state));
      }
    } else {
      return refusal("pre_tokenizer", type_of(step) + (last ? " at the end" : " before the end"),
                     kSupported);
    }
  }
  return ok_status();
}

Status read_template(const Json& post, TokenizerState* state) {
  const Json* single = find_member(post, "single");
  const Json* special = find_member(post, "special_tokens");
  if (single == nullptr || !single->is_array()) {
    return malformed("post_processor.single", "missing, expected a list");
  }
  bool seen_text = false;
  for (const Json& item : *single) {
    if (find_member(item, "Sequence") != nullptr) {
      if (seen_text) {
        return malformed("post_processor.single", "two Sequences");
      }
      seen_text = true;
      continue;
    }
    const Json* token = find_member(item, "SpecialToken");
    const Json* name = token == nullptr ? nullptr : find_member(*token, "id");
    const Json* entry = name == nullptr || special == nullptr || !name->is_string()
                            ? nullptr
                            : find_member(*special, name->get_ref<const std::string&>());
    const Json* ids = entry == nullptr ? nullptr : find_member(*entry, "ids");
    if (ids == nullptr || !ids->is_array()) {
      return malformed("post_processor.single", "a SpecialToken that special_tokens does not list");
    }
    for (const Json& id_json : *ids) {
      LACUNA_ASSIGN_OR_RETURN(const int64_t id, read_id(id_json, "post_processor.special_tokens"));
      (seen_text ? state->ids_after : state->ids_before).push_back(static_cast<int32_t>(id));
    }
  }
  return ok_status();
}

Status read_post_processor(const Json& post, TokenizerState* state) {
  // ByteLevel only trims offsets, which do not exist here.
  if (has_type(post, "ByteLevel")) {
    return ok_status();
  }
  if (has_type(post, "TemplateProcessing")) {
    return read_template(post, state);
  }
  return refusal("post_processor", type_of(post), "null, ByteLevel, TemplateProcessing");
}

Status read_decoder(const Json& root, TokenizerState* state) {
  const Json* decoder = find_member(root, "decoder");
  if (decoder == nullptr || !has_type(*decoder, "ByteLevel")) {
    return refusal("decoder", decoder == nullptr ? "null" : type_of(*decoder), "ByteLevel");
  }
  const Json* post = find_member(root, "post_processor");
  if (post == nullptr) {
    return ok_status();
  }
  const Json* parts = has_type(*post, "Sequence") ? find_member(*post, "processors") : nullptr;
  if (parts == nullptr || !parts->is_array()) {
    return read_post_processor(*post, state);
  }
  for (const Json& part : *parts) {
    LACUNA_RETURN_IF_ERROR(read_post_processor(part, state));
  }
  return ok_status();
}

Status read_merge(const Json& merge, int32_t rank, TokenizerState* state, std::string* joined) {
  const auto field = [rank] { return "model.merges[" + std::to_string(rank) + "]"; };
  std::string_view left;
  std::string_view right;
  if (merge.is_string()) {
    const std::string_view text = merge.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string_view::npos) {
      left = text.substr(0, space);
      right = text.substr(space + 1);
    }
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    left = merge[0].get_ref<const std::string&>();
    right = merge[1].get_ref<const std::string&>();
  }
  if (left.empty() || right.empty()) {
    return malformed(field(),
                     describe(merge) + ", expected two tokens (\"a b\" or [\"a\", \"b\"])");
  }
  joined->assign(left).append(right);
  std::array<int32_t, 3> ids = {};  // left, right, joined
  const std::array<std::string_view, 3> texts = {left, right, *joined};
  for (size_t i = 0; i < texts.size(); ++i) {
    const auto at = state->ids.find(texts[i]);
    if (at == state->ids.end()) {
      return malformed(field(), "token " + quote_text(texts[i]) + " is not in model.vocab");
    }
    ids[i] = at->second;
  }
  state->merges.set(pair_key(ids[0], ids[1]), Merge{rank, ids[2]});
  return ok_status();
}

Status read_model(const Json& root, TokenizerState* state) {
  const Json* model = find_member(root, "model");
  if (model == nullptr || !model->is_object()) {
    return malformed("model", model == nullptr ? "missing" : describe(*model));
  }
  if (find_member(*model, "type") != nullptr && !has_type(*model, "BPE")) {
    return refusal("model type", type_of(*model), "BPE");
  }
  if (flag(*model, "byte_fallback", false)) {
    return refusal("model byte_fallback", "true", "false");
  }
  if (const Json* dropout = find_member(*model, "dropout");
      dropout != nullptr && *dropout != 0 && *dropout != 0.0) {
    return refusal("model dropout", describe(*dropout), "null");
  }
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (const Json* affix = find_member(*model, name); !is_empty_text(affix)) {
      return refusal(std::string("model ") + name, describe(*affix), "null");
    }
  }

  const Json* vocab = find_member(*model, "vocab");
  if (vocab == nullptr || !vocab->is_object() || vocab->empty()) {
    return malformed("model.vocab", (vocab == nullptr ? "missing" : describe(*vocab)) +
                                        std::string(", expected an object from tokens to ids"));
  }
  const bool whole_words = flag(*model, "ignore_merges", false);
  state->ids.reserve(vocab->size() + vocab->size() / 8);
  state->tokens.reserve(vocab->size() + vocab->size() / 8);
  for (const auto& [entry, id_json] : vocab->get_ref<const Json::object_t&>()) {
    const auto field = [&name = entry] { return "model.vocab[" + quote_text(name) + "]"; };
    LACUNA_ASSIGN_OR_RETURN(const int64_t id, read_id(id_json, field));
    const std::string bytes = entry_bytes(entry);
    LACUNA_RETURN_IF_ERROR(state->add_token(id, bytes, [&] { return kWhere + field(); }));
    state->ids.emplace(entry, static_cast<int32_t>(id));
    if (whole_words) {
      state->ids_by_bytes.emplace(bytes, static_cast<int32_t>(id));
    }
  }
  int num_missing = 0;
  for (int byte = 0; byte < 256; ++byte) {
    std::string entry;
    append_utf8(kByteAlphabet[byte], &entry);
    const auto at = state->ids.find(entry);
    state->byte_ids[byte] = at == state->ids.end() ? -1 : at->second;
    num_missing += at == state->ids.end();
  }
  // With a token for every byte nothing is unknown; otherwise encode() says which byte is.
  if (const Json* unknown = find_member(*model, "unk_token");
      unknown != nullptr && num_missing > 0) {
    return refusal("model unk_token", describe(*unknown), "null, or a vocabulary of all 256 bytes");
  }

  const Json* merges = find_member(*model, "merges");
  if (merges == nullptr || !merges->is_array()) {
    return malformed("model.merges", (merges == nullptr ? "missing" : describe(*merges)) +
                                         std::string(", expected a list"));
  }
  state->merges.reserve(merges->size());
  std::string joined;
  for (size_t i = 0; i < merges->size(); ++i) {
    LACUNA_RETURN_IF_ERROR(read_merge((*merges)[i], static_cast<int32_t>(i), state, &joined));
  }
  return ok_status();
}

Status read_added_tokens(const Json& root, TokenizerState* state) {
  const Json* list = find_member(root, "added_tokens");
  if (list == nullptr) {
    return ok_status();
  }
  if (!list->is_array()) {
    return malformed("added_tokens", describe(*list) + ", expected a list");
  }
  for (size_t i = 0; i < list->size(); ++i) {
    const Json& added = (*list)[i];
    const std::string field = "added_tokens[" + std::to_string(i) + "]";
    const Json* content = find_member(added, "content");
    const Json* id_json = find_member(added, "id");
    if (content == nullptr || !content->is_string() || id_json == nullptr) {
      return malformed(field, "expected an object with id and content");
    }
    const std::string& text = content->get_ref<const std::string&>();
    if (text.empty()) {
      return malformed(field, "content is empty");
    }
    LACUNA_ASSIGN_OR_RETURN(const int64_t id, read_id(*id_json, field + ".id"));
    const auto [at, inserted] = state->ids.emplace(text, static_cast<int32_t>(id));
    if (inserted) {
      LACUNA_RETURN_IF_ERROR(
          state->add_token(id, text, [&] { return kWhere + field + " " + quote_text(text); }));
    } else if (at->second != id) {
      return malformed(field, quote_text(text) + " has id " + std::to_string(id) + " here and id " +
                                  std::to_string(at->second) + " elsewhere in the file");
    }
    Token& token = state->tokens[static_cast<size_t>(id)];
    token.special = token.special || flag(added, "special", false);
    token.single_word = flag(added, "single_word", false);
    token.lstrip = flag(added, "lstrip", false);
    token.rstrip = flag(added, "rstrip", false);
    if (token.single_word && !state->word_character.has_value()) {
      LACUNA_ASSIGN_OR_RETURN(state->word_character,
                              SplitPattern::compile("[\\w\\x{200C}\\x{200D}]",
                                                    SplitBehavior::kRemoved, /*invert=*/false));
    }
    const size_t pass = flag(added, "normalized", true) ? 1 : 0;
    state->added[pass].insert(text, static_cast<int32_t>(id));
  }
  return ok_status();
}

}  // namespace

Result<Tokenizer> Tokenizer::load(const std::string& model_dir) {
  LACUNA_ASSIGN_OR_RETURN(const ModelDir dir, list_model_dir(model_dir));
  if (!dir.has("tokenizer.json")) {
    if (dir.has("tokenizer.model")) {
      return unsupported(dir.path("tokenizer.model") +
                         ": SentencePiece tokenizers are not supported; what loads: tokenizer.json "
                         "with a byte-level BPE");
    }
    return dir.missing("tokenizer.json");
  }
  LACUNA_ASSIGN_OR_RETURN(const std::string text,
                          read_file(dir.path("tokenizer.json"), kTokenizerBytesMax));
  Result<Tokenizer> tokenizer = parse(text);
  if (!tokenizer.ok()) {
    // parse() begins its messages with the file's name; here the folder is known too.
    return Status(tokenizer.status().code(), dir.root + "/" + tokenizer.status().message());
  }
  return tokenizer;
}

Result<Tokenizer> Tokenizer::parse(std::string_view tokenizer_json) {
  LACUNA_ASSIGN_OR_RETURN(const Json root, parse_json(tokenizer_json, "tokenizer.json"));
  auto state = std::make_shared<TokenizerState>();
  LACUNA_RETURN_IF_ERROR(read_model(root, state.get()));
  LACUNA_RETURN_IF_ERROR(read_normalizer(root));
  LACUNA_RETURN_IF_ERROR(read_pre_tokenizer(root, state.get()));
  LACUNA_RETURN_IF_ERROR(read_decoder(root, state.get()));
  LACUNA_RETURN_IF_ERROR(read_added_tokens(root, state.get()));
  return Tokenizer(std::move(state));
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text,
                                               bool add_special_tokens) const {
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    if (step.kind != Utf8Step::Kind::kCharacter) {
      return invalid_argument("text: not valid UTF-8 at byte " + std::to_string(at));
    }
    at += step.length;
  }
  if (text.size() > static_cast<size_t>(INT32_MAX)) {
    return invalid_argument("text: " + std::to_string(text.size()) +
                            " bytes, expected fewer than 2^31");
  }
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 3 + 8);
  if (add_special_tokens) {
    ids = state_->ids_before;
  }
  if (!text.empty()) {
    SplitScratch scratch;
    LACUNA_RETURN_IF_ERROR(state_->encode_pass(0, text, &scratch, &ids));
  }
  if (add_special_tokens) {
    ids.insert(ids.end(), state_->ids_after.begin(), state_->ids_after.end());
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special);
  std::string text = decoder.feed(ids);
  text += decoder.flush();
  return text;
}

std::string_view Tokenizer::token_bytes(int32_t id) const {
  if (id < 0 || id >= vocab_size()) {
    return {};
  }
  const Token& token = state_->tokens[static_cast<size_t>(id)];
  return std::string_view(state_->pool).substr(token.offset, token.length);
}

bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < vocab_size() && state_->tokens[static_cast<size_t>(id)].special;
}

int32_t Tokenizer::vocab_size() const { return static_cast<int32_t>(state_->tokens.size()); }

std::optional<int32_t> Tokenizer::token_id(std::string_view content) const {
  const auto at = state_->ids.find(content);
  return at == state_->ids.end() ? std::nullopt : std::optional(at->second);
}

std::string StreamDecoder::feed(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (!skip_special_ || !tokenizer_.is_special(id)) {
      pending_ += tokenizer_.token_bytes(id);
    }
  }
  std::string text;
  pending_.erase(0, append_complete(pending_, &text));
  return text;
}

std::string StreamDecoder::flush() {
  std::string text;
  if (!pending_.empty()) {
    text = kReplacement;  // what waits is the beginning of one character
    pending_.clear();
  }
  return text;
}

}  // namespace lacuna
