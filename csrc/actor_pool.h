// SPDX-License-Identifier: Apache-2.0
// The actors: one thread a stream to an environment server.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agreement.h"
#include "array.h"
#include "batching_queue.h"
#include "credentials.h"
#include "dynamic_batcher.h"
#include "env_stream.h"
#include "mutex.h"
#include "nest.h"
#include "rollout.h"

namespace torchbeast {

// For each row that its server sends, an actor gets the agent's outputs from the batcher and sends
// the action among them; every `unroll_length` steps it puts a rollout into the learner's queue.
//
// Without `reconnect` the first failure ends run(). With it a failing server costs only the rollout
// that it was at: the actor connects again, after a pause that grows, with the initial agent state.
// What the agent side throws (a wrong shape, say) ends run() in either case.
class ActorPool {
 public:
  struct Options {
    bool dict_outputs = false;
    std::optional<int64_t> num_envs;           // to ask for
    std::optional<int64_t> expected_num_envs;  // what every handshake must say
    std::vector<std::string> seeds;  // one a stream, or none; a count of connections is appended
    bool newest_frame_only = false;
    bool reconnect = false;
    std::optional<std::string> spaces;  // what every handshake must say
    std::string env;                    // likewise, but some may not say it
    Rollout::Ranges ranges;             // what rows may hold
    double connect_timeout_s = 60;
    double step_timeout_s = 300;
    Credentials credentials;
  };

  // `addresses`: one a stream; `initial_agent_state`: of one environment, [layers, 1, ...], copied.
  //
  // Throws std::invalid_argument for arguments that make no sense.
  ActorPool(int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> addresses,
            const Nest<Array>& initial_agent_state, Options options);

  // Blocks until the queue or the batcher is closed, which ends every stream within a quarter of a
  // second. Throws the first failure, once all threads have ended. Throws std::runtime_error when
  // called twice.
  void run();

  // Steps of environments so far.
  int64_t count() const { return count_; }
  int64_t num_connected() const { return num_connected_; }
  // Streams that were lost and have come back.
  int64_t num_reconnects() const { return num_reconnects_; }

  // What streams wait for: answers of inference, their servers' next rows, room in the learner's
  // queue.
  enum Wait { kInference, kEnvironments, kLearner, kNumWaits };
  // Seconds of all streams together since the start, waits that go on included.
  static constexpr std::array<const char*, kNumWaits> kWaits{"inference", "environments",
                                                             "learner"};
  std::array<double, kNumWaits> waits();

  // What each stream waits for ("connection", too), and for how many seconds.
  std::vector<std::pair<std::string, double>> silences();

  // Blocks for the next line about a server; nullopt after the end of run().
  std::optional<std::string> next_event();

 private:
  struct Actor {
    std::shared_ptr<EnvStream> stream;  // held here so that other threads can cancel it
    bool connected = false;
    int64_t num_connections = 0;  // so far
    std::optional<Wait> wait;
    // Of that wait, or of being without a connection.
    std::chrono::steady_clock::time_point wait_began = std::chrono::steady_clock::now();
  };
  class Timer;

  void act(size_t index);
  void run_stream(size_t index, std::chrono::duration<double>* pause);
  void open(size_t index, const std::shared_ptr<EnvStream>& stream, const rpcenv::Step** first);
  void disconnect(size_t index);
  std::vector<std::shared_ptr<EnvStream>> streams();
  bool wait_for_end(std::chrono::steady_clock::time_point deadline);
  void fail(std::exception_ptr error);
  void stop();
  void report(std::string event);

  const int64_t unroll_length_;
  const std::shared_ptr<BatchingQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const std::vector<std::string> addresses_;
  const Options options_;
  const std::shared_ptr<MemoryPool> pool_ = std::make_shared<MemoryPool>();
  const Nest<Array> initial_agent_state_;
  Agreement agreement_;

  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> num_connected_{0};
  std::atomic<int64_t> num_reconnects_{0};

  Mutex mutex_;
  Condition changed_;
  std::vector<Actor> actors_ TB_GUARDED_BY(mutex_);
  // That are over.
  std::array<std::chrono::duration<double>, kNumWaits> waits_ TB_GUARDED_BY(mutex_){};
  std::deque<std::string> events_ TB_GUARDED_BY(mutex_);
  size_t num_running_ TB_GUARDED_BY(mutex_) = 0;
  bool started_ TB_GUARDED_BY(mutex_) = false;
  bool finished_ TB_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ TB_GUARDED_BY(mutex_);
};

}  // namespace torchbeast
