// The order of things at the start and at the end.
#include "server/server.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "core/check.h"

namespace lacuna::server {
namespace {

constexpr std::chrono::seconds kStatsInterval(10);

}  // namespace

Server::Server(ServerOptions options) : options_(std::move(options)) {
  ApiOptions api = options_.api;
  api.num_connections = [this] {
    const HttpServer* http = listening_;
    return http == nullptr ? 0 : http->num_connections();
  };
  api_ = std::make_unique<Api>(std::move(api));
}

Result<std::unique_ptr<Server>> Server::start(ServerOptions options) {
  std::unique_ptr<Server> server(new Server(std::move(options)));
  LACUNA_ASSIGN_OR_RETURN(server->http_,
                          HttpServer::start(server->api_.get(), server->options_.http));
  server->listening_ = server->http_.get();
  if (server->options_.log_stats && server->options_.api.log) {
    server->stats_ = std::thread([raw = server.get()] { raw->log_stats(); });
  }
  return server;
}

Server::~Server() {
  if (http_ != nullptr) {
    shut_down(0);
  }
}

void Server::attach(std::unique_ptr<Engine> engine) {
  api_->attach(std::move(engine), options_.loop);
}

bool Server::shut_down(double timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (stats_.joinable()) {
    stats_.join();
  }
  auto wait_idle = [this](double seconds) {
    const Clock::time_point deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                          std::chrono::duration<double>(seconds));
    while (api_->num_active() > 0 && Clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return api_->num_active() == 0;
  };
  api_->begin_drain();
  http_->stop_accepting();
  const bool finished = wait_idle(timeout_seconds);
  if (!finished) {
    // Clients are told; those who do not listen are cut off below.
    constexpr double kTellSeconds = 2;
    api_->cancel_all();
    wait_idle(kTellSeconds);
  }
  http_->close(finished && timeout_seconds > 0 ? 1 : 0);
  return finished;
}

void Server::log_stats() {
  EngineCounters last;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kStatsInterval, [this] { return stopping_; })) {
    const std::optional<EngineLoad> load = api_->load();
    if (!load.has_value()) {
      continue;
    }
    const EngineCounters& now = load->counters;
    if (now.steps == last.steps) {
      continue;  // nothing to tell
    }
    const double seconds = std::chrono::duration<double>(kStatsInterval).count();
    auto percent = [](int64_t part, int64_t whole) {
      return 100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1));
    };
    options_.api.log(fmt::format(
        "{} running, {} waiting; prompt {:.1f} tokens/s, generated {:.1f} tokens/s; cache {:.1f} % "
        "used, prefix hits {:.1f} %; keys read {:.1f} % of visible",
        load->num_running, load->num_waiting,
        static_cast<double>(now.prompt_tokens - last.prompt_tokens) / seconds,
        static_cast<double>(now.generated_tokens - last.generated_tokens) / seconds,
        percent(now.blocks_used, now.blocks_total),
        percent(now.prefix_hits - last.prefix_hits, now.prefix_queries - last.prefix_queries),
        percent(now.keys_read - last.keys_read, now.keys_visible - last.keys_visible)));
    last = now;
  }
}

}  // namespace lacuna::server
