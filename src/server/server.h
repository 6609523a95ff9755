// `lacuna serve` without the command line: listens at once, answers once an engine is attached,
// drains on request.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "lacuna/engine.h"
#include "lacuna/status.h"
#include "server/api.h"
#include "server/http_server.h"

namespace lacuna::server {

struct ServerOptions {
  ApiOptions api;
  HttpServerOptions http;
  EngineLoopOptions loop;
  bool log_stats = true;  // a line each 10 s while there is work
};

class Server {
 public:
  static Result<std::unique_ptr<Server>> start(ServerOptions options);
  ~Server();

  void attach(std::unique_ptr<Engine> engine);
  int port() const { return http_->port(); }

  // Takes no new requests and finishes running ones, at most this long; then cancels what is left.
  // True: nothing had to be cancelled.
  bool shut_down(double timeout_seconds);

 private:
  explicit Server(ServerOptions options);
  void log_stats();

  const ServerOptions options_;
  std::unique_ptr<Api> api_;
  std::unique_ptr<HttpServer> http_;
  std::atomic<const HttpServer*> listening_ = nullptr;  // http_, for handlers that run already
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  std::thread stats_;
};

}  // namespace lacuna::server
