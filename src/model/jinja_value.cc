// Values of the Jinja interpreter: construction, comparison and their texts.
#include "model/jinja_value.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "model/utf8.h"

namespace lacuna {
namespace {

constexpr size_t kRequestJsonDepthMax = 64;
constexpr int kRequestJsonMembersMax = 4096;
constexpr char kHex[] = "0123456789abcdef";

// Objects are searched from the front, so their size is bounded: otherwise a request of one object
// with many members would take minutes.
class ExtentCheck : public OrderedJson::json_sax_t {
 public:
  std::string error;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(); }
  bool start_array(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t&) override {
    if (++num_members_.back() > kRequestJsonMembersMax) {
      error = "an object has more than " + std::to_string(kRequestJsonMembersMax) + " members";
      return false;
    }
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::json::exception&) override {
    error = "not valid JSON at byte " + std::to_string(position);
    return false;
  }

 private:
  bool open() {
    num_members_.push_back(0);
    if (num_members_.size() > kRequestJsonDepthMax) {
      error = "nested more than " + std::to_string(kRequestJsonDepthMax) + " deep";
      return false;
    }
    return true;
  }
  bool close() {
    num_members_.pop_back();
    return true;
  }

  std::vector<int> num_members_;
};

// Python's repr of a float: the shortest digits that read back, with an exponent below 1e-4 and
// from 1e16 on.
std::string float_text(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value < 0 ? "-inf" : "inf";
  }
  char buffer[64];
  const auto shortest =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::scientific);
  std::string text(buffer, shortest.ptr);
  const size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  if (exponent < -4 || exponent >= 16) {
    return text;
  }
  const auto fixed =
      std::to_chars(buffer, buffer + sizeof(buffer), value, std::chars_format::fixed);
  text.assign(buffer, fixed.ptr);
  return text.find('.') == std::string::npos ? text + ".0" : text;
}

std::string string_repr(const std::string& text) {
  const bool has_single = text.find('\'') != std::string::npos;
  const char quote = has_single && text.find('"') == std::string::npos ? '"' : '\'';
  std::string out(1, quote);
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == quote || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  return out + quote;
}

void append_unicode_escape(uint32_t unit, std::string* out) {
  *out += {'\\',           'u', kHex[unit >> 12 & 15], kHex[unit >> 8 & 15], kHex[unit >> 4 & 15],
           kHex[unit & 15]};
}

void append_json_string(const std::string& text, bool ensure_ascii, std::string* out) {
  *out += '"';
  for (size_t at = 0; at < text.size();) {
    const Utf8Step step = utf8_step(text, at);
    const char32_t c = step.code_point;
    if (c >= 0x80 && ensure_ascii) {
      if (c >= 0x10000) {
        append_unicode_escape(0xD800 + ((c - 0x10000) >> 10), out);
        append_unicode_escape(0xDC00 + ((c - 0x10000) & 0x3FF), out);
      } else {
        append_unicode_escape(c, out);
      }
    } else if (c == '"' || c == '\\') {
      *out += {'\\', static_cast<char>(c)};
    } else if (c >= 0x20 || step.kind != Utf8Step::Kind::kCharacter) {
      out->append(text, at, step.length);
    } else if (c == '\n') {
      *out += "\\n";
    } else if (c == '\r') {
      *out += "\\r";
    } else if (c == '\t') {
      *out += "\\t";
    } else if (c == '\b') {
      *out += "\\b";
    } else if (c == '\f') {
      *out += "\\f";
    } else {
      append_unicode_escape(c, out);
    }
    at += step.length;
  }
  *out += '"';
}

void append_json(const JinjaValue& value, const JinjaJsonStyle& style, int level,
                 std::string* out) {
  using Type = JinjaValue::Type;
  const auto new_line = [&](int levels) {
    if (style.has_indent) {
      *out += '\n';
      for (int i = 0; i < levels; ++i) {
        *out += style.indent;
      }
    }
  };
  switch (value.type()) {
    case Type::kNone:
      *out += "null";
      return;
    case Type::kBool:
      *out += value.truth() ? "true" : "false";
      return;
    case Type::kInt:
      *out += std::to_string(value.as_int());
      return;
    case Type::kFloat: {
      const double real = value.as_double();
      *out += std::isnan(real)   ? "NaN"
              : std::isinf(real) ? (real < 0 ? "-Infinity" : "Infinity")
                                 : float_text(real);
      return;
    }
    case Type::kString:
      append_json_string(value.as_string(), style.ensure_ascii, out);
      return;
    case Type::kList: {
      *out += '[';
      bool first = true;
      for (const JinjaValue& item : value.as_list()) {
        *out += first ? "" : style.item_separator;
        first = false;
        new_line(level + 1);
        append_json(item, style, level + 1, out);
      }
      if (!first) {
        new_line(level);
      }
      *out += ']';
      return;
    }
    case Type::kDict: {
      std::vector<const JinjaValue::Dict::value_type*> members;
      for (const auto& member : value.as_dict()) {
        members.push_back(&member);
      }
      if (style.sort_keys) {
        std::stable_sort(members.begin(), members.end(),
                         [](const auto* a, const auto* b) { return a->first < b->first; });
      }
      *out += '{';
      bool first = true;
      for (const auto* member : members) {
        *out += first ? "" : style.item_separator;
        first = false;
        new_line(level + 1);
        append_json_string(member->first, style.ensure_ascii, out);
        *out += style.key_separator;
        append_json(member->second, style, level + 1, out);
      }
      if (!first) {
        new_line(level);
      }
      *out += '}';
      return;
    }
    default:
      throw JinjaError{StatusCode::kInvalidArgument,
                       std::string("tojson: ") + value.type_name() + " has no JSON form"};
  }
}

void check_extent(int depth, int64_t weight) {
  if (depth > kJinjaValueDepthMax) {
    throw JinjaError{
        StatusCode::kInvalidArgument,
        "values are nested more than " + std::to_string(kJinjaValueDepthMax) + " deep"};
  }
  if (weight > kJinjaValueWeightMax) {
    throw JinjaError{StatusCode::kInvalidArgument, "a value is larger than 64 MiB"};
  }
}

}  // namespace

Result<OrderedJson> parse_ordered_json(std::string_view text, const std::string& what) {
  ExtentCheck check;
  if (!OrderedJson::sax_parse(text.begin(), text.end(), &check)) {
    return invalid_argument(what + ": " + check.error);
  }
  OrderedJson json = OrderedJson::parse(text.begin(), text.end(), nullptr,
                                        /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return invalid_argument(what + ": not valid JSON");
  }
  return json;
}

JinjaValue JinjaValue::undefined(std::string name) {
  JinjaValue value(Type::kUndefined);
  value.object_ = std::make_shared<Text>(Text{std::move(name)});
  return value;
}

JinjaValue JinjaValue::boolean(bool flag) {
  JinjaValue value(Type::kBool);
  value.integer_ = flag ? 1 : 0;
  return value;
}

JinjaValue JinjaValue::integer(int64_t integer) {
  JinjaValue value(Type::kInt);
  value.integer_ = integer;
  return value;
}

JinjaValue JinjaValue::real(double real) {
  JinjaValue value(Type::kFloat);
  value.real_ = real;
  return value;
}

JinjaValue JinjaValue::string(std::string text) {
  JinjaValue value(Type::kString);
  value.object_ = std::make_shared<Text>(Text{std::move(text)});
  return value;
}

JinjaValue JinjaValue::list(List items, bool is_tuple) {
  int depth = 1;
  int64_t weight = 1;
  for (const JinjaValue& item : items) {
    depth = std::max(depth, item.depth() + 1);
    weight += item.weight();
  }
  check_extent(depth, weight);
  JinjaValue value(Type::kList);
  value.flag_ = is_tuple;
  value.object_ = std::make_shared<Items>(Items{std::move(items), depth, weight});
  return value;
}

JinjaValue JinjaValue::dict(Dict members) {
  int depth = 1;
  int64_t weight = 1;
  for (const auto& [key, member] : members) {
    depth = std::max(depth, member.depth() + 1);
    weight += static_cast<int64_t>(key.size()) + member.weight();
  }
  check_extent(depth, weight);
  JinjaValue value(Type::kDict);
  value.object_ = std::make_shared<Members>(Members{std::move(members), depth, weight});
  return value;
}

JinjaValue JinjaValue::from_json(const OrderedJson& json) {
  switch (json.type()) {
    case OrderedJson::value_t::null:
      return none();
    case OrderedJson::value_t::boolean:
      return boolean(json.get<bool>());
    case OrderedJson::value_t::number_integer:
      return integer(json.get<int64_t>());
    case OrderedJson::value_t::number_unsigned: {
      const uint64_t number = json.get<uint64_t>();
      return number <= INT64_MAX ? integer(static_cast<int64_t>(number))
                                 : real(static_cast<double>(number));
    }
    case OrderedJson::value_t::number_float:
      return real(json.get<double>());
    case OrderedJson::value_t::string:
      return string(json.get<std::string>());
    case OrderedJson::value_t::array: {
      List items;
      for (const OrderedJson& item : json) {
        items.push_back(from_json(item));
      }
      return list(std::move(items));
    }
    case OrderedJson::value_t::object: {
      Dict members;
      for (const auto& [key, member] : json.items()) {
        members.emplace_back(key, from_json(member));
      }
      return dict(std::move(members));
    }
    default:
      return none();
  }
}

JinjaValue JinjaValue::other(Type type, std::shared_ptr<void> object) {
  JinjaValue value(type);
  value.object_ = std::move(object);
  return value;
}

bool JinjaValue::truth() const {
  switch (type_) {
    case Type::kUndefined:
    case Type::kNone:
      return false;
    case Type::kBool:
    case Type::kInt:
      return integer_ != 0;
    case Type::kFloat:
      return real_ != 0;
    case Type::kString:
      return !as_string().empty();
    case Type::kList:
      return !as_list().empty();
    case Type::kDict:
      return !as_dict().empty();
    default:
      return true;
  }
}

const JinjaValue* JinjaValue::find(std::string_view key) const {
  for (const auto& [name, value] : as_dict()) {
    if (name == key) {
      return &value;
    }
  }
  return nullptr;
}

int JinjaValue::depth() const {
  switch (type_) {
    case Type::kList:
      return static_cast<Items*>(object_.get())->depth;
    case Type::kDict:
      return static_cast<Members*>(object_.get())->depth;
    default:
      return 1;
  }
}

int64_t JinjaValue::weight() const {
  switch (type_) {
    case Type::kString:
      return 1 + static_cast<int64_t>(as_string().size());
    case Type::kList:
      return static_cast<Items*>(object_.get())->weight;
    case Type::kDict:
      return static_cast<Members*>(object_.get())->weight;
    default:
      return 1;
  }
}

std::string JinjaValue::to_text() const {
  switch (type_) {
    case Type::kUndefined:
      return "";
    case Type::kString:
      return as_string();
    default:
      return repr();
  }
}

std::string JinjaValue::repr() const {
  switch (type_) {
    case Type::kUndefined:
      return "Undefined";
    case Type::kNone:
      return "None";
    case Type::kBool:
      return integer_ != 0 ? "True" : "False";
    case Type::kInt:
      return std::to_string(integer_);
    case Type::kFloat:
      return float_text(real_);
    case Type::kString:
      return string_repr(as_string());
    case Type::kList: {
      std::string out = flag_ ? "(" : "[";
      for (size_t i = 0; i < as_list().size(); ++i) {
        out += (i == 0 ? "" : ", ") + as_list()[i].repr();
      }
      if (flag_ && as_list().size() == 1) {
        out += ',';
      }
      return out + (flag_ ? ")" : "]");
    }
    case Type::kDict: {
      std::string out = "{";
      for (const auto& [key, value] : as_dict()) {
        out += (out.size() == 1 ? "" : ", ") + string_repr(key) + ": " + value.repr();
      }
      return out + "}";
    }
    default:
      return std::string("<") + type_name() + ">";
  }
}

const char* JinjaValue::type_name() const {
  switch (type_) {
    case Type::kUndefined:
      return "an undefined value";
    case Type::kNone:
      return "none";
    case Type::kBool:
      return "a boolean";
    case Type::kInt:
      return "an integer";
    case Type::kFloat:
      return "a float";
    case Type::kString:
      return "a string";
    case Type::kList:
      return flag_ ? "a tuple" : "a list";
    case Type::kDict:
      return "a mapping";
    case Type::kNamespace:
      return "a namespace";
    case Type::kMethod:
      return "a method";
    case Type::kFunction:
      return "a function";
    case Type::kMacro:
      return "a macro";
    case Type::kLoop:
      return "the loop";
  }
  return "a value";
}

bool jinja_equal(const JinjaValue& a, const JinjaValue& b) {
  using Type = JinjaValue::Type;
  if (a.is_integral() && b.is_integral()) {
    return a.as_int() == b.as_int();
  }
  if (a.is_number() && b.is_number()) {
    return a.as_double() == b.as_double();
  }
  if (a.type() != b.type()) {
    return false;
  }
  switch (a.type()) {
    case Type::kUndefined:
    case Type::kNone:
      return true;
    case Type::kString:
      return a.as_string() == b.as_string();
    case Type::kList: {
      const auto& x = a.as_list();
      const auto& y = b.as_list();
      return a.is_tuple() == b.is_tuple() &&
             std::equal(x.begin(), x.end(), y.begin(), y.end(), jinja_equal);
    }
    case Type::kDict:
      return a.as_dict().size() == b.as_dict().size() &&
             std::all_of(a.as_dict().begin(), a.as_dict().end(), [&](const auto& member) {
               const JinjaValue* other = b.find(member.first);
               return other != nullptr && jinja_equal(member.second, *other);
             });
    default:
      return a.identity() == b.identity();
  }
}

bool jinja_less(const JinjaValue& a, const JinjaValue& b) {
  using Type = JinjaValue::Type;
  if (a.is_integral() && b.is_integral()) {
    return a.as_int() < b.as_int();
  }
  if (a.is_number() && b.is_number()) {
    return a.as_double() < b.as_double();
  }
  if (a.is(Type::kString) && b.is(Type::kString)) {
    return a.as_string() < b.as_string();  // UTF-8 sorts as its code points do
  }
  if (a.is(Type::kList) && b.is(Type::kList)) {
    const auto& x = a.as_list();
    const auto& y = b.as_list();
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!jinja_equal(x[i], y[i])) {
        return jinja_less(x[i], y[i]);
      }
    }
    return x.size() < y.size();
  }
  throw JinjaError{StatusCode::kInvalidArgument,
                   std::string("no order between ") + a.type_name() + " and " + b.type_name()};
}

std::string jinja_to_json(const JinjaValue& value, const JinjaJsonStyle& style) {
  std::string out;
  append_json(value, style, 0, &out);
  return out;
}

bool is_python_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20) || c == 0x85 || c == 0xA0 ||
         c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F ||
         c == 0x205F || c == 0x3000;
}

std::string_view strip_python_space(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    const Utf8Step step = utf8_step(text, 0);
    if (step.kind != Utf8Step::Kind::kCharacter || !is_python_space(step.code_point)) {
      break;
    }
    text.remove_prefix(step.length);
  }
  while (right && !text.empty()) {
    size_t at = text.size() - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) {
      --at;
    }
    const Utf8Step step = utf8_step(text, at);
    if (step.kind != Utf8Step::Kind::kCharacter || !is_python_space(step.code_point)) {
      break;
    }
    text.remove_suffix(text.size() - at);
  }
  return text;
}

}  // namespace lacuna
