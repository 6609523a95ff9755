// Status and Result<T>: how every function of the library reports failure. The library never throws
// across its boundary, prints or exits. A message names the argument, the value seen and what would
// work.
#pragma once

#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace lacuna {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,  // the caller's input is wrong, whatever the machine
  kUnsupported,      // well formed, but nothing here can run it; the message lists every refusal
  kNotFound,         // a file, tensor, kernel or name that does not exist
  kOutOfMemory,      // memory or workspace too small; the message gives both numbers
  kIo,               // the operating system refused
  kDataLoss,         // a file is truncated or malformed
  kCancelled,        // stopped on request
  kInternal,  // a backend failed (driver, library); never our own broken invariant, which aborts
};

constexpr std::string_view status_code_name(StatusCode code) {
  switch (code) {
    case StatusCode::kOk:
      return "ok";
    case StatusCode::kInvalidArgument:
      return "invalid argument";
    case StatusCode::kUnsupported:
      return "unsupported";
    case StatusCode::kNotFound:
      return "not found";
    case StatusCode::kOutOfMemory:
      return "out of memory";
    case StatusCode::kIo:
      return "i/o error";
    case StatusCode::kDataLoss:
      return "data loss";
    case StatusCode::kCancelled:
      return "cancelled";
    case StatusCode::kInternal:
      return "internal error";
  }
  return "unknown";
}

// A code and a message. An ok status holds no message and costs no allocation.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status ok_status() { return {}; }
inline Status invalid_argument(std::string message) {
  return {StatusCode::kInvalidArgument, std::move(message)};
}
inline Status unsupported(std::string message) {
  return {StatusCode::kUnsupported, std::move(message)};
}
inline Status not_found(std::string message) { return {StatusCode::kNotFound, std::move(message)}; }
inline Status out_of_memory(std::string message) {
  return {StatusCode::kOutOfMemory, std::move(message)};
}
inline Status io_error(std::string message) { return {StatusCode::kIo, std::move(message)}; }
inline Status data_loss(std::string message) { return {StatusCode::kDataLoss, std::move(message)}; }
inline Status internal_error(std::string message) {
  return {StatusCode::kInternal, std::move(message)};
}

// A value or the reason why there is none. Reading the value of a failed result is a programming
// error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit by design
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit by design

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& value() & { return *value_; }
  const T& value() const& { return *value_; }
  T&& value() && { return std::move(*value_); }
  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return std::move(*value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace lacuna
