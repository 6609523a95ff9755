// Asks evaluation problems of the engine in this process or of a server.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "cli/problems.h"
#include "lacuna/engine.h"

namespace lacuna::cli {

struct AskOptions {
  int64_t max_tokens = 16;
  std::vector<std::string> stop;
  int64_t seed = 42;        // answers are greedy: recorded, and sent as others' harnesses do
  int64_t concurrency = 1;  // problems asked at a time
  bool nll = false;         // the engine only: the prompt's negative log-likelihood
};

struct Answer {
  std::string text;
  double nll = 0;
  int64_t nll_tokens = 0;
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
};

// Called for each problem, by its index, as answers come; one call at a time.
using OnAnswer = std::function<void(size_t index, const Answer& answer)>;

Status ask_engine(Engine& engine, std::span<const Problem* const> problems,
                  const AskOptions& options, const OnAnswer& on_answer);

struct ServerFlags {
  std::string base_url;
  std::string api_key;
  std::string model;  // empty: the first one that the server lists
};

// The name of the model that would answer; an unreachable server shows here.
Result<std::string> server_model(const ServerFlags& server);

Status ask_server(const ServerFlags& server, std::span<const Problem* const> problems,
                  const AskOptions& options, const OnAnswer& on_answer);

}  // namespace lacuna::cli
