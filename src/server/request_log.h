// The last requests: what attention did for them step by step and, for those that asked, which keys
// were selected. Shown at /v1/lacuna/requests.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lacuna/engine.h"

namespace lacuna::server {

struct LoggedRequest {
  std::string id;
  std::string endpoint;
  int64_t created = 0;
  std::string finish;  // empty: it runs
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t completion_tokens = 0;
  double seconds = 0;
  std::vector<StepInfo> steps;
  int64_t steps_left_out = 0;
  // With a record of the selection.
  bool has_selection = false;
  std::vector<int32_t> token_ids;  // prompt and answer
  RequestRecord record;
};

struct SelectionScene {
  const Engine* engine = nullptr;
  int64_t block_size = 0;
  std::optional<int> layer;  // only this one
};

// Safe for use by several threads.
class RequestLog {
 public:
  static constexpr size_t kRequestsMax = 32;
  static constexpr size_t kStepsMax = 4096;                          // of one request
  static constexpr int64_t kSelectionBytesMax = int64_t{256} << 20;  // of all of them

  // The handle is the writer's until finish().
  std::shared_ptr<LoggedRequest> begin(LoggedRequest request);
  void step(LoggedRequest& request, const TokenEvent& event);
  void finish(LoggedRequest& request, std::string_view reason, double seconds,
              RequestRecord record);

  std::string list_json() const;
  // Empty: no such request, or nothing was recorded for it.
  std::optional<std::string> selection_json(std::string_view id, const SelectionScene& scene) const;

 private:
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<LoggedRequest>> requests_;  // the newest first
};

}  // namespace lacuna::server
