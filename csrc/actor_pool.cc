// SPDX-License-Identifier: Apache-2.0
#include "actor_pool.h"

#include <algorithm>
#include <random>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>

#include "wire.h"

namespace torchbeast {

namespace {

using Seconds = std::chrono::duration<double>;

constexpr size_t kAgentDim = 1;  // batch dimension of agent states and outputs
constexpr size_t kMaxEvents = 1000;
constexpr auto kWatchInterval = std::chrono::milliseconds(250);
constexpr Seconds kFirstPause{0.1};
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

std::string seconds_text(Seconds duration) {
  const std::string text = std::to_string(duration.count());
  return text.substr(0, text.find('.') + 2) + " s";
}

// As in ({a: uint8[1, 2]}, float32[1]).
std::string text_of(const Nest<std::string>& nest) {
  if (nest.is_leaf()) return nest.leaf();
  std::string text;
  if (nest.is_tuple()) {
    for (const auto& item : nest.tuple()) text += (text.empty() ? "" : ", ") + text_of(item);
    return "(" + text + ")";
  }
  for (const auto& [key, item] : nest.dict()) {
    text += (text.empty() ? "" : ", ") + key + ": " + text_of(item);
  }
  return "{" + text + "}";
}

Nest<Array> copy_state(const Nest<Array>& state) {
  auto pool = std::make_shared<MemoryPool>();
  return repeat_columns(state, 1, kAgentDim, *pool);
}

}  // namespace

// Counts a stream's wait for as long as it lives.
class ActorPool::Timer {
 public:
  Timer(ActorPool* pool, size_t index, Wait wait) : pool_(pool), actor_(pool->actors_[index]) {
    std::lock_guard lock(pool_->mutex_);
    actor_.wait = wait;
    actor_.wait_began = Clock::now();
  }
  ~Timer() {
    std::lock_guard lock(pool_->mutex_);
    pool_->waits_[*actor_.wait] += Clock::now() - actor_.wait_began;
    actor_.wait.reset();
  }

 private:
  using Clock = std::chrono::steady_clock;
  ActorPool* pool_;
  Actor& actor_;
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
      initial_agent_state_(copy_state(initial_agent_state)),
      actors_(addresses_.size()),
      num_envs_(options_.expected_num_envs ? options_.expected_num_envs : options_.num_envs),
      spaces_(options_.spaces) {
  if (unroll_length_ < 1) {
    throw std::invalid_argument("unroll_length is " + std::to_string(unroll_length_) +
                                "; it must be at least 1");
  }
  if (addresses_.empty()) {
    throw std::invalid_argument("env_server_addresses is empty; name one for each stream");
  }
  if (!options_.seeds.empty() && options_.seeds.size() != addresses_.size()) {
    throw std::invalid_argument("there are " + std::to_string(options_.seeds.size()) +
                                " seeds for " + std::to_string(addresses_.size()) + " streams");
  }
  if (options_.num_envs && *options_.num_envs < 1) {
    throw std::invalid_argument("num_envs is " + std::to_string(*options_.num_envs) +
                                "; it must be at least 1");
  }
  if (!(options_.connect_timeout_s > 0 && options_.step_timeout_s > 0)) {
    throw std::invalid_argument("connect_timeout_s and step_timeout_s must be positive");
  }
  options_.credentials.check();
}

void ActorPool::run() {
  {
    std::lock_guard lock(mutex_);
    if (started_) throw std::runtime_error("run() was called before");
    started_ = true;
    num_running_ = addresses_.size();
  }
  const auto on_close = [pool = weak_from_this()] {
    if (const auto alive = pool.lock()) alive->stop();
  };
  learner_queue_->on_close(on_close);
  inference_batcher_->on_close(on_close);
  std::vector<std::thread> threads;
  try {
    for (size_t i = 0; i < addresses_.size(); ++i) threads.emplace_back([this, i] { act(i); });
  } catch (const std::system_error&) {  // so many threads cannot be had
    fail(std::current_exception());
    std::lock_guard guard(mutex_);
    num_running_ -= addresses_.size() - threads.size();
  }

  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kWatchInterval, [&] { return num_running_ == 0; })) {
    for (const Actor& actor : actors_) {
      if (actor.stream) actor.stream->cancel_if_late();
    }
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  lock.lock();
  finished_ = true;
  changed_.notify_all();
  if (error_) std::rethrow_exception(error_);
}

// One actor's thread.
void ActorPool::act(size_t index) {
  std::minstd_rand random(std::random_device{}());
  std::uniform_real_distribution<double> jitter(0.5, 1.5);  // lest all come back at once
  Seconds pause = kFirstPause;
  const auto lost = [&](const std::exception& error) {
    if (stopped_) return;
    if (!options_.reconnect) return fail(std::current_exception());
    const Seconds duration = pause * jitter(random);
    pause = std::min(2 * pause, kLongestPause);
    report("stream " + std::to_string(index) + ": " + error.what() + "; trying again in " +
           seconds_text(duration));
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, duration, [&] { return stopped_.load(); });
  };
  while (!stopped_) {
    try {
      serve(index, &pause);
    } catch (const ClosedError&) {
      break;
    } catch (const ConnectionError& error) {
      leave(index);
      lost(error);
    } catch (const TimeoutError& error) {
      leave(index);
      lost(error);
    } catch (...) {
      fail(std::current_exception());
    }
  }
  leave(index);
  {
    std::lock_guard lock(mutex_);
    --num_running_;
  }
  changed_.notify_all();
}

// Connect, and give rollouts until something throws.
void ActorPool::serve(size_t index, Seconds* pause) {
  const std::string& address = addresses_[index];
  Wishes wishes{options_.num_envs, "", options_.newest_frame_only, options_.dict_outputs};
  if (!options_.seeds.empty()) {
    // Those who come back must not play the same games again.
    std::lock_guard lock(mutex_);
    wishes.seed = options_.seeds[index] + "," + std::to_string(actors_[index].num_connections);
  }
  const auto stream = std::make_shared<EnvStream>(address, wishes, options_.credentials);
  const rpcenv::Step* step = nullptr;
  open(index, stream, &step);
  try {
    std::optional<int32_t> actor;
    if (options_.dict_outputs) actor = static_cast<int32_t>(index);
    Rollout rollout(unroll_length_, options_.dict_outputs, *step, pool_, actor);
    check_row(index, rollout);
    const int64_t num_envs = rollout.num_envs();
    Nest<Array> state = repeat_columns(initial_agent_state_, num_envs, kAgentDim, *pool_);
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
        rollout.set_env_outputs(t, next);
        count_ += num_envs;
      }
      *pause = kFirstPause;  // it works
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
    std::lock_guard lock(mutex_);
    actors_[index].stream = stream;
  }
  if (stopped_) throw ClosedError("the actors are stopped");
  *first = &stream->open(Seconds(options_.connect_timeout_s), Seconds(options_.step_timeout_s));
  const rpcenv::Handshake& handshake = (*first)->handshake();
  std::lock_guard lock(mutex_);
  const std::string who = "refused: the environment server at " + addresses_[index];
  if (spaces_.value_or(handshake.spaces()) != handshake.spaces()) {
    throw RefusedError(who + " has the spaces " + handshake.spaces() + ", but expected are " +
                       *spaces_);
  }
  if (num_envs_.value_or(handshake.num_envs()) != handshake.num_envs()) {
    throw RefusedError(who + " has " + std::to_string(handshake.num_envs()) +
                       " environments a stream, but expected are " + std::to_string(*num_envs_));
  }
  spaces_ = handshake.spaces();
  num_envs_ = handshake.num_envs();
  Actor& actor = actors_[index];
  actor.connected = true;
  ++num_connected_;
  if (actor.num_connections++ > 0) {
    ++num_reconnects_;
    add_event("stream " + std::to_string(index) + ": the environment server at " +
              addresses_[index] + " is back");
    changed_.notify_all();
  }
}

// Rows that differ could not be joined into batches.
void ActorPool::check_row(size_t index, const Rollout& rollout) {
  const Nest<std::string> row =
      rollout.env_outputs(0).map([](const Array& array) { return array.description(); });
  std::lock_guard lock(mutex_);
  if (row_ && !(row.same_structure(*row_) && row.flatten() == row_->flatten())) {
    throw RefusedError("refused: the environment server at " + addresses_[index] +
                       " sends rows of " + text_of(row) + ", but the others of " + text_of(*row_));
  }
  row_ = row;
}

void ActorPool::leave(size_t index) {
  std::shared_ptr<EnvStream> stream;  // ends after the lock
  std::lock_guard lock(mutex_);
  Actor& actor = actors_[index];
  stream.swap(actor.stream);
  if (actor.connected) {
    --num_connected_;
    actor.wait_began = std::chrono::steady_clock::now();
  }
  actor.connected = false;
}

void ActorPool::fail(std::exception_ptr error) {
  {
    std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  stop();
}

void ActorPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    for (const Actor& actor : actors_) {
      if (actor.stream) actor.stream->cancel();
    }
  }
  changed_.notify_all();
  learner_queue_->wake();
  inference_batcher_->wake();
}

void ActorPool::report(std::string event) {
  {
    std::lock_guard lock(mutex_);
    add_event(std::move(event));
  }
  changed_.notify_all();
}

// Requires mutex_. Where nobody asks for events, the oldest are dropped.
void ActorPool::add_event(std::string event) {
  if (events_.size() == kMaxEvents) events_.pop_front();
  events_.push_back(std::move(event));
}

std::array<double, ActorPool::kNumWaits> ActorPool::waits() {
  std::lock_guard lock(mutex_);
  auto waits = waits_;
  const auto now = std::chrono::steady_clock::now();
  for (const Actor& actor : actors_) {
    if (actor.wait) waits[*actor.wait] += now - actor.wait_began;
  }
  return {waits[kInference].count(), waits[kEnvironments].count(), waits[kLearner].count()};
}

std::vector<std::pair<std::string, double>> ActorPool::silences() {
  std::lock_guard lock(mutex_);
  const auto now = std::chrono::steady_clock::now();
  std::vector<std::pair<std::string, double>> silences;
  for (const Actor& actor : actors_) {
    const bool works = actor.connected && !actor.wait;
    const Seconds seconds = works ? Seconds(0) : now - actor.wait_began;
    silences.emplace_back(actor.wait ? kWaits[*actor.wait] : "connection", seconds.count());
  }
  return silences;
}

std::optional<std::string> ActorPool::next_event() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !events_.empty() || finished_ || (stopped_ && !started_); });
  if (events_.empty()) return std::nullopt;
  std::string event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace torchbeast
