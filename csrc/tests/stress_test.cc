// SPDX-License-Identifier: Apache-2.0
// The core's objects, opened, used and closed by many threads at once, at random times: whether
// they keep their promises then. For STRESS_SECONDS (in the environment), else 2.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "array.h"
#include "batching_queue.h"
#include "check.h"
#include "dynamic_batcher.h"
#include "rollout.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;
using Clock = std::chrono::steady_clock;
using Random = std::minstd_rand;
using Threads = std::vector<std::unique_ptr<Thread>>;

constexpr int64_t kMillion = 1'000'000;

bool one_in(unsigned n, Random& random) { return random() % n == 0; }

int64_t from(int64_t low, int64_t high, Random& random) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// So that threads meet each other everywhere.
void dawdle(Random& random) {
  if (one_in(4, random)) std::this_thread::yield();
  if (one_in(16, random)) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

// Call `round` until this test's share of the time is over.
void repeat(const std::function<void(Random&)>& round) {
  const char* text = std::getenv("STRESS_SECONDS");
  const std::chrono::duration<double> seconds(text == nullptr ? 2 : std::atof(text));
  const auto end = Clock::now() + seconds / all_tests().size();
  unsigned count = 0;
  do {
    alarm(60);  // ends a round, and the program, where somebody is never woken
    Random random(++count);
    round(random);
  } while (Clock::now() < end);
  alarm(0);
  std::printf("  %u rounds\n", count);
}

// Threads that call `function` with their number and random numbers of their own.
void start(Threads* threads, int64_t count, Random& random,
           const std::function<void(int64_t, Random&)>& function) {
  for (int64_t i = 0; i < count; ++i) {
    threads->push_back(std::make_unique<Thread>([function, i, seed = random()] {
      Random own(seed);
      function(i, own);
    }));
  }
}

void join(Threads* threads) {
  for (auto& thread : *threads) thread->join();
  threads->clear();
}

Array columns(const Values& values) {
  return int64_array({1, static_cast<int64_t>(values.size())}, values);
}

// What a thread asks of a queue or a batcher can be cancelled by another.
struct Party {
  std::atomic<bool> cancelled{false};
  std::atomic<bool> ended{false};

  // To be called after ClosedError: whether that was for good.
  template <class Closable>
  bool is_closed(const Closable& closable) {
    if (closable.is_closed()) return true;
    CHECK(cancelled.exchange(false));  // else nobody has asked for it
    return false;
  }
};

// Cancel what some of the parties do until `done`; nothing else may be needed to wake them.
template <class Closable>
void cancel_some(Closable& closable, std::vector<Party>& parties, const std::atomic<bool>& done,
                 Random& random) {
  while (!done) {
    Party& party = parties[random() % parties.size()];
    party.cancelled = true;
    closable.wake();
    while (party.cancelled && !party.ended && !done) std::this_thread::yield();
    dawdle(random);
  }
}

// Close it in two threads at once, of which one must be refused.
template <class Closable>
void close(Closable& closable, Random& random) {
  std::atomic<int> refused{0};
  Threads threads;
  start(&threads, 2, random, [&](int64_t, Random& own) {
    dawdle(own);
    try {
      closable.close();
    } catch (const std::runtime_error&) {
      ++refused;
    }
  });
  join(&threads);
  CHECK(refused == 1);
}

TEST(queues_lose_and_double_nothing) {
  repeat([](Random& random) {
    const int64_t minimum = from(1, 4, random);
    const int64_t maximum = minimum + from(0, 6, random);
    std::optional<int64_t> timeout_ms, size;
    if (one_in(2, random)) timeout_ms = from(0, 2, random);
    if (one_in(2, random)) size = minimum + from(0, 6, random);
    BatchingQueue queue({1, minimum, maximum, timeout_ms, size}, new_pool(), one_in(2, random));
    const bool drains = one_in(2, random);  // else it is closed amid traffic
    const int64_t num_consumers = drains ? from(1, 3, random) : from(0, 3, random);

    std::vector<Party> parties(4);
    std::vector<Values> sent(parties.size()), received(static_cast<size_t>(num_consumers));
    Threads producers, consumers, canceller;
    std::atomic<bool> done{false};
    start(&producers, 4, random, [&](int64_t p, Random& own) {
      Party& party = parties[static_cast<size_t>(p)];
      for (int64_t i = 0; !drains || i < 200; i += 4) {
        Values values;
        for (int64_t k = from(1, 4, own); k > 0; --k) values.push_back(p * kMillion + i + 4 - k);
        try {
          queue.enqueue(columns(values), one_in(2, own), &party.cancelled);
          sent[static_cast<size_t>(p)].insert(sent[static_cast<size_t>(p)].end(), values.begin(),
                                              values.end());
        } catch (const ClosedError&) {
          if (party.is_closed(queue)) break;
        }
        dawdle(own);
      }
      party.ended = true;
    });
    start(&consumers, num_consumers, random, [&](int64_t c, Random& own) {
      std::map<int64_t, int64_t> last;
      while (const std::optional<Arrays> batch = queue.dequeue()) {
        const Array& array = batch->leaf();
        const Values values = values_of(array);
        CHECK(!values.empty() && values.size() <= static_cast<size_t>(maximum));
        CHECK(timeout_ms || values.size() >= static_cast<size_t>(minimum));
        for (const int64_t value : values) {
          const auto [place, is_new] = last.emplace(value / kMillion, value);
          CHECK(is_new || place->second < value);  // each producer's come in order
          place->second = value;
          received[static_cast<size_t>(c)].push_back(value);
        }
        std::memset(array.data.get(), 0xff, array.num_bytes());  // it is ours
        dawdle(own);
      }
      CHECK(queue.is_closed());
    });
    start(&canceller, 1, random,
          [&](int64_t, Random& own) { cancel_some(queue, parties, done, own); });
    if (drains) {
      join(&producers);
      const int64_t left = timeout_ms ? 0 : minimum - 1;
      wait_until([&] { return queue.size() <= left; });
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    done = true;
    join(&canceller);
    close(queue, random);
    join(&producers);
    join(&consumers);

    Values all_sent, all_received;
    for (const Values& v : sent) all_sent.insert(all_sent.end(), v.begin(), v.end());
    for (const Values& v : received) all_received.insert(all_received.end(), v.begin(), v.end());
    std::sort(all_sent.begin(), all_sent.end());
    std::sort(all_received.begin(), all_received.end());
    CHECK(std::adjacent_find(all_received.begin(), all_received.end()) == all_received.end());
    CHECK(
        std::includes(all_sent.begin(), all_sent.end(), all_received.begin(), all_received.end()));
    const auto lost = static_cast<int64_t>(all_sent.size() - all_received.size());
    if (drains) CHECK(lost < minimum && (lost == 0 || !timeout_ms));
    if (size) CHECK(lost < *size + 4);  // no more than was in it
  });
}

TEST(batchers_answer_each_call_once_and_rightly) {
  repeat([](Random& random) {
    const int64_t minimum = from(1, 4, random);
    const int64_t maximum = minimum + from(4, 8, random);
    std::optional<int64_t> timeout_ms;
    if (minimum > 1 || one_in(2, random)) timeout_ms = from(0, 2, random);
    const auto batcher = std::make_shared<DynamicBatcher>(
        DynamicBatcher::Options{1, minimum, maximum, timeout_ms}, new_pool());
    const bool drains = one_in(2, random);

    enum Outcome { kAnswered, kDropped, kCancelled };
    std::vector<Party> parties(5);
    std::array<std::map<int64_t, Outcome>, 5> outcomes;  // of each column of each caller
    std::array<std::map<int64_t, Outcome>, 2> served;
    Threads callers, servers, canceller;
    std::atomic<bool> done{false};
    start(&callers, 5, random, [&](int64_t p, Random& own) {
      Party& party = parties[static_cast<size_t>(p)];
      for (int64_t i = 0; !drains || i < 200; i += 4) {
        Values values;
        for (int64_t k = from(1, 4, own); k > 0; --k) values.push_back(p * kMillion + i + 4 - k);
        Outcome outcome = kAnswered;
        try {
          Values outputs =
              values_of(batcher->compute(columns(values), &party.cancelled).dict().at("y").leaf());
          for (int64_t& output : outputs) output = -output;
          CHECK(outputs == values);
        } catch (const AsyncError&) {
          outcome = kDropped;
        } catch (const ClosedError&) {
          outcome = kCancelled;
        }
        for (const int64_t value : values) outcomes[static_cast<size_t>(p)][value] = outcome;
        if (outcome == kCancelled && party.is_closed(*batcher)) break;
        dawdle(own);
      }
      party.ended = true;
    });
    start(&servers, 2, random, [&](int64_t s, Random& own) {
      while (const std::unique_ptr<Batch> batch = batcher->next()) {
        const Values values = values_of(batch->inputs().leaf());
        CHECK(!values.empty() && values.size() <= static_cast<size_t>(maximum));
        const bool drop = one_in(8, own);
        for (const int64_t value : values) {
          const Outcome outcome = drop ? kDropped : kAnswered;
          CHECK(served[static_cast<size_t>(s)].emplace(value, outcome).second);
        }
        dawdle(own);
        if (drop) continue;
        if (one_in(8, own)) {
          CHECK_THROWS(std::invalid_argument,
                       (batch->set_outputs(columns(Values(maximum + 1))), 0));
        }
        Values outputs;
        for (const int64_t value : values) outputs.push_back(-value);
        const Arrays nest = Arrays::Dict{{"y", columns(outputs)}};
        batch->set_outputs(nest);
        if (one_in(8, own)) CHECK_THROWS(std::runtime_error, (batch->set_outputs(nest), 0));
      }
      CHECK(batcher->is_closed());
    });
    start(&canceller, 1, random,
          [&](int64_t, Random& own) { cancel_some(*batcher, parties, done, own); });
    if (drains) {
      join(&callers);
      CHECK(batcher->size() == 0);
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
    }
    done = true;
    join(&canceller);
    close(*batcher, random);
    join(&callers);
    join(&servers);

    size_t count = 0;
    for (const auto& outcome : outcomes) {
      for (const auto& [value, what] : outcome) {
        std::vector<Outcome> found;
        for (const auto& server : served) {
          if (const auto place = server.find(value); place != server.end()) {
            found.push_back(place->second);
          }
        }
        count += found.size();
        CHECK(found.size() <= 1);  // it was in one batch
        CHECK(what == kCancelled || (found.size() == 1 && found[0] == what));
      }
    }
    CHECK(count == served[0].size() + served[1].size());
  });
}

TEST(blocks_of_a_pool_are_one_users_alone_and_all_are_freed) {
  repeat([](Random& random) {
    std::atomic<int64_t> num_blocks{0};
    auto pool = std::make_shared<MemoryPool>([&](size_t size) {
      ++num_blocks;
      return MemoryPool::Block(new std::byte[size], [&](std::byte* block) {
        delete[] block;
        --num_blocks;
      });
    });
    struct Slot {
      std::mutex mutex;
      MemoryPool::Block block;
      size_t size = 0;
      std::byte value{};
    };
    std::array<Slot, 8> slots;
    Threads threads;
    start(&threads, 4, random, [&slots, pool](int64_t, Random& own) {
      for (int i = 0; i < 200; ++i) {
        size_t size = own() % (size_t{1} << own() % 14);
        auto value = static_cast<std::byte>(own());
        MemoryPool::Block block = pool->take(size);
        std::memset(block.get(), static_cast<int>(value), size);
        dawdle(own);
        Slot& slot = slots[own() % slots.size()];
        {
          std::lock_guard lock(slot.mutex);
          slot.block.swap(block);
          std::swap(slot.size, size);
          std::swap(slot.value, value);
        }
        for (size_t k = 0; k < size; ++k) CHECK(block.get()[k] == value);
      }
    });
    pool.reset();  // those who use it, and its blocks, keep it
    join(&threads);
    CHECK(num_blocks > 0);
    for (Slot& slot : slots) slot.block.reset();
    CHECK(num_blocks == 0);
  });
}

constexpr int64_t kNumEnvs = 2;

template <class T>
std::string twice(T value) {
  const T values[kNumEnvs] = {value, value};
  return std::string(reinterpret_cast<const char*>(values), sizeof(values));
}

rpcenv::Step step_of(int64_t row) {
  rpcenv::Step step;
  step.mutable_handshake()->set_num_envs(kNumEnvs);
  rpcenv::Array* frame = step.mutable_observation()->mutable_array();
  frame->set_dtype(rpcenv::INT64);
  frame->add_shape(kNumEnvs);
  frame->set_data(twice(row));
  const std::string zeros = twice<char>(0);
  for (std::string* bools : {step.mutable_done(), step.mutable_truncated(),
                             step.mutable_terminated(), step.mutable_game_done()}) {
    *bools = zeros;
  }
  for (std::string* numbers :
       {step.mutable_reward(), step.mutable_episode_return(), step.mutable_episode_step(),
        step.mutable_game_return(), step.mutable_game_step()}) {
    *numbers = twice<int32_t>(0);
  }
  step.set_last_action(twice<int64_t>(0));
  return step;
}

TEST(actors_and_learners_share_whole_rollouts_and_end_together) {
  constexpr int64_t kUnrollLength = 3;
  repeat([](Random& random) {
    const auto pool = new_pool();
    BatchingQueue queue({1, 2, 1 + from(1, 6, random), std::nullopt, 8}, pool);
    const auto batcher =
        std::make_shared<DynamicBatcher>(DynamicBatcher::Options{1, 1, 6, 1}, pool);
    std::atomic<bool> stopped{false};
    const auto stop = [&] {
      stopped = true;
      queue.wake();
      batcher->wake();
    };

    Threads threads;
    std::array<std::vector<int64_t>, 2> seen;  // by each learner: first rows
    start(&threads, 4, random, [&](int64_t a, Random& own) {
      int64_t row = a * kMillion;
      Rollout rollout(kUnrollLength, true, step_of(row), pool);
      try {
        while (true) {
          for (int64_t t = 1; t <= kUnrollLength; ++t) {
            rollout.set_agent_outputs(
                t, batcher->compute(rollout.env_outputs(t - 1).dict().at("frame"), &stopped));
            rollout.set_env_outputs(t, step_of(++row));
            dawdle(own);
          }
          queue.enqueue(rollout.finish(), true, &stopped);
          rollout.begin();
        }
      } catch (const ClosedError&) {
        CHECK(queue.is_closed() || batcher->is_closed());
        stop();  // those that wait for the one that is still open
      }
    });
    start(&threads, 2, random, [&](int64_t, Random& own) {
      while (const std::unique_ptr<Batch> batch = batcher->next()) {
        Values values = values_of(batch->inputs().leaf());
        for (int64_t& value : values) value *= 2;
        dawdle(own);
        batch->set_outputs(columns(values));
      }
    });
    start(&threads, 2, random, [&](int64_t l, Random& own) {
      while (const std::optional<Arrays> batch = queue.dequeue()) {
        const Array& frame = batch->tuple().at(0).dict().at("frame").leaf();
        const Values rows = values_of(frame);
        const Values answers = values_of(batch->tuple().at(1).leaf());
        const auto width = static_cast<size_t>(frame.shape.at(1));
        CHECK(rows.size() == (kUnrollLength + 1) * width && answers.size() == rows.size());
        for (size_t i = 0; i < rows.size() - width; ++i) {
          CHECK(rows[i + width] == rows[i] + 1 && answers[i + width] == 2 * rows[i]);
        }
        seen[static_cast<size_t>(l)].insert(seen[static_cast<size_t>(l)].end(), rows.begin(),
                                            rows.begin() + static_cast<int64_t>(width));
        std::memset(frame.data.get(), 0xff, frame.num_bytes());  // it is ours
        dawdle(own);
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    start(&threads, 2, random, [&](int64_t i, Random& own) {
      dawdle(own);
      i == 0 ? queue.close() : batcher->close();
    });
    join(&threads);
    std::map<int64_t, int64_t> counts;
    for (const auto& firsts : seen) {
      for (const int64_t first : firsts) CHECK(++counts[first] <= kNumEnvs);
    }
  });
}

}  // namespace
}  // namespace torchbeast
