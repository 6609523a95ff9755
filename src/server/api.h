// The endpoints: an HTTP call in, a reply out, with an engine loop behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/engine_loop.h"
#include "server/generation.h"
#include "server/http_types.h"
#include "server/metrics.h"
#include "server/request_log.h"
#include "server/request_parser.h"
#include "server/response_writer.h"

namespace lacuna::server {

struct ApiOptions {
  std::vector<std::string> served_names;     // the first is what responses say
  std::vector<std::string> api_keys;         // empty: no key is asked for
  std::vector<std::string> allowed_origins;  // of pages elsewhere; "*": all
  std::string version;
  std::string metrics_prefix = "lacuna:";
  int64_t block_size = 64;
  GenerationOptions generation;
  bool log_requests = false;
  std::function<void(std::string_view)> log;  // a line for the operator
  std::function<int64_t()> num_connections;
};

class Api {
 public:
  explicit Api(ApiOptions options);
  ~Api();

  // Until then everything that needs a model answers 503.
  void attach(std::unique_ptr<Engine> engine, const EngineLoopOptions& options);

  // Before the body is read: a wrong key, a preflight, a body in a coding that is not understood.
  std::optional<ApiReply> admit(const ApiCall& call) const;
  ApiReply handle(const ApiCall& call);
  // CORS headers for every reply to this call.
  std::vector<std::pair<std::string, std::string>> cors_headers(const ApiCall& call) const;

  // New generations are refused from now on.
  void begin_drain() { draining_ = true; }
  int64_t num_active() const { return num_active_; }
  void cancel_all();
  // Counters for the line about throughput; nothing before the engine is attached.
  std::optional<EngineLoad> load() const;

 private:
  EngineLoop* loop() const { return ready_ ? loop_.get() : nullptr; }
  std::optional<ApiError> check_model(const std::string& name) const;
  ApiReply version() const;
  ApiReply models(std::string_view id) const;
  ApiReply tokenize(const ApiCall& call);
  ApiReply detokenize(const ApiCall& call);
  ApiReply generate(const ApiCall& call, bool chat);
  ApiReply metrics_text() const;
  ApiReply selection(const ApiCall& call, std::string_view id) const;
  std::string new_id(std::string_view prefix);

  const ApiOptions options_;
  const int64_t started_;
  Metrics metrics_;
  RequestLog request_log_;
  std::unique_ptr<EngineLoop> loop_;
  std::atomic<bool> ready_ = false;
  std::atomic<bool> draining_ = false;
  std::atomic<int64_t> num_active_ = 0;
  std::atomic<uint64_t> next_id_;
};

ApiReply error_reply(const ApiError& error);

}  // namespace lacuna::server
