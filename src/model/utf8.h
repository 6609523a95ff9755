// UTF-8 one character at a time, with Unicode's rule for broken text: each maximal part of a
// sequence that cannot be completed counts as one error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lacuna {

struct Utf8Step {
  enum class Kind : uint8_t {
    kCharacter,
    kInvalid,     // `length` bytes that begin no character, whatever follows
    kIncomplete,  // the text ends within a character that is right so far
  };
  Kind kind = Kind::kCharacter;
  size_t length = 0;  // bytes, at least 1
  char32_t code_point = 0;
};

// The character that begins at text[at]; `at` is below text.size(). Surrogates, overlong forms and
// code points above U+10FFFF are invalid (Unicode 16, table 3-7).
constexpr Utf8Step utf8_step(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(at);
  if (lead < 0x80) {
    return {Utf8Step::Kind::kCharacter, 1, lead};
  }
  size_t length = 0;
  unsigned char low = 0x80;  // bounds of the second byte
  unsigned char high = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    length = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    length = 3;
    low = lead == 0xE0 ? 0xA0 : low;
    high = lead == 0xED ? 0x9F : high;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    length = 4;
    low = lead == 0xF0 ? 0x90 : low;
    high = lead == 0xF4 ? 0x8F : high;
  } else {
    return {Utf8Step::Kind::kInvalid, 1, 0};
  }
  char32_t code_point = lead & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    if (at + i == text.size()) {
      return {Utf8Step::Kind::kIncomplete, i, 0};
    }
    const unsigned char next = byte(at + i);
    if (next < low || next > high) {
      return {Utf8Step::Kind::kInvalid, i, 0};
    }
    low = 0x80;
    high = 0xBF;
    code_point = code_point << 6 | (next & 0x3F);
  }
  return {Utf8Step::Kind::kCharacter, length, code_point};
}

inline void append_utf8(char32_t code_point, std::string* out) {
  if (code_point < 0x80) {
    *out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    *out +=
        {static_cast<char>(0xC0 | code_point >> 6), static_cast<char>(0x80 | (code_point & 63))};
  } else if (code_point < 0x10000) {
    *out += {static_cast<char>(0xE0 | code_point >> 12),
             static_cast<char>(0x80 | (code_point >> 6 & 63)),
             static_cast<char>(0x80 | (code_point & 63))};
  } else {
    *out += {static_cast<char>(0xF0 | code_point >> 18),
             static_cast<char>(0x80 | (code_point >> 12 & 63)),
             static_cast<char>(0x80 | (code_point >> 6 & 63)),
             static_cast<char>(0x80 | (code_point & 63))};
  }
}

}  // namespace lacuna
