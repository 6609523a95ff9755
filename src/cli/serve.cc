// `lacuna serve`: the engine behind an OpenAI-compatible HTTP server.
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <thread>

#include "cli/commands.h"
#include "cli/engine_flags.h"
#include "cli/text.h"
#include "core/check.h"
#include "server/server.h"

namespace lacuna::cli {
namespace {

struct ServeFlags {
  EngineFlags engine;
  std::string model_positional;
  std::vector<std::string> served_names;
  server::HttpServerOptions http;
  std::vector<std::string> api_keys;
  std::vector<std::string> allowed_origins;
  int64_t max_queued = 1024;
  double request_timeout = 0;
  double shutdown_timeout = 30;
  std::string metrics_prefix = "lacuna:";
  std::string reasoning_parser;
  std::string load_format = "auto";
  int64_t tensor_parallel_size = 1;
  bool chunked_prefill = true;
  double memory_utilization = 0;
  bool trust_remote_code = false;
  bool log_requests = false;
  bool log_stats = true;
};

// SIGTERM and SIGINT: the first asks for a graceful end, the second does not ask. Waits on a thread
// of its own, so that loading a model can be interrupted too.
class SignalWaiter {
 public:
  SignalWaiter() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);  // inherited by every thread from here on
    std::thread([this] { work(); }).detach();
  }
  // From now on the first signal ends wait() instead of the process.
  void arm() { armed_ = true; }
  void wait() {
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return asked_; });
  }

 private:
  void work() {
    for (int count = 1;; ++count) {
      int signal_number = 0;
      if (sigwait(&signals_, &signal_number) != 0) {
        continue;
      }
      if (count > 1 || !armed_) {
        std::_Exit(128 + signal_number);
      }
      const std::lock_guard lock(mutex_);
      asked_ = true;
      wake_.notify_all();
    }
  }

  sigset_t signals_;
  std::atomic<bool> armed_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool asked_ = false;
};

Status check_flags(const ServeFlags& flags) {
  if (flags.tensor_parallel_size != 1) {
    return invalid_argument(
        fmt::format("--tensor-parallel-size: {}, expected 1: this version runs on one device",
                    flags.tensor_parallel_size));
  }
  if (flags.load_format != "auto" && flags.load_format != "safetensors") {
    return invalid_argument("--load-format: \"" + flags.load_format +
                            "\", expected auto or safetensors");
  }
  if (!flags.reasoning_parser.empty() && flags.reasoning_parser != "deepseek_r1" &&
      flags.reasoning_parser != "deepseek_v3" && flags.reasoning_parser != "glm45") {
    return invalid_argument("--reasoning-parser: \"" + flags.reasoning_parser +
                            "\", expected deepseek_r1, deepseek_v3 or glm45");
  }
  if (!flags.chunked_prefill) {
    return invalid_argument("--no-enable-chunked-prefill: prompts are always computed in chunks");
  }
  for (const std::string& key : flags.api_keys) {
    if (key.empty()) {
      return invalid_argument("--api-key: empty, expected a key");
    }
  }
  return ok_status();
}

// Each connection has a descriptor; the default limit of 1024 would be met before our own.
void raise_descriptor_limit(int64_t max_connections) {
  constexpr rlim_t kOthers = 256;
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    const rlim_t wanted = static_cast<rlim_t>(max_connections) + kOthers;
    if (limit.rlim_cur < wanted) {
      limit.rlim_cur = std::min(wanted, limit.rlim_max);
      setrlimit(RLIMIT_NOFILE, &limit);
    }
  }
}

// A prefill and a decode step, so that the first client finds memory touched; and the names of the
// kernels that attention took.
Result<std::string> warm_up(Engine& engine) {
  Request request;
  request.prompt.assign(std::min<int64_t>(8, engine.info().max_model_len - 1), 0);
  request.sampling.max_tokens = 2;
  request.sampling.ignore_eos = true;
  LACUNA_RETURN_IF_ERROR(engine.submit(std::move(request)).status());
  while (engine.has_work()) {
    LACUNA_RETURN_IF_ERROR(engine.step().status());
  }
  std::string names;
  for (const auto& [kernel, calls] : engine.counters().kernel_calls) {
    if (kernel.find("mla") != std::string::npos || kernel.find("mha") != std::string::npos) {
      names += (names.empty() ? "" : ", ") + kernel;
    }
  }
  return names;
}

Status serve(ServeFlags flags) {
  if (!flags.model_positional.empty()) {
    if (!flags.engine.model.empty() && flags.engine.model != flags.model_positional) {
      return invalid_argument("--model: given twice, as \"" + flags.model_positional +
                              "\" and as \"" + flags.engine.model + "\"");
    }
    flags.engine.model = flags.model_positional;
  }
  LACUNA_RETURN_IF_ERROR(check_flags(flags));
  if (flags.api_keys.empty()) {
    if (const char* key = std::getenv("LACUNA_API_KEY"); key != nullptr && *key != '\0') {
      flags.api_keys.emplace_back(key);
    }
  }
  const std::string model = flags.engine.model.empty() ? default_model_dir() : flags.engine.model;
  if (flags.served_names.empty()) {
    const std::filesystem::path path = std::filesystem::path(model).lexically_normal();
    flags.served_names.push_back(
        (path.has_filename() ? path.filename() : path.parent_path().filename()).string());
    if (model != flags.served_names.front()) {
      flags.served_names.push_back(model);  // as in vLLM, whose clients name the path
    }
  }
  SignalWaiter signals;
  raise_descriptor_limit(flags.http.max_connections);

  server::ServerOptions options;
  options.http = flags.http;
  options.log_stats = flags.log_stats;
  options.loop.sequences_max = flags.engine.max_num_seqs + flags.max_queued;
  options.api.served_names = flags.served_names;
  options.api.api_keys = flags.api_keys;
  options.api.allowed_origins = flags.allowed_origins;
  options.api.version = LACUNA_VERSION;
  options.api.metrics_prefix = flags.metrics_prefix;
  options.api.block_size = flags.engine.block_size;
  options.api.generation.timeout_seconds = flags.request_timeout;
  options.api.generation.reasoning_parser = !flags.reasoning_parser.empty();
  options.api.log_requests = flags.log_requests;
  options.api.log = [](std::string_view line) { fmt::print(stderr, "{}\n", line); };
  // Listens while the model is loaded: /health says 503 until it is there.
  LACUNA_ASSIGN_OR_RETURN(const std::unique_ptr<server::Server> running,
                          server::Server::start(std::move(options)));
  LACUNA_ASSIGN_OR_RETURN(std::unique_ptr<Engine> engine,
                          make_engine(flags.engine, /*quiet=*/false));
  const EngineInfo info = engine->info();
  LACUNA_ASSIGN_OR_RETURN(const std::string kernel, warm_up(*engine));
  signals.arm();
  running->attach(std::move(engine));
  const std::string host = flags.http.host.find(':') == std::string::npos
                               ? flags.http.host
                               : "[" + flags.http.host + "]";
  fmt::print(stderr,
             "ready: http://{}:{} serves {} ({}, cache {}) on {}; {} tokens of cache, context {}, "
             "{} sequences; attention: {}; top-{}, {} index groups in {} layers\n",
             host, running->port(), flags.served_names.front(), info.dtype, info.kv_format,
             info.device, info.kv_cache_tokens, info.max_model_len, flags.engine.max_num_seqs,
             kernel, info.index_topk, info.num_leader_layers, info.num_layers);
  signals.wait();
  fmt::print(stderr, "shutting down: running requests have {} s, a second signal ends at once\n",
             flags.shutdown_timeout);
  if (!running->shut_down(flags.shutdown_timeout)) {
    fmt::print(stderr, "some requests did not finish in time and were cancelled\n");
  }
  return ok_status();
}

}  // namespace

void add_serve(CLI::App& app, Action& action) {
  CLI::App* command = app.add_subcommand("serve", "Serve an OpenAI-compatible HTTP API");
  auto flags = std::make_shared<ServeFlags>();
  flags->engine.max_num_seqs = 16;
  command->add_option("model", flags->model_positional, "Model folder, like --model");
  add_engine_flags(*command, flags->engine);
  add_serving_flags(*command, flags->engine);
  command->add_option("-a,--served-model-name,--alias", flags->served_names,
                      "Names of the model in the API; default: its folder's");
  command->add_option("--host", flags->http.host, "Address to listen on; 0.0.0.0: all")
      ->capture_default_str();
  command->add_option("--port", flags->http.port, "0: any free one")
      ->check(CLI::Range(0, 65535))
      ->capture_default_str();
  command->add_option(
      "--api-key", flags->api_keys,
      "Key that clients must send (repeatable); default: LACUNA_API_KEY, else none");
  command->add_option("--allowed-origins", flags->allowed_origins,
                      "Web pages elsewhere that may use the API, http://host:port; *: all");
  command->add_option("--max-connections", flags->http.max_connections, "More get a 503")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--max-request-bytes", flags->http.max_request_bytes, "Larger get a 413")
      ->check(CLI::Range(int64_t{1024}, int64_t{1} << 40))
      ->capture_default_str();
  command
      ->add_option("--max-queued-requests", flags->max_queued,
                   "Sequences that wait besides the running ones; more get a 503")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 30))
      ->capture_default_str();
  command
      ->add_option("--request-timeout", flags->request_timeout, "Seconds of a request; 0: no limit")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  command
      ->add_option("--shutdown-timeout", flags->shutdown_timeout,
                   "Seconds that running requests have after SIGTERM")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  command
      ->add_option("--metrics-prefix", flags->metrics_prefix,
                   "Of names in /metrics; vllm: suits dashboards made for vLLM")
      ->capture_default_str();
  command->add_option("--reasoning-parser", flags->reasoning_parser,
                      "Split thoughts off chat answers: deepseek_r1, deepseek_v3 or glm45");
  command
      ->add_option("--tensor-parallel-size,--tp-size", flags->tensor_parallel_size,
                   "1 in this version")
      ->capture_default_str();
  command->add_option("--load-format", flags->load_format, "auto or safetensors")
      ->capture_default_str();
  command->add_flag("--enable-chunked-prefill,!--no-enable-chunked-prefill", flags->chunked_prefill,
                    "Always on");
  command
      ->add_option("--gpu-memory-utilization", flags->memory_utilization,
                   "Accepted; --kv-cache-memory-bytes says what the caches take")
      ->check(CLI::Range(0.0, 1.0));
  command->add_flag("--trust-remote-code", flags->trust_remote_code,
                    "Accepted; a model's own code is never run");
  command->add_flag("--enable-log-requests,!--disable-log-requests,!--no-enable-log-requests",
                    flags->log_requests, "A line for each request");
  command->add_flag("!--disable-log-stats", flags->log_stats, "No line each 10 s");
  command->callback([flags, &action] {
    action = [flags] {
      const Status status = serve(*flags);
      return status.ok() ? 0 : report(status);
    };
  });
}

}  // namespace lacuna::cli
