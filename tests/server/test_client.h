// A small HTTP client over a plain socket, which may misbehave in every way that a test wants.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lacuna::server {

using Json = nlohmann::json;

// By how much more the test waits for the server: a sanitizer's build is that much slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kSlowness = 8;
#else
inline constexpr int kSlowness = 1;
#endif

struct Reply {
  int status = 0;  // 0: no response came
  std::map<std::string, std::string> headers;
  std::string body;

  Json json() const { return Json::parse(body, nullptr, /*allow_exceptions=*/false); }
  Json error() const {
    const Json parsed = json();
    return parsed.is_object() ? parsed.value("error", Json::object()) : Json::object();
  }
};

class Client {
 public:
  // `receive_buffer_bytes`: of the socket; 0: as the system likes it.
  explicit Client(int port, int receive_buffer_bytes = 0)
      : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    if (receive_buffer_bytes > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer_bytes, sizeof(receive_buffer_bytes));
    }
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  Client(Client&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_) {}
  ~Client() { hang_up(); }

  bool connected() const { return connected_; }
  void hang_up() {
    if (fd_ >= 0) {
      close(std::exchange(fd_, -1));
    }
  }

  bool send_bytes(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) {
        return false;
      }
      bytes.remove_prefix(static_cast<size_t>(sent));
    }
    return true;
  }

  void send_request(const std::string& method, const std::string& path, const std::string& body,
                    const std::vector<std::string>& headers = {}) {
    std::string text = method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n";
    for (const std::string& header : headers) {
      text += header + "\r\n";
    }
    if (method != "GET") {
      text += "Content-Length: " + std::to_string(body.size()) + "\r\n";
    }
    send_bytes(text + "\r\n" + body);
  }

  void end_sending() { shutdown(fd_, SHUT_WR); }

  // Bytes as they come; empty: the end, or nothing within `milliseconds`.
  std::string read_some(int milliseconds = 30000 * kSlowness) {
    pollfd poller = {fd_, POLLIN, 0};
    char buffer[16384];
    if (poll(&poller, 1, milliseconds) <= 0) {
      return {};
    }
    const ssize_t got = recv(fd_, buffer, sizeof(buffer), 0);
    return got > 0 ? std::string(buffer, static_cast<size_t>(got)) : std::string();
  }
  bool closed_within(int milliseconds) {
    pollfd poller = {fd_, POLLIN, 0};
    char byte;
    return poll(&poller, 1, milliseconds) > 0 && recv(fd_, &byte, 1, MSG_PEEK) <= 0;
  }

  Reply read_reply() {
    Reply reply;
    const std::optional<std::string> head = read_until("\r\n\r\n");
    if (!head.has_value()) {
      return reply;
    }
    reply.status = std::stoi(head->substr(9, 3));
    for (size_t begin = head->find("\r\n") + 2; begin < head->size();) {
      const size_t end = head->find("\r\n", begin);
      const size_t colon = head->find(": ", begin);
      if (colon == std::string::npos || end == std::string::npos || colon > end) {
        break;
      }
      std::string name = head->substr(begin, colon - begin);
      std::transform(name.begin(), name.end(), name.begin(), ::tolower);
      reply.headers[name] = head->substr(colon + 2, end - colon - 2);
      begin = end + 2;
    }
    if (reply.headers.contains("content-length")) {
      read_exactly(std::stoul(reply.headers["content-length"]), &reply.body);
    } else if (reply.headers.contains("transfer-encoding")) {
      for (;;) {
        const std::optional<std::string> size = read_until("\r\n");
        const size_t bytes = size.has_value() ? std::stoul(*size, nullptr, 16) : 0;
        read_exactly(bytes, &reply.body);
        if (!read_until("\r\n").has_value() || bytes == 0) {
          break;
        }
      }
    }
    return reply;
  }

 private:
  bool more() {
    const std::string bytes = read_some();
    pending_ += bytes;
    return !bytes.empty();
  }
  std::optional<std::string> read_until(std::string_view mark) {
    for (;;) {
      if (const size_t found = pending_.find(mark); found != std::string::npos) {
        std::string text = pending_.substr(0, found + mark.size());
        pending_.erase(0, found + mark.size());
        return text;
      }
      if (!more()) {
        return std::nullopt;
      }
    }
  }
  void read_exactly(size_t bytes, std::string* out) {
    while (pending_.size() < bytes && more()) {
    }
    const size_t count = std::min(bytes, pending_.size());
    *out += pending_.substr(0, count);
    pending_.erase(0, count);
  }

  int fd_;
  bool connected_ = false;
  std::string pending_;
};

inline Reply call(int port, const std::string& method, const std::string& path,
                  const std::string& body = {}, const std::vector<std::string>& headers = {}) {
  Client client(port);
  client.send_request(method, path, body, headers);
  return client.read_reply();
}

// The JSON of every event of a stream; "[DONE]" as a string.
inline std::vector<Json> events_of(const std::string& stream) {
  std::vector<Json> events;
  for (size_t begin = 0; begin < stream.size();) {
    const size_t end = std::min(stream.find("\n\n", begin), stream.size());
    const std::string event = stream.substr(begin, end - begin);
    if (event.starts_with("data: ")) {
      const std::string data = event.substr(6);
      events.push_back(data == "[DONE]" ? Json(data) : Json::parse(data));
    }
    begin = end + 2;
  }
  return events;
}

}  // namespace lacuna::server
