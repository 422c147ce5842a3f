// SPDX-License-Identifier: Apache-2.0
// The actors: one thread a stream of environments.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "agreement.h"
#include "array.h"
#include "batching_queue.h"
#include "credentials.h"
#include "dynamic_batcher.h"
#include "env_stream.h"
#include "errors.h"
#include "event_log.h"
#include "listener.h"
#include "mutex.h"
#include "nest.h"
#include "rollout.h"
#include "wait_times.h"

namespace torchbeast {

// An actor passes each row from its server to the batcher and sends the server the action among the
// agent's outputs; every `unroll_length` steps it puts a rollout into the learner's queue.
//
// Without `reconnect` the first failure ends run(). With it, a failing server costs only the
// rollout under way: after a pause, longer each time, the actor connects again and begins with the
// initial agent state. An error of the agent that shows here (no action, say) ends run() in either
// case; an action that a server refuses counts as the server's failure.
//
// Streams of a listener come and go: each is an actor for as long as it lasts.
class ActorPool {
 public:
  struct Options {
    bool dict_outputs = false;
    std::optional<int64_t> num_envs;           // N to ask servers for; unset: the server's choice
    std::optional<int64_t> expected_num_envs;  // N required of every handshake
    // Of streams to servers: one a stream, or none; the number of the attempt is added.
    std::vector<std::string> seeds;
    // Of the listener's streams, or empty; a stream's index and the attempt's number are added.
    std::string listener_seed;
    bool newest_frame_only = false;
    bool reconnect = false;
    std::optional<std::string> spaces;  // spaces required of every handshake
    std::string env;                    // environment required of every handshake that names one
    Rollout::Ranges ranges;             // limits of the integers in rows
    double connect_timeout_s = 60;
    double step_timeout_s = 300;
    Credentials credentials;
  };

  // `addresses` has one for each stream to a server; `initial_agent_state`, [layers, 1, ...], is of
  // one environment, and copied; `listener` may be null. Throws std::invalid_argument for invalid
  // arguments.
  ActorPool(int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, std::vector<std::string> addresses,
            const Nest<Array>& initial_agent_state, Options options,
            std::shared_ptr<Listener> listener);

  // Blocks until the queue or the batcher is closed, which ends every stream within a quarter of a
  // second. Throws the first failure, once all threads have ended. Throws std::runtime_error when
  // called twice.
  void run();

  // Rows after the first ones of streams so far, also those at ends of episodes that are no steps.
  int64_t count() const { return count_; }
  // Reconnections of all streams so far.
  int64_t num_reconnects() const { return num_reconnects_; }

  WaitTimes& wait_times() { return wait_times_; }

  // Log lines about streams, until the end of run().
  EventLog& events() { return events_; }

  // For each stream its index, whom it is with, what it waits for (as of WaitTimes), and for how
  // many seconds.
  std::vector<std::tuple<size_t, std::string, std::string, double>> silences();

 private:
  struct Actor {
    std::string peer;                   // empty: the place of a stream that has gone
    std::shared_ptr<EnvStream> stream;  // for other threads to cancel
    int64_t num_connections = 0;        // connections so far
    int64_t num_failures = 0;           // streams that failed before their handshake
  };

  void act(size_t index);
  std::string act_for(const std::shared_ptr<IncomingStream>& stream);
  void wait_to_reconnect(size_t index, const ServerError& error,
                         std::chrono::duration<double> duration);
  void run_stream(size_t index, EnvStream& stream, std::chrono::duration<double>* pause);
  std::shared_ptr<EnvStream> create_stream(size_t index);
  std::optional<size_t> add_stream(const std::shared_ptr<IncomingStream>& stream);
  StreamOptions make_options(std::string seed, int64_t number) const;
  const rpcenv::Step& open(size_t index, EnvStream& stream);
  Nest<Array>::Tuple infer(size_t index, Nest<Array> env_outputs, Nest<Array> state);
  const rpcenv::Step& step(size_t index, EnvStream& stream, const Nest<Array>& action);
  void disconnect(size_t index);
  std::vector<std::shared_ptr<EnvStream>> streams();
  bool wait_for_end(std::chrono::steady_clock::time_point deadline);
  bool is_running() const TB_REQUIRES(mutex_);
  void fail(std::exception_ptr error);
  void stop();
  bool stop_if_closed();

  const int64_t unroll_length_;
  const std::shared_ptr<BatchingQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const std::vector<std::string> addresses_;
  const Options options_;
  const std::shared_ptr<Listener> listener_;
  const std::shared_ptr<MemoryPool> pool_ = std::make_shared<MemoryPool>();
  const Nest<Array> initial_agent_state_;
  Agreement agreement_;
  WaitTimes wait_times_;
  EventLog events_{
      [this] { return "; streams now: " + std::to_string(wait_times_.num_connected()); }};

  std::atomic<bool> stopped_{false};
  std::atomic<int64_t> count_{0};
  std::atomic<int64_t> num_reconnects_{0};

  Mutex mutex_;
  Condition changed_;
  std::vector<Actor> actors_ TB_GUARDED_BY(mutex_);
  size_t num_running_ TB_GUARDED_BY(mutex_) = 0;
  bool started_ TB_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ TB_GUARDED_BY(mutex_);
};

}  // namespace torchbeast
