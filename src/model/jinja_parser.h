// The syntax tree of a Jinja template and its parser.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "model/jinja_value.h"

namespace lacuna {

struct JinjaNode {
  enum class Kind : uint8_t {
    // Statements.
    kBlock,     // children in order
    kText,      // text
    kOutput,    // children[0]
    kIf,        // condition, block, condition, block, ..., [else block]
    kFor,       // target, iterable, filter or null, body, else or null
    kSet,       // target, value
    kBlockSet,  // target, body; filters: children[2] applied to the text, or null
    kMacro,     // text: name; parameters in names, defaults in named; body children[0]
    kWith,      // targets and values alternating, body last
    kBreak,
    kContinue,
    // Expressions.
    kConstant,   // value
    kName,       // text
    kList,       // children
    kTuple,      // children
    kDict,       // key, value, key, value, ...
    kAttribute,  // children[0] . text
    kSubscript,  // children[0] [ children[1] ]
    kSlice,      // children[0] [ children[1] : children[2] : children[3] ], any of 1..3 null
    kCall,       // children[0] ( children[1..], named )
    kFilter,     // children[0] | text ( children[1..], named )
    kTest,       // children[0] is text ( children[1..] )
    kNot,
    kNegate,
    kPositive,
    kAnd,
    kOr,
    kCompare,      // children[0] names[0] children[1] names[1] children[2] ...
    kArithmetic,   // children[0] text children[1]
    kConcatenate,  // children
    kConditional,  // value, condition, other or null
    kBlockText,    // what a filter of a block set applies to
  };

  Kind kind = Kind::kBlock;
  int line = 1;
  int height = 1;  // of the tree below, bounded so that recursion over it is
  std::string text;
  JinjaValue value;
  std::vector<std::unique_ptr<JinjaNode>> children;
  std::vector<std::string> names;
  std::vector<std::pair<std::string, std::unique_ptr<JinjaNode>>> named;
};

// Throws JinjaError.
std::unique_ptr<JinjaNode> parse_jinja(std::string_view source);

}  // namespace lacuna
