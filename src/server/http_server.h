// Sockets: accepts connections, gives each a thread, and lets cpp-httplib parse requests and write
// responses in between. Limits on number, size and time of everything a client may do.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "lacuna/status.h"
#include "server/api.h"

namespace lacuna::server {

struct HttpServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;  // 0: any free one
  int64_t max_connections = 1024;
  int64_t max_request_bytes = int64_t{32} << 20;
  double idle_timeout_seconds = 30;   // between requests, and before the first
  double read_timeout_seconds = 30;   // of a request, headers and body
  double write_timeout_seconds = 30;  // without any progress
  int send_buffer_bytes = 0;          // of a connection; 0: as the system likes it
};

class HttpServer {
 public:
  // Accepts from here on. `api` must outlive the server.
  static Result<std::unique_ptr<HttpServer>> start(Api* api, const HttpServerOptions& options);
  // Closes everything at once.
  ~HttpServer();

  int port() const { return port_; }
  int64_t num_connections() const { return num_connections_; }

  // No new connections; idle ones are closed, busy ones close after their response.
  void stop_accepting();
  // Waits for busy connections, at most this long, then cuts them off.
  void close(double grace_seconds);

 private:
  class Core;  // httplib's server, http_server.cc
  struct Connection {
    int fd = -1;
    std::atomic<bool> done = false;
    std::thread thread;
  };

  HttpServer(Api* api, const HttpServerOptions& options);
  Status listen();
  void accept_loop();
  void accept_one();
  void serve(Connection& connection);
  void reap(bool all);

  Api* api_;
  const HttpServerOptions options_;
  std::unique_ptr<Core> core_;
  int listen_fd_ = -1;
  int stop_fd_ = -1;  // readable once the server stops
  int port_ = 0;
  std::atomic<bool> stopping_ = false;
  std::atomic<int64_t> num_connections_ = 0;
  std::mutex mutex_;
  std::list<Connection> connections_;
  std::thread acceptor_;
};

}  // namespace lacuna::server
