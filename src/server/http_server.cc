// cpp-httplib's own accept loop is not used: it has a backlog of 5, a fixed pool of threads,
// selects on descriptors below 1024, does not tell whether a client is still there, and aborts
// streams when told to stop. Its parser and writer work over any httplib::Stream; the one here
// counts bytes and watches the clock.
#include "server/http_server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>

namespace lacuna::server {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kHeaderBytesMax = int64_t{64} << 10;
constexpr int kBacklog = 1024;

int milliseconds_until(Clock::time_point deadline) {
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left + 1, 0, 1 << 30));
}

Clock::time_point after(double seconds) {
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

std::string error_text(int error) { return std::generic_category().message(error); }

// A connection as httplib sees it, for any number of requests in turn.
class SocketStream : public httplib::Stream {
 public:
  SocketStream(int fd, double write_timeout_seconds)
      : fd_(fd), write_timeout_seconds_(write_timeout_seconds) {}

  void begin_request(double read_timeout_seconds, int64_t bytes_max) {
    read_deadline_ = after(read_timeout_seconds);
    bytes_left_ = bytes_max;
    over_limit_ = false;
    timed_out_ = false;
  }
  bool has_buffered() const { return begin_ < end_; }
  bool over_limit() const { return over_limit_; }
  bool timed_out() const { return timed_out_; }

  // The other end has closed, or only its writing half, which no client of this API does while it
  // waits. Bytes of a next request do not count.
  bool gone() const {
    char byte;
    const ssize_t got = recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  }

  bool is_readable() const override { return has_buffered() || wait(POLLIN, Clock::now()); }
  bool is_writable() const override { return !write_failed_; }

  ssize_t read(char* out, size_t size) override {
    if (!has_buffered() && !fill()) {
      return -1;
    }
    if (begin_ == end_) {
      return 0;
    }
    const size_t count = std::min(size, end_ - begin_);
    if (static_cast<int64_t>(count) > bytes_left_) {
      over_limit_ = true;
      return -1;
    }
    bytes_left_ -= static_cast<int64_t>(count);
    std::memcpy(out, buffer_.data() + begin_, count);
    begin_ += count;
    return static_cast<ssize_t>(count);
  }

  ssize_t write(const char* data, size_t size) override {
    size_t done = 0;
    while (done < size && !write_failed_) {
      const ssize_t sent = send(fd_, data + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        done += static_cast<size_t>(sent);
      } else if (sent < 0 && errno == EINTR) {
        continue;
      } else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        write_failed_ = !wait(POLLOUT, after(write_timeout_seconds_));
      } else {
        write_failed_ = true;
      }
    }
    return write_failed_ ? -1 : static_cast<ssize_t>(size);
  }

  void get_remote_ip_and_port(std::string&, int&) const override {}
  void get_local_ip_and_port(std::string&, int&) const override {}
  // Only compared with FD_SETSIZE, which does not matter without select.
  socket_t socket() const override { return 0; }

 private:
  bool wait(short events, Clock::time_point deadline) const {
    for (;;) {
      pollfd poller = {fd_, events, 0};
      const int ready = poll(&poller, 1, milliseconds_until(deadline));
      if (ready >= 0 || errno != EINTR) {
        return ready > 0;
      }
    }
  }

  bool fill() {
    for (;;) {
      const ssize_t got = recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
      if (got >= 0) {
        begin_ = 0;
        end_ = static_cast<size_t>(got);
        return true;
      }
      if (errno == EINTR) {
        continue;
      }
      if (errno != EAGAIN && errno != EWOULDBLOCK) {
        return false;
      }
      if (Clock::now() >= read_deadline_ || !wait(POLLIN, read_deadline_)) {
        timed_out_ = true;
        return false;
      }
    }
  }

  const int fd_;
  const double write_timeout_seconds_;
  Clock::time_point read_deadline_;
  int64_t bytes_left_ = 0;
  bool over_limit_ = false;
  bool timed_out_ = false;
  bool write_failed_ = false;
  std::array<char, 16384> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
};

// Of the request that this thread serves: httplib's handlers are not told.
struct CurrentRequest {
  SocketStream* stream = nullptr;
  bool close_after = false;
};
thread_local CurrentRequest current;

// Lets a client read the last reply although it is still sending: closing with unread bytes would
// reset the connection.
void linger(int fd) {
  shutdown(fd, SHUT_WR);
  std::array<char, 16384> rest;
  const Clock::time_point deadline = after(1);
  pollfd poller = {fd, POLLIN, 0};
  while (Clock::now() < deadline && poll(&poller, 1, milliseconds_until(deadline)) > 0) {
    const ssize_t got = recv(fd, rest.data(), rest.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
      return;
    }
  }
}

bool has_body(const httplib::Request& request) {
  return request.has_header("Transfer-Encoding") ||
         (request.has_header("Content-Length") &&
          request.get_header_value("Content-Length") != "0");
}

ApiCall to_call(const httplib::Request& request) {
  ApiCall call;
  call.method = request.method;
  call.path = request.path;
  call.query.insert(request.params.begin(), request.params.end());
  for (const auto& [name, value] : request.headers) {
    std::string lower = name;
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    call.headers.emplace(std::move(lower), value);
  }
  call.client_gone = [stream = current.stream] { return stream->gone(); };
  return call;
}

ApiError plain_error(int status) {
  switch (status) {
    case 408:
      return {408, "The request did not arrive in time."};
    case 413:
      return {413, "The request is too large.", "invalid_request_error", "", "request_too_large"};
    case 414:
      return {414, "The request line is too long."};
    case 404:
      return {404, "Not found.", "invalid_request_error", "", "not_found"};
    default:
      return {status, status < 500 ? "The HTTP request is malformed." : "Internal server error.",
              status < 500 ? "invalid_request_error" : "server_error"};
  }
}

}  // namespace

class HttpServer::Core : public httplib::Server {
 public:
  Core(Api* api, const HttpServerOptions& options) : api_(api), options_(options) {
    // Anything but INVALID_SOCKET: httplib would abort streams.
    svr_sock_ = 0;
    set_payload_max_length(static_cast<size_t>(options.max_request_bytes));
    set_keep_alive_timeout(static_cast<time_t>(options.idle_timeout_seconds));
    set_keep_alive_max_count(1 << 30);
    const Handler handler = [this](const httplib::Request& request, httplib::Response& response) {
      // GET has no body here; one that was sent would be read as the next request.
      current.close_after =
          current.close_after ||
          ((request.method == "GET" || request.method == "HEAD") && has_body(request));
      ApiCall call = to_call(request);
      // The request is httplib's local variable; nobody reads its body after the handler.
      call.body = std::move(const_cast<httplib::Request&>(request).body);
      apply(call, api_->handle(call), request, response);
    };
    Get(".*", handler);
    Post(".*", handler);
    Put(".*", handler);
    Patch(".*", handler);
    Delete(".*", handler);
    Options(".*", handler);
    set_pre_routing_handler([this](const httplib::Request& request, httplib::Response& response) {
      const ApiCall call = to_call(request);
      std::optional<ApiReply> reply = api_->admit(call);
      if (!reply.has_value()) {
        return HandlerResponse::Unhandled;
      }
      current.close_after = current.close_after || has_body(request);
      apply(call, std::move(*reply), request, response);
      return HandlerResponse::Handled;
    });
    set_expect_100_continue_handler(
        [this](const httplib::Request& request, httplib::Response& response) {
          const std::string length = request.get_header_value("Content-Length");
          const ApiCall call = to_call(request);
          std::optional<ApiReply> reply = api_->admit(call);
          if (!reply.has_value() && std::strtoll(length.c_str(), nullptr, 10) >
                                        static_cast<long long>(options_.max_request_bytes)) {
            reply = error_reply(plain_error(413));
          }
          if (!reply.has_value()) {
            return 100;
          }
          current.close_after = true;
          apply(call, std::move(*reply), request, response);
          return response.status;
        });
    const HandlerWithResponse on_error = [this](const httplib::Request& request,
                                                httplib::Response& response) {
      if (!response.body.empty() || response.content_provider_) {
        return HandlerResponse::Unhandled;
      }
      const int status = current.stream->over_limit()  ? 413
                         : current.stream->timed_out() ? 408
                                                       : response.status;
      // The rest of such a request is somewhere in the stream.
      current.close_after = true;
      apply(to_call(request), error_reply(plain_error(status)), request, response);
      return HandlerResponse::Handled;
    };
    set_error_handler(on_error);
    set_exception_handler(
        [](const httplib::Request&, httplib::Response& response, std::exception_ptr) {
          // The error handler writes the body. What was thrown (out of memory, most likely) is
          // nothing for clients.
          response.status = 500;
        });
  }

  // False: the connection is to be closed. `has_rest`: bytes of the request are yet unread.
  bool serve_one(SocketStream& stream, bool last, bool* has_rest) {
    current = {.stream = &stream};
    bool closed = false;
    bool written = false;
    try {
      written = process_request(stream, last, closed, [](httplib::Request&) {});
    } catch (const std::exception&) {
      // From outside of a handler: memory is short. The connection is dropped.
    }
    const bool keep = written && !closed && !last && !current.close_after;
    *has_rest = current.close_after;
    current = {};
    return keep;
  }

 private:
  void apply(const ApiCall& call, ApiReply reply, const httplib::Request& request,
             httplib::Response& response) {
    response.status = reply.status;
    for (const auto& [name, value] : reply.headers) {
      response.set_header(name, value);
    }
    for (const auto& [name, value] : api_->cors_headers(call)) {
      response.set_header(name, value);
    }
    if (current.close_after && !response.has_header("Connection")) {
      response.set_header("Connection", "close");
    }
    if (!reply.stream) {
      if (!reply.body.empty() || reply.status != 204) {
        response.set_content(reply.body, reply.content_type);
      }
      return;
    }
    auto provider = [stream = std::move(reply.stream)](size_t, httplib::DataSink& sink) {
      bool writable = true;
      stream([&](std::string_view bytes) {
        writable = writable && sink.write(bytes.data(), bytes.size());
        return writable;
      });
      if (writable) {
        sink.done();
      }
      return writable;
    };
    if (request.version == "HTTP/1.0") {
      // Without chunks the end of a stream is the end of the connection.
      current.close_after = true;
      response.set_content_provider(reply.content_type, std::move(provider));
    } else {
      response.set_chunked_content_provider(reply.content_type, std::move(provider));
    }
  }

  Api* api_;
  const HttpServerOptions options_;
};

HttpServer::HttpServer(Api* api, const HttpServerOptions& options)
    : api_(api), options_(options), core_(std::make_unique<Core>(api, options)) {}

Result<std::unique_ptr<HttpServer>> HttpServer::start(Api* api, const HttpServerOptions& options) {
  std::unique_ptr<HttpServer> server(new HttpServer(api, options));
  if (Status status = server->listen(); !status.ok()) {
    return status;
  }
  server->acceptor_ = std::thread([raw = server.get()] { raw->accept_loop(); });
  return server;
}

HttpServer::~HttpServer() {
  close(0);
  if (listen_fd_ >= 0) {
    ::close(listen_fd_);
  }
  if (stop_fd_ >= 0) {
    ::close(stop_fd_);
  }
}

Status HttpServer::listen() {
  const std::string where = fmt::format("--host {} --port {}", options_.host, options_.port);
  stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* addresses = nullptr;
  if (const int error = getaddrinfo(options_.host.c_str(), std::to_string(options_.port).c_str(),
                                    &hints, &addresses);
      error != 0) {
    return io_error(where + ": " + gai_strerror(error));
  }
  int error = 0;
  for (const addrinfo* address = addresses; address != nullptr && listen_fd_ < 0;
       address = address->ai_next) {
    const int fd = ::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      error = errno;
      continue;
    }
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, address->ai_addr, address->ai_addrlen) == 0 && ::listen(fd, kBacklog) == 0) {
      listen_fd_ = fd;
    } else {
      error = errno;
      ::close(fd);
    }
  }
  freeaddrinfo(addresses);
  if (listen_fd_ < 0 || stop_fd_ < 0) {
    return io_error(where + ": " + error_text(error));
  }
  sockaddr_storage bound = {};
  socklen_t length = sizeof(bound);
  getsockname(listen_fd_, reinterpret_cast<sockaddr*>(&bound), &length);
  port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                                            : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
  return ok_status();
}

void HttpServer::accept_loop() {
  while (!stopping_) {
    pollfd pollers[] = {{listen_fd_, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
    if (poll(pollers, 2, -1) > 0 && (pollers[0].revents & POLLIN) != 0 && !stopping_) {
      accept_one();
    }
    reap(/*all=*/false);
  }
}

void HttpServer::accept_one() {
  const int fd = accept4(listen_fd_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      // The client waits in the backlog until some other one leaves.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return;
  }
  const int yes = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
  if (options_.send_buffer_bytes > 0) {
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &options_.send_buffer_bytes,
               sizeof(options_.send_buffer_bytes));
  }
  if (num_connections_ < options_.max_connections) {
    const std::lock_guard lock(mutex_);
    Connection& connection = connections_.emplace_back();
    connection.fd = fd;
    ++num_connections_;
    try {
      connection.thread = std::thread([this, &connection] { serve(connection); });
      return;
    } catch (const std::system_error&) {
      --num_connections_;
      connections_.pop_back();
    }
  }
  const std::string body =
      error_body({503, "Too many connections.", "server_error", "", "too_many_connections"});
  const std::string reply = fmt::format(
      "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
      "Connection: close\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
  send(fd, reply.data(), reply.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  shutdown(fd, SHUT_WR);
  // Unread bytes at close() would reset the connection before the reply is read.
  std::array<char, 4096> rest;
  recv(fd, rest.data(), rest.size(), MSG_DONTWAIT);
  ::close(fd);
}

void HttpServer::serve(Connection& connection) {
  const int fd = connection.fd;
  bool has_rest = false;
  {
    auto stream = std::make_unique<SocketStream>(fd, options_.write_timeout_seconds);
    for (;;) {
      if (!stream->has_buffered()) {
        pollfd pollers[] = {{fd, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
        const int ready =
            poll(pollers, 2, milliseconds_until(after(options_.idle_timeout_seconds)));
        if (ready <= 0 || (pollers[0].revents & POLLIN) == 0) {
          break;
        }
      }
      stream->begin_request(options_.read_timeout_seconds,
                            options_.max_request_bytes + kHeaderBytesMax);
      if (!core_->serve_one(*stream, /*last=*/stopping_, &has_rest)) {
        break;
      }
    }
  }
  if (has_rest) {
    linger(fd);
  }
  const std::lock_guard lock(mutex_);
  ::close(fd);
  connection.fd = -1;
  connection.done = true;
  --num_connections_;
}

void HttpServer::reap(bool all) {
  std::list<Connection> finished;
  {
    const std::lock_guard lock(mutex_);
    for (auto it = connections_.begin(); it != connections_.end();) {
      const auto next = std::next(it);
      if (all || it->done) {  // done: its thread is about to return
        finished.splice(finished.end(), connections_, it);
      }
      it = next;
    }
  }
  for (Connection& connection : finished) {
    connection.thread.join();
  }
}

void HttpServer::stop_accepting() {
  if (stopping_.exchange(true)) {
    return;
  }
  const uint64_t one = 1;
  if (::write(stop_fd_, &one, sizeof(one)) < 0) {
    // Cannot happen to a fresh eventfd; connections would end at their idle timeout.
  }
  if (acceptor_.joinable()) {
    acceptor_.join();
  }
  if (listen_fd_ >= 0) {
    ::close(listen_fd_);
    listen_fd_ = -1;
  }
}

void HttpServer::close(double grace_seconds) {
  stop_accepting();
  const Clock::time_point deadline = after(grace_seconds);
  while (num_connections_ > 0 && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  {
    const std::lock_guard lock(mutex_);
    for (Connection& connection : connections_) {
      if (connection.fd >= 0) {
        shutdown(connection.fd, SHUT_RDWR);
      }
    }
  }
  reap(/*all=*/true);
}

}  // namespace lacuna::server
