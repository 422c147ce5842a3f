// SPDX-License-Identifier: Apache-2.0
#include "actor_pool.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <typeinfo>
#include <utility>

#include "errors.h"
#include "outgoing_stream.h"
#include "stream_options.h"

namespace torchbeast {

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr size_t kAgentDim = 1;  // batch dimension of agent states and outputs
constexpr auto kWatchInterval = std::chrono::milliseconds(250);
constexpr auto kMaxGap = std::chrono::seconds(10);  // longer between two checks: we were stopped
constexpr Seconds kFirstPause{0.1};                 // before reconnecting; doubles each time
constexpr Seconds kLongestPause{30};
constexpr int64_t kEnoughRollouts = 10;  // after these the pause is short again
constexpr int kLinesAtOnce = 10;         // of a stream's losses, and of its returns

// The action among an agent's outputs: a bare array, the first item of a tuple, or a dict's
// "action".
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

ActorPool::ActorPool(int64_t unroll_length, std::shared_ptr<BatchingQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     std::vector<std::string> addresses, const Nest<Array>& initial_agent_state,
                     Options options, std::shared_ptr<Listener> listener)
    : unroll_length_(unroll_length),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      addresses_(std::move(addresses)),
      options_(std::move(options)),
      listener_(std::move(listener)),
      initial_agent_state_(repeat_columns(initial_agent_state, 1, kAgentDim, *pool_)),
      agreement_({options_.spaces,
                  options_.expected_num_envs ? options_.expected_num_envs : options_.num_envs,
                  options_.env}),
      wait_times_(addresses_.size()),
      actors_(addresses_.size()) {
  const int64_t num_envs = options_.num_envs.value_or(1);
  require(unroll_length_ >= 1,
          "unroll_length is " + std::to_string(unroll_length_) + "; it must be at least 1");
  require(!addresses_.empty() || listener_ != nullptr,
          "env_server_addresses is empty; name one for each stream, or give a listener");
  require(options_.seeds.empty() || options_.seeds.size() == addresses_.size(),
          "there are " + std::to_string(options_.seeds.size()) + " seeds for " +
              std::to_string(addresses_.size()) + " streams");
  const auto check_seed = [](const std::string& seed) {
    require(seed.find_first_not_of("0123456789,") == std::string::npos,
            "a seed should be integers separated by commas, not '" + seed + "'");
  };
  for (const std::string& seed : options_.seeds) check_seed(seed);
  check_seed(options_.listener_seed);
  require(num_envs >= 1, "num_envs is " + std::to_string(num_envs) + "; it must be at least 1");
  require(options_.connect_timeout_s > 0 && options_.step_timeout_s > 0,
          "connect_timeout_s and step_timeout_s must be positive");
  options_.credentials.check();
  for (size_t i = 0; i < addresses_.size(); ++i) {
    actors_[i].peer = "the environment server at " + addresses_[i];
  }
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
  } catch (const std::system_error& error) {
    fail(std::make_exception_ptr(std::runtime_error(
        "the system has no thread for each of " + std::to_string(addresses_.size()) +
        " streams (ulimit -u, or the container's limit of processes): " + error.what())));
    Lock lock(mutex_);
    num_running_ -= addresses_.size() - threads.size();
  }
  std::shared_ptr<Listener::Use> use;
  if (listener_) use = listener_->begin_use([this](const auto& stream) { return act_for(stream); });
  auto last_check = Clock::now();
  while (!wait_for_end(Clock::now() + kWatchInterval)) {
    stop_if_closed();
    const auto gap = Clock::now() - last_check;
    last_check += gap;
    for (const auto& stream : streams()) {
      if (gap > kMaxGap) {
        stream->extend(gap);
      } else {
        stream->cancel_if_late();
      }
    }
  }
  for (std::thread& thread : threads) thread.join();
  if (listener_) listener_->end_use(use);
  events_.close();
  Lock lock(mutex_);
  if (error_) std::rethrow_exception(error_);
}

// Returns whether all actors have ended.
bool ActorPool::wait_for_end(Clock::time_point deadline) {
  Lock lock(mutex_);
  while (is_running() && Clock::now() < deadline) changed_.wait_until(lock, deadline);
  return !is_running();
}

bool ActorPool::is_running() const { return num_running_ > 0 || (listener_ && !stopped_); }

// The thread of a stream to a server.
void ActorPool::act(size_t index) {
  std::minstd_rand random(std::random_device{}());
  std::uniform_real_distribution<double> jitter(0.5, 1.5);  // spreads the streams' attempts
  Seconds pause = kFirstPause;
  while (!stopped_) {
    try {
      run_stream(index, *create_stream(index), &pause);
    } catch (const ClosedError&) {
      stop();  // ends the streams that wait for their servers, too
    } catch (const ServerError& error) {
      disconnect(index);
      if (stop_if_closed()) break;
      if (options_.reconnect) {
        wait_to_reconnect(index, error, pause * jitter(random));
        pause = std::min(2 * pause, kLongestPause);
      } else {
        fail(std::current_exception());
      }
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

// The thread of a stream that environments have opened. Returns why it has failed, if it has.
std::string ActorPool::act_for(const std::shared_ptr<IncomingStream>& stream) {
  const std::optional<size_t> index = add_stream(stream);
  if (!index) return "";
  std::string kind, failure;
  try {
    Seconds pause;
    run_stream(*index, *stream, &pause);
  } catch (const ClosedError&) {
    stop();
  } catch (const ServerError& error) {
    kind = typeid(error).name();
    failure = error.what();
  } catch (...) {
    fail(std::current_exception());
  }
  disconnect(*index);
  {
    Lock lock(mutex_);
    actors_[*index].peer.clear();
  }
  if (!failure.empty() && !stop_if_closed()) {
    events_.report(kind, "stream " + std::to_string(*index) + ": " + failure);
  }
  {
    Lock lock(mutex_);
    --num_running_;
  }
  changed_.notify_all();
  return failure;
}

// Its index, which it may have from one that has gone; nullopt after stop().
std::optional<size_t> ActorPool::add_stream(const std::shared_ptr<IncomingStream>& stream) {
  Lock lock(mutex_);
  if (stopped_) return std::nullopt;
  size_t index = addresses_.size();
  while (index < actors_.size() && !actors_[index].peer.empty()) ++index;
  if (index == actors_.size()) actors_.emplace_back();
  wait_times_.begin_stream(index);
  Actor& actor = actors_[index];
  std::string seed = options_.listener_seed;
  if (!seed.empty()) seed += "," + std::to_string(index);
  stream->set_options(make_options(std::move(seed), actor.num_connections + actor.num_failures));
  actor.peer = stream->peer();
  actor.stream = stream;
  ++num_running_;
  return index;
}

// The number of the attempt keeps a new one from playing the same games again, or from failing by
// the same seed.
StreamOptions ActorPool::make_options(std::string seed, int64_t number) const {
  if (!seed.empty()) seed += "," + std::to_string(number);
  return {options_.num_envs, std::move(seed), options_.newest_frame_only, options_.dict_outputs};
}

void ActorPool::wait_to_reconnect(size_t index, const ServerError& error, Seconds duration) {
  const std::string who = "stream " + std::to_string(index);
  events_.report(who + " lost",
                 who + ": " + error.what() + "; trying again in " + seconds_text(duration),
                 kLinesAtOnce);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(duration);
  Lock lock(mutex_);
  while (!stopped_ && Clock::now() < deadline) changed_.wait_until(lock, deadline);
}

// Connect, and make rollouts until something throws. Resets *pause once the stream works.
void ActorPool::run_stream(size_t index, EnvStream& stream, Seconds* pause) {
  const rpcenv::Step& first = open(index, stream);
  try {
    std::optional<int32_t> actor;
    if (options_.dict_outputs) actor = static_cast<int32_t>(index);
    Rollout rollout(unroll_length_, options_.dict_outputs, first, pool_, actor, options_.ranges);
    try {
      agreement_.check_row(stream.peer(), rollout.env_outputs(0));
    } catch (const RefusedError& error) {
      stream.refuse(error.what());
      throw;
    }
    const int64_t num_envs = rollout.num_envs();
    Nest<Array> state = repeat_columns(initial_agent_state_, num_envs, kAgentDim, *pool_);
    for (int64_t num_rollouts = 1;; ++num_rollouts) {
      Nest<Array> initial_agent_state = state;
      for (int64_t t = 1; t <= unroll_length_; ++t) {
        Nest<Array>::Tuple answer = infer(index, rollout.env_outputs(t - 1), std::move(state));
        const Nest<Array>& agent_outputs = answer[0];
        state = std::move(answer[1]);
        rollout.set_agent_outputs(t, agent_outputs);  // throws before a wrong action is sent
        const Nest<Array>& action = action_of(agent_outputs);
        rollout.set_env_outputs(t, step(index, stream, action), &action);
        count_ += num_envs;
      }
      if (num_rollouts == kEnoughRollouts) *pause = kFirstPause;
      Nest<Array>::Tuple finished{rollout.finish(), std::move(initial_agent_state)};
      {
        const WaitTimes::Timer timer(&wait_times_, index, WaitTimes::kLearner);
        learner_queue_->enqueue(std::move(finished), true, &stopped_);
      }
      rollout.begin();
    }
  } catch (const WireError& error) {
    throw ConnectionError(stream.peer() + " sent a malformed message: " + error.what());
  }
}

// The stream is registered before it is opened, so that stop() cancels each one that is.
std::shared_ptr<EnvStream> ActorPool::create_stream(size_t index) {
  std::string seed = options_.seeds.empty() ? "" : options_.seeds[index];
  int64_t number;
  {
    Lock lock(mutex_);
    number = actors_[index].num_connections + actors_[index].num_failures;
  }
  auto stream = std::make_shared<OutgoingStream>(
      addresses_[index], make_options(std::move(seed), number), options_.credentials);
  Lock lock(mutex_);
  if (stopped_) throw ClosedError("the actors are stopped");
  actors_[index].stream = stream;
  return stream;
}

// Open the stream and return its first message, whose handshake is what was asked for and agrees
// with the other servers'.
const rpcenv::Step& ActorPool::open(size_t index, EnvStream& stream) {
  const rpcenv::Step* message = nullptr;
  try {
    message = &stream.open(Seconds(options_.connect_timeout_s), Seconds(options_.step_timeout_s));
  } catch (const TimeoutError&) {  // nobody has got the seed
    throw;
  } catch (const ServerError&) {
    Lock lock(mutex_);
    ++actors_[index].num_failures;
    throw;
  }
  const rpcenv::Step& first = *message;
  try {
    agreement_.check_handshake(stream.peer(), first.handshake());
  } catch (const RefusedError& error) {
    stream.refuse(error.what());
    throw;
  }
  wait_times_.set_connected(index, true);
  bool is_first;
  {
    Lock lock(mutex_);
    is_first = actors_[index].num_connections++ == 0;
  }
  if (!is_first) ++num_reconnects_;
  const std::string who = "stream " + std::to_string(index);
  if (index >= addresses_.size()) {
    events_.report("come", who + ": " + stream.peer() + " has come");
  } else if (!is_first) {
    events_.report(who + " back", who + ": " + stream.peer() + " is back", kLinesAtOnce);
  }
  return first;
}

// The agent's outputs and its new state.
Nest<Array>::Tuple ActorPool::infer(size_t index, Nest<Array> env_outputs, Nest<Array> state) {
  const WaitTimes::Timer timer(&wait_times_, index, WaitTimes::kInference);
  Nest<Array> answer = inference_batcher_->compute(
      Nest<Array>::Tuple{std::move(env_outputs), std::move(state)}, &stopped_);
  if (!answer.is_tuple() || answer.tuple().size() != 2) {
    throw std::invalid_argument("outputs should be a pair: agent outputs, new agent state");
  }
  return std::move(answer.tuple());
}

// Send the action and return the server's next message.
const rpcenv::Step& ActorPool::step(size_t index, EnvStream& stream, const Nest<Array>& action) {
  const WaitTimes::Timer timer(&wait_times_, index, WaitTimes::kEnvironments);
  stream.write(action, Seconds(options_.step_timeout_s));
  return stream.read();
}

void ActorPool::disconnect(size_t index) {
  wait_times_.set_connected(index, false);
  std::shared_ptr<EnvStream> stream;  // declared before the lock: destroyed after its release
  Lock lock(mutex_);
  stream.swap(actors_[index].stream);
}

// A copy, since streams are canceled without the mutex: gRPC takes locks of its own for that.
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

// Stops the actors if the queue or the batcher is closed; returns whether they are stopped. A
// server may end right after that, sooner than run() looks.
bool ActorPool::stop_if_closed() {
  if (learner_queue_->is_closed() || inference_batcher_->is_closed()) stop();
  return stopped_;
}

std::vector<std::tuple<size_t, std::string, std::string, double>> ActorPool::silences() {
  std::vector<std::tuple<size_t, std::string, std::string, double>> silences;
  const auto waits = wait_times_.silences();
  Lock lock(mutex_);
  for (size_t i = 0; i < std::min(waits.size(), actors_.size()); ++i) {
    if (!actors_[i].peer.empty()) {
      silences.emplace_back(i, actors_[i].peer, waits[i].first, waits[i].second);
    }
  }
  return silences;
}

}  // namespace torchbeast
