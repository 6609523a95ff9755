// Lock order: the loop's mutex is never held while a job's is taken, nor the other way round.
#include "server/engine_loop.h"

#include <algorithm>
#include <utility>

namespace lacuna::server {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int64_t bytes_of(const TokenEvent& event) {
  return static_cast<int64_t>(sizeof(SequenceEvent) + event.text.size() +
                              event.top_logprobs.size() * sizeof(TokenLogprob));
}

}  // namespace

Job::News Job::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [this] { return fresh_ || ended_; });
  News news;
  news.events.swap(events_);
  event_bytes_ = 0;
  news.error = error_;
  news.accepted = accepted_;
  news.ended = ended_;
  fresh_ = false;
  return news;
}

RequestRecord Job::take_record(int64_t index) {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(index);
  return found == records_.end() ? RequestRecord() : std::move(found->second);
}

EngineLoop::EngineLoop(std::unique_ptr<Engine> engine, const EngineLoopOptions& options,
                       Metrics* metrics)
    : engine_(std::move(engine)), options_(options), metrics_(metrics) {
  load_.counters = engine_->counters();
  worker_ = std::thread([this] { work(); });
}

EngineLoop::~EngineLoop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  worker_.join();
}

std::shared_ptr<Job> EngineLoop::submit(std::vector<Request> requests) {
  auto job = std::make_shared<Job>();
  const int64_t count = static_cast<int64_t>(requests.size());
  job->requests_ = std::move(requests);
  job->arrival_ = std::chrono::steady_clock::now();
  job->num_unfinished_ = count;
  {
    const std::lock_guard lock(mutex_);
    if (num_sequences_ + count > options_.sequences_max || stopping_) {
      metrics_->refused();
      return nullptr;
    }
    num_sequences_ += count;
    incoming_.push_back(job);
  }
  wake_.notify_one();
  return job;
}

void EngineLoop::cancel(const std::shared_ptr<Job>& job) {
  {
    const std::lock_guard lock(mutex_);
    if (job->cancelled_) {
      return;
    }
    job->cancelled_ = true;
    cancelled_.push_back(job);
  }
  wake_.notify_one();
}

void EngineLoop::cancel_all() {
  {
    const std::lock_guard lock(mutex_);
    cancel_all_ = true;
  }
  wake_.notify_one();
}

EngineLoad EngineLoop::load() const {
  const std::lock_guard lock(mutex_);
  EngineLoad load = load_;
  // Those that came or went since the last step count already.
  load.num_running = std::min(load.num_running, num_sequences_);
  load.num_waiting = num_sequences_ - load.num_running;
  return load;
}

void EngineLoop::work() {
  std::deque<std::shared_ptr<Job>> incoming;
  std::vector<std::shared_ptr<Job>> cancelled;
  for (;;) {
    bool stop = false;
    bool cancel_everything = false;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] {
        return stopping_ || cancel_all_ || !incoming_.empty() || !cancelled_.empty() ||
               engine_->has_work();
      });
      incoming.swap(incoming_);
      cancelled.swap(cancelled_);
      cancel_everything = std::exchange(cancel_all_, false);
      stop = stopping_;
    }
    for (const std::shared_ptr<Job>& job : incoming) {
      start_job(job);
    }
    for (const std::shared_ptr<Job>& job : cancelled) {
      cancel_sequences(*job);
    }
    incoming.clear();
    cancelled.clear();
    if (cancel_everything) {
      for (const auto& [id, live] : live_) {
        engine_->cancel(id);
      }
    }
    if (stop) {
      fail_all(Status(StatusCode::kCancelled, "the server is shutting down"));
      return;
    }
    if (engine_->has_work()) {
      Result<std::vector<TokenEvent>> events = engine_->step();
      if (events.ok()) {
        int64_t rows = 0;
        for (TokenEvent& event : *events) {
          for (const int64_t lane_rows : event.step.rows_by_lane) {
            rows += lane_rows;
          }
          deliver(std::move(event));
        }
        if (rows > 0) {
          metrics_->step(rows);
        }
      } else {
        // The engine does not tell whose fault it was. A step fails only when a kernel does, and
        // an answer that never comes is worse than an error.
        fail_all(events.status());
      }
    }
    publish_load();
  }
}

void EngineLoop::publish_load() {
  EngineLoad load;
  load.counters = engine_->counters();
  for (const auto& [id, live] : live_) {
    load.num_running += live.times.scheduled >= 0 ? 1 : 0;
  }
  const std::lock_guard lock(mutex_);
  load_ = std::move(load);
}

void EngineLoop::start_job(const std::shared_ptr<Job>& job) {
  std::vector<Request> requests = std::move(job->requests_);
  const int64_t count = static_cast<int64_t>(requests.size());
  Status error;
  for (int64_t i = 0; i < count; ++i) {
    Live live{.job = job, .index = i};
    live.keeps_record = requests[i].prompt_logprobs || requests[i].record_selection;
    live.times.prompt_tokens = static_cast<int64_t>(requests[i].prompt.size());
    Result<int64_t> id = engine_->submit(std::move(requests[i]));
    if (!id.ok()) {
      error = id.status();
      break;
    }
    job->engine_ids_.push_back(*id);
    live_.emplace(*id, std::move(live));
  }
  int64_t forgotten = 0;
  if (!error.ok()) {
    // All or nothing: those that were taken are dropped.
    for (const int64_t id : job->engine_ids_) {
      engine_->cancel(id);
      live_.erase(id);
    }
    job->engine_ids_.clear();
    forgotten = count;
  }
  {
    const std::lock_guard lock(job->mutex_);
    job->accepted_ = error.ok();
    job->ended_ = !error.ok();
    job->error_ = error;
    job->fresh_ = true;
  }
  job->changed_.notify_all();
  if (forgotten > 0) {
    const std::lock_guard lock(mutex_);
    num_sequences_ -= forgotten;
  }
}

void EngineLoop::cancel_sequences(Job& job) {
  for (const int64_t id : job.engine_ids_) {
    if (live_.contains(id)) {
      engine_->cancel(id);
    }
  }
}

void EngineLoop::deliver(TokenEvent event) {
  const auto found = live_.find(event.request_id);
  if (found == live_.end()) {
    return;  // of a job that was refused in part
  }
  Live& live = found->second;
  Job& job = *live.job;
  const double now = seconds_since(job.arrival_);
  SequenceTimes& times = live.times;
  if (times.scheduled < 0 && event.finish != FinishReason::kCancelled) {
    times.scheduled = std::max(0.0, now - event.step.seconds);
  }
  if (event.token_id >= 0) {
    ++times.generated_tokens;
    if (times.first_token < 0) {
      times.first_token = now;
      metrics_->first_token(now);
    } else {
      metrics_->next_token(now - times.last_token);
    }
    times.last_token = now;
  }
  const bool finished = event.finish != FinishReason::kNone;
  RequestRecord record;
  if (finished) {
    times.finished = now;
    metrics_->finished(times, event.finish);
    if (live.keeps_record) {
      record = engine_->take_record(event.request_id);
    }
  }
  const std::shared_ptr<Job> keep = live.job;
  bool overflow = false;
  {
    const std::lock_guard lock(job.mutex_);
    job.event_bytes_ += bytes_of(event);
    overflow = job.event_bytes_ > options_.mailbox_bytes_max && job.error_.ok();
    if (overflow) {
      job.error_ = Status(StatusCode::kCancelled, "the answer was not read fast enough");
    }
    if (finished && live.keeps_record) {
      job.records_[live.index] = std::move(record);
    }
    // After an error nobody wants the rest, and it must not pile up.
    if (job.error_.ok()) {
      job.events_.push_back({live.index, std::move(event)});
    }
    if (finished && --job.num_unfinished_ == 0) {
      job.ended_ = true;
    }
    job.fresh_ = true;
  }
  job.changed_.notify_all();
  if (finished) {
    live_.erase(found);
  }
  if (overflow) {
    cancel_sequences(*keep);
  }
  if (finished) {
    const std::lock_guard lock(mutex_);
    --num_sequences_;
  }
}

void EngineLoop::fail_all(const Status& status) {
  for (const auto& [id, live] : live_) {
    engine_->cancel(id);
    metrics_->finished(live.times, FinishReason::kCancelled);
    {
      const std::lock_guard lock(live.job->mutex_);
      live.job->error_ = status;
      live.job->ended_ = true;
    }
    live.job->changed_.notify_all();
  }
  const std::lock_guard lock(mutex_);
  num_sequences_ -= static_cast<int64_t>(live_.size());
  live_.clear();
}

}  // namespace lacuna::server
