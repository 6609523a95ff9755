// The client of OpenAI-compatible servers, on cpp-httplib.
#include "server/http_client.h"

#include <httplib.h>

#include <charconv>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/check.h"

namespace lacuna::server {
namespace {

struct Address {
  std::string host;
  int port = 80;
  std::string path;
};

Result<Address> parse_base_url(const std::string& url, const std::string& default_path) {
  const auto bad = [&](const char* what) {
    return invalid_argument("base URL \"" + url + "\": " + what +
                            ", expected http://HOST[:PORT][/v1]");
  };
  constexpr std::string_view kScheme = "http://";
  if (!url.starts_with(kScheme)) {
    return bad(url.starts_with("https://") ? "encrypted connections are not supported"
                                           : "does not start with http://");
  }
  std::string_view rest = std::string_view(url).substr(kScheme.size());
  Address address;
  if (const size_t slash = rest.find('/'); slash != std::string_view::npos) {
    address.path = rest.substr(slash);
    rest = rest.substr(0, slash);
  }
  while (address.path.ends_with('/')) {
    address.path.pop_back();
  }
  if (address.path.empty()) {
    address.path = default_path;
  }
  // An IPv6 address stands in brackets, as its colons are not a port's.
  size_t host_end = rest.find(':');
  if (rest.starts_with('[')) {
    host_end = rest.find(']');
    if (host_end == std::string_view::npos) {
      return bad("'[' without ']'");
    }
    address.host = rest.substr(1, host_end - 1);
    ++host_end;
  } else {
    host_end = std::min(host_end, rest.size());
    address.host = rest.substr(0, host_end);
  }
  if (address.host.empty()) {
    return bad("no host");
  }
  if (host_end < rest.size()) {
    const std::string_view digits = rest.substr(host_end + 1);
    const auto [end, error] =
        std::from_chars(digits.data(), digits.data() + digits.size(), address.port);
    if (rest[host_end] != ':' || error != std::errc() || end != digits.data() + digits.size() ||
        address.port < 1 || address.port > 65535) {
      return bad("the port is not a number from 1 to 65535");
    }
  }
  return address;
}

// Cuts a stream into the data of its events: lines "data: ...", each event ending in an empty line.
class EventSplitter {
 public:
  // False when `on_event` wants no more.
  bool add(std::string_view bytes, const std::function<bool(std::string_view)>& on_event) {
    pending_ += bytes;
    size_t begin = 0;
    bool go_on = true;
    for (size_t end; go_on && (end = pending_.find('\n', begin)) != std::string::npos;
         begin = end + 1) {
      std::string_view line(pending_.data() + begin, end - begin);
      if (line.ends_with('\r')) {
        line.remove_suffix(1);
      }
      if (line.empty()) {
        if (!data_.empty()) {
          go_on = on_event(data_);
          data_.clear();
        }
      } else if (line.starts_with("data:")) {
        line.remove_prefix(line.starts_with("data: ") ? 6 : 5);
        data_ += (data_.empty() ? "" : "\n");
        data_ += line;
      }
    }
    pending_.erase(0, begin);
    return go_on;
  }

 private:
  std::string pending_;
  std::string data_;
};

}  // namespace

struct HttpClient::Connection {
  Connection(const Address& address, const HttpClientOptions& options)
      : client(address.host, address.port),
        path(address.path),
        name(address.host + ":" + std::to_string(address.port)) {
    const auto seconds = static_cast<time_t>(options.timeout_seconds);
    client.set_connection_timeout(10);
    client.set_read_timeout(seconds);
    client.set_write_timeout(seconds);
    client.set_keep_alive(true);
    client.set_tcp_nodelay(true);
    if (!options.api_key.empty()) {
      client.set_default_headers({{"Authorization", "Bearer " + options.api_key}});
    }
  }

  Status failed(httplib::Error error) const {
    return io_error("the server at " + name + " gave no answer: " + httplib::to_string(error));
  }

  httplib::Client client;
  std::string path;
  std::string name;
};

HttpClient::HttpClient(std::unique_ptr<Connection> connection)
    : connection_(std::move(connection)) {}
HttpClient::HttpClient(HttpClient&&) noexcept = default;
HttpClient& HttpClient::operator=(HttpClient&&) noexcept = default;
HttpClient::~HttpClient() = default;

Result<HttpClient> HttpClient::create(const HttpClientOptions& options) {
  LACUNA_ASSIGN_OR_RETURN(const Address address,
                          parse_base_url(options.base_url, options.default_path));
  if (!(options.timeout_seconds > 0)) {
    return invalid_argument("timeout: " + std::to_string(options.timeout_seconds) +
                            " s, expected more than 0");
  }
  return HttpClient(std::make_unique<Connection>(address, options));
}

Result<HttpReply> HttpClient::get(const std::string& path) {
  const httplib::Result got = connection_->client.Get(connection_->path + path);
  if (!got) {
    return connection_->failed(got.error());
  }
  return HttpReply{got->status, got->body};
}

Result<HttpReply> HttpClient::post(const std::string& path, const std::string& json) {
  const httplib::Result got =
      connection_->client.Post(connection_->path + path, json, "application/json");
  if (!got) {
    return connection_->failed(got.error());
  }
  return HttpReply{got->status, got->body};
}

Result<HttpReply> HttpClient::post_stream(const std::string& path, const std::string& json,
                                          const std::function<bool(std::string_view)>& on_event) {
  HttpReply reply;
  EventSplitter splitter;
  bool stopped = false;
  httplib::Request request;
  request.method = "POST";
  request.path = connection_->path + path;
  request.headers = {{"Accept", "text/event-stream"}};
  request.set_header("Content-Type", "application/json");
  request.body = json;
  request.response_handler = [&](const httplib::Response& response) {
    reply.status = response.status;
    return true;
  };
  request.content_receiver = [&](const char* data, size_t bytes, uint64_t, uint64_t) {
    if (reply.status != 200) {
      reply.body.append(data, bytes);
      return true;
    }
    stopped = !splitter.add({data, bytes}, on_event);
    return !stopped;
  };
  const httplib::Result got = connection_->client.send(request);
  if (!got && !stopped) {
    return connection_->failed(got.error());
  }
  return reply;
}

std::string error_message(const HttpReply& reply) {
  const nlohmann::json json = nlohmann::json::parse(reply.body, nullptr, false);
  if (json.is_object() && json.contains("error")) {
    const nlohmann::json& error = json["error"];
    if (error.is_object() && error.contains("message") && error["message"].is_string()) {
      return error["message"].get<std::string>();
    }
  }
  return reply.body.substr(0, 200);
}

}  // namespace lacuna::server
