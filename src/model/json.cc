// A DOM builder over nlohmann's SAX interface: unlike its own parser, it can stop at a duplicate
// key or at too deep a nesting.
#include "model/json.h"

#include <utility>
#include <vector>

namespace lacuna {
namespace {

class Builder : public nlohmann::json_sax<Json> {
 public:
  Json root;
  std::string error;

  bool null() override { return place(nullptr) != nullptr; }
  bool boolean(bool value) override { return place(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return place(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return place(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return place(value) != nullptr;
  }
  bool string(string_t& value) override { return place(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    auto [member, inserted] = stack_.back()->get_ref<Json::object_t&>().emplace(name, nullptr);
    if (!inserted) {
      error = "duplicate key " + quote_text(name);
      return false;
    }
    member_ = &member->second;
    return true;
  }

  bool parse_error(std::size_t position, const std::string& last_token,
                   const nlohmann::json::exception&) override {
    error =
        "not valid JSON at byte " + std::to_string(position) + ", near " + quote_text(last_token);
    return false;
  }

 private:
  Json* place(Json value) {
    if (stack_.empty()) {
      root = std::move(value);
      return &root;
    }
    Json& parent = *stack_.back();
    if (parent.is_array()) {
      // Growing the list moves its elements, but all of them are complete: only the last one of
      // any list on the stack is still open.
      parent.push_back(std::move(value));
      return &parent.back();
    }
    *member_ = std::move(value);
    return member_;
  }

  bool open(Json container) {
    if (stack_.size() >= static_cast<size_t>(kJsonDepthMax)) {
      error = "nested more than " + std::to_string(kJsonDepthMax) + " deep";
      return false;
    }
    stack_.push_back(place(std::move(container)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  std::vector<Json*> stack_;
  Json* member_ = nullptr;  // where the value of the last key goes
};

}  // namespace

Result<Json> parse_json(std::string_view text, const std::string& what) {
  Builder builder;
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return data_loss(what + ": " + builder.error);
  }
  return std::move(builder.root);
}

std::string quote_text(std::string_view text) {
  constexpr size_t kShownMax = 96;
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  size_t shown = text.size();
  if (shown > kShownMax) {
    shown = kShownMax;
    while (shown > 0 && (static_cast<unsigned char>(text[shown]) & 0xC0) == 0x80) {
      --shown;  // do not cut a character in two
    }
  }
  for (const char c : text.substr(0, shown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7F) {
      out += {'\\', 'x', kHex[byte >> 4], kHex[byte & 15]};
    } else {
      out += c;
    }
  }
  return out + (shown < text.size() ? "...\"" : "\"");
}

std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::string:
      return quote_text(value.get_ref<const std::string&>());
    case Json::value_t::array:
      return "a list of " + std::to_string(value.size());
    case Json::value_t::object:
      return "an object";
    default:
      return value.dump();
  }
}

const Json* find_member(const Json& object, std::string_view name) {
  if (!object.is_object()) {
    return nullptr;
  }
  const auto& members = object.get_ref<const Json::object_t&>();
  const auto at = members.find(std::string(name));
  return at == members.end() || at->second.is_null() ? nullptr : &at->second;
}

}  // namespace lacuna
