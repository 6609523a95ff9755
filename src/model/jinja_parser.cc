// Jinja source to a syntax tree: text and tags are told apart first (white space control happens
// there), then each tag is cut into tokens and parsed by recursive descent.
#include "model/jinja_parser.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "model/json.h"
#include "model/utf8.h"

namespace lacuna {
namespace {

using Kind = JinjaNode::Kind;
using NodePtr = std::unique_ptr<JinjaNode>;

constexpr size_t kSourceBytesMax = size_t{1} << 20;
// Of nested blocks and of parentheses while parsing, and of the tree that comes out.
constexpr int kNestingMax = 64;
constexpr int kHeightMax = 256;

[[noreturn]] void fail(int line, const std::string& message,
                       StatusCode code = StatusCode::kDataLoss) {
  throw JinjaError{code, message, line};
}

struct Token {
  enum class Kind : uint8_t { kName, kString, kInteger, kFloat, kOperator, kEnd };
  Kind kind = Kind::kEnd;
  std::string text;
  int line = 1;
};

// A piece of the template: literal text, {{ ... }} or {% ... %}.
struct Piece {
  enum class Kind : uint8_t { kText, kVariable, kBlock };
  Kind kind = Kind::kText;
  std::string text;           // of text
  std::vector<Token> tokens;  // of the others, kEnd last
  int line = 1;
};

bool is_name_start(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
         (static_cast<unsigned char>(c) & 0x80) != 0;
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Splitter {
 public:
  explicit Splitter(std::string_view source) {
    source_.reserve(source.size());
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] == '\r') {
        source_ += '\n';
        i += i + 1 < source.size() && source[i + 1] == '\n';
      } else {
        source_ += source[i];
      }
    }
    if (source_.ends_with('\n')) {
      source_.pop_back();
    }
  }

  std::vector<Piece> split() {
    bool line_starting = true;
    while (at_ < source_.size()) {
      size_t open = at_;
      while (true) {
        open = source_.find('{', open);
        if (open == std::string::npos || open + 1 >= source_.size() || source_[open + 1] == '{' ||
            source_[open + 1] == '%' || source_[open + 1] == '#') {
          break;
        }
        ++open;
      }
      if (open == std::string::npos || open + 1 >= source_.size()) {
        add_text(std::string_view(source_).substr(at_));
        break;
      }
      const char type = source_[open + 1];
      std::string_view text = std::string_view(source_).substr(at_, open - at_);
      size_t inside = open + 2;
      const char sign = inside < source_.size() ? source_[inside] : ' ';
      if (sign == '-') {
        text = strip_python_space(text, false, true);
        ++inside;
      } else if (sign == '+' && type != '{') {
        ++inside;
      } else if (type != '{') {
        // lstrip_blocks: white space between the line's beginning and the tag goes.
        const size_t line_begin = text.rfind('\n') + 1;  // 0 when there is no newline
        if ((line_begin > 0 || line_starting) &&
            strip_python_space(text.substr(line_begin), true, false).empty()) {
          text = text.substr(0, line_begin);
        }
      }
      add_text(text);
      count_lines(at_, open);
      at_ = inside;
      if (type == '#') {
        skip_comment();
      } else {
        read_tag(type == '{');
      }
      line_starting = at_ > 0 && source_[at_ - 1] == '\n';
    }
    return std::move(pieces_);
  }

 private:
  void add_text(std::string_view text) {
    if (!text.empty()) {
      pieces_.push_back({Piece::Kind::kText, std::string(text), {}, line_});
    }
  }

  void count_lines(size_t begin, size_t end) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(begin),
                                         source_.begin() + static_cast<std::ptrdiff_t>(end), '\n'));
  }

  void move_to(size_t end) {
    count_lines(at_, end);
    at_ = end;
  }

  void skip_space() {
    const std::string_view rest = std::string_view(source_).substr(at_);
    move_to(source_.size() - strip_python_space(rest, true, false).size());
  }

  // After a tag: "-%}" takes all white space that follows, "%}" one newline (trim_blocks).
  void after_tag(char sign, bool trims_newline) {
    if (sign == '-') {
      skip_space();
    } else if (sign != '+' && trims_newline && at_ < source_.size() && source_[at_] == '\n') {
      move_to(at_ + 1);
    }
  }

  void skip_comment() {
    const size_t close = source_.find("#}", at_);
    if (close == std::string::npos) {
      fail(line_, "a comment {# is not closed");
    }
    const char sign = close > at_ ? source_[close - 1] : ' ';
    move_to(close + 2);
    after_tag(sign, true);
  }

  void read_tag(bool variable) {
    Piece piece;
    piece.kind = variable ? Piece::Kind::kVariable : Piece::Kind::kBlock;
    piece.line = line_;
    const std::string_view close = variable ? "}}" : "%}";
    std::string brackets;
    while (true) {
      skip_space();
      if (at_ >= source_.size()) {
        fail(piece.line, variable ? "{{ is not closed" : "{% is not closed");
      }
      const std::string_view rest = std::string_view(source_).substr(at_);
      const char sign = rest.front();
      if (brackets.empty()) {
        if (rest.starts_with(close)) {
          move_to(at_ + 2);
          after_tag(' ', !variable);
          break;
        }
        if ((sign == '-' || (sign == '+' && !variable)) && rest.substr(1).starts_with(close)) {
          move_to(at_ + 3);
          after_tag(sign, !variable);
          break;
        }
      }
      piece.tokens.push_back(read_token(rest, &brackets));
    }
    piece.tokens.push_back({Token::Kind::kEnd, "", line_});
    if (!variable && piece.tokens.front().text == "raw" && piece.tokens.size() == 2) {
      read_raw();
      return;
    }
    pieces_.push_back(std::move(piece));
  }

  Token read_token(std::string_view rest, std::string* brackets) {
    Token token;
    token.line = line_;
    const char c = rest.front();
    size_t length = 1;
    if (is_name_start(c)) {
      while (length < rest.size() && (is_name_start(rest[length]) || is_digit(rest[length]))) {
        ++length;
      }
      token.kind = Token::Kind::kName;
      token.text = rest.substr(0, length);
    } else if (is_digit(c)) {
      read_number(rest, &token, &length);
    } else if (c == '\'' || c == '"') {
      while (length < rest.size() && rest[length] != c) {
        length += rest[length] == '\\' ? 2 : 1;
      }
      if (length >= rest.size()) {
        fail(line_, "a string is not closed");
      }
      token.kind = Token::Kind::kString;
      token.text = unescape(rest.substr(1, length - 1));
      ++length;
    } else {
      static constexpr std::string_view kLong[] = {"**", "//", "==", "!=", "<=", ">="};
      for (const std::string_view op : kLong) {
        length = rest.starts_with(op) ? 2 : length;
      }
      token.kind = Token::Kind::kOperator;
      token.text = rest.substr(0, length);
      if (length == 1 && std::string_view("+-*/%~<>=.:|,()[]{}").find(c) == std::string::npos) {
        fail(line_,
             "unexpected character " + quote_text(rest.substr(0, utf8_step(rest, 0).length)));
      }
      if (c == '(' || c == '[' || c == '{') {
        *brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
      } else if (c == ')' || c == ']' || c == '}') {
        if (brackets->empty() || brackets->back() != c) {
          fail(line_, "unexpected " + quote_text(token.text));
        }
        brackets->pop_back();
      }
    }
    move_to(at_ + length);
    return token;
  }

  static void read_number(std::string_view rest, Token* token, size_t* length) {
    const auto digits = [&](size_t from) {
      while (from < rest.size() && (is_digit(rest[from]) || rest[from] == '_')) {
        ++from;
      }
      return from;
    };
    token->kind = Token::Kind::kInteger;
    *length = digits(0);
    if (*length + 1 < rest.size() && rest[*length] == '.' && is_digit(rest[*length + 1])) {
      token->kind = Token::Kind::kFloat;
      *length = digits(*length + 1);
    }
    if (*length < rest.size() && (rest[*length] == 'e' || rest[*length] == 'E')) {
      size_t exponent = *length + 1;
      exponent += exponent < rest.size() && (rest[exponent] == '+' || rest[exponent] == '-');
      if (exponent < rest.size() && is_digit(rest[exponent])) {
        token->kind = Token::Kind::kFloat;
        *length = digits(exponent);
      }
    }
    token->text = rest.substr(0, *length);
    std::erase(token->text, '_');
  }

  std::string unescape(std::string_view text) const {
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\' || i + 1 >= text.size()) {
        out += text[i];
        continue;
      }
      const char c = text[++i];
      static constexpr std::string_view kFrom = "ntrbfav0\\'\"";
      static constexpr char kTo[] = {'\n', '\t', '\r', '\b', '\f', '\a',
                                     '\v', '\0', '\\', '\'', '"'};
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : c == 'U' ? 8 : 0;
      if (const size_t simple = kFrom.find(c); simple != std::string_view::npos) {
        out += kTo[simple];
      } else if (c == '\n') {
        continue;  // a line joined to the next
      } else if (digits > 0) {
        uint32_t code_point = 0;
        const char* begin = text.data() + i + 1;
        const char* end = text.data() + std::min(text.size(), i + 1 + digits);
        const auto read = std::from_chars(begin, end, code_point, 16);
        if (read.ptr != begin + digits || code_point > 0x10FFFF ||
            (code_point >= 0xD800 && code_point < 0xE000)) {
          fail(line_, "a string has a broken \\" + std::string(1, c) + " escape");
        }
        append_utf8(code_point, &out);
        i += digits;
      } else {
        out += {'\\', c};
      }
    }
    return out;
  }

  // {% raw %} ... {% endraw %}: text that is not looked at.
  void read_raw() {
    const int line = line_;
    for (size_t open = at_; (open = source_.find("{%", open)) != std::string::npos; open += 2) {
      size_t i = open + 2;
      const bool strips = i < source_.size() && source_[i] == '-';
      i += strips || (i < source_.size() && source_[i] == '+');
      const std::string_view rest =
          strip_python_space(std::string_view(source_).substr(i), true, false);
      if (!rest.starts_with("endraw")) {
        continue;
      }
      std::string_view tail = strip_python_space(rest.substr(6), true, false);
      const char sign = tail.empty() ? ' ' : tail.front();
      if (sign == '-' || sign == '+') {
        tail.remove_prefix(1);
      }
      if (!tail.starts_with("%}")) {
        continue;
      }
      std::string_view text = std::string_view(source_).substr(at_, open - at_);
      if (strips) {
        text = strip_python_space(text, false, true);
      } else if (source_[open + 2] != '+') {
        const size_t line_begin = text.rfind('\n') + 1;
        if (line_begin > 0 && strip_python_space(text.substr(line_begin), true, false).empty()) {
          text = text.substr(0, line_begin);
        }
      }
      add_text(text);
      move_to(source_.size() - tail.size() + 2);
      after_tag(sign, true);
      return;
    }
    fail(line, "{% raw %} is not closed");
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  std::vector<Piece> pieces_;
};

class Parser {
 public:
  explicit Parser(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  NodePtr parse() {
    NodePtr root = parse_block({});
    return root;
  }

 private:
  // A level of nesting; the parser recurses only through these.
  class Level {
   public:
    Level(Parser* parser, int line) : parser_(parser) {
      if (++parser_->level_ > kNestingMax) {
        fail(line, "nested more than " + std::to_string(kNestingMax) + " deep");
      }
    }
    ~Level() { --parser_->level_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser* parser_;
  };

  NodePtr node(Kind kind) const { return node(kind, peek().line); }
  static NodePtr node(Kind kind, int line) {
    auto made = std::make_unique<JinjaNode>();
    made->kind = kind;
    made->line = line;
    return made;
  }

  static void grow(JinjaNode* parent, const JinjaNode* child) {
    if (child == nullptr) {
      return;
    }
    parent->height = std::max(parent->height, child->height + 1);
    if (parent->height > kHeightMax) {
      fail(parent->line,
           "an expression is longer than " + std::to_string(kHeightMax) + " operators in a row");
    }
  }
  static void adopt(JinjaNode* parent, NodePtr child) {
    grow(parent, child.get());
    parent->children.push_back(std::move(child));
  }

  const Token& peek(size_t ahead = 0) const {
    static const Token kNone;
    if (tokens_ == nullptr) {
      return kNone;
    }
    return (*tokens_)[std::min(token_ + ahead, tokens_->size() - 1)];
  }
  Token next() {
    const Token& token = peek();
    if (token.kind != Token::Kind::kEnd) {
      ++token_;
    }
    return token;
  }
  bool at_operator(std::string_view text) const {
    return peek().kind == Token::Kind::kOperator && peek().text == text;
  }
  bool at_name(std::string_view text) const {
    return peek().kind == Token::Kind::kName && peek().text == text;
  }
  bool at_end() const { return peek().kind == Token::Kind::kEnd; }
  bool take_operator(std::string_view text) {
    const bool there = at_operator(text);
    token_ += there;
    return there;
  }
  bool take_name(std::string_view text) {
    const bool there = at_name(text);
    token_ += there;
    return there;
  }
  static std::string shown(const Token& token) {
    return token.kind == Token::Kind::kEnd ? "the end of the tag" : quote_text(token.text);
  }
  void expect_operator(std::string_view text) {
    if (!take_operator(text)) {
      fail(peek().line, "expected \"" + std::string(text) + "\", found " + shown(peek()));
    }
  }
  std::string expect_name() {
    if (peek().kind != Token::Kind::kName) {
      fail(peek().line, "expected a name, found " + shown(peek()));
    }
    return next().text;
  }
  void expect_end() {
    if (!at_end()) {
      fail(peek().line, "expected the end of the tag, found " + shown(peek()));
    }
  }

  // Statements up to a tag whose first word is in `ends`, which is left current with its first word
  // taken; end_ holds the word. Without `ends`: up to the end of the template.
  NodePtr parse_block(const std::vector<std::string_view>& ends) {
    const int line = piece_ < pieces_.size() ? pieces_[piece_].line : 1;
    const Level level(this, line);
    NodePtr block = node(Kind::kBlock, line);
    while (piece_ < pieces_.size()) {
      Piece& piece = pieces_[piece_++];
      if (piece.kind == Piece::Kind::kText) {
        NodePtr text = node(Kind::kText, piece.line);
        text->text = std::move(piece.text);
        adopt(block.get(), std::move(text));
        continue;
      }
      tokens_ = &piece.tokens;
      token_ = 0;
      if (piece.kind == Piece::Kind::kVariable) {
        NodePtr output = node(Kind::kOutput, piece.line);
        adopt(output.get(), parse_tuple());
        expect_end();
        adopt(block.get(), std::move(output));
        continue;
      }
      const int tag_line = peek().line;
      const std::string word = expect_name();
      if (std::find(ends.begin(), ends.end(), word) != ends.end()) {
        end_ = word;
        return block;
      }
      if (NodePtr statement = parse_statement(word, tag_line)) {
        adopt(block.get(), std::move(statement));
      }
    }
    if (!ends.empty()) {
      fail(line, "{% " + std::string(ends.back()) + " %} is missing");
    }
    return block;
  }

  NodePtr parse_statement(const std::string& word, int line) {
    if (word == "if") {
      return parse_if(line);
    }
    if (word == "for") {
      return parse_for(line);
    }
    if (word == "set") {
      return parse_set(line);
    }
    if (word == "macro") {
      return parse_macro(line);
    }
    if (word == "with") {
      return parse_with(line);
    }
    if (word == "generation") {
      // Marks for training what the model wrote; the text is the same.
      expect_end();
      NodePtr block = parse_block({"endgeneration"});
      expect_end();
      return block;
    }
    if (word == "break" || word == "continue") {
      if (loops_ == 0) {
        fail(line, "{% " + word + " %} outside of a loop");
      }
      expect_end();
      return node(word == "break" ? Kind::kBreak : Kind::kContinue, line);
    }
    fail(line,
         "the tag {% " + word +
             " %} is not supported here; supported: if, for, set, macro, "
             "with, break, continue, raw, generation",
         StatusCode::kUnsupported);
  }

  NodePtr parse_if(int line) {
    NodePtr made = node(Kind::kIf, line);
    while (true) {
      adopt(made.get(), parse_tuple());
      expect_end();
      adopt(made.get(), parse_block({"elif", "else", "endif"}));
      if (end_ == "elif") {
        continue;
      }
      if (end_ == "else") {
        expect_end();
        adopt(made.get(), parse_block({"endif"}));
      }
      expect_end();
      return made;
    }
  }

  NodePtr parse_for(int line) {
    NodePtr made = node(Kind::kFor, line);
    adopt(made.get(), parse_target());
    if (!take_name("in")) {
      fail(peek().line, "expected \"in\", found " + shown(peek()));
    }
    adopt(made.get(), parse_tuple(/*conditional=*/false));
    adopt(made.get(), take_name("if") ? parse_expression() : nullptr);
    if (at_name("recursive")) {
      fail(line, "recursive loops are not supported", StatusCode::kUnsupported);
    }
    expect_end();
    ++loops_;
    adopt(made.get(), parse_block({"else", "endfor"}));
    --loops_;
    if (end_ == "else") {
      expect_end();
      adopt(made.get(), parse_block({"endfor"}));
    } else {
      made->children.push_back(nullptr);
    }
    expect_end();
    return made;
  }

  // What is assigned to: a name, name.attribute, or a list of such.
  NodePtr parse_target(bool attributes = false) {
    std::vector<NodePtr> targets;
    const int line = peek().line;
    bool is_tuple = false;
    const bool parenthesized = take_operator("(");
    while (true) {
      NodePtr target = node(Kind::kName);
      target->text = expect_name();
      if (target->text == "true" || target->text == "false" || target->text == "none") {
        fail(target->line, quote_text(target->text) + " can not be assigned to");
      }
      if (attributes && take_operator(".")) {
        NodePtr attribute = node(Kind::kAttribute, target->line);
        attribute->text = expect_name();
        adopt(attribute.get(), std::move(target));
        target = std::move(attribute);
      }
      targets.push_back(std::move(target));
      if (!take_operator(",")) {
        break;
      }
      is_tuple = true;
      if (peek().kind != Token::Kind::kName || at_name("in")) {
        break;
      }
    }
    if (parenthesized) {
      expect_operator(")");
    }
    if (!is_tuple) {
      return std::move(targets.front());
    }
    NodePtr tuple = node(Kind::kTuple, line);
    for (NodePtr& target : targets) {
      adopt(tuple.get(), std::move(target));
    }
    return tuple;
  }

  NodePtr parse_set(int line) {
    NodePtr target = parse_target(/*attributes=*/true);
    if (take_operator("=")) {
      NodePtr made = node(Kind::kSet, line);
      adopt(made.get(), std::move(target));
      adopt(made.get(), parse_tuple());
      expect_end();
      return made;
    }
    NodePtr made = node(Kind::kBlockSet, line);
    adopt(made.get(), std::move(target));
    NodePtr filters;
    if (at_operator("|")) {
      filters = parse_filters(node(Kind::kBlockText));
    }
    expect_end();
    const int loops = std::exchange(loops_, 0);
    adopt(made.get(), parse_block({"endset"}));
    loops_ = loops;
    expect_end();
    adopt(made.get(), std::move(filters));
    return made;
  }

  NodePtr parse_macro(int line) {
    NodePtr made = node(Kind::kMacro, line);
    made->text = expect_name();
    expect_operator("(");
    while (!take_operator(")")) {
      if (!made->names.empty()) {
        expect_operator(",");
      }
      made->names.push_back(expect_name());
      if (take_operator("=")) {
        NodePtr value = parse_expression();
        grow(made.get(), value.get());
        made->named.emplace_back(made->names.back(), std::move(value));
      } else if (!made->named.empty()) {
        fail(line, "a parameter without a default follows one with a default");
      }
    }
    expect_end();
    const int loops = std::exchange(loops_, 0);
    adopt(made.get(), parse_block({"endmacro"}));
    loops_ = loops;
    token_ += peek().kind == Token::Kind::kName && peek().text == made->text;
    expect_end();
    return made;
  }

  NodePtr parse_with(int line) {
    NodePtr made = node(Kind::kWith, line);
    while (!at_end()) {
      if (!made->children.empty()) {
        expect_operator(",");
      }
      adopt(made.get(), parse_target());
      expect_operator("=");
      adopt(made.get(), parse_expression());
    }
    adopt(made.get(), parse_block({"endwith"}));
    expect_end();
    return made;
  }

  // One expression, or several with commas between: a tuple.
  NodePtr parse_tuple(bool conditional = true) {
    const int line = peek().line;
    const auto one = [&] { return conditional ? parse_expression() : parse_or(); };
    NodePtr first = one();
    if (!at_operator(",")) {
      return first;
    }
    NodePtr tuple = node(Kind::kTuple, line);
    adopt(tuple.get(), std::move(first));
    while (take_operator(",")) {
      if (at_end() || at_operator(")")) {
        break;
      }
      adopt(tuple.get(), one());
    }
    return tuple;
  }

  NodePtr parse_expression() {
    const Level level(this, peek().line);
    NodePtr value = parse_or();
    while (at_name("if")) {
      NodePtr made = node(Kind::kConditional);
      next();
      adopt(made.get(), std::move(value));
      adopt(made.get(), parse_or());
      adopt(made.get(), take_name("else") ? parse_expression() : nullptr);
      value = std::move(made);
    }
    return value;
  }

  NodePtr binary(Kind kind, NodePtr left, int line, NodePtr right) {
    NodePtr made = node(kind, line);
    adopt(made.get(), std::move(left));
    adopt(made.get(), std::move(right));
    return made;
  }

  NodePtr parse_or() {
    NodePtr left = parse_and();
    while (at_name("or")) {
      const int line = next().line;
      left = binary(Kind::kOr, std::move(left), line, parse_and());
    }
    return left;
  }

  NodePtr parse_and() {
    NodePtr left = parse_not();
    while (at_name("and")) {
      const int line = next().line;
      left = binary(Kind::kAnd, std::move(left), line, parse_not());
    }
    return left;
  }

  NodePtr parse_not() {
    if (!at_name("not")) {
      return parse_compare();
    }
    const Level level(this, peek().line);
    NodePtr made = node(Kind::kNot);
    next();
    adopt(made.get(), parse_not());
    return made;
  }

  NodePtr parse_compare() {
    NodePtr left = parse_sum();
    NodePtr made;
    while (true) {
      std::string op;
      static constexpr std::string_view kOperators[] = {"==", "!=", "<", "<=", ">", ">="};
      if (peek().kind == Token::Kind::kOperator &&
          std::find(std::begin(kOperators), std::end(kOperators), peek().text) !=
              std::end(kOperators)) {
        op = next().text;
      } else if (take_name("in")) {
        op = "in";
      } else if (at_name("not") && peek(1).kind == Token::Kind::kName && peek(1).text == "in") {
        token_ += 2;
        op = "not in";
      } else {
        return made != nullptr ? std::move(made) : std::move(left);
      }
      if (made == nullptr) {
        made = node(Kind::kCompare, left->line);
        adopt(made.get(), std::move(left));
      }
      made->names.push_back(std::move(op));
      adopt(made.get(), parse_sum());
    }
  }

  NodePtr arithmetic(NodePtr left, const Token& op, NodePtr right) {
    NodePtr made = binary(Kind::kArithmetic, std::move(left), op.line, std::move(right));
    made->text = op.text;
    return made;
  }

  NodePtr parse_sum() {
    NodePtr left = parse_concatenation();
    while (at_operator("+") || at_operator("-")) {
      const Token op = next();
      left = arithmetic(std::move(left), op, parse_concatenation());
    }
    return left;
  }

  NodePtr parse_concatenation() {
    NodePtr left = parse_product();
    if (!at_operator("~")) {
      return left;
    }
    NodePtr made = node(Kind::kConcatenate);
    adopt(made.get(), std::move(left));
    while (take_operator("~")) {
      adopt(made.get(), parse_product());
    }
    return made;
  }

  NodePtr parse_product() {
    NodePtr left = parse_power();
    while (at_operator("*") || at_operator("/") || at_operator("//") || at_operator("%")) {
      const Token op = next();
      left = arithmetic(std::move(left), op, parse_power());
    }
    return left;
  }

  NodePtr parse_power() {
    NodePtr left = parse_unary(true);
    while (at_operator("**")) {
      const Token op = next();
      left = arithmetic(std::move(left), op, parse_unary(true));
    }
    return left;
  }

  NodePtr parse_unary(bool with_filters) {
    NodePtr value;
    if (at_operator("-") || at_operator("+")) {
      const Level level(this, peek().line);
      value = node(at_operator("-") ? Kind::kNegate : Kind::kPositive);
      next();
      adopt(value.get(), parse_unary(false));
    } else {
      value = parse_primary();
    }
    value = parse_postfix(std::move(value));
    return with_filters ? parse_filters(std::move(value)) : std::move(value);
  }

  NodePtr constant(JinjaValue value, int line) {
    NodePtr made = node(Kind::kConstant, line);
    made->value = std::move(value);
    return made;
  }

  NodePtr parse_primary() {
    const Level level(this, peek().line);
    const Token token = next();
    switch (token.kind) {
      case Token::Kind::kName:
        if (token.text == "true" || token.text == "True") {
          return constant(JinjaValue::boolean(true), token.line);
        }
        if (token.text == "false" || token.text == "False") {
          return constant(JinjaValue::boolean(false), token.line);
        }
        if (token.text == "none" || token.text == "None") {
          return constant(JinjaValue::none(), token.line);
        }
        {
          NodePtr name = node(Kind::kName, token.line);
          name->text = token.text;
          return name;
        }
      case Token::Kind::kString: {
        std::string text = token.text;
        while (peek().kind == Token::Kind::kString) {
          text += next().text;
        }
        return constant(JinjaValue::string(std::move(text)), token.line);
      }
      case Token::Kind::kInteger: {
        int64_t value = 0;
        const char* end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ptr != end ||
            std::from_chars(token.text.data(), end, value).ec != std::errc()) {
          fail(token.line, "the number " + token.text + " is too large");
        }
        return constant(JinjaValue::integer(value), token.line);
      }
      case Token::Kind::kFloat: {
        double value = 0;
        (void)std::from_chars(token.text.data(), token.text.data() + token.text.size(), value);
        return constant(JinjaValue::real(value), token.line);
      }
      case Token::Kind::kOperator:
        if (token.text == "(") {
          if (take_operator(")")) {
            return node(Kind::kTuple, token.line);
          }
          NodePtr inner = parse_tuple();
          expect_operator(")");
          return inner;
        }
        if (token.text == "[") {
          NodePtr list = node(Kind::kList, token.line);
          while (!take_operator("]")) {
            if (!list->children.empty()) {
              expect_operator(",");
              if (take_operator("]")) {
                break;
              }
            }
            adopt(list.get(), parse_expression());
          }
          return list;
        }
        if (token.text == "{") {
          NodePtr dict = node(Kind::kDict, token.line);
          while (!take_operator("}")) {
            if (!dict->children.empty()) {
              expect_operator(",");
              if (take_operator("}")) {
                break;
              }
            }
            adopt(dict.get(), parse_expression());
            expect_operator(":");
            adopt(dict.get(), parse_expression());
          }
          return dict;
        }
        [[fallthrough]];
      default:
        fail(token.line, "expected an expression, found " + shown(token));
    }
  }

  NodePtr parse_postfix(NodePtr value) {
    while (true) {
      const int line = peek().line;
      if (take_operator(".")) {
        NodePtr made = node(Kind::kAttribute, line);
        if (peek().kind == Token::Kind::kInteger) {
          made->kind = Kind::kSubscript;
          adopt(made.get(), std::move(value));
          adopt(made.get(), parse_primary());
        } else {
          made->text = expect_name();
          adopt(made.get(), std::move(value));
        }
        value = std::move(made);
      } else if (take_operator("[")) {
        value = parse_subscript(std::move(value), line);
      } else if (at_operator("(")) {
        value = parse_call(std::move(value));
      } else {
        return value;
      }
    }
  }

  NodePtr parse_subscript(NodePtr value, int line) {
    NodePtr made = node(Kind::kSubscript, line);
    adopt(made.get(), std::move(value));
    const auto part = [&]() -> NodePtr {
      return at_operator(":") || at_operator("]") ? nullptr : parse_tuple();
    };
    adopt(made.get(), part());
    if (at_operator(":")) {
      made->kind = Kind::kSlice;
      while (take_operator(":") && made->children.size() < 4) {
        adopt(made.get(), part());
      }
      made->children.resize(4);
    } else if (made->children[1] == nullptr) {
      fail(line, "an empty subscript");
    }
    expect_operator("]");
    return made;
  }

  // At "(": the arguments of a call, added to `made`, which may be a filter or a test too.
  void parse_arguments(JinjaNode* made) {
    expect_operator("(");
    bool first = true;
    while (!take_operator(")")) {
      if (!first) {
        expect_operator(",");
        if (take_operator(")")) {
          break;
        }
      }
      first = false;
      if (at_operator("*") || at_operator("**")) {
        fail(peek().line, "calls with * are not supported", StatusCode::kUnsupported);
      }
      if (peek().kind == Token::Kind::kName && peek(1).kind == Token::Kind::kOperator &&
          peek(1).text == "=") {
        std::string name = next().text;
        next();
        NodePtr value = parse_expression();
        grow(made, value.get());
        made->named.emplace_back(std::move(name), std::move(value));
      } else if (!made->named.empty()) {
        fail(peek().line, "a positional argument follows a named one");
      } else {
        adopt(made, parse_expression());
      }
    }
  }

  NodePtr parse_call(NodePtr value) {
    NodePtr made = node(Kind::kCall);
    adopt(made.get(), std::move(value));
    parse_arguments(made.get());
    return made;
  }

  NodePtr parse_filters(NodePtr value) {
    while (true) {
      if (at_operator("|")) {
        NodePtr made = node(Kind::kFilter);
        next();
        made->text = expect_name();
        adopt(made.get(), std::move(value));
        if (at_operator("(")) {
          parse_arguments(made.get());
        }
        value = std::move(made);
      } else if (at_name("is")) {
        value = parse_test(std::move(value));
      } else if (at_operator("(")) {
        value = parse_call(std::move(value));
      } else {
        return value;
      }
    }
  }

  NodePtr parse_test(NodePtr value) {
    NodePtr made = node(Kind::kTest);
    next();
    const int line = made->line;
    const bool negated = take_name("not");
    made->text = expect_name();
    adopt(made.get(), std::move(value));
    const Token& token = peek();
    const bool word = token.kind == Token::Kind::kName;
    if (at_operator("(")) {
      parse_arguments(made.get());
    } else if ((word && token.text != "else" && token.text != "or" && token.text != "and" &&
                token.text != "is" && token.text != "if" && token.text != "not" &&
                token.text != "in") ||
               token.kind == Token::Kind::kString || token.kind == Token::Kind::kInteger ||
               token.kind == Token::Kind::kFloat || at_operator("[") || at_operator("{")) {
      adopt(made.get(), parse_postfix(parse_primary()));
    }
    if (!negated) {
      return made;
    }
    NodePtr outer = node(Kind::kNot, line);
    adopt(outer.get(), std::move(made));
    return outer;
  }

  std::vector<Piece> pieces_;
  size_t piece_ = 0;
  const std::vector<Token>* tokens_ = nullptr;
  size_t token_ = 0;
  std::string end_;  // the word of the tag that ended the last block
  int level_ = 0;
  int loops_ = 0;
};

}  // namespace

std::unique_ptr<JinjaNode> parse_jinja(std::string_view source) {
  if (source.size() > kSourceBytesMax) {
    fail(1, "longer than 1 MiB");
  }
  for (size_t at = 0; at < source.size();) {
    const Utf8Step step = utf8_step(source, at);
    if (step.kind != Utf8Step::Kind::kCharacter) {
      fail(1 + static_cast<int>(std::count(source.begin(), source.begin() + at, '\n')),
           "not valid UTF-8");
    }
    at += step.length;
  }
  return Parser(Splitter(source).split()).parse();
}

}  // namespace lacuna
