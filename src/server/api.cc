// Routes and the short endpoints. Generations are in generation.cc.
#include "server/api.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <ctime>
#include <random>

#include "server/binary_hash.h"
#include "server/page_files.h"

namespace lacuna::server {
namespace {

int64_t unix_time() { return static_cast<int64_t>(std::time(nullptr)); }

ApiReply json_reply(const OrderedJson& json) {
  ApiReply reply;
  reply.body = dump(json);
  return reply;
}

ApiError not_ready() {
  return {503, "The model is still being loaded.", "server_error", "", "not_ready"};
}

// Takes as long for a wrong key as for the right one.
bool same_key(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) {
    return false;
  }
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

// What monitors and the page's own files need is open; everything about content is not.
bool needs_key(const ApiCall& call) {
  return call.path.starts_with("/v1/") || call.path == "/tokenize" || call.path == "/detokenize";
}

constexpr std::string_view kBearer = "Bearer ";
constexpr std::string_view kRequestsPath = "/v1/lacuna/requests";

}  // namespace

ApiReply error_reply(const ApiError& error) {
  ApiReply reply;
  reply.status = error.status;
  reply.body = error_body(error);
  if (error.code == "queue_full" || error.code == "not_ready") {
    reply.headers.emplace_back("Retry-After", "1");
  }
  return reply;
}

Api::Api(ApiOptions options)
    : options_(std::move(options)), started_(unix_time()), next_id_(std::random_device()()) {}

Api::~Api() = default;

void Api::attach(std::unique_ptr<Engine> engine, const EngineLoopOptions& options) {
  loop_ = std::make_unique<EngineLoop>(std::move(engine), options, &metrics_);
  ready_ = true;
}

void Api::cancel_all() {
  if (EngineLoop* engine_loop = loop()) {
    engine_loop->cancel_all();
  }
}

std::optional<EngineLoad> Api::load() const {
  const EngineLoop* engine_loop = loop();
  return engine_loop == nullptr ? std::nullopt : std::optional(engine_loop->load());
}

std::string Api::new_id(std::string_view prefix) {
  // Odd multiplier: distinct counters give distinct ids.
  const uint64_t number = next_id_.fetch_add(1) * 0x9E3779B97F4A7C15u;
  return fmt::format("{}-{:016x}", prefix, number);
}

std::optional<ApiError> Api::check_model(const std::string& name) const {
  const auto& names = options_.served_names;
  if (name.empty() || std::find(names.begin(), names.end(), name) != names.end()) {
    return std::nullopt;
  }
  return ApiError{
      404, fmt::format("The model `{}` does not exist; this server has `{}`.", name, names.front()),
      "invalid_request_error", "model", "model_not_found"};
}

std::vector<std::pair<std::string, std::string>> Api::cors_headers(const ApiCall& call) const {
  const std::string origin(call.header("origin"));
  const auto& allowed = options_.allowed_origins;
  if (origin.empty() || allowed.empty()) {
    return {};
  }
  const bool any = std::find(allowed.begin(), allowed.end(), "*") != allowed.end();
  if (!any && std::find(allowed.begin(), allowed.end(), origin) == allowed.end()) {
    return {};
  }
  std::vector<std::pair<std::string, std::string>> headers = {
      {"Access-Control-Allow-Origin", any ? "*" : origin}, {"Vary", "Origin"}};
  if (call.method == "OPTIONS") {
    headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    headers.emplace_back("Access-Control-Allow-Headers", "Authorization, Content-Type");
    headers.emplace_back("Access-Control-Max-Age", "600");
  }
  return headers;
}

std::optional<ApiReply> Api::admit(const ApiCall& call) const {
  if (call.method == "OPTIONS") {
    ApiReply reply;
    reply.status = 204;
    return reply;
  }
  if (!options_.api_keys.empty() && needs_key(call)) {
    std::string_view given = call.header("authorization");
    given = given.starts_with(kBearer) ? given.substr(kBearer.size()) : std::string_view();
    bool known = false;
    for (const std::string& key : options_.api_keys) {
      known = same_key(given, key) || known;
    }
    if (!known) {
      ApiReply reply =
          error_reply({401,
                       given.empty() ? "No API key was given (header Authorization: Bearer KEY)."
                                     : "The API key is wrong.",
                       "invalid_request_error", "", "invalid_api_key"});
      reply.headers.emplace_back("WWW-Authenticate", "Bearer");
      return reply;
    }
  }
  const std::string_view coding = call.header("content-encoding");
  if (!coding.empty() && coding != "identity") {
    // A small compressed body may hold more than memory does.
    return error_reply({415, fmt::format("Content-Encoding: {} is not accepted.", coding)});
  }
  return std::nullopt;
}

ApiReply Api::version() const {
  OrderedJson json;
  json["version"] = options_.version;
  json["binary_hash"] = binary_hash();
  if (const EngineLoop* engine_loop = loop()) {
    const EngineInfo& info = engine_loop->engine().info();
    json["device"] = info.device;
    json["dtype"] = info.dtype;
    json["kv_format"] = info.kv_format;
    json["index_format"] = info.index_format;
    json["vocab_size"] = info.vocab_size;
    json["kernels"] = OrderedJson::array();
    for (const auto& [kernel, calls] : engine_loop->load().counters.kernel_calls) {
      json["kernels"].push_back(kernel);
    }
  }
  return json_reply(json);
}

ApiReply Api::models(std::string_view id) const {
  const EngineLoop* engine_loop = loop();
  if (engine_loop == nullptr) {
    return error_reply(not_ready());
  }
  if (!id.empty()) {
    if (const std::optional<ApiError> error = check_model(std::string(id))) {
      return error_reply(*error);
    }
  }
  OrderedJson list = OrderedJson::array();
  for (const std::string& name : options_.served_names) {
    OrderedJson model;
    model["id"] = name;
    model["object"] = "model";
    model["created"] = started_;
    model["owned_by"] = "lacuna";
    model["max_model_len"] = engine_loop->engine().info().max_model_len;
    if (name == id) {
      return json_reply(model);
    }
    list.push_back(std::move(model));
  }
  return json_reply({{"object", "list"}, {"data", std::move(list)}});
}

ApiReply Api::tokenize(const ApiCall& call) {
  TokenizeRequest request;
  if (const std::optional<ApiError> error = parse_tokenize(call.body, &request)) {
    return error_reply(*error);
  }
  if (const std::optional<ApiError> error = check_model(request.model)) {
    return error_reply(*error);
  }
  const Engine& engine = loop()->engine();
  if (!request.messages_json.empty()) {
    Result<std::string> text =
        engine.apply_chat_template(request.messages_json, request.options_json);
    if (!text.ok()) {
      return error_reply(bad_request(text.status().message(), "messages"));
    }
    request.prompt = std::move(*text);
  }
  const Result<std::vector<int32_t>> ids = engine.encode(request.prompt);
  if (!ids.ok()) {
    return error_reply(bad_request(ids.status().message(), "prompt"));
  }
  OrderedJson json;
  json["count"] = ids->size();
  json["max_model_len"] = engine.info().max_model_len;
  json["tokens"] = *ids;
  if (request.return_token_strs) {
    json["token_strs"] = OrderedJson::array();
    for (const int32_t id : *ids) {
      json["token_strs"].push_back(std::string(engine.token_bytes(id)));
    }
  }
  return json_reply(json);
}

ApiReply Api::detokenize(const ApiCall& call) {
  DetokenizeRequest request;
  if (const std::optional<ApiError> error = parse_detokenize(call.body, &request)) {
    return error_reply(*error);
  }
  if (const std::optional<ApiError> error = check_model(request.model)) {
    return error_reply(*error);
  }
  const Engine& engine = loop()->engine();
  for (const int32_t id : request.tokens) {
    if (id >= engine.info().vocab_size) {
      return error_reply(bad_request(
          fmt::format("tokens: {}, expected 0 to {}.", id, engine.info().vocab_size - 1),
          "tokens"));
    }
  }
  return json_reply({{"prompt", engine.decode(request.tokens)}});
}

ApiReply Api::generate(const ApiCall& call, bool chat) {
  // Counted before looking, so that whoever begins to drain sees this request or stops it.
  struct Active {
    explicit Active(std::atomic<int64_t>* count) : count(count) { ++*count; }
    ~Active() { --*count; }
    std::atomic<int64_t>* count;
  };
  auto active = std::make_shared<Active>(&num_active_);
  if (draining_) {
    ApiReply reply =
        error_reply({503, "The server is shutting down.", "server_error", "", "shutting_down"});
    reply.headers.emplace_back("Connection", "close");
    return reply;
  }
  GenerationRequest request;
  if (const std::optional<ApiError> error =
          chat ? parse_chat(call.body, &request) : parse_completion(call.body, &request)) {
    return error_reply(*error);
  }
  if (const std::optional<ApiError> error = check_model(request.model)) {
    return error_reply(*error);
  }
  ResponseHead head;
  head.chat = chat;
  head.id = new_id(chat ? "chatcmpl" : "cmpl");
  head.created = unix_time();
  head.model = request.model.empty() ? options_.served_names.front() : request.model;
  const std::string id = head.id;
  const bool streams = request.stream;
  auto generation = std::make_shared<Generation>(loop(), &request_log_, options_.generation,
                                                 std::move(request), std::move(head));
  auto log_end = [this, id, path = call.path](const Generation& ended) {
    if (options_.log_requests && options_.log) {
      options_.log(fmt::format("{} {}: {}", path, id, ended.summary()));
    }
  };
  ApiReply reply;
  if (const std::optional<ApiError> error = generation->start(call.client_gone)) {
    reply = error_reply(*error);
  } else if (!streams) {
    reply = generation->collect(call.client_gone);
    log_end(*generation);
  } else {
    reply.content_type = "text/event-stream";
    reply.headers.emplace_back("Cache-Control", "no-cache");
    reply.stream = [active, generation, log_end,
                    client_gone = call.client_gone](const StreamWriter& write) {
      generation->stream(write, client_gone);
      log_end(*generation);
    };
  }
  reply.headers.emplace_back("X-Request-Id", id);
  return reply;
}

ApiReply Api::metrics_text() const {
  MetricsScene scene;
  scene.prefix = options_.metrics_prefix;
  scene.model_name = options_.served_names.front();
  if (const std::optional<EngineLoad> now = load()) {
    scene.counters = now->counters;
    scene.num_running = now->num_running;
    scene.num_waiting = now->num_waiting;
  }
  scene.num_connections = options_.num_connections ? options_.num_connections() : 0;
  ApiReply reply;
  reply.content_type = "text/plain; version=0.0.4; charset=utf-8";
  reply.body = metrics_.render(scene);
  return reply;
}

ApiReply Api::selection(const ApiCall& call, std::string_view id) const {
  SelectionScene scene{.engine = &loop()->engine(), .block_size = options_.block_size};
  if (const auto layer = call.query.find("layer"); layer != call.query.end()) {
    int number = 0;
    const std::string& text = layer->second;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), number);
    if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) {
      return error_reply(bad_request("layer: \"" + text + "\", expected an integer.", "layer"));
    }
    scene.layer = number;
  }
  std::optional<std::string> body = request_log_.selection_json(id, scene);
  if (!body.has_value()) {
    return error_reply({404,
                        fmt::format("No selection is recorded for `{}`: send \"record_selection"
                                    "\": true with a request; the last {} requests are kept.",
                                    id, RequestLog::kRequestsMax),
                        "invalid_request_error", "id", "not_found"});
  }
  ApiReply reply;
  reply.body = std::move(*body);
  return reply;
}

ApiReply Api::handle(const ApiCall& call) {
  const bool get = call.method == "GET" || call.method == "HEAD";
  const std::string& path = call.path;
  const std::string_view page =
      path == "/" ? "index.html" : std::string_view(path).substr(path.empty() ? 0 : 1);
  for (const PageFile& file : page_files()) {
    if (get && file.name == page) {
      ApiReply reply;
      reply.content_type = file.content_type;
      reply.body = file.content;
      reply.headers.emplace_back("Content-Security-Policy", "default-src 'self'");
      reply.headers.emplace_back("X-Content-Type-Options", "nosniff");
      return reply;
    }
  }
  struct Route {
    std::string_view path;
    bool is_get;
    bool needs_model;
    std::function<ApiReply()> run;
  };
  const Route routes[] = {
      {"/health", true, true, [] { return ApiReply{.content_type = "text/plain"}; }},
      {"/version", true, false, [&] { return version(); }},
      {"/metrics", true, false, [&] { return metrics_text(); }},
      {"/v1/models", true, true, [&] { return models(""); }},
      {kRequestsPath, true, true,
       [&] {
         ApiReply reply;
         reply.body = request_log_.list_json();
         return reply;
       }},
      {"/v1/completions", false, true, [&] { return generate(call, /*chat=*/false); }},
      {"/v1/chat/completions", false, true, [&] { return generate(call, /*chat=*/true); }},
      {"/tokenize", false, true, [&] { return tokenize(call); }},
      {"/detokenize", false, true, [&] { return detokenize(call); }},
  };
  for (const Route& route : routes) {
    if (route.path != path) {
      continue;
    }
    if (get != route.is_get || (!get && call.method != "POST")) {
      ApiReply reply = error_reply(
          {405,
           fmt::format("{} {}: expected {}.", call.method, path, route.is_get ? "GET" : "POST"),
           "invalid_request_error", "", "method_not_allowed"});
      reply.headers.emplace_back("Allow", route.is_get ? "GET" : "POST");
      return reply;
    }
    if (route.needs_model && loop() == nullptr) {
      return error_reply(not_ready());
    }
    return route.run();
  }
  constexpr std::string_view kModelsPath = "/v1/models/";
  if (get && path.starts_with(kModelsPath) && path.size() > kModelsPath.size()) {
    return models(std::string_view(path).substr(kModelsPath.size()));
  }
  constexpr std::string_view kSelection = "/selection";
  if (get && loop() != nullptr && path.starts_with(kRequestsPath) && path.ends_with(kSelection) &&
      path.size() > kRequestsPath.size() + 1 + kSelection.size()) {
    return selection(call, std::string_view(path).substr(
                               kRequestsPath.size() + 1,
                               path.size() - kRequestsPath.size() - 1 - kSelection.size()));
  }
  for (const std::string_view later : {"/v1/responses", "/v1/messages", "/v1/embeddings"}) {
    if (path == later) {
      return error_reply({501,
                          fmt::format("{} is not implemented; /v1/chat/completions and "
                                      "/v1/completions are.",
                                      path),
                          "invalid_request_error", "", "not_implemented"});
    }
  }
  return error_reply(
      {404, fmt::format("There is no {} here.", path), "invalid_request_error", "", "not_found"});
}

}  // namespace lacuna::server
