// Values of the Jinja interpreter: Python's, as far as templates see them. Immutable except for
// namespaces.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/jinja.h"

namespace lacuna {

// Thrown within the interpreter only; JinjaTemplate's functions turn it into a Status.
struct JinjaError {
  StatusCode code;
  std::string message;
  int line = 0;  // 0: not known yet
};

// A template may build a list of lists of lists: recursion over values ends here. And a list may
// hold another twice, which doubles what its text needs: weight is the size of a value written out.
inline constexpr int kJinjaValueDepthMax = 96;
inline constexpr int64_t kJinjaValueWeightMax = int64_t{1} << 26;

class JinjaValue {
 public:
  enum class Type : uint8_t {
    kUndefined,
    kNone,
    kBool,
    kInt,
    kFloat,
    kString,
    kList,
    kDict,
    kNamespace,
    kMethod,    // of another value: text.strip
    kFunction,  // range, namespace, ...
    kMacro,
    kLoop,
  };

  using List = std::vector<JinjaValue>;
  // In order of insertion. Searched from the front: objects in templates are small.
  using Dict = std::vector<std::pair<std::string, JinjaValue>>;

  JinjaValue() = default;
  static JinjaValue undefined(std::string name);
  static JinjaValue none() { return JinjaValue(Type::kNone); }
  static JinjaValue boolean(bool value);
  static JinjaValue integer(int64_t value);
  static JinjaValue real(double value);
  static JinjaValue string(std::string value);
  static JinjaValue list(List items, bool is_tuple = false);
  static JinjaValue dict(Dict members);
  static JinjaValue from_json(const OrderedJson& json);
  // Values that the interpreter gives a meaning to.
  static JinjaValue other(Type type, std::shared_ptr<void> object);

  Type type() const { return type_; }
  bool is(Type type) const { return type_ == type; }
  bool is_number() const { return is_integral() || type_ == Type::kFloat; }
  bool is_integral() const { return type_ == Type::kInt || type_ == Type::kBool; }
  bool is_tuple() const { return is(Type::kList) && flag_; }

  bool truth() const;
  // Of an integer or boolean.
  int64_t as_int() const { return integer_; }
  double as_double() const { return is(Type::kFloat) ? real_ : static_cast<double>(integer_); }
  // Of the matching type only. Of an undefined value: its name.
  const std::string& as_string() const { return static_cast<Text*>(object_.get())->text; }
  const List& as_list() const { return static_cast<Items*>(object_.get())->items; }
  const Dict& as_dict() const { return static_cast<Members*>(object_.get())->members; }
  template <class T>
  T* as() const {
    return static_cast<T*>(object_.get());
  }
  const void* identity() const { return object_.get(); }

  const JinjaValue* find(std::string_view key) const;  // in a dict; null if absent
  int depth() const;
  int64_t weight() const;

  // Python's str() and repr().
  std::string to_text() const;
  std::string repr() const;
  // For messages: "a string", "none", ...
  const char* type_name() const;

 private:
  struct Text {
    std::string text;
  };
  struct Items {
    List items;
    int depth = 0;
    int64_t weight = 0;
  };
  struct Members {
    Dict members;
    int depth = 0;
    int64_t weight = 0;
  };

  explicit JinjaValue(Type type) : type_(type) {}

  Type type_ = Type::kUndefined;
  bool flag_ = false;  // of a list: it is a tuple
  union {
    int64_t integer_ = 0;
    double real_;
  };
  std::shared_ptr<void> object_;
};

bool jinja_equal(const JinjaValue& a, const JinjaValue& b);
// a < b. Throws for values that have no order.
bool jinja_less(const JinjaValue& a, const JinjaValue& b);

struct JinjaJsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  bool has_indent = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
// Python's json.dumps.
std::string jinja_to_json(const JinjaValue& value, const JinjaJsonStyle& style);

// Python's idea of white space (str.isspace).
bool is_python_space(char32_t code_point);
std::string_view strip_python_space(std::string_view text, bool left, bool right);

}  // namespace lacuna
