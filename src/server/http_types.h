// What a handler sees of HTTP: free of sockets and of the HTTP library.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lacuna::server {

struct ApiCall {
  std::string method;
  std::string path;
  std::map<std::string, std::string> query;
  std::map<std::string, std::string> headers;  // names in lower case
  std::string body;
  std::function<bool()> client_gone;  // asks the socket

  std::string_view header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? std::string_view() : found->second;
  }
};

// Sends a piece of a stream; false: the client is gone or reads too slowly.
using StreamWriter = std::function<bool(std::string_view)>;

struct ApiReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  std::vector<std::pair<std::string, std::string>> headers;
  std::function<void(const StreamWriter&)> stream;  // instead of body
};

}  // namespace lacuna::server
