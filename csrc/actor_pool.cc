// SPDX-License-Identifier: Apache-2.0
#include "actor_pool.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "errors.h"
#include "stream_options.h"

namespace torchbeast {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kAgentDim = 1;  // batch dimension of agent states and outputs
constexpr size_t kMaxEvents = 1000;
constexpr auto kWatchInterval = std::chrono::milliseconds(250);
constexpr auto kMaxGap = std::chrono::seconds(10);  // of two looks: then this process was stopped
constexpr Seconds kFirstPause{0.1};
constexpr int64_t kEnoughRollouts = 10;  // after which a stream is said to work
constexpr Seconds kLongestPause{30};

// The action among an agent's outputs: under its key in a dict, else the first of a tuple.
const Nest<Array>& action_of(const Nest<Array>& agent_outputs) {
  if (agent_outputs.is_leaf()) return agent_outputs;
  if (agent_outputs.is_tuple()) {
    if (!agent_outputs.tuple().empty()) return agent_outputs.tuple()[0];
  } else {
    const auto found = agent_outputs.dict().find("action");
    if (found != agent_outputs.dict().end()) return found->second;
  }
  throw std::invalid_argument("the agent's outputs have no action");
}

void require(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

}  // namespace

// Counts a stream's wait for as long as it lives.
class ActorPool::Timer {
 public:
  Timer(ActorPool* pool, size_t index, Wait wait) : pool_(pool), index_(index) {
    Lock lock(pool_->mutex_);
    pool_->actors_[index_].wait = wait;
    pool_->actors_[index_].wait_began = Clock::now();
  }
  ~Timer() {
    Lock lock(pool_->mutex_);
    Actor& actor = pool_->actors_[index_];
    pool_->waits_[*actor.wait] += Clock::now() - actor.wait_began;
    actor.wait.reset();
  }

 private:
  ActorPool* const pool_;
  const size_t index_;
};

ActorPool::ActorPool(int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     std::vector<std::string> addresses, const Nest<Array>& initial_agent_state,
                     Options options)
    : unroll_length_(unroll_length),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      addresses_(std::move(addresses)),
      options_(std::move(options)),
      initial_agent_state_(repeat_columns(initial_agent_state, 1, kAgentDim, *pool_)),
      agreement_({options_.spaces,
                  options_.expected_num_envs ? options_.expected_num_envs : options_.num_envs,
                  options_.env}),
      actors_(addresses_.size()) {
  const int64_t num_envs = options_.num_envs.value_or(1);
  require(unroll_length_ >= 1,
          "unroll_length is " + std::to_string(unroll_length_) + "; it must be at least 1");
  require(!addresses_.empty(), "env_server_addresses is empty; name one for each stream");
  require(options_.seeds.empty() || options_.seeds.size() == addresses_.size(),
          "there are " + std::to_string(options_.seeds.size()) + " seeds for " +
              std::to_string(addresses_.size()) + " streams");
  require(num_envs >= 1, "num_envs is " + std::to_string(num_envs) + "; it must be at least 1");
  require(options_.connect_timeout_s > 0 && options_.step_timeout_s > 0,
          "connect_timeout_s and step_timeout_s must be positive");
  options_.credentials.check();
}

void ActorPool::run() {
  {
    Lock lock(mutex_);
    if (started_) throw std::runtime_error("run() was called before");
    started_ = true;
    num_running_ = addresses_.size();
  }
  std::vector<std::thread> threads;
  try {
    for (size_t i = 0; i < addresses_.size(); ++i) threads.emplace_back([this, i] { act(i); });
  } catch (const std::system_error&) {  // the system has no more threads
    fail(std::current_exception());
    Lock lock(mutex_);
    num_running_ -= addresses_.size() - threads.size();
  }
  auto last_look = Clock::now();
  while (!wait_for_end(Clock::now() + kWatchInterval)) {
    if (learner_queue_->is_closed() || inference_batcher_->is_closed()) stop();
    const auto gap = Clock::now() - last_look;
    last_look += gap;
    for (const auto& stream : streams()) {
      if (gap > kMaxGap) {
        stream->extend(gap);
      } else {
        stream->cancel_if_late();
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  Lock lock(mutex_);
  finished_ = true;
  changed_.notify_all();
  if (error_) std::rethrow_exception(error_);
}

// Returns whether all actors have ended.
bool ActorPool::wait_for_end(Clock::time_point deadline) {
  Lock lock(mutex_);
  while (num_running_ > 0 && Clock::now() < deadline) changed_.wait_until(lock, deadline);
  return num_running_ == 0;
}

// One actor's thread.
void ActorPool::act(size_t index) {
  std::minstd_rand random(std::random_device{}());
  std::uniform_real_distribution<double> jitter(0.5, 1.5);  // so that not all come back at once
  Seconds pause = kFirstPause;
  const auto lost = [&](const ServerError& error) {
    if (stopped_) return;
    if (!options_.reconnect) return fail(std::current_exception());
    const Seconds duration = pause * jitter(random);
    pause = std::min(2 * pause, kLongestPause);
    report("stream " + std::to_string(index) + ": " + error.what() + "; trying again in " +
           seconds_text(duration));
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration);
    Lock lock(mutex_);
    while (!stopped_ && Clock::now() < deadline) changed_.wait_until(lock, deadline);
  };
  while (!stopped_) {
    try {
      run_stream(index, &pause);
    } catch (const ClosedError&) {
      stop();  // the streams that wait for their servers, too
    } catch (const ServerError& error) {
      disconnect(index);
      lost(error);
    } catch (...) {
      fail(std::current_exception());
    }
  }
  disconnect(index);
  {
    Lock lock(mutex_);
    --num_running_;
  }
  changed_.notify_all();
}

// Connect, and make rollouts until something throws.
void ActorPool::run_stream(size_t index, Seconds* pause) {
  const std::string& address = addresses_[index];
  StreamOptions options{options_.num_envs, "", options_.newest_frame_only, options_.dict_outputs};
  if (!options_.seeds.empty()) {
    // A stream that has reconnected must not play the same games again.
    Lock lock(mutex_);
    options.seed = options_.seeds[index] + "," + std::to_string(actors_[index].num_connections);
  }
  const auto stream = std::make_shared<EnvStream>(address, options, options_.credentials);
  const rpcenv::Step* step = nullptr;
  open(index, stream, &step);
  try {
    std::optional<int32_t> actor;
    if (options_.dict_outputs) actor = static_cast<int32_t>(index);
    Rollout rollout = [&] {
      try {
        return Rollout(unroll_length_, options_.dict_outputs, *step, pool_, actor, options_.ranges);
      } catch (const std::bad_alloc&) {
        throw WireError("rows of which a rollout does not fit into memory");
      }
    }();
    agreement_.check_row(address, rollout.env_outputs(0));
    const int64_t num_envs = rollout.num_envs();
    Nest<Array> state = repeat_columns(initial_agent_state_, num_envs, kAgentDim, *pool_);
    int64_t num_rollouts = 0;
    while (true) {
      Nest<Array> initial_agent_state = state;
      for (int64_t t = 1; t <= unroll_length_; ++t) {
        Nest<Array> answer = [&] {
          const Timer timer(this, index, kInference);
          return inference_batcher_->compute(
              Nest<Array>::Tuple{rollout.env_outputs(t - 1), std::move(state)}, &stopped_);
        }();
        if (!answer.is_tuple() || answer.tuple().size() != 2) {
          throw std::invalid_argument("outputs should be a pair: agent outputs, new agent state");
        }
        const Nest<Array>& agent_outputs = answer.tuple()[0];
        rollout.set_agent_outputs(t, agent_outputs);  // which checks them
        state = std::move(answer.tuple()[1]);
        const rpcenv::Step& next = [&]() -> const rpcenv::Step& {
          const Timer timer(this, index, kEnvironments);
          stream->write(action_of(agent_outputs), Seconds(options_.step_timeout_s));
          return stream->read();
        }();
        rollout.set_env_outputs(t, next, &action_of(agent_outputs));
        count_ += num_envs;
      }
      if (++num_rollouts == kEnoughRollouts) *pause = kFirstPause;
      Nest<Array>::Tuple finished{rollout.finish(), std::move(initial_agent_state)};
      {
        const Timer timer(this, index, kLearner);
        learner_queue_->enqueue(std::move(finished), true, &stopped_);
      }
      rollout.begin();
    }
  } catch (const WireError& error) {
    throw ConnectionError("the environment server at " + address +
                          " sent what cannot be read: " + error.what());
  }
}

// Open the stream and check that its server agrees with what was asked for and with the others.
void ActorPool::open(size_t index, const std::shared_ptr<EnvStream>& stream,
                     const rpcenv::Step** first) {
  {
    Lock lock(mutex_);
    actors_[index].stream = stream;
  }
  if (stopped_) throw ClosedError("the actors are stopped");
  *first = &stream->open(Seconds(options_.connect_timeout_s), Seconds(options_.step_timeout_s));
  try {
    agreement_.check_handshake(addresses_[index], (*first)->handshake());
  } catch (const RefusedError& error) {
    stream->refuse(error.what());
    throw;
  }
  ++num_connected_;
  {
    Lock lock(mutex_);
    actors_[index].connected = true;
    if (actors_[index].num_connections++ == 0) return;
  }
  ++num_reconnects_;
  report("stream " + std::to_string(index) + ": the environment server at " + addresses_[index] +
         " is back");
}

void ActorPool::disconnect(size_t index) {
  std::shared_ptr<EnvStream> stream;  // ends after the lock
  Lock lock(mutex_);
  Actor& actor = actors_[index];
  stream.swap(actor.stream);
  if (actor.connected) {
    --num_connected_;
    actor.wait_began = Clock::now();
  }
  actor.connected = false;
}

// Streams are cancelled without the mutex: gRPC's part of that takes locks of its own.
std::vector<std::shared_ptr<EnvStream>> ActorPool::streams() {
  std::vector<std::shared_ptr<EnvStream>> streams;
  Lock lock(mutex_);
  for (const Actor& actor : actors_) {
    if (actor.stream) streams.push_back(actor.stream);
  }
  return streams;
}

void ActorPool::fail(std::exception_ptr error) {
  {
    Lock lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  stop();
}

void ActorPool::stop() {
  {
    Lock lock(mutex_);
    if (stopped_) return;
    stopped_ = true;  // from here on no stream is opened
  }
  changed_.notify_all();
  for (const auto& stream : streams()) stream->cancel();
  learner_queue_->wake();
  inference_batcher_->wake();
}

// Where nobody asks for events, the oldest are dropped.
void ActorPool::report(std::string event) {
  {
    Lock lock(mutex_);
    if (events_.size() == kMaxEvents) events_.pop_front();
    events_.push_back(std::move(event));
  }
  changed_.notify_all();
}

std::array<double, ActorPool::kNumWaits> ActorPool::waits() {
  Lock lock(mutex_);
  auto waits = waits_;
  const auto now = Clock::now();
  for (const Actor& actor : actors_) {
    if (actor.wait) waits[*actor.wait] += now - actor.wait_began;
  }
  return {waits[kInference].count(), waits[kEnvironments].count(), waits[kLearner].count()};
}

std::vector<std::pair<std::string, double>> ActorPool::silences() {
  Lock lock(mutex_);
  const auto now = Clock::now();
  std::vector<std::pair<std::string, double>> silences;
  for (const Actor& actor : actors_) {
    const bool works = actor.connected && !actor.wait;
    const Seconds seconds = works ? Seconds(0) : now - actor.wait_began;
    silences.emplace_back(actor.wait ? kWaits[*actor.wait] : "connection", seconds.count());
  }
  return silences;
}

std::optional<std::string> ActorPool::next_event() {
  Lock lock(mutex_);
  while (events_.empty() && !finished_) changed_.wait(lock);
  if (events_.empty()) return std::nullopt;
  std::string event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace torchbeast
