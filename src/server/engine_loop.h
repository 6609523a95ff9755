// The one thread that owns an engine. Others queue requests and read what came of them; nobody who
// reads slowly can hold a step up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "lacuna/engine.h"
#include "server/metrics.h"

namespace lacuna::server {

struct SequenceEvent {
  int64_t index = 0;  // of the sequence within its job
  TokenEvent event;
};

// The sequences of one HTTP request and the mailbox of their events.
class Job {
 public:
  struct News {
    std::vector<SequenceEvent> events;
    Status error;           // why the job ended early; kCancelled: the reader was too slow
    bool accepted = false;  // the engine took every sequence
    bool ended = false;     // nothing will come after these events
  };

  // Waits for news, at most this long.
  News wait(std::chrono::milliseconds timeout);
  // What was recorded of a finished sequence.
  RequestRecord take_record(int64_t index);

 private:
  friend class EngineLoop;

  std::vector<Request> requests_;  // until the worker takes them
  std::chrono::steady_clock::time_point arrival_;
  std::vector<int64_t> engine_ids_;  // the worker's
  int64_t num_unfinished_ = 0;       // the worker's
  bool cancelled_ = false;           // the loop's mutex

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  bool fresh_ = false;
  bool accepted_ = false;
  bool ended_ = false;
  Status error_;
  std::vector<SequenceEvent> events_;
  int64_t event_bytes_ = 0;
  std::map<int64_t, RequestRecord> records_;
};

struct EngineLoopOptions {
  int64_t sequences_max = 1024;            // running and waiting
  int64_t mailbox_bytes_max = 16ll << 20;  // unread events of a job; more: it is cancelled
};

struct EngineLoad {
  EngineCounters counters;
  int64_t num_running = 0;
  int64_t num_waiting = 0;
};

class EngineLoop {
 public:
  EngineLoop(std::unique_ptr<Engine> engine, const EngineLoopOptions& options, Metrics* metrics);
  // Cancels what is left.
  ~EngineLoop();

  // For its const functions, which are safe for use by several threads.
  const Engine& engine() const { return *engine_; }

  // Null when too many sequences run or wait already.
  std::shared_ptr<Job> submit(std::vector<Request> requests);
  // Its sequences end soon; the job ends with them.
  void cancel(const std::shared_ptr<Job>& job);
  void cancel_all();
  EngineLoad load() const;

 private:
  struct Live {
    std::shared_ptr<Job> job;
    int64_t index = 0;
    SequenceTimes times;
    bool keeps_record = false;
  };

  void work();
  void start_job(const std::shared_ptr<Job>& job);
  void cancel_sequences(Job& job);
  void deliver(TokenEvent event);
  void fail_all(const Status& status);
  void publish_load();

  std::unique_ptr<Engine> engine_;
  const EngineLoopOptions options_;
  Metrics* metrics_;

  // The worker's.
  std::map<int64_t, Live> live_;  // by the engine's id

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> incoming_;
  std::vector<std::shared_ptr<Job>> cancelled_;
  bool cancel_all_ = false;
  bool stopping_ = false;
  int64_t num_sequences_ = 0;
  EngineLoad load_;

  std::thread worker_;
};

}  // namespace lacuna::server
