// What went wrong with a request, in the shape of the OpenAI API.
#pragma once

#include <string>
#include <utility>

namespace lacuna::server {

struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;  // empty: null
  std::string code;   // empty: null
};

inline ApiError bad_request(std::string message, std::string param = {}, std::string code = {}) {
  return {400, std::move(message), "invalid_request_error", std::move(param), std::move(code)};
}

// {"error": {"message", "type", "param", "code"}}
std::string error_body(const ApiError& error);

}  // namespace lacuna::server
