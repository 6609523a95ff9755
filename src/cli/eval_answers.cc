// The two ways to an answer: Engine::step here, POST /completions there.
#include "cli/eval_answers.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "core/check.h"
#include "server/http_client.h"

namespace lacuna::cli {
namespace {

using Json = nlohmann::json;

std::string name_of(const Problem& problem) { return "problem " + std::to_string(problem.id); }

Result<server::HttpClient> connect(const ServerFlags& server) {
  return server::HttpClient::create({.base_url = server.base_url, .api_key = server.api_key});
}

Status refused(const std::string& what, const server::HttpReply& reply) {
  return io_error(what + ": the server answered " + std::to_string(reply.status) + ": " +
                  server::error_message(reply));
}

Result<Answer> ask_once(server::HttpClient& client, const std::string& model,
                        const Problem& problem, const AskOptions& options) {
  const Json body = {
      {"model", model},   {"prompt", problem.prompt}, {"max_tokens", options.max_tokens},
      {"temperature", 0}, {"seed", options.seed},     {"stop", options.stop}};
  // A prompt may hold bytes that are not UTF-8; JSON cannot.
  LACUNA_ASSIGN_OR_RETURN(
      const server::HttpReply reply,
      client.post("/completions", body.dump(-1, ' ', false, Json::error_handler_t::replace)));
  if (reply.status != 200) {
    return refused(name_of(problem), reply);
  }
  const Json json = Json::parse(reply.body, nullptr, /*allow_exceptions=*/false);
  const Json::json_pointer text_at("/choices/0/text");
  if (!json.is_object() || !json.contains(text_at) || !json[text_at].is_string()) {
    return data_loss(name_of(problem) + ": the server's answer has no choices[0].text");
  }
  Answer answer;
  answer.text = json[text_at].get<std::string>();
  if (json.contains("usage") && json["usage"].is_object()) {
    const auto count = [&](const char* name) -> int64_t {
      const Json& usage = json["usage"];
      return usage.contains(name) && usage[name].is_number_integer() ? usage[name].get<int64_t>()
                                                                     : 0;
    };
    answer.prompt_tokens = count("prompt_tokens");
    answer.generated_tokens = count("completion_tokens");
  }
  return answer;
}

}  // namespace

Status ask_engine(Engine& engine, std::span<const Problem* const> problems,
                  const AskOptions& options, const OnAnswer& on_answer) {
  struct Running {
    size_t index = 0;
    Answer answer;
  };
  std::map<int64_t, Running> running;
  size_t next = 0;
  while (next < problems.size() || !running.empty()) {
    while (next < problems.size() && std::ssize(running) < options.concurrency) {
      Request request;
      LACUNA_ASSIGN_OR_RETURN(request.prompt, engine.encode(problems[next]->prompt));
      request.prompt_logprobs = options.nll;
      request.sampling.max_tokens = options.max_tokens;
      request.sampling.stop = options.stop;
      Running started;
      started.index = next;
      started.answer.prompt_tokens = std::ssize(request.prompt);
      const Result<int64_t> id = engine.submit(std::move(request));
      if (!id.ok()) {
        return Status(id.status().code(),
                      name_of(*problems[next]) + ": " + std::string(id.status().message()));
      }
      running.emplace(*id, std::move(started));
      ++next;
    }
    LACUNA_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events, engine.step());
    for (const TokenEvent& event : events) {
      const auto found = running.find(event.request_id);
      if (found == running.end()) {
        continue;
      }
      Answer& answer = found->second.answer;
      answer.text += event.text;
      answer.generated_tokens += event.token_id >= 0;
      if (event.finish == FinishReason::kNone) {
        continue;
      }
      const RequestRecord record = engine.take_record(event.request_id);
      for (const float logprob : record.prompt_logprobs) {
        answer.nll -= logprob;
      }
      answer.nll_tokens = std::ssize(record.prompt_logprobs);
      on_answer(found->second.index, answer);
      running.erase(found);
    }
  }
  return ok_status();
}

Result<std::string> server_model(const ServerFlags& server) {
  LACUNA_ASSIGN_OR_RETURN(server::HttpClient client, connect(server));
  if (!server.model.empty()) {
    return server.model;
  }
  LACUNA_ASSIGN_OR_RETURN(const server::HttpReply reply, client.get("/models"));
  if (reply.status != 200) {
    return refused("GET /models", reply);
  }
  const Json json = Json::parse(reply.body, nullptr, /*allow_exceptions=*/false);
  const Json::json_pointer id_at("/data/0/id");
  if (!json.is_object() || !json.contains(id_at) || !json[id_at].is_string()) {
    return data_loss("GET /models: the server lists no model, expected --model NAME");
  }
  return json[id_at].get<std::string>();
}

Status ask_server(const ServerFlags& server, std::span<const Problem* const> problems,
                  const AskOptions& options, const OnAnswer& on_answer) {
  std::mutex mutex;  // of `first_error` and on_answer
  Status first_error = ok_status();
  std::atomic<size_t> next = 0;
  const auto fail = [&](const Status& status) {
    const std::lock_guard lock(mutex);
    if (first_error.ok()) {
      first_error = status;
    }
    next = problems.size();
  };
  const auto work = [&] {
    Result<server::HttpClient> client = connect(server);
    if (!client.ok()) {
      return fail(client.status());
    }
    for (size_t index; (index = next++) < problems.size();) {
      const Result<Answer> answer = ask_once(*client, server.model, *problems[index], options);
      if (!answer.ok()) {
        return fail(answer.status());
      }
      const std::lock_guard lock(mutex);
      on_answer(index, *answer);
    }
  };
  std::vector<std::thread> threads;
  const int64_t num_threads = std::min<int64_t>(options.concurrency, std::ssize(problems));
  for (int64_t i = 0; i < num_threads; ++i) {
    threads.emplace_back(work);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return first_error;
}

}  // namespace lacuna::cli
