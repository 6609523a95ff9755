// A client of OpenAI-compatible servers, for the commands that measure one: blocking and streamed
// POST of JSON over http://.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "lacuna/status.h"

namespace lacuna::server {

struct HttpReply {
  int status = 0;
  std::string body;  // of a stream that went well: empty
};

struct HttpClientOptions {
  // "http://127.0.0.1:8000" or "http://127.0.0.1:8000/v1"; an address without path gets this one.
  std::string base_url;
  std::string default_path = "/v1";
  std::string api_key;  // empty: none is sent
  double timeout_seconds = 600;
};

// One connection, kept open between calls; for one thread at a time. A status other than 200 is a
// reply, not an error: errors are connections that fail.
class HttpClient {
 public:
  static Result<HttpClient> create(const HttpClientOptions& options);
  HttpClient(HttpClient&&) noexcept;
  HttpClient& operator=(HttpClient&&) noexcept;
  ~HttpClient();

  // `path` comes after that of the base URL: "/models", "/completions".
  Result<HttpReply> get(const std::string& path);
  Result<HttpReply> post(const std::string& path, const std::string& json);
  // `on_event` gets the data of each server-sent event as it comes, "[DONE]" too, and says whether
  // to go on; false closes the connection, which is no error.
  Result<HttpReply> post_stream(const std::string& path, const std::string& json,
                                const std::function<bool(std::string_view)>& on_event);

 private:
  struct Connection;
  explicit HttpClient(std::unique_ptr<Connection> connection);

  std::unique_ptr<Connection> connection_;
};

// What an error reply says: the "message" of its JSON, else the start of its body.
std::string error_message(const HttpReply& reply);

}  // namespace lacuna::server
