// The connection's thread runs all of this; the engine's thread only fills the job's mailbox.
#include "server/generation.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

namespace lacuna::server {
namespace {

// How often a waiting thread looks at its client and its deadline.
constexpr std::chrono::milliseconds kLookInterval(200);

std::string_view finish_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "abort";
    case FinishReason::kNone:
      break;
  }
  return "";
}

// Nobody reads it; the log does.
ApiError client_left() { return {499, "The client closed the connection.", "server_error"}; }

ApiError shutting_down() {
  return {503, "The server is shutting down.", "server_error", "", "shutting_down"};
}

}  // namespace

ApiError engine_error(const Status& status) {
  if (status.code() == StatusCode::kInvalidArgument || status.code() == StatusCode::kUnsupported) {
    // Messages begin with the argument's name.
    const size_t colon = status.message().find(':');
    const std::string name = colon == std::string::npos ? "" : status.message().substr(0, colon);
    return bad_request(status.message(), name.find(' ') == std::string::npos ? name : "");
  }
  if (status.code() == StatusCode::kCancelled) {
    return {503, status.message(), "server_error", "", "cancelled"};
  }
  return {500, status.message(), "server_error", "", "engine_error"};
}

Generation::Generation(EngineLoop* loop, RequestLog* log, const GenerationOptions& options,
                       GenerationRequest request, ResponseHead head)
    : loop_(loop),
      log_(log),
      options_(options),
      request_(std::move(request)),
      head_(std::move(head)),
      start_(std::chrono::steady_clock::now()),
      max_tokens_(request_.max_tokens) {}

Generation::~Generation() {
  if (job_ != nullptr && !ended_) {
    loop_->cancel(job_);
  }
  for (Choice& choice : choices_) {
    log_->finish(*choice.logged, "abort", seconds(), {});
  }
}

double Generation::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

std::optional<ApiError> Generation::read_prompts() {
  const Engine& engine = loop_->engine();
  const char* name = request_.chat ? "messages" : "prompt";
  if (request_.chat) {
    Result<std::string> text =
        engine.apply_chat_template(request_.messages_json, request_.options_json);
    if (!text.ok()) {
      return bad_request(text.status().message(), name);
    }
    PromptInput prompt;
    prompt.text = std::move(*text);
    request_.prompts.push_back(std::move(prompt));
  }
  const int64_t vocab = engine.info().vocab_size;
  for (PromptInput& prompt : request_.prompts) {
    if (prompt.is_ids) {
      for (const int32_t id : prompt.ids) {
        if (id >= vocab) {
          return bad_request(fmt::format("prompt: token id {}, expected 0 to {}.", id, vocab - 1),
                             name);
        }
      }
      prompt_texts_.push_back(request_.echo ? engine.decode(prompt.ids) : "");
      prompt_ids_.push_back(std::move(prompt.ids));
    } else {
      Result<std::vector<int32_t>> ids = engine.encode(prompt.text);
      if (!ids.ok()) {
        return bad_request(ids.status().message(), name);
      }
      prompt_ids_.push_back(std::move(*ids));
      prompt_texts_.push_back(std::move(prompt.text));
    }
    if (prompt_ids_.back().empty()) {
      return bad_request(fmt::format("{}: no tokens, expected at least one.", name), name);
    }
  }
  request_.prompts.clear();
  return std::nullopt;
}

std::optional<ApiError> Generation::check_lengths() {
  constexpr int64_t kDefaultMaxTokens = 16;  // of completions, as in the OpenAI API
  constexpr int64_t kSelectionBytesMax = int64_t{64} << 20;
  const char* name = request_.chat ? "messages" : "prompt";
  const EngineInfo& info = loop_->engine().info();
  const int64_t context = std::min(info.max_model_len, info.kv_cache_tokens);
  for (const std::vector<int32_t>& ids : prompt_ids_) {
    const int64_t length = static_cast<int64_t>(ids.size());
    const int64_t room = context - length;
    if (room < 1) {
      return bad_request(
          fmt::format("This model's maximum context length is {} tokens. Your prompt has {}, which "
                      "leaves no room for an answer; please shorten it.",
                      context, length),
          name, "context_length_exceeded");
    }
    if (max_tokens_.has_value() && *max_tokens_ > room) {
      return bad_request(
          fmt::format("max_tokens: {}, the context of {} tokens has room for {} after a prompt of "
                      "{}.",
                      *max_tokens_, context, room, length),
          "max_tokens", "context_length_exceeded");
    }
    const int64_t wanted =
        request_.chat ? room : std::max(kDefaultMaxTokens, request_.sampling.min_tokens);
    // An answer of no tokens is one of a token that is not shown: the prompt must be computed.
    room_.push_back(max_tokens_.has_value() ? std::max<int64_t>(*max_tokens_, 1)
                                            : std::min(wanted, room));
    const int64_t list_bytes = (length + room_.back()) * info.index_topk * info.num_leader_layers *
                               static_cast<int64_t>(sizeof(int32_t));
    if (request_.record_selection && list_bytes * request_.n > kSelectionBytesMax) {
      return bad_request(
          fmt::format("record_selection: would keep {} MB of key lists, expected at most {} MB; "
                      "use a shorter prompt or a smaller max_tokens.",
                      list_bytes * request_.n >> 20, kSelectionBytesMax >> 20),
          "record_selection");
    }
  }
  return std::nullopt;
}

std::vector<Request> Generation::make_requests() const {
  std::vector<Request> requests;
  for (size_t p = 0; p < prompt_ids_.size(); ++p) {
    for (int64_t i = 0; i < request_.n; ++i) {
      Request request;
      request.prompt = prompt_ids_[p];
      request.sampling = request_.sampling;
      request.sampling.max_tokens = room_[p];
      request.sampling.seed = seed_ + static_cast<uint64_t>(i);
      request.priority = request_.priority;
      request.record_selection = request_.record_selection;
      if (needs_prompt_logprobs()) {
        request.prompt_logprobs = true;
        request.prompt_top_logprobs = std::max(request_.prompt_logprobs.value_or(0),
                                               request_.echo ? request_.sampling.top_logprobs : 0);
      }
      requests.push_back(std::move(request));
    }
  }
  return requests;
}

std::optional<ApiError> Generation::start(const std::function<bool()>& client_gone) {
  if (std::optional<ApiError> error = read_prompts()) {
    return error;
  }
  if (std::optional<ApiError> error = check_lengths()) {
    return error;
  }
  if (request_.seed.has_value()) {
    seed_ = *request_.seed;
  } else {
    std::random_device device;
    seed_ = (uint64_t{device()} << 32) | device();
  }
  const bool thinks = options_.reasoning_parser && request_.chat;
  job_ = loop_->submit(make_requests());
  if (job_ == nullptr) {
    return ApiError{503, "Too many requests are waiting; please try again later.", "server_error",
                    "", "queue_full"};
  }
  for (size_t p = 0; p < prompt_ids_.size(); ++p) {
    for (int64_t i = 0; i < request_.n; ++i) {
      Choice choice;
      choice.prompt = p;
      choice.splitter = ReasoningSplitter(thinks, opens_think_block(prompt_texts_[p]));
      LoggedRequest logged;
      logged.id = prompt_ids_.size() * request_.n == 1
                      ? head_.id
                      : fmt::format("{}-{}", head_.id, choices_.size());
      logged.endpoint = request_.chat ? "/v1/chat/completions" : "/v1/completions";
      logged.created = head_.created;
      logged.prompt_tokens = static_cast<int64_t>(prompt_ids_[p].size());
      logged.has_selection = request_.record_selection;
      if (request_.record_selection) {
        logged.token_ids = prompt_ids_[p];
      }
      choice.logged = log_->begin(std::move(logged));
      choices_.push_back(std::move(choice));
    }
  }
  // The first news says whether the engine took it; events that come with it are kept.
  std::optional<Job::News> news = next_news(client_gone);
  if (failure_.has_value()) {
    return failure_;
  }
  if (news.has_value()) {
    pending_ = std::move(news->events);
  }
  return std::nullopt;
}

std::optional<Job::News> Generation::next_news(const std::function<bool()>& client_gone,
                                               const std::function<bool()>& on_silence) {
  while (!ended_ && !failure_.has_value()) {
    Job::News news = job_->wait(kLookInterval);
    ended_ = news.ended;
    if (!news.error.ok()) {
      failure_ = engine_error(news.error);
      return std::nullopt;
    }
    if (options_.timeout_seconds > 0 && seconds() > options_.timeout_seconds && !news.ended) {
      failure_ = ApiError{504,
                          fmt::format("The request took longer than {} s (--request-timeout).",
                                      options_.timeout_seconds),
                          "server_error", "", "timeout"};
      return std::nullopt;
    }
    // Also while events come: an answer that nobody will read is not worth computing.
    if (!news.ended && client_gone()) {
      failure_ = client_left();
      return std::nullopt;
    }
    const bool newly_accepted = news.accepted && !accepted_;
    accepted_ = news.accepted;
    if (newly_accepted || news.ended || !news.events.empty()) {
      return news;
    }
    if (on_silence && !on_silence()) {
      failure_ = client_left();
      return std::nullopt;
    }
  }
  return std::nullopt;
}

TokenDetail Generation::detail(const TokenEvent& event) const {
  const Engine& engine = loop_->engine();
  TokenDetail token;
  token.id = event.token_id;
  token.bytes = engine.token_bytes(event.token_id);
  token.logprob = event.logprob;
  for (const TokenLogprob& other : event.top_logprobs) {
    token.top.push_back(
        {other.token_id, std::string(engine.token_bytes(other.token_id)), other.logprob});
  }
  return token;
}

std::vector<TokenDetail> Generation::prompt_details(size_t prompt,
                                                    const RequestRecord& record) const {
  const Engine& engine = loop_->engine();
  std::vector<TokenDetail> details;
  for (size_t i = 0; i < prompt_ids_[prompt].size(); ++i) {
    TokenDetail token;
    token.id = prompt_ids_[prompt][i];
    token.bytes = engine.token_bytes(token.id);
    token.has_logprob = i > 0 && i - 1 < record.prompt_logprobs.size();
    if (token.has_logprob) {
      token.logprob = record.prompt_logprobs[i - 1];
      if (i - 1 < record.prompt_top_logprobs.size()) {
        for (const TokenLogprob& other : record.prompt_top_logprobs[i - 1]) {
          token.top.push_back(
              {other.token_id, std::string(engine.token_bytes(other.token_id)), other.logprob});
        }
      }
    }
    details.push_back(std::move(token));
  }
  return details;
}

Generation::Delta Generation::accept(const SequenceEvent& news) {
  const TokenEvent& event = news.event;
  Choice& choice = choices_[news.index];
  log_->step(*choice.logged, event);
  cached_tokens_ += news.index % request_.n == 0 ? event.step.cached_tokens : 0;
  if (event.finish == FinishReason::kCancelled) {
    failure_ = shutting_down();
    return {};
  }
  Delta delta;
  if (!discards_answer()) {
    ReasoningSplitter::Piece piece = choice.splitter.feed(event.text);
    if (event.finish != FinishReason::kNone) {
      ReasoningSplitter::Piece rest = choice.splitter.flush();
      piece.reasoning += rest.reasoning;
      piece.content += rest.content;
    }
    delta.text = std::move(piece.content);
    delta.reasoning = std::move(piece.reasoning);
    if (event.token_id >= 0) {
      ++choice.num_generated;
      if (request_.logprobs) {
        delta.token = detail(event);
      }
    }
  }
  if (event.finish != FinishReason::kNone) {
    choice.finish = discards_answer() ? "length" : finish_name(event.finish);
  }
  return delta;
}

void Generation::finish_log(Choice& choice, int64_t index, std::string_view reason) {
  log_->finish(*choice.logged, reason, seconds(), job_->take_record(index));
}

ChoiceBody Generation::full_choice(int64_t index) {
  Choice& choice = choices_[index];
  ChoiceBody body;
  body.index = index;
  body.text = (request_.echo ? prompt_texts_[choice.prompt] : "") + choice.text;
  body.reasoning = choice.reasoning;
  body.finish = choice.finish;
  RequestRecord record = job_->take_record(index);
  std::vector<TokenDetail> prompt;
  if (needs_prompt_logprobs()) {
    prompt = prompt_details(choice.prompt, record);
  }
  if (request_.prompt_logprobs.has_value()) {
    body.prompt_logprobs = prompt_logprobs_json(prompt);
  }
  if (request_.logprobs) {
    std::vector<TokenDetail> tokens;
    if (request_.echo) {
      tokens = std::move(prompt);
    }
    tokens.insert(tokens.end(), choice.tokens.begin(), choice.tokens.end());
    int64_t offset = 0;
    body.logprobs = request_.chat ? chat_logprobs(tokens) : completion_logprobs(tokens, &offset);
  }
  log_->finish(*choice.logged, choice.finish, seconds(), std::move(record));
  return body;
}

Usage Generation::usage() const {
  Usage usage;
  for (const std::vector<int32_t>& ids : prompt_ids_) {
    usage.prompt_tokens += static_cast<int64_t>(ids.size());
  }
  for (const Choice& choice : choices_) {
    usage.completion_tokens += choice.num_generated;
  }
  usage.cached_tokens = cached_tokens_;
  return usage;
}

ApiReply Generation::collect(const std::function<bool()>& client_gone) {
  auto take = [this](const std::vector<SequenceEvent>& events) {
    for (const SequenceEvent& event : events) {
      Delta delta = accept(event);
      Choice& choice = choices_[event.index];
      choice.text += delta.text;
      choice.reasoning += delta.reasoning;
      if (delta.token.has_value()) {
        choice.tokens.push_back(std::move(*delta.token));
      }
    }
  };
  take(pending_);
  while (std::optional<Job::News> news = next_news(client_gone)) {
    take(news->events);
  }
  ApiReply reply;
  if (failure_.has_value()) {
    reply.status = failure_->status;
    reply.body = error_body(*failure_);
    return reply;
  }
  std::vector<ChoiceBody> bodies;
  for (size_t i = 0; i < choices_.size(); ++i) {
    bodies.push_back(full_choice(static_cast<int64_t>(i)));
  }
  reply.body = full_response(head_, bodies, usage());
  return reply;
}

void Generation::stream(const StreamWriter& write, const std::function<bool()>& client_gone) {
  auto last_write = std::chrono::steady_clock::now();
  bool writable = true;
  auto send = [&](std::string_view bytes) {
    writable = writable && write(bytes);
    last_write = std::chrono::steady_clock::now();
    return writable;
  };
  const bool null_usage = request_.include_usage;
  for (size_t i = 0; i < choices_.size() && writable; ++i) {
    ChoiceBody body;
    body.index = static_cast<int64_t>(i);
    if (request_.chat) {
      send(stream_chunk(head_, body, /*with_role=*/true, null_usage));
    } else if (request_.echo) {
      body.text = prompt_texts_[choices_[i].prompt];
      send(stream_chunk(head_, body, /*with_role=*/false, null_usage));
    }
  }
  auto take = [&](const std::vector<SequenceEvent>& events) {
    for (const SequenceEvent& event : events) {
      Delta delta = accept(event);
      Choice& choice = choices_[event.index];
      if (failure_.has_value() || !writable) {
        return;
      }
      if (delta.text.empty() && delta.reasoning.empty() && !delta.token.has_value() &&
          choice.finish.empty()) {
        continue;
      }
      ChoiceBody body;
      body.index = event.index;
      body.text = std::move(delta.text);
      body.reasoning = std::move(delta.reasoning);
      body.finish = choice.finish;
      if (delta.token.has_value()) {
        const std::vector<TokenDetail> tokens = {std::move(*delta.token)};
        body.logprobs = request_.chat ? chat_logprobs(tokens)
                                      : completion_logprobs(tokens, &choice.text_offset);
      }
      send(stream_chunk(head_, body, /*with_role=*/false, null_usage));
      if (!choice.finish.empty()) {
        finish_log(choice, event.index, choice.finish);
      }
    }
  };
  const std::chrono::duration<double> silence_max(options_.keep_alive_seconds);
  auto on_silence = [&] {
    return std::chrono::steady_clock::now() - last_write < silence_max || send(kStreamKeepAlive);
  };
  take(pending_);
  while (writable && !failure_.has_value()) {
    std::optional<Job::News> news = next_news(client_gone, on_silence);
    if (!news.has_value()) {
      break;
    }
    take(news->events);
    on_silence();
  }
  if (!writable) {
    failure_ = client_left();
    return;
  }
  if (failure_.has_value()) {
    // The status line is long gone: the error is an event of the stream.
    send(stream_event(error_body(*failure_)));
    send(kStreamEnd);
    return;
  }
  if (request_.include_usage) {
    send(usage_chunk(head_, usage()));
  }
  send(kStreamEnd);
}

std::string Generation::summary() const {
  const Usage used = usage();
  return fmt::format("{} prompt tokens ({} cached), {} generated, {:.2f} s, {}", used.prompt_tokens,
                     used.cached_tokens, used.completion_tokens, seconds(),
                     failure_.has_value() ? failure_->message
                     : choices_.empty()   ? "refused"
                                          : choices_.front().finish);
}

}  // namespace lacuna::server
