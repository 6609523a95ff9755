// Rows of a record are the computed positions in order; prompt tokens that the prefix cache held
// were not computed and have none.
#include "server/request_log.h"

#include <algorithm>

#include "server/response_writer.h"

namespace lacuna::server {
namespace {

OrderedJson lanes_json(const StepInfo& step) {
  OrderedJson json = OrderedJson::object();
  for (int lane = 0; lane < kNumRowLanes; ++lane) {
    if (step.rows_by_lane[lane] > 0) {
      json[std::string(row_lane_name(lane))] = step.rows_by_lane[lane];
    }
  }
  return json;
}

OrderedJson step_json(const StepInfo& step) {
  OrderedJson json;
  json["phase"] = step.decode ? "decode" : "prefill";
  json["rows"] = lanes_json(step);
  json["keys_read"] = step.keys_read;
  json["keys_visible"] = step.keys_visible;
  json["seconds"] = step.seconds;
  return json;
}

int64_t selection_bytes(const LoggedRequest& request) {
  int64_t bytes = 0;
  for (const auto& [layer, keys] : request.record.selected_keys) {
    bytes += static_cast<int64_t>(keys.size() * sizeof(int32_t));
  }
  return bytes;
}

OrderedJson token_json(const Engine& engine, int32_t id, int64_t block) {
  const std::string_view bytes = engine.token_bytes(id);
  OrderedJson json;
  json["id"] = id;
  json["text"] = valid_utf8(bytes);
  // A part of a character: whoever shows the text joins the bytes of neighbours.
  if (json["text"].get_ref<const std::string&>() != bytes) {
    json["bytes"] = std::vector<uint8_t>(bytes.begin(), bytes.end());
  }
  json["block"] = block;
  return json;
}

OrderedJson rows_json(const std::vector<int32_t>& lists, int64_t width, int64_t num_computed) {
  OrderedJson rows = OrderedJson::array();
  const int64_t num_rows = width > 0 ? static_cast<int64_t>(lists.size()) / width : 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    const auto begin = lists.begin() + row * width;
    const auto end = std::find(begin, begin + width, -1);
    OrderedJson entry;
    entry["position"] = num_computed - num_rows + row;
    // A row without a list took the dense lane, which reads every key before it.
    entry["keys"] = begin == end ? OrderedJson() : OrderedJson(std::vector<int32_t>(begin, end));
    rows.push_back(std::move(entry));
  }
  return rows;
}

}  // namespace

std::shared_ptr<LoggedRequest> RequestLog::begin(LoggedRequest request) {
  auto entry = std::make_shared<LoggedRequest>(std::move(request));
  const std::lock_guard lock(mutex_);
  requests_.push_front(entry);
  if (requests_.size() > kRequestsMax) {
    requests_.pop_back();
  }
  return entry;
}

void RequestLog::step(LoggedRequest& request, const TokenEvent& event) {
  const std::lock_guard lock(mutex_);
  request.cached_tokens = std::max(request.cached_tokens, event.step.cached_tokens);
  if (event.token_id >= 0) {
    ++request.completion_tokens;
    if (request.has_selection) {
      request.token_ids.push_back(event.token_id);
    }
  }
  if (event.finish == FinishReason::kCancelled) {
    return;
  }
  if (request.steps.size() < kStepsMax) {
    request.steps.push_back(event.step);
  } else {
    ++request.steps_left_out;
  }
}

void RequestLog::finish(LoggedRequest& request, std::string_view reason, double seconds,
                        RequestRecord record) {
  const std::lock_guard lock(mutex_);
  if (!request.finish.empty()) {
    return;
  }
  request.finish = reason;
  request.seconds = seconds;
  request.record = std::move(record);
  int64_t bytes = 0;
  for (const std::shared_ptr<LoggedRequest>& other : requests_) {
    bytes += selection_bytes(*other);
    if (bytes > kSelectionBytesMax) {
      other->record = {};
      other->has_selection = false;
    }
  }
}

std::string RequestLog::list_json() const {
  const std::lock_guard lock(mutex_);
  OrderedJson data = OrderedJson::array();
  for (const std::shared_ptr<LoggedRequest>& request : requests_) {
    OrderedJson entry;
    entry["id"] = request->id;
    entry["endpoint"] = request->endpoint;
    entry["created"] = request->created;
    entry["finish_reason"] = request->finish.empty() ? OrderedJson() : OrderedJson(request->finish);
    entry["prompt_tokens"] = request->prompt_tokens;
    entry["cached_tokens"] = request->cached_tokens;
    entry["completion_tokens"] = request->completion_tokens;
    entry["seconds"] = request->seconds;
    entry["has_selection"] = request->has_selection && !request->finish.empty();
    StepInfo total;
    entry["steps"] = OrderedJson::array();
    for (const StepInfo& step : request->steps) {
      for (int lane = 0; lane < kNumRowLanes; ++lane) {
        total.rows_by_lane[lane] += step.rows_by_lane[lane];
      }
      total.keys_read += step.keys_read;
      total.keys_visible += step.keys_visible;
      entry["steps"].push_back(step_json(step));
    }
    entry["steps_left_out"] = request->steps_left_out;
    entry["rows"] = lanes_json(total);
    entry["keys_read"] = total.keys_read;
    entry["keys_visible"] = total.keys_visible;
    data.push_back(std::move(entry));
  }
  return dump({{"object", "list"}, {"data", std::move(data)}});
}

std::optional<std::string> RequestLog::selection_json(std::string_view id,
                                                      const SelectionScene& scene) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(requests_.begin(), requests_.end(),
                                  [&](const auto& request) { return request->id == id; });
  if (found == requests_.end() || !(*found)->has_selection || (*found)->finish.empty()) {
    return std::nullopt;
  }
  const LoggedRequest& request = **found;
  OrderedJson json;
  json["id"] = request.id;
  json["prompt_tokens"] = request.prompt_tokens;
  json["cached_tokens"] = request.cached_tokens;
  json["num_layers"] = scene.engine->info().num_layers;
  json["index_topk"] = scene.engine->info().index_topk;
  json["block_size"] = scene.block_size;
  json["tokens"] = OrderedJson::array();
  for (size_t i = 0; i < request.token_ids.size(); ++i) {
    json["tokens"].push_back(
        token_json(*scene.engine, request.token_ids[i],
                   static_cast<int64_t>(i) / std::max<int64_t>(scene.block_size, 1)));
  }
  // The last token of an answer was never the input of a step.
  const int64_t num_computed = static_cast<int64_t>(request.token_ids.size()) - 1;
  json["layers"] = OrderedJson::array();
  for (const auto& [layer, lists] : request.record.selected_keys) {
    if (scene.layer.has_value() && *scene.layer != layer) {
      continue;
    }
    json["layers"].push_back(
        {{"layer", layer},
         {"rows", rows_json(lists, scene.engine->info().index_topk, num_computed)}});
  }
  return dump(json);
}

}  // namespace lacuna::server
