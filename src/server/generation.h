// One request of /v1/completions or /v1/chat/completions from its prompts to the last byte of its
// answer.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/engine_loop.h"
#include "server/http_types.h"
#include "server/reasoning_splitter.h"
#include "server/request_log.h"
#include "server/request_parser.h"
#include "server/response_writer.h"

namespace lacuna::server {

struct GenerationOptions {
  double timeout_seconds = 0;      // 0: none
  double keep_alive_seconds = 10;  // of silence in a stream, before a comment line
  bool reasoning_parser = false;   // chat: thoughts before </think> are reasoning_content
};

class Generation {
 public:
  Generation(EngineLoop* loop, RequestLog* log, const GenerationOptions& options,
             GenerationRequest request, ResponseHead head);
  // Cancels what still runs: when a reply was dropped, or its client is gone.
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // Prompts to token ids, queued in the engine. Returns once the engine has taken them.
  std::optional<ApiError> start(const std::function<bool()>& client_gone);
  ApiReply collect(const std::function<bool()>& client_gone);
  void stream(const StreamWriter& write, const std::function<bool()>& client_gone);

  // "12 prompt tokens, 30 generated, 1.20 s, stop"
  std::string summary() const;

 private:
  struct Choice {
    size_t prompt = 0;
    std::string text;
    std::string reasoning;
    std::vector<TokenDetail> tokens;
    std::string finish;
    int64_t num_generated = 0;
    int64_t text_offset = 0;  // of logprobs in a stream
    ReasoningSplitter splitter;
    std::shared_ptr<LoggedRequest> logged;
  };
  // What an event adds to a choice.
  struct Delta {
    std::string text;
    std::string reasoning;
    std::optional<TokenDetail> token;
  };

  std::optional<ApiError> read_prompts();
  std::optional<ApiError> check_lengths();
  std::vector<Request> make_requests() const;
  // Waits for news while client and deadline allow; nothing after the last, or with failure_ set.
  std::optional<Job::News> next_news(const std::function<bool()>& client_gone,
                                     const std::function<bool()>& on_silence = {});
  Delta accept(const SequenceEvent& event);
  TokenDetail detail(const TokenEvent& event) const;
  std::vector<TokenDetail> prompt_details(size_t prompt, const RequestRecord& record) const;
  ChoiceBody full_choice(int64_t index);
  void finish_log(Choice& choice, int64_t index, std::string_view reason);
  bool needs_prompt_logprobs() const {
    return request_.prompt_logprobs.has_value() || (request_.echo && request_.logprobs);
  }
  bool discards_answer() const { return max_tokens_ == 0; }
  Usage usage() const;
  double seconds() const;

  EngineLoop* loop_;
  RequestLog* log_;
  const GenerationOptions options_;
  GenerationRequest request_;
  const ResponseHead head_;
  const std::chrono::steady_clock::time_point start_;
  std::vector<std::vector<int32_t>> prompt_ids_;
  std::vector<std::string> prompt_texts_;
  std::optional<int64_t> max_tokens_;
  std::vector<int64_t> room_;  // by prompt: tokens that may be generated
  uint64_t seed_ = 0;
  std::shared_ptr<Job> job_;
  bool accepted_ = false;
  bool ended_ = false;
  std::optional<ApiError> failure_;
  std::vector<SequenceEvent> pending_;  // came before the answer was begun
  std::vector<Choice> choices_;
  int64_t cached_tokens_ = 0;
};

ApiError engine_error(const Status& status);

}  // namespace lacuna::server
