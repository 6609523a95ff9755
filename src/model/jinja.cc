// The Jinja interpreter: walks the tree of a template with Python's rules for values.
#include "model/jinja.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <ctime>
#include <optional>

#include "model/jinja_parser.h"
#include "model/jinja_value.h"
#include "model/json.h"
#include "model/utf8.h"

namespace lacuna {
namespace {

using Kind = JinjaNode::Kind;
using Value = JinjaValue;
using Type = JinjaValue::Type;

constexpr int64_t kRangeMax = 100'000;  // as in Jinja's sandbox

[[noreturn]] void fail(const std::string& message) {
  throw JinjaError{StatusCode::kInvalidArgument, message};
}
[[noreturn]] void refuse(const std::string& message) {
  throw JinjaError{StatusCode::kUnsupported, message};
}

struct Namespace {
  Value::Dict members;
};

struct Method {
  Value self;
  std::string name;
};

struct Function {
  std::string name;
};

struct Macro {
  const JinjaNode* node;
};

struct Loop {
  std::shared_ptr<const Value::List> items;
  int64_t index = 0;
  int64_t depth = 1;
};

struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;

  const Value* find(size_t position, std::string_view name) const {
    if (position < positional.size()) {
      return &positional[position];
    }
    for (const auto& [key, value] : named) {
      if (key == name) {
        return &value;
      }
    }
    return nullptr;
  }
};

void set_member(Value::Dict* members, const std::string& key, Value value) {
  for (auto& [name, old] : *members) {
    if (name == key) {
      old = std::move(value);
      return;
    }
  }
  members->emplace_back(key, std::move(value));
}

const std::string& text_of(const Value& value, const char* what) {
  if (!value.is(Type::kString)) {
    fail(std::string(what) + ": expected a string, found " + value.type_name());
  }
  return value.as_string();
}

int64_t int_of(const Value& value, const char* what) {
  if (!value.is_integral()) {
    fail(std::string(what) + ": expected an integer, found " + value.type_name());
  }
  return value.as_int();
}

size_t text_length(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_step(text, at).length;
    out.push_back(text.substr(at, length));
    at += length;
  }
  return out;
}

bool is_upper(char c) { return c >= 'A' && c <= 'Z'; }
bool is_lower(char c) { return c >= 'a' && c <= 'z'; }
bool is_letter(char c) { return is_upper(c) || is_lower(c) || (c & 0x80) != 0; }
char to_upper(char c) { return is_lower(c) ? static_cast<char>(c - 32) : c; }
char to_lower(char c) { return is_upper(c) ? static_cast<char>(c + 32) : c; }

// Ranges of small letters and how far below their capitals are: ASCII, Latin-1, Greek, Cyrillic.
// Other letters keep their case; templates change that of roles and keywords.
struct CaseRange {
  char32_t first;
  char32_t last;
  char32_t distance;
};
constexpr CaseRange kCaseRanges[] = {{0x61, 0x7A, 32},   {0xE0, 0xF6, 32},   {0xF8, 0xFE, 32},
                                     {0x3B1, 0x3C1, 32}, {0x3C3, 0x3C9, 32}, {0x430, 0x44F, 32},
                                     {0x450, 0x45F, 80}};

std::string map_case(std::string_view text, bool to_upper_case) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    char32_t c = step.code_point;
    at += step.length;
    for (const CaseRange& range : kCaseRanges) {
      const char32_t shift = to_upper_case ? 0 : range.distance;
      if (c + shift >= range.first && c + shift <= range.last) {
        c = to_upper_case ? c - range.distance : c + range.distance;
        break;
      }
    }
    append_utf8(c, &out);
  }
  return out;
}
std::string upper(std::string_view text) { return map_case(text, true); }
std::string lower(std::string_view text) { return map_case(text, false); }
std::string capitalize(std::string text) {
  text = lower(text);
  if (!text.empty()) {
    text[0] = to_upper(text[0]);
  }
  return text;
}
// str.title(): a word begins after anything that is no letter. The filter's words begin after
// white space, hyphens and opening brackets.
std::string title(std::string text, bool filter) {
  bool begins = true;
  for (char& c : text) {
    const char original = c;
    c = begins ? to_upper(c) : to_lower(c);
    begins = filter ? std::string_view(" \t\n\r\v\f-({[<").find(original) != std::string::npos
                    : !is_letter(original);
  }
  return text;
}

std::string strip(std::string_view text, const Value* chars, bool left, bool right) {
  if (chars == nullptr || chars->is(Type::kNone)) {
    return std::string(strip_python_space(text, left, right));
  }
  const std::vector<std::string_view> set = characters(text_of(*chars, "strip"));
  const std::vector<std::string_view> all = characters(text);
  const auto in_set = [&](std::string_view c) {
    return std::find(set.begin(), set.end(), c) != set.end();
  };
  size_t begin = 0;
  size_t end = all.size();
  while (left && begin < end && in_set(all[begin])) {
    ++begin;
  }
  while (right && end > begin && in_set(all[end - 1])) {
    --end;
  }
  std::string out;
  for (size_t i = begin; i < end; ++i) {
    out += all[i];
  }
  return out;
}

std::vector<std::string_view> split_lines(std::string_view text) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '\n' || text[at] == '\r') {
      lines.push_back(text.substr(begin, at - begin));
      at += text[at] == '\r' && at + 1 < text.size() && text[at + 1] == '\n';
      begin = at + 1;
    }
  }
  if (begin < text.size()) {
    lines.push_back(text.substr(begin));
  }
  return lines;
}

enum class Flow : uint8_t { kNext, kBreak, kContinue };

class Interpreter {
 public:
  Interpreter(const JinjaLimits& limits, std::string* out) : limits_(limits), out_(out) {
    frames_.emplace_back();
  }
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;
  ~Interpreter() {
    // A namespace may hold itself.
    for (const auto& space : namespaces_) {
      space->members.clear();
    }
  }

  void define(const std::string& name, Value value) {
    set_member(&frames_.front(), name, std::move(value));
  }

  Flow run(const JinjaNode& node) {
    try {
      return run_here(node);
    } catch (JinjaError& error) {
      error.line = error.line == 0 ? node.line : error.line;
      throw;
    }
  }

 private:
  using Frame = Value::Dict;

  // Bounds: steps, and bytes that are about to be built.
  void step() {
    if (++steps_ > limits_.steps) {
      fail("more than " + std::to_string(limits_.steps) + " steps");
    }
  }
  void charge(size_t bytes) {
    if (bytes > static_cast<size_t>(limits_.output_bytes)) {
      fail("a text is longer than " + std::to_string(limits_.output_bytes) + " bytes");
    }
    total_bytes_ += static_cast<int64_t>(bytes);
    if (total_bytes_ > limits_.total_bytes) {
      fail("more than " + std::to_string(limits_.total_bytes) + " bytes were built");
    }
  }
  void charge_items(size_t count) { charge(count * sizeof(Value)); }

  Value make_text(std::string text) {
    charge(text.size());
    return Value::string(std::move(text));
  }
  Value make_list(Value::List items, bool is_tuple = false) {
    charge_items(items.size());
    return Value::list(std::move(items), is_tuple);
  }
  std::string text_of_any(const Value& value) {
    charge(static_cast<size_t>(value.weight()));
    return value.to_text();
  }
  void emit(std::string_view text) {
    charge(text.size());
    if (out_->size() + text.size() > static_cast<size_t>(limits_.output_bytes)) {
      fail("the output is longer than " + std::to_string(limits_.output_bytes) + " bytes");
    }
    *out_ += text;
  }

  class Level {
   public:
    explicit Level(Interpreter* in) : in_(in) {
      if (++in_->level_ > in_->limits_.depth) {
        --in_->level_;
        fail("macros are nested more than " + std::to_string(in_->limits_.depth) + " deep");
      }
    }
    ~Level() { --in_->level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Interpreter* in_;
  };

  // Names of a macro, a loop's turn or a captured block; whatever happens, they go.
  class Scope {
   public:
    explicit Scope(Interpreter* in, bool is_macro = false)
        : in_(in), size_(in->frames_.size()), base_(in->base_) {
      in->base_ = is_macro ? size_ : base_;
      in->frames_.emplace_back();
    }
    ~Scope() {
      in_->frames_.resize(size_);
      in_->base_ = base_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Interpreter* in_;
    size_t size_;
    size_t base_;
  };

  // Output goes to a text of its own.
  class Capture {
   public:
    explicit Capture(Interpreter* in) : in_(in), before_(in->out_) { in->out_ = &text; }
    ~Capture() { in_->out_ = before_; }
    Capture(const Capture&) = delete;
    Capture& operator=(const Capture&) = delete;
    std::string text;

   private:
    Interpreter* in_;
    std::string* before_;
  };

  const Value* find_name(const std::string& name) const {
    const auto find = [&](const Frame& frame) -> const Value* {
      for (const auto& [key, value] : frame) {
        if (key == name) {
          return &value;
        }
      }
      return nullptr;
    };
    for (size_t i = frames_.size(); i-- > base_;) {
      if (const Value* value = find(frames_[i])) {
        return value;
      }
    }
    return base_ > 0 ? find(frames_.front()) : nullptr;
  }

  void assign(const JinjaNode& target, const Value& value) {
    if (target.kind == Kind::kName) {
      set_member(&frames_.back(), target.text, value);
    } else if (target.kind == Kind::kAttribute) {
      const Value object = evaluate(*target.children[0]);
      if (!object.is(Type::kNamespace)) {
        fail("only attributes of a namespace can be set, not those of " +
             std::string(object.type_name()));
      }
      set_member(&object.as<Namespace>()->members, target.text, value);
    } else {
      const Value::List items = iterate(value);
      if (items.size() != target.children.size()) {
        fail(std::to_string(items.size()) + " values for " +
             std::to_string(target.children.size()) + " names");
      }
      for (size_t i = 0; i < items.size(); ++i) {
        assign(*target.children[i], items[i]);
      }
    }
  }

  Flow run_here(const JinjaNode& node) {
    step();
    switch (node.kind) {
      case Kind::kBlock:
        for (const auto& child : node.children) {
          const Flow flow = run(*child);
          if (flow != Flow::kNext) {
            return flow;
          }
        }
        return Flow::kNext;
      case Kind::kText:
        emit(node.text);
        return Flow::kNext;
      case Kind::kOutput: {
        const Value value = evaluate(*node.children[0]);
        if (value.is(Type::kString)) {
          emit(value.as_string());
        } else {
          emit(text_of_any(value));
        }
        return Flow::kNext;
      }
      case Kind::kIf:
        for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
          if (evaluate(*node.children[i]).truth()) {
            return run(*node.children[i + 1]);
          }
        }
        return node.children.size() % 2 == 1 ? run(*node.children.back()) : Flow::kNext;
      case Kind::kFor:
        return run_for(node);
      case Kind::kSet:
        assign(*node.children[0], evaluate(*node.children[1]));
        return Flow::kNext;
      case Kind::kBlockSet: {
        Value text = Value::string(captured(*node.children[1]));
        if (node.children.size() > 2 && node.children[2] != nullptr) {
          std::swap(block_text_, text);
          Value filtered = evaluate(*node.children[2]);
          std::swap(block_text_, text);
          text = std::move(filtered);
        }
        assign(*node.children[0], text);
        return Flow::kNext;
      }
      case Kind::kMacro:
        assign_macro(node);
        return Flow::kNext;
      case Kind::kWith: {
        std::vector<Value> values;
        for (size_t i = 1; i < node.children.size(); i += 2) {
          values.push_back(evaluate(*node.children[i]));
        }
        const Scope scope(this);
        for (size_t i = 0; i < values.size(); ++i) {
          assign(*node.children[2 * i], values[i]);
        }
        return run(*node.children.back());
      }
      case Kind::kBreak:
        return Flow::kBreak;
      case Kind::kContinue:
        return Flow::kContinue;
      default:
        fail("not a statement");
    }
  }

  void assign_macro(const JinjaNode& node) {
    set_member(&frames_.back(), node.text,
               Value::other(Type::kMacro, std::make_shared<Macro>(Macro{&node})));
  }

  std::string captured(const JinjaNode& body) {
    const Scope scope(this);
    Capture capture(this);
    run(body);
    return std::move(capture.text);
  }

  Flow run_for(const JinjaNode& node) {
    const JinjaNode& target = *node.children[0];
    auto items = std::make_shared<Value::List>(iterate(evaluate(*node.children[1])));
    if (node.children[2] != nullptr) {
      auto kept = std::make_shared<Value::List>();
      for (const Value& item : *items) {
        const Scope scope(this);
        assign(target, item);
        if (evaluate(*node.children[2]).truth()) {
          kept->push_back(item);
        }
      }
      items = std::move(kept);
    }
    if (items->empty()) {
      if (node.children[4] == nullptr) {
        return Flow::kNext;
      }
      const Scope scope(this);
      return run(*node.children[4]);
    }
    const auto loop = std::make_shared<Loop>();
    loop->items = items;
    loop->depth = ++loop_depth_;
    for (size_t i = 0; i < items->size(); ++i) {
      const Scope scope(this);
      loop->index = static_cast<int64_t>(i);
      set_member(&frames_.back(), "loop", Value::other(Type::kLoop, loop));
      assign(target, (*items)[i]);
      if (run(*node.children[3]) == Flow::kBreak) {
        break;
      }
    }
    --loop_depth_;
    return Flow::kNext;
  }

  Value::List iterate(const Value& value) {
    switch (value.type()) {
      case Type::kUndefined:
        return {};
      case Type::kList:
        charge_items(value.as_list().size());
        return value.as_list();
      case Type::kDict: {
        Value::List keys;
        charge_items(value.as_dict().size());
        for (const auto& [key, member] : value.as_dict()) {
          keys.push_back(Value::string(key));
        }
        return keys;
      }
      case Type::kString: {
        Value::List out;
        charge_items(value.as_string().size());
        for (const std::string_view c : characters(value.as_string())) {
          out.push_back(Value::string(std::string(c)));
        }
        return out;
      }
      default:
        fail(std::string(value.type_name()) + " can not be iterated over");
    }
  }

  Value evaluate(const JinjaNode& node) {
    try {
      step();
      return evaluate_here(node);
    } catch (JinjaError& error) {
      error.line = error.line == 0 ? node.line : error.line;
      throw;
    }
  }

  Value evaluate_here(const JinjaNode& node) {
    switch (node.kind) {
      case Kind::kConstant:
        return node.value;
      case Kind::kBlockText:
        return block_text_;
      case Kind::kName:
        return evaluate_name(node.text);
      case Kind::kList:
      case Kind::kTuple: {
        Value::List items;
        for (const auto& child : node.children) {
          items.push_back(evaluate(*child));
        }
        return make_list(std::move(items), node.kind == Kind::kTuple);
      }
      case Kind::kDict: {
        Value::Dict members;
        for (size_t i = 0; i < node.children.size(); i += 2) {
          const Value key = evaluate(*node.children[i]);
          set_member(&members, text_of(key, "the key of a mapping"),
                     evaluate(*node.children[i + 1]));
        }
        charge_items(2 * members.size());
        return Value::dict(std::move(members));
      }
      case Kind::kAttribute:
        return attribute(evaluate(*node.children[0]), node.text);
      case Kind::kSubscript: {
        const Value object = evaluate(*node.children[0]);
        return subscript(object, evaluate(*node.children[1]));
      }
      case Kind::kSlice:
        return slice(node);
      case Kind::kCall: {
        const Value callee = evaluate(*node.children[0]);
        return call(callee, arguments(node), node);
      }
      case Kind::kFilter: {
        const Value value = evaluate(*node.children[0]);
        return filter(node.text, value, arguments(node));
      }
      case Kind::kTest: {
        const Value value = evaluate(*node.children[0]);
        return Value::boolean(test(node.text, value, arguments(node)));
      }
      case Kind::kNot:
        return Value::boolean(!evaluate(*node.children[0]).truth());
      case Kind::kNegate:
      case Kind::kPositive: {
        const Value value = evaluate(*node.children[0]);
        const bool negate = node.kind == Kind::kNegate;
        if (value.is_integral()) {
          int64_t out = value.as_int();
          if (negate && __builtin_sub_overflow(int64_t{0}, value.as_int(), &out)) {
            fail("integer overflow");
          }
          return Value::integer(out);
        }
        if (!value.is_number()) {
          fail(std::string("expected a number, found ") + value.type_name());
        }
        return Value::real(negate ? -value.as_double() : value.as_double());
      }
      case Kind::kAnd: {
        Value left = evaluate(*node.children[0]);
        return left.truth() ? evaluate(*node.children[1]) : left;
      }
      case Kind::kOr: {
        Value left = evaluate(*node.children[0]);
        return left.truth() ? left : evaluate(*node.children[1]);
      }
      case Kind::kCompare: {
        Value left = evaluate(*node.children[0]);
        for (size_t i = 0; i < node.names.size(); ++i) {
          Value right = evaluate(*node.children[i + 1]);
          if (!compare(node.names[i], left, right)) {
            return Value::boolean(false);
          }
          left = std::move(right);
        }
        return Value::boolean(true);
      }
      case Kind::kArithmetic: {
        const Value left = evaluate(*node.children[0]);
        return arithmetic(node.text, left, evaluate(*node.children[1]));
      }
      case Kind::kConcatenate: {
        std::string text;
        for (const auto& child : node.children) {
          text += text_of_any(evaluate(*child));
          charge(text.size());
        }
        return Value::string(std::move(text));
      }
      case Kind::kConditional:
        if (evaluate(*node.children[1]).truth()) {
          return evaluate(*node.children[0]);
        }
        return node.children[2] != nullptr ? evaluate(*node.children[2])
                                           : Value::undefined("the other branch of an inline if");
      default:
        fail("not an expression");
    }
  }

  Arguments arguments(const JinjaNode& node) {
    Arguments out;
    for (size_t i = 1; i < node.children.size(); ++i) {
      out.positional.push_back(evaluate(*node.children[i]));
    }
    for (const auto& [name, value] : node.named) {
      out.named.emplace_back(name, evaluate(*value));
    }
    return out;
  }

  Value evaluate_name(const std::string& name) {
    if (const Value* value = find_name(name)) {
      return *value;
    }
    for (const char* function : {"range", "namespace", "dict", "raise_exception", "strftime_now"}) {
      if (name == function) {
        return Value::other(Type::kFunction, std::make_shared<Function>(Function{name}));
      }
    }
    return Value::undefined(quote_text(name));
  }

  Value method(const Value& self, const std::string& name) {
    return Value::other(Type::kMethod, std::make_shared<Method>(Method{self, name}));
  }

  static bool is_method(Type type, const std::string& name) {
    static constexpr std::string_view kText[] = {
        "strip",      "lstrip",  "rstrip",       "split",        "rsplit",  "startswith",
        "endswith",   "replace", "upper",        "lower",        "title",   "capitalize",
        "find",       "rfind",   "count",        "join",         "isdigit", "isalpha",
        "splitlines", "isspace", "removeprefix", "removesuffix", "format",  "isupper",
        "islower",    "index",   "zfill",        "isnumeric",    "encode"};
    static constexpr std::string_view kDict[] = {"items",      "get",    "keys",   "values",
                                                 "copy",       "pop",    "update", "clear",
                                                 "setdefault", "popitem"};
    static constexpr std::string_view kList[] = {"append",  "extend", "insert", "pop",
                                                 "remove",  "index",  "count",  "sort",
                                                 "reverse", "clear",  "copy"};
    const auto in = [&](const auto& names) {
      return std::find(std::begin(names), std::end(names), name) != std::end(names);
    };
    return type == Type::kString ? in(kText) : type == Type::kDict ? in(kDict) : in(kList);
  }

  // object.name: Python's attribute first, which for a mapping means its methods, then the member.
  Value attribute(const Value& object, const std::string& name) {
    switch (object.type()) {
      case Type::kUndefined:
        fail(object.as_string() + " is undefined, so it has no " + quote_text(name));
      case Type::kNamespace:
        for (const auto& [key, value] : object.as<Namespace>()->members) {
          if (key == name) {
            return value;
          }
        }
        break;
      case Type::kDict:
        if (is_method(Type::kDict, name)) {
          return method(object, name);
        }
        if (const Value* member = object.find(name)) {
          return *member;
        }
        break;
      case Type::kString:
      case Type::kList:
        if (is_method(object.type(), name)) {
          return method(object, name);
        }
        break;
      case Type::kLoop:
        return loop_attribute(*object.as<Loop>(), name);
      default:
        break;
    }
    return Value::undefined(quote_text(name) + " of " + object.type_name());
  }

  static Value loop_attribute(const Loop& loop, const std::string& name) {
    const int64_t length = static_cast<int64_t>(loop.items->size());
    const int64_t i = loop.index;
    if (name == "index") {
      return Value::integer(i + 1);
    }
    if (name == "index0") {
      return Value::integer(i);
    }
    if (name == "revindex") {
      return Value::integer(length - i);
    }
    if (name == "revindex0") {
      return Value::integer(length - i - 1);
    }
    if (name == "first") {
      return Value::boolean(i == 0);
    }
    if (name == "last") {
      return Value::boolean(i + 1 == length);
    }
    if (name == "length") {
      return Value::integer(length);
    }
    if (name == "depth" || name == "depth0") {
      return Value::integer(loop.depth - (name == "depth0"));
    }
    if (name == "previtem") {
      return i > 0 ? (*loop.items)[i - 1] : Value::undefined("there is no previous item");
    }
    if (name == "nextitem") {
      return i + 1 < length ? (*loop.items)[i + 1] : Value::undefined("there is no next item");
    }
    if (name == "cycle") {
      auto copy = std::make_shared<Loop>(loop);
      return Value::other(Type::kMethod, std::make_shared<Method>(Method{
                                             Value::other(Type::kLoop, std::move(copy)), name}));
    }
    return Value::undefined(quote_text(name) + " of the loop");
  }

  Value subscript(const Value& object, const Value& key) {
    if (object.is(Type::kUndefined)) {
      fail(object.as_string() + " is undefined, so it has no " + key.repr());
    }
    if (object.is(Type::kDict) && key.is(Type::kString)) {
      if (const Value* member = object.find(key.as_string())) {
        return *member;
      }
      return is_method(Type::kDict, key.as_string()) ? method(object, key.as_string())
                                                     : Value::undefined(key.repr());
    }
    if (key.is(Type::kString)) {
      return attribute(object, key.as_string());
    }
    if (key.is_integral() && object.is(Type::kList)) {
      const auto& items = object.as_list();
      const int64_t size = static_cast<int64_t>(items.size());
      const int64_t at = key.as_int() < 0 ? key.as_int() + size : key.as_int();
      return at >= 0 && at < size ? items[at] : Value::undefined("element " + key.repr());
    }
    if (key.is_integral() && object.is(Type::kString)) {
      charge(object.as_string().size());
      const std::vector<std::string_view> all = characters(object.as_string());
      const int64_t size = static_cast<int64_t>(all.size());
      const int64_t at = key.as_int() < 0 ? key.as_int() + size : key.as_int();
      return at >= 0 && at < size ? Value::string(std::string(all[at]))
                                  : Value::undefined("element " + key.repr());
    }
    return Value::undefined(std::string(key.type_name()) + " as a subscript of " +
                            object.type_name());
  }

  Value slice(const JinjaNode& node) {
    const Value object = evaluate(*node.children[0]);
    std::array<std::optional<int64_t>, 3> bounds;
    for (size_t i = 0; i < 3; ++i) {
      if (node.children[i + 1] != nullptr) {
        const Value bound = evaluate(*node.children[i + 1]);
        if (!bound.is(Type::kNone)) {
          bounds[i] = int_of(bound, "a slice");
        }
      }
    }
    if (!object.is(Type::kString) && !object.is(Type::kList)) {
      fail(std::string("a slice of ") + object.type_name() + ", expected a string or a list");
    }
    std::vector<std::string_view> text;
    if (object.is(Type::kString)) {
      charge(object.as_string().size());
      text = characters(object.as_string());
    }
    const int64_t size =
        static_cast<int64_t>(object.is(Type::kString) ? text.size() : object.as_list().size());
    const int64_t stride = bounds[2].value_or(1);
    if (stride == 0) {
      fail("the step of a slice is zero");
    }
    // Python's rules (PySlice_AdjustIndices).
    const int64_t low = stride > 0 ? 0 : -1;
    const int64_t high = stride > 0 ? size : size - 1;
    const auto adjust = [&](std::optional<int64_t> bound, int64_t missing) {
      if (!bound.has_value()) {
        return missing;
      }
      return std::clamp(*bound < 0 ? *bound + size : *bound, low, high);
    };
    const int64_t begin = adjust(bounds[0], stride > 0 ? low : high);
    const int64_t end = adjust(bounds[1], stride > 0 ? high : low);
    std::string out;
    Value::List items;
    for (int64_t i = begin; stride > 0 ? i < end : i > end;) {
      if (object.is(Type::kString)) {
        out += text[i];
      } else {
        items.push_back(object.as_list()[i]);
      }
      if (stride > size || stride < -size) {
        break;
      }
      i += stride;
    }
    return object.is(Type::kString) ? make_text(std::move(out))
                                    : make_list(std::move(items), object.is_tuple());
  }

  bool contains(const Value& container, const Value& item) {
    switch (container.type()) {
      case Type::kUndefined:
        return false;
      case Type::kString:
        return container.as_string().find(text_of(item, "in")) != std::string::npos;
      case Type::kList:
        return std::any_of(container.as_list().begin(), container.as_list().end(),
                           [&](const Value& value) { return equal(value, item); });
      case Type::kDict:
        return item.is(Type::kString) && container.find(item.as_string()) != nullptr;
      default:
        fail(std::string("\"in\": ") + container.type_name() + " contains nothing");
    }
  }

  bool equal(const Value& a, const Value& b) {
    charge(static_cast<size_t>(std::min(a.weight(), b.weight())));
    return jinja_equal(a, b);
  }
  bool less(const Value& a, const Value& b) {
    charge(static_cast<size_t>(std::min(a.weight(), b.weight())));
    return jinja_less(a, b);
  }

  bool compare(const std::string& op, const Value& a, const Value& b) {
    if (op == "==" || op == "!=") {
      return equal(a, b) == (op == "==");
    }
    if (op == "in" || op == "not in") {
      return contains(b, a) == (op == "in");
    }
    if (op == "<") {
      return less(a, b);
    }
    if (op == ">") {
      return less(b, a);
    }
    if (op == "<=") {
      return less(a, b) || equal(a, b);
    }
    return less(b, a) || equal(a, b);
  }

  Value arithmetic(const std::string& op, const Value& a, const Value& b) {
    if (op == "+" && a.is(Type::kString) && b.is(Type::kString)) {
      return make_text(a.as_string() + b.as_string());
    }
    if (op == "+" && a.is(Type::kList) && b.is(Type::kList) && a.is_tuple() == b.is_tuple()) {
      Value::List items = a.as_list();
      items.insert(items.end(), b.as_list().begin(), b.as_list().end());
      return make_list(std::move(items), a.is_tuple());
    }
    if (op == "*" && (a.is_integral() || b.is_integral())) {
      const Value& count = a.is_integral() ? a : b;
      const Value& repeated = a.is_integral() ? b : a;
      if (repeated.is(Type::kString) || repeated.is(Type::kList)) {
        return repeat(repeated, count.as_int());
      }
    }
    if (op == "%" && a.is(Type::kString)) {
      refuse("formatting with % is not supported");
    }
    if (!a.is_number() || !b.is_number()) {
      const auto name = [](const Value& value) {
        return value.is(Type::kUndefined) ? value.as_string() + ", which is undefined,"
                                          : std::string(value.type_name());
      };
      fail("\"" + op + "\" between " + name(a) + " and " + name(b));
    }
    return a.is_integral() && b.is_integral() ? integer_arithmetic(op, a.as_int(), b.as_int())
                                              : real_arithmetic(op, a.as_double(), b.as_double());
  }

  Value repeat(const Value& value, int64_t count) {
    const int64_t size = static_cast<int64_t>(value.is(Type::kString) ? value.as_string().size()
                                                                      : value.as_list().size());
    if (count <= 0 || size == 0) {
      return value.is(Type::kString) ? Value::string("") : Value::list({}, value.is_tuple());
    }
    if (count > limits_.output_bytes / size) {
      fail("a text or list repeated " + std::to_string(count) + " times is too long");
    }
    if (value.is(Type::kString)) {
      charge(static_cast<size_t>(count * size));
      std::string text;
      for (int64_t i = 0; i < count; ++i) {
        text += value.as_string();
      }
      return Value::string(std::move(text));
    }
    charge_items(static_cast<size_t>(count * size));
    Value::List items;
    for (int64_t i = 0; i < count; ++i) {
      items.insert(items.end(), value.as_list().begin(), value.as_list().end());
    }
    return Value::list(std::move(items), value.is_tuple());
  }

  Value integer_arithmetic(const std::string& op, int64_t a, int64_t b) {
    int64_t out = 0;
    bool overflow = false;
    if (op == "+") {
      overflow = __builtin_add_overflow(a, b, &out);
    } else if (op == "-") {
      overflow = __builtin_sub_overflow(a, b, &out);
    } else if (op == "*") {
      overflow = __builtin_mul_overflow(a, b, &out);
    } else if (op == "**") {
      if (b < 0) {
        return Value::real(std::pow(static_cast<double>(a), static_cast<double>(b)));
      }
      out = 1;
      for (int64_t i = 0; i < b && !overflow && out != 0 && !(a == 1 || (a == -1 && i > 1)); ++i) {
        overflow = __builtin_mul_overflow(out, a, &out);
      }
      if (a == -1) {
        out = b % 2 == 0 ? 1 : -1;
      }
    } else {
      if (b == 0) {
        fail("division by zero");
      }
      if (op == "/") {
        return Value::real(static_cast<double>(a) / static_cast<double>(b));
      }
      if (a == INT64_MIN && b == -1) {
        fail("integer overflow");
      }
      const int64_t rest = a % b;
      const bool adjust = rest != 0 && (rest < 0) != (b < 0);
      out = op == "//" ? a / b - adjust : rest + (adjust ? b : 0);
    }
    if (overflow) {
      fail("integer overflow");
    }
    return Value::integer(out);
  }

  static Value real_arithmetic(const std::string& op, double a, double b) {
    if (op == "+") {
      return Value::real(a + b);
    }
    if (op == "-") {
      return Value::real(a - b);
    }
    if (op == "*") {
      return Value::real(a * b);
    }
    if (op == "**") {
      return Value::real(std::pow(a, b));
    }
    if (b == 0) {
      fail("division by zero");
    }
    if (op == "/") {
      return Value::real(a / b);
    }
    if (op == "//") {
      return Value::real(std::floor(a / b));
    }
    const double rest = std::fmod(a, b);
    return Value::real(rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest);
  }

  Value call(const Value& callee, const Arguments& args, const JinjaNode& node) {
    switch (callee.type()) {
      case Type::kMacro:
        return call_macro(*callee.as<Macro>()->node, args);
      case Type::kMethod:
        return call_method(callee.as<Method>()->self, callee.as<Method>()->name, args);
      case Type::kFunction:
        return call_function(callee.as<Function>()->name, args);
      case Type::kUndefined:
        fail(callee.as_string() + " is undefined and can not be called");
      default:
        (void)node;
        fail(std::string(callee.type_name()) + " can not be called");
    }
  }

  Value call_macro(const JinjaNode& macro, const Arguments& args) {
    const Level level(this);
    if (args.positional.size() > macro.names.size()) {
      fail("macro " + quote_text(macro.text) + " takes " + std::to_string(macro.names.size()) +
           " arguments, " + std::to_string(args.positional.size()) + " are given");
    }
    for (const auto& [name, value] : args.named) {
      const auto at = std::find(macro.names.begin(), macro.names.end(), name);
      if (at == macro.names.end()) {
        fail("macro " + quote_text(macro.text) + " has no parameter " + quote_text(name));
      }
      if (static_cast<size_t>(at - macro.names.begin()) < args.positional.size()) {
        fail("macro " + quote_text(macro.text) + ": " + quote_text(name) + " is given twice");
      }
    }
    const Scope scope(this, /*is_macro=*/true);
    for (size_t i = 0; i < macro.names.size(); ++i) {
      const std::string& name = macro.names[i];
      Value value = Value::undefined("parameter " + quote_text(name));
      if (const Value* given = args.find(i, name)) {
        value = *given;
      } else {
        for (const auto& [key, standard] : macro.named) {
          if (key == name) {
            value = evaluate(*standard);
          }
        }
      }
      set_member(&frames_.back(), name, std::move(value));
    }
    Capture capture(this);
    run(*macro.children[0]);
    return Value::string(std::move(capture.text));
  }

  Value call_function(const std::string& name, const Arguments& args) {
    if (name == "range") {
      return range(args);
    }
    if (name == "namespace" || name == "dict") {
      Value::Dict members;
      for (const Value& value : args.positional) {
        if (!value.is(Type::kDict)) {
          fail(name + ": expected a mapping, found " + value.type_name());
        }
        for (const auto& [key, member] : value.as_dict()) {
          set_member(&members, key, member);
        }
      }
      for (const auto& [key, value] : args.named) {
        set_member(&members, key, value);
      }
      charge_items(2 * members.size());
      if (name == "dict") {
        return Value::dict(std::move(members));
      }
      auto space = std::make_shared<Namespace>(Namespace{std::move(members)});
      namespaces_.push_back(space);
      charge_items(8);
      return Value::other(Type::kNamespace, std::move(space));
    }
    if (name == "raise_exception") {
      const Value* message = args.find(0, "message");
      fail(message == nullptr ? "raise_exception" : text_of_any(*message));
    }
    // strftime_now
    const Value* format = args.find(0, "format");
    if (format == nullptr) {
      fail("strftime_now: expected a format");
    }
    const std::string& pattern = text_of(*format, "strftime_now");
    if (pattern.size() > 1024) {
      fail("strftime_now: the format is longer than 1024 bytes");
    }
    const std::time_t now = std::time(nullptr);
    std::tm local = {};
    (void)localtime_r(&now, &local);
    // The added character tells an empty result from one that does not fit.
    std::string text(65536, '\0');
    text.resize(std::strftime(text.data(), text.size(), (pattern + "x").c_str(), &local));
    if (!text.empty()) {
      text.pop_back();
    }
    return make_text(std::move(text));
  }

  Value range(const Arguments& args) {
    if (args.positional.empty() || args.positional.size() > 3) {
      fail("range: expected 1 to 3 integers");
    }
    const bool one = args.positional.size() == 1;
    const int64_t begin = one ? 0 : int_of(args.positional[0], "range");
    const int64_t end = int_of(args.positional[one ? 0 : 1], "range");
    const int64_t stride = args.positional.size() == 3 ? int_of(args.positional[2], "range") : 1;
    if (stride == 0) {
      fail("range: the step is zero");
    }
    Value::List items;
    for (int64_t i = begin; stride > 0 ? i < end : i > end;) {
      if (items.size() >= static_cast<size_t>(kRangeMax)) {
        fail("range: more than " + std::to_string(kRangeMax) + " numbers");
      }
      items.push_back(Value::integer(i));
      if (__builtin_add_overflow(i, stride, &i)) {
        break;
      }
    }
    return make_list(std::move(items));
  }

  Value call_method(const Value& self, const std::string& name, const Arguments& args) {
    if (self.is(Type::kString)) {
      return text_method(self.as_string(), name, args);
    }
    if (self.is(Type::kLoop)) {  // cycle
      if (args.positional.empty()) {
        fail("loop.cycle: expected values");
      }
      return args.positional[static_cast<size_t>(self.as<Loop>()->index) % args.positional.size()];
    }
    if (self.is(Type::kDict)) {
      if (name == "items") {
        return dict_items(self);
      }
      if (name == "keys") {
        return make_list(iterate(self));
      }
      if (name == "values") {
        Value::List values;
        for (const auto& [key, value] : self.as_dict()) {
          values.push_back(value);
        }
        return make_list(std::move(values));
      }
      if (name == "get") {
        const Value* key = args.find(0, "key");
        if (key == nullptr) {
          fail("get: expected a key");
        }
        const Value* found = key->is(Type::kString) ? self.find(key->as_string()) : nullptr;
        const Value* standard = args.find(1, "default");
        return found != nullptr ? *found : standard != nullptr ? *standard : Value::none();
      }
      if (name == "copy") {
        return self;
      }
    } else if (name == "copy") {
      return self;
    } else if (name == "index" || name == "count") {
      const Value* item = args.find(0, "value");
      int64_t count = 0;
      for (size_t i = 0; item != nullptr && i < self.as_list().size(); ++i) {
        if (equal(self.as_list()[i], *item)) {
          if (name == "index") {
            return Value::integer(static_cast<int64_t>(i));
          }
          ++count;
        }
      }
      if (item == nullptr || name == "index") {
        fail(name + ": no such element");
      }
      return Value::integer(count);
    }
    fail("the method " + quote_text(name) + " changes " + self.type_name() +
         ", which templates may not do");
  }

  Value dict_items(const Value& dict) {
    Value::List items;
    for (const auto& [key, value] : dict.as_dict()) {
      items.push_back(make_list({Value::string(key), value}, /*is_tuple=*/true));
    }
    return make_list(std::move(items));
  }

  Value text_method(const std::string& text, const std::string& name, const Arguments& args) {
    const auto argument = [&](size_t i) -> const std::string& {
      if (i >= args.positional.size()) {
        fail(name + ": expected " + std::to_string(i + 1) + " arguments");
      }
      return text_of(args.positional[i], name.c_str());
    };
    charge(text.size());
    if (name == "strip" || name == "lstrip" || name == "rstrip") {
      return make_text(strip(text, args.find(0, "chars"), name != "rstrip", name != "lstrip"));
    }
    if (name == "split" || name == "rsplit") {
      return split(text, args, name == "rsplit");
    }
    if (name == "splitlines") {
      Value::List lines;
      for (const std::string_view line : split_lines(text)) {
        lines.push_back(Value::string(std::string(line)));
      }
      return make_list(std::move(lines));
    }
    if (name == "startswith" || name == "endswith") {
      const auto matches = [&](const std::string& part) {
        return name == "startswith" ? text.starts_with(part) : text.ends_with(part);
      };
      if (!args.positional.empty() && args.positional[0].is(Type::kList)) {
        const auto& parts = args.positional[0].as_list();
        return Value::boolean(std::any_of(parts.begin(), parts.end(), [&](const Value& part) {
          return matches(text_of(part, name.c_str()));
        }));
      }
      return Value::boolean(matches(argument(0)));
    }
    if (name == "removeprefix") {
      return make_text(text.starts_with(argument(0)) ? text.substr(argument(0).size()) : text);
    }
    if (name == "removesuffix") {
      return make_text(text.ends_with(argument(0)) && !argument(0).empty()
                           ? text.substr(0, text.size() - argument(0).size())
                           : text);
    }
    if (name == "replace") {
      const Value* count = args.find(2, "count");
      return replace(text, argument(0), argument(1),
                     count == nullptr ? -1 : int_of(*count, "replace"));
    }
    if (name == "upper") {
      return make_text(upper(text));
    }
    if (name == "lower") {
      return make_text(lower(text));
    }
    if (name == "title") {
      return make_text(title(text, /*filter=*/false));
    }
    if (name == "capitalize") {
      return make_text(capitalize(text));
    }
    if (name == "join") {
      if (args.positional.empty()) {
        fail("join: expected a list");
      }
      return join(iterate(args.positional[0]), text, /*strict=*/true);
    }
    if (name == "find" || name == "rfind" || name == "index") {
      const size_t at = name == "rfind" ? text.rfind(argument(0)) : text.find(argument(0));
      if (at == std::string::npos) {
        if (name == "index") {
          fail("index: the text does not contain " + quote_text(argument(0)));
        }
        return Value::integer(-1);
      }
      return Value::integer(
          static_cast<int64_t>(text_length(std::string_view(text).substr(0, at))));
    }
    if (name == "count") {
      const std::string& part = argument(0);
      if (part.empty()) {
        return Value::integer(static_cast<int64_t>(text_length(text)) + 1);
      }
      int64_t count = 0;
      for (size_t at = 0; (at = text.find(part, at)) != std::string::npos; at += part.size()) {
        ++count;
      }
      return Value::integer(count);
    }
    const auto all = [&](auto&& predicate) {
      return Value::boolean(!text.empty() && std::all_of(text.begin(), text.end(), predicate));
    };
    if (name == "isdigit" || name == "isnumeric") {
      return all([](char c) { return c >= '0' && c <= '9'; });
    }
    if (name == "isalpha") {
      return all(is_letter);
    }
    if (name == "isspace") {
      return Value::boolean(!text.empty() && strip_python_space(text, true, false).empty());
    }
    if (name == "isupper" || name == "islower") {
      const bool want_upper = name == "isupper";
      return Value::boolean(
          std::any_of(text.begin(), text.end(), want_upper ? is_upper : is_lower) &&
          std::none_of(text.begin(), text.end(), want_upper ? is_lower : is_upper));
    }
    refuse("the string method " + quote_text(name) + " is not supported");
  }

  Value split(const std::string& text, const Arguments& args, bool from_right) {
    const Value* separator = args.find(0, "sep");
    const Value* count = args.find(1, "maxsplit");
    int64_t left = count == nullptr ? -1 : int_of(*count, "split");
    Value::List parts;
    const auto add = [&](std::string_view part) {
      parts.push_back(Value::string(std::string(part)));
    };
    if (separator == nullptr || separator->is(Type::kNone)) {
      if (from_right && left >= 0) {
        refuse("rsplit with a count but without a separator is not supported");
      }
      std::string_view rest = strip_python_space(text, true, false);
      while (!rest.empty()) {
        if (left == 0) {
          add(rest);
          break;
        }
        --left;
        size_t end = 0;
        while (end < rest.size()) {
          const Utf8Step step = utf8_step(rest, end);
          if (is_python_space(step.code_point) && step.kind == Utf8Step::Kind::kCharacter) {
            break;
          }
          end += step.length;
        }
        add(rest.substr(0, end));
        rest = strip_python_space(rest.substr(end), true, false);
      }
      return make_list(std::move(parts));
    }
    const std::string& mark = text_of(*separator, "split");
    if (mark.empty()) {
      fail("split: the separator is empty");
    }
    std::string_view rest = text;
    while (left != 0) {
      const size_t at = from_right ? rest.rfind(mark) : rest.find(mark);
      if (at == std::string_view::npos) {
        break;
      }
      --left;
      if (from_right) {
        add(rest.substr(at + mark.size()));
        rest = rest.substr(0, at);
      } else {
        add(rest.substr(0, at));
        rest.remove_prefix(at + mark.size());
      }
    }
    add(rest);
    if (from_right) {
      std::reverse(parts.begin(), parts.end());
    }
    return make_list(std::move(parts));
  }

  Value replace(const std::string& text, const std::string& from, const std::string& to,
                int64_t count) {
    std::string out;
    size_t at = 0;
    while (count != 0) {
      const size_t found = from.empty() ? at : text.find(from, at);
      if (found == std::string::npos || (from.empty() && at > text.size())) {
        break;
      }
      --count;
      out.append(text, at, found - at);
      out += to;
      at = found + from.size();
      if (from.empty()) {
        if (at == text.size()) {
          break;
        }
        const size_t length = utf8_step(text, at).length;
        out.append(text, at, length);
        at += length;
      }
      if (out.size() > static_cast<size_t>(limits_.output_bytes)) {
        fail("replace: the text becomes too long");
      }
    }
    if (at < text.size()) {
      out.append(text, at);
    }
    return make_text(std::move(out));
  }

  Value join(const Value::List& items, const std::string& separator, bool strict) {
    std::string out;
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) {
        out += separator;
      }
      if (strict) {
        out += text_of(items[i], "join");
      } else {
        out += text_of_any(items[i]);
      }
      if (out.size() > static_cast<size_t>(limits_.output_bytes)) {
        fail("join: the text becomes too long");
      }
    }
    return make_text(std::move(out));
  }

  // "a.b.0" as map(attribute=) and selectattr take it.
  Value attribute_path(Value value, const Value& path) {
    if (path.is_integral()) {
      return subscript(value, path);
    }
    std::string_view rest = text_of(path, "attribute");
    while (true) {
      const size_t dot = rest.find('.');
      const std::string part(rest.substr(0, dot));
      int64_t index = 0;
      const auto read = std::from_chars(part.data(), part.data() + part.size(), index);
      if (!part.empty() && read.ptr == part.data() + part.size() && read.ec == std::errc()) {
        value = subscript(value, Value::integer(index));
      } else {
        // Jinja looks for the item first here.
        value = subscript(value, Value::string(part));
      }
      if (dot == std::string_view::npos) {
        return value;
      }
      rest.remove_prefix(dot + 1);
    }
  }

  Value filter(const std::string& name, const Value& value, const Arguments& args) {
    if (name == "tojson") {
      return to_json(value, args);
    }
    if (name == "trim") {
      return make_text(strip(text_of_any(value), args.find(0, "chars"), true, true));
    }
    if (name == "length" || name == "count") {
      return length(value);
    }
    if (name == "join") {
      const Value* separator = args.find(0, "d");
      Value::List items = iterate(value);
      if (const Value* path = args.find(1, "attribute")) {
        for (Value& item : items) {
          item = attribute_path(item, *path);
        }
      }
      return join(items, separator == nullptr ? "" : text_of_any(*separator), /*strict=*/false);
    }
    if (name == "items") {
      if (value.is(Type::kUndefined)) {
        return Value::list({});
      }
      if (!value.is(Type::kDict)) {
        fail(std::string("items: expected a mapping, found ") + value.type_name());
      }
      return dict_items(value);
    }
    if (name == "dictsort") {
      if (!value.is(Type::kDict)) {
        fail(std::string("dictsort: expected a mapping, found ") + value.type_name());
      }
      Value::List items = dict_items(value).as_list();
      std::stable_sort(items.begin(), items.end(), [](const Value& a, const Value& b) {
        return lower(a.as_list()[0].as_string()) < lower(b.as_list()[0].as_string());
      });
      return make_list(std::move(items));
    }
    if (name == "upper") {
      return make_text(upper(text_of_any(value)));
    }
    if (name == "lower") {
      return make_text(lower(text_of_any(value)));
    }
    if (name == "title") {
      return make_text(title(text_of_any(value), /*filter=*/true));
    }
    if (name == "capitalize") {
      return make_text(capitalize(text_of_any(value)));
    }
    if (name == "string" || name == "safe") {
      return value.is(Type::kString) || name == "safe" ? value : make_text(text_of_any(value));
    }
    if (name == "default" || name == "d") {
      const Value* boolean = args.find(1, "boolean");
      const bool missing =
          value.is(Type::kUndefined) || (boolean != nullptr && boolean->truth() && !value.truth());
      const Value* standard = args.find(0, "default_value");
      return !missing ? value : standard != nullptr ? *standard : Value::string("");
    }
    if (name == "list") {
      return make_list(iterate(value));
    }
    if (name == "first" || name == "last") {
      const Value::List items = iterate(value);
      return items.empty()     ? Value::undefined("the " + name + " of nothing")
             : name == "first" ? items.front()
                               : items.back();
    }
    if (name == "replace") {
      const Value* from = args.find(0, "old");
      const Value* to = args.find(1, "new");
      const Value* count = args.find(2, "count");
      if (from == nullptr || to == nullptr) {
        fail("replace: expected two texts");
      }
      return replace(text_of_any(value), text_of_any(*from), text_of_any(*to),
                     count == nullptr || count->is(Type::kNone) ? -1 : int_of(*count, "replace"));
    }
    if (name == "int") {
      return to_int(value, args);
    }
    if (name == "float") {
      return to_float(value, args);
    }
    if (name == "abs") {
      if (!value.is_number()) {
        fail(std::string("abs: expected a number, found ") + value.type_name());
      }
      return value.is_integral() && value.as_int() != INT64_MIN
                 ? Value::integer(std::abs(value.as_int()))
                 : Value::real(std::fabs(value.as_double()));
    }
    if (name == "indent") {
      return indent(text_of_any(value), args);
    }
    if (name == "reverse") {
      Value::List items = iterate(value);
      std::reverse(items.begin(), items.end());
      return value.is(Type::kString) ? join(items, "", /*strict=*/true)
                                     : make_list(std::move(items));
    }
    if (name == "unique") {
      Value::List kept;
      for (const Value& item : iterate(value)) {
        step();
        if (!contains(Value::list(kept), item)) {
          kept.push_back(item);
        }
      }
      return make_list(std::move(kept));
    }
    if (name == "sort") {
      return sort(iterate(value), args);
    }
    if (name == "min" || name == "max") {
      const Value::List items = iterate(value);
      const auto order = [this](const Value& a, const Value& b) { return less(a, b); };
      return items.empty()   ? Value::undefined("the " + name + " of nothing")
             : name == "min" ? *std::min_element(items.begin(), items.end(), order)
                             : *std::max_element(items.begin(), items.end(), order);
    }
    if (name == "sum") {
      Value total = Value::integer(0);
      for (const Value& item : iterate(value)) {
        const Value* path = args.find(0, "attribute");
        total = arithmetic("+", total, path == nullptr ? item : attribute_path(item, *path));
      }
      return total;
    }
    if (name == "map") {
      return map(iterate(value), args);
    }
    if (name == "select" || name == "reject" || name == "selectattr" || name == "rejectattr") {
      return select(name, iterate(value), args);
    }
    refuse("the filter " + quote_text(name) + " is not supported");
  }

  Value length(const Value& value) {
    switch (value.type()) {
      case Type::kUndefined:
        return Value::integer(0);
      case Type::kString:
        charge(value.as_string().size());
        return Value::integer(static_cast<int64_t>(text_length(value.as_string())));
      case Type::kList:
        return Value::integer(static_cast<int64_t>(value.as_list().size()));
      case Type::kDict:
        return Value::integer(static_cast<int64_t>(value.as_dict().size()));
      default:
        fail(std::string("length: ") + value.type_name() + " has none");
    }
  }

  Value to_json(const Value& value, const Arguments& args) {
    // As transformers defines it: tojson(x, ensure_ascii=False, indent=None, separators=None,
    // sort_keys=False).
    JinjaJsonStyle style;
    if (const Value* ensure = args.find(0, "ensure_ascii")) {
      style.ensure_ascii = ensure->truth();
    }
    if (const Value* indent = args.find(1, "indent");
        indent != nullptr && !indent->is(Type::kNone)) {
      style.has_indent = true;
      style.item_separator = ",";
      if (indent->is(Type::kString)) {
        style.indent = indent->as_string();
      } else {
        style.indent.assign(
            static_cast<size_t>(std::clamp<int64_t>(int_of(*indent, "tojson"), 0, 64)), ' ');
      }
      if (style.indent.size() > 64) {
        fail("tojson: the indent is longer than 64 characters");
      }
    }
    if (const Value* separators = args.find(2, "separators");
        separators != nullptr && !separators->is(Type::kNone)) {
      if (!separators->is(Type::kList) || separators->as_list().size() != 2) {
        fail("tojson: separators are not a pair");
      }
      style.item_separator = text_of(separators->as_list()[0], "tojson");
      style.key_separator = text_of(separators->as_list()[1], "tojson");
      if (style.item_separator.size() > 64 || style.key_separator.size() > 64) {
        fail("tojson: a separator is longer than 64 characters");
      }
    }
    if (const Value* sort_keys = args.find(3, "sort_keys")) {
      style.sort_keys = sort_keys->truth();
    }
    // An escape makes six bytes of one, an indent up to 64 a level.
    const int64_t worst =
        value.weight() *
        (6 + static_cast<int64_t>(style.item_separator.size() + style.key_separator.size()) +
         static_cast<int64_t>(style.indent.size()) * value.depth());
    if (worst > 8 * limits_.output_bytes) {
      fail("tojson: the text becomes too long");
    }
    return make_text(jinja_to_json(value, style));
  }

  Value to_int(const Value& value, const Arguments& args) {
    const Value* standard = args.find(0, "default");
    const Value fallback = standard == nullptr ? Value::integer(0) : *standard;
    if (const Value* base = args.find(1, "base"); base != nullptr && int_of(*base, "int") != 10) {
      refuse("int with a base is not supported");
    }
    if (value.is_integral()) {
      return Value::integer(value.as_int());
    }
    double real = 0;
    if (value.is(Type::kFloat)) {
      real = value.as_double();
    } else if (value.is(Type::kString)) {
      std::string_view text = strip_python_space(value.as_string(), true, true);
      text.remove_prefix(text.starts_with('+'));
      int64_t integer = 0;
      const char* end = text.data() + text.size();
      auto read = std::from_chars(text.data(), end, integer);
      if (!text.empty() && read.ptr == end && read.ec == std::errc()) {
        return Value::integer(integer);
      }
      read = std::from_chars(text.data(), end, real);
      if (text.empty() || read.ptr != end || read.ec != std::errc()) {
        return fallback;
      }
    } else {
      return fallback;
    }
    return std::fabs(real) < 9e18 ? Value::integer(static_cast<int64_t>(real)) : fallback;
  }

  Value to_float(const Value& value, const Arguments& args) {
    const Value* standard = args.find(0, "default");
    if (value.is_number()) {
      return Value::real(value.as_double());
    }
    if (value.is(Type::kString)) {
      std::string_view text = strip_python_space(value.as_string(), true, true);
      text.remove_prefix(text.starts_with('+'));
      double real = 0;
      const char* end = text.data() + text.size();
      const auto read = std::from_chars(text.data(), end, real);
      if (!text.empty() && read.ptr == end && read.ec == std::errc()) {
        return Value::real(real);
      }
    }
    return standard == nullptr ? Value::real(0) : *standard;
  }

  Value indent(const std::string& text, const Arguments& args) {
    const Value* width = args.find(0, "width");
    const Value* first = args.find(1, "first");
    const Value* blank = args.find(2, "blank");
    const std::string by =
        width == nullptr ? "    "
        : width->is(Type::kString)
            ? width->as_string()
            : std::string(
                  static_cast<size_t>(std::clamp<int64_t>(int_of(*width, "indent"), 0, 1024)), ' ');
    std::string out = first != nullptr && first->truth() ? by : "";
    const std::string ended = text + "\n";
    const std::vector<std::string_view> lines = split_lines(ended);
    for (size_t i = 0; i < lines.size(); ++i) {
      if (i > 0) {
        out += '\n';
        if (!lines[i].empty() || (blank != nullptr && blank->truth())) {
          out += by;
        }
      }
      out += lines[i];
      if (out.size() > static_cast<size_t>(limits_.output_bytes)) {
        fail("indent: the text becomes too long");
      }
    }
    return make_text(std::move(out));
  }

  Value sort(Value::List items, const Arguments& args) {
    const Value* reverse = args.find(0, "reverse");
    const Value* case_sensitive = args.find(1, "case_sensitive");
    const Value* path = args.find(2, "attribute");
    std::vector<std::pair<Value, Value>> keyed;
    for (const Value& item : items) {
      Value key = path == nullptr ? item : attribute_path(item, *path);
      if (key.is(Type::kString) && (case_sensitive == nullptr || !case_sensitive->truth())) {
        key = make_text(lower(key.as_string()));
      }
      keyed.emplace_back(std::move(key), item);
    }
    const bool down = reverse != nullptr && reverse->truth();
    std::stable_sort(keyed.begin(), keyed.end(), [&](const auto& a, const auto& b) {
      return down ? less(b.first, a.first) : less(a.first, b.first);
    });
    for (size_t i = 0; i < items.size(); ++i) {
      items[i] = std::move(keyed[i].second);
    }
    return make_list(std::move(items));
  }

  // The arguments that follow the name of a filter or test.
  static Arguments rest_of(const Arguments& args, size_t skipped) {
    Arguments rest;
    rest.positional.assign(args.positional.begin() + static_cast<std::ptrdiff_t>(
                                                         std::min(skipped, args.positional.size())),
                           args.positional.end());
    rest.named = args.named;
    return rest;
  }

  Value map(const Value::List& items, const Arguments& args) {
    Value::List out;
    const Value* path = args.find(SIZE_MAX, "attribute");
    const Value* standard = args.find(SIZE_MAX, "default");
    if (path == nullptr && args.positional.empty()) {
      fail("map: expected a filter or attribute=");
    }
    for (const Value& item : items) {
      step();
      if (path != nullptr) {
        Value value = attribute_path(item, *path);
        out.push_back(value.is(Type::kUndefined) && standard != nullptr ? *standard
                                                                        : std::move(value));
      } else {
        out.push_back(filter(text_of(args.positional[0], "map"), item, rest_of(args, 1)));
      }
    }
    return make_list(std::move(out));
  }

  Value select(const std::string& name, const Value::List& items, const Arguments& args) {
    const bool by_attribute = name.ends_with("attr");
    const bool wanted = name.starts_with("select");
    const size_t test_at = by_attribute ? 1 : 0;
    if (by_attribute && args.positional.empty()) {
      fail(name + ": expected the name of an attribute");
    }
    Value::List out;
    for (const Value& item : items) {
      step();
      const Value value = by_attribute ? attribute_path(item, args.positional[0]) : item;
      const bool passes = args.positional.size() > test_at
                              ? test(text_of(args.positional[test_at], name.c_str()), value,
                                     rest_of(args, test_at + 1))
                              : value.truth();
      if (passes == wanted) {
        out.push_back(item);
      }
    }
    return make_list(std::move(out));
  }

  bool test(const std::string& name, const Value& value, const Arguments& args) {
    const auto other = [&]() -> const Value& {
      if (args.positional.empty()) {
        fail("the test " + quote_text(name) + " needs a value to compare with");
      }
      return args.positional[0];
    };
    const auto integer = [&] { return int_of(value, name.c_str()); };
    if (name == "defined") {
      return !value.is(Type::kUndefined);
    }
    if (name == "undefined") {
      return value.is(Type::kUndefined);
    }
    if (name == "none") {
      return value.is(Type::kNone);
    }
    if (name == "string") {
      return value.is(Type::kString);
    }
    if (name == "mapping") {
      return value.is(Type::kDict);
    }
    if (name == "iterable" || name == "sequence") {
      return value.is(Type::kString) || value.is(Type::kList) || value.is(Type::kDict) ||
             value.is(Type::kUndefined);
    }
    if (name == "number") {
      return value.is_number();
    }
    if (name == "integer") {
      return value.is(Type::kInt);
    }
    if (name == "float") {
      return value.is(Type::kFloat);
    }
    if (name == "boolean") {
      return value.is(Type::kBool);
    }
    if (name == "true" || name == "false") {
      return value.is(Type::kBool) && value.truth() == (name == "true");
    }
    if (name == "callable") {
      return value.is(Type::kMacro) || value.is(Type::kMethod) || value.is(Type::kFunction);
    }
    if (name == "equalto" || name == "eq" || name == "==" || name == "sameas") {
      return (name != "sameas" || value.type() == other().type()) && equal(value, other());
    }
    if (name == "ne" || name == "!=") {
      return !equal(value, other());
    }
    if (name == "lt" || name == "lessthan" || name == "<") {
      return less(value, other());
    }
    if (name == "gt" || name == "greaterthan" || name == ">") {
      return less(other(), value);
    }
    if (name == "le" || name == "<=") {
      return compare("<=", value, other());
    }
    if (name == "ge" || name == ">=") {
      return compare(">=", value, other());
    }
    if (name == "in") {
      return contains(other(), value);
    }
    if (name == "odd") {
      return integer() % 2 != 0;
    }
    if (name == "even") {
      return integer() % 2 == 0;
    }
    if (name == "divisibleby") {
      const int64_t by = int_of(other(), "divisibleby");
      if (by == 0) {
        fail("division by zero");
      }
      return by == -1 || integer() % by == 0;
    }
    refuse("the test " + quote_text(name) + " is not supported");
  }

  const JinjaLimits& limits_;
  std::string* out_;
  std::vector<Frame> frames_;
  size_t base_ = 0;  // names are looked up in frames from here on, then in the first
  Value block_text_;
  std::vector<std::shared_ptr<Namespace>> namespaces_;
  int64_t steps_ = 0;
  int64_t total_bytes_ = 0;
  int64_t loop_depth_ = 0;
  int level_ = 0;
};

Status to_status(const JinjaError& error, const std::string& what) {
  const std::string line = error.line > 0 ? " line " + std::to_string(error.line) : "";
  std::string message = what + line + ": " + error.message;
  return {error.code, std::move(message)};
}

}  // namespace

Result<JinjaTemplate> JinjaTemplate::parse(std::string_view source, const std::string& what) {
  try {
    return JinjaTemplate(parse_jinja(source), what);
  } catch (const JinjaError& error) {
    return to_status(error, what);
  }
}

Result<std::string> JinjaTemplate::render(const OrderedJson& variables,
                                          const JinjaLimits& limits) const {
  try {
    std::string out;
    Interpreter interpreter(limits, &out);
    for (const auto& [name, value] : variables.items()) {
      interpreter.define(name, JinjaValue::from_json(value));
    }
    interpreter.run(*root_);
    return out;
  } catch (const JinjaError& error) {
    return to_status(error, what_);
  }
}

}  // namespace lacuna
