// Our own invariants (abort) and Status plumbing. A LACUNA_CHECK can never be reached by a caller's
// input.
#pragma once

#include "lacuna/status.h"

namespace lacuna {

[[noreturn]] void check_failed(const char* expression, const char* file, int line);

}  // namespace lacuna

#define LACUNA_CHECK(condition)                               \
  do {                                                        \
    if (!(condition)) {                                       \
      ::lacuna::check_failed(#condition, __FILE__, __LINE__); \
    }                                                         \
  } while (0)

#ifdef NDEBUG
#define LACUNA_DCHECK(condition) \
  do {                           \
    (void)sizeof(!(condition));  \
  } while (0)
#else
#define LACUNA_DCHECK(condition) LACUNA_CHECK(condition)
#endif

#define LACUNA_RETURN_IF_ERROR(expression)          \
  do {                                              \
    ::lacuna::Status lacuna_status_ = (expression); \
    if (!lacuna_status_.ok()) {                     \
      return lacuna_status_;                        \
    }                                               \
  } while (0)

#define LACUNA_CONCAT_INNER(a, b) a##b
#define LACUNA_CONCAT(a, b) LACUNA_CONCAT_INNER(a, b)

// LACUNA_ASSIGN_OR_RETURN(auto x, f()): x is the value of a Result, or the function returns its
// status.
#define LACUNA_ASSIGN_OR_RETURN(target, expression) \
  LACUNA_ASSIGN_OR_RETURN_IMPL(LACUNA_CONCAT(lacuna_result_, __LINE__), target, expression)
#define LACUNA_ASSIGN_OR_RETURN_IMPL(result, target, expression) \
  auto result = (expression);                                    \
  if (!result.ok()) {                                            \
    return result.status();                                      \
  }                                                              \
  target = std::move(result).value()
