// SPDX-License-Identifier: Apache-2.0
// Whether the core's objects keep their promises while many threads open, use and close them at
// random times, for STRESS_SECONDS (an environment variable; default 2).
#include <unistd.h>

#include <array>
#include <map>
#include <optional>
#include <random>
#include <set>

#include "array.h"
#include "batching_queue.h"
#include "check.h"
#include "dynamic_batcher.h"
#include "rollout.h"
#include "steps.h"

namespace torchbeast {
namespace {

using Arrays = Nest<Array>;
using Clock = std::chrono::steady_clock;
using Random = std::minstd_rand;

constexpr int64_t kMillion = 1'000'000;

bool one_in(unsigned n, Random& random) { return random() % n == 0; }

int64_t from(int64_t low, int64_t high, Random& random) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void sleep_a_little(Random& random) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
}

// Vary the moments at which threads meet.
void dawdle(Random& random) {
  if (one_in(4, random)) std::this_thread::yield();
  if (one_in(16, random)) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

// Call `round` until this test has used its share of the time.
void repeat(const std::function<void(Random&)>& round) {
  const char* text = std::getenv("STRESS_SECONDS");
  const std::chrono::duration<double> seconds(text == nullptr ? 2 : std::atof(text));
  const auto end = Clock::now() + seconds / all_tests().size();
  unsigned count = 0;
  do {
    alarm(60);  // ends the program where a thread is never woken
    Random random(++count);
    round(random);
  } while (Clock::now() < end);
  alarm(0);
  std::printf("  %u rounds\n", count);
}

// Start threads that call `function` with their number and random numbers of their own.
void start(Threads* threads, size_t count, Random& random,
           const std::function<void(size_t, Random&)>& function) {
  for (size_t i = 0; i < count; ++i) {
    threads->push_back(std::make_unique<Thread>([function, i, seed = random()] {
      Random own(seed);
      function(i, own);
    }));
  }
}

// A thread whose calls of a queue or a batcher are cancelled by another one.
struct Party {
  std::atomic<bool> cancelled{false};
  std::atomic<bool> ended{false};

  // Whether a ClosedError, just caught, was due to close() rather than to a cancelled call.
  template <class Closable>
  bool is_closed(const Closable& closable) {
    if (closable.is_closed()) return true;
    CHECK(cancelled.exchange(false));  // no other reason is allowed
    return false;
  }
};

// Cancel the parties' calls at random during `traffic`, then close the queue or batcher.
template <class Closable>
void disturb_and_close(Closable& closable, std::vector<Party>& parties, Random& random,
                       const std::function<void()>& traffic) {
  std::atomic<bool> done{false};
  Threads threads;
  start(&threads, 1, random, [&](size_t, Random& own) {
    while (!done) {
      Party& party = parties[own() % parties.size()];
      party.cancelled = true;
      closable.wake();  // nothing else may be needed to end the call
      while (party.cancelled && !party.ended && !done) std::this_thread::yield();
      dawdle(own);
    }
  });
  traffic();
  done = true;
  join(&threads);
  std::atomic<int> refused{0};
  start(&threads, 2, random, [&](size_t, Random& own) {
    dawdle(own);
    try {
      closable.close();
    } catch (const std::runtime_error&) {
      ++refused;
    }
  });
  join(&threads);
  CHECK(refused == 1);  // of two that close at once
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
    Threads producers, consumers;
    start(&producers, 4, random, [&](size_t p, Random& own) {
      Party& party = parties[p];
      for (int64_t i = 0; !drains || i < 200; i += 4) {
        Values values;
        for (int64_t k = from(1, 4, own); k > 0; --k) values.push_back(p * kMillion + i + 4 - k);
        try {
          queue.enqueue(columns(values), one_in(2, own), &party.cancelled);
          sent[p].insert(sent[p].end(), values.begin(), values.end());
        } catch (const ClosedError&) {
          if (party.is_closed(queue)) break;
        }
        dawdle(own);
      }
      party.ended = true;
    });
    start(&consumers, num_consumers, random, [&](size_t c, Random& own) {
      std::map<int64_t, int64_t> last;
      while (const std::optional<Arrays> batch = queue.dequeue()) {
        const Array& array = batch->leaf();
        const Values values = values_of(array);
        CHECK(!values.empty() && values.size() <= static_cast<size_t>(maximum));
        CHECK(timeout_ms || values.size() >= static_cast<size_t>(minimum));
        for (const int64_t value : values) {
          const auto [place, is_new] = last.emplace(value / kMillion, value);
          CHECK(is_new || place->second < value);  // in order of each producer
          place->second = value;
          received[c].push_back(value);
        }
        std::memset(array.data.get(), 0xff, array.num_bytes());  // the caller owns it
        dawdle(own);
      }
      CHECK(queue.is_closed());
    });
    disturb_and_close(queue, parties, random, [&] {
      if (!drains) return sleep_a_little(random);
      join(&producers);
      const int64_t left = timeout_ms ? 0 : minimum - 1;
      wait_until([&] { return queue.size() <= left; });
    });
    join(&producers);
    join(&consumers);

    std::set<int64_t> lost;
    for (const Values& values : sent) lost.insert(values.begin(), values.end());
    for (const Values& values : received) {
      for (const int64_t value : values) CHECK(lost.erase(value) == 1);  // sent, and received once
    }
    const auto num_lost = static_cast<int64_t>(lost.size());
    if (drains) CHECK(num_lost < minimum && (num_lost == 0 || !timeout_ms));
    if (size) CHECK(num_lost < *size + 4);  // no more than was in the queue
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
    Threads callers, servers;
    start(&callers, 5, random, [&](size_t p, Random& own) {
      Party& party = parties[p];
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
        for (const int64_t value : values) outcomes[p][value] = outcome;
        if (outcome == kCancelled && party.is_closed(*batcher)) break;
        dawdle(own);
      }
      party.ended = true;
    });
    start(&servers, 2, random, [&](size_t s, Random& own) {
      while (const std::unique_ptr<Batch> batch = batcher->next()) {
        const Values values = values_of(batch->inputs().leaf());
        CHECK(!values.empty() && values.size() <= static_cast<size_t>(maximum));
        const bool drop = one_in(8, own);
        for (const int64_t value : values) {
          CHECK(served[s].emplace(value, drop ? kDropped : kAnswered).second);
        }
        dawdle(own);
        if (drop) continue;
        Values outputs;
        for (const int64_t value : values) outputs.push_back(-value);
        batch->set_outputs(Arrays::Dict{{"y", columns(outputs)}});
      }
      CHECK(batcher->is_closed());
    });
    disturb_and_close(*batcher, parties, random, [&] {
      if (!drains) return sleep_a_little(random);
      join(&callers);
      CHECK(batcher->size() == 0);
    });
    join(&callers);
    join(&servers);

    std::map<int64_t, Outcome> in_batches = served[0], of_calls;
    in_batches.insert(served[1].begin(), served[1].end());
    CHECK(in_batches.size() == served[0].size() + served[1].size());  // no column was in two
    for (const auto& outcome : outcomes) of_calls.insert(outcome.begin(), outcome.end());
    for (const auto& item : in_batches) CHECK(of_calls.count(item.first) == 1);
    for (const auto& [value, outcome] : of_calls) {
      const auto found = in_batches.find(value);
      CHECK(outcome == kCancelled || (found != in_batches.end() && found->second == outcome));
    }
  });
}

TEST(actors_and_learners_share_whole_rollouts_and_end_together) {
  constexpr int64_t kUnrollLength = 3, kNumEnvs = 2;
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
    start(&threads, 4, random, [&](size_t a, Random& own) {
      int64_t row = a * kMillion;
      rpcenv::Step first = make_step(kNumEnvs, row);
      first.set_last_action(repeated<int64_t>(kNumEnvs, 0));
      Rollout rollout(kUnrollLength, true, first, pool);
      try {
        while (true) {
          for (int64_t t = 1; t <= kUnrollLength; ++t) {
            rollout.set_agent_outputs(
                t, batcher->compute(rollout.env_outputs(t - 1).dict().at("frame"), &stopped));
            rollout.set_env_outputs(t, make_step(kNumEnvs, ++row));
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
    start(&threads, 2, random, [&](size_t, Random& own) {
      while (const std::unique_ptr<Batch> batch = batcher->next()) {
        Values values = values_of(batch->inputs().leaf());
        for (int64_t& value : values) value *= 2;
        dawdle(own);
        batch->set_outputs(columns(values));
      }
    });
    start(&threads, 2, random, [&](size_t l, Random& own) {
      while (const std::optional<Arrays> batch = queue.dequeue()) {
        const Array& frame = batch->tuple().at(0).dict().at("frame").leaf();
        const Values rows = values_of(frame);
        const Values answers = values_of(batch->tuple().at(1).leaf());
        const auto width = static_cast<size_t>(frame.shape.at(1));
        CHECK(rows.size() == (kUnrollLength + 1) * width && answers.size() == rows.size());
        for (size_t i = 0; i < rows.size() - width; ++i) {
          CHECK(rows[i + width] == rows[i] + 1 && answers[i + width] == 2 * rows[i]);
        }
        seen[l].insert(seen[l].end(), rows.begin(), rows.begin() + static_cast<int64_t>(width));
        std::memset(frame.data.get(), 0xff, frame.num_bytes());  // the caller owns it
        dawdle(own);
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
    start(&threads, 2, random, [&](size_t i, Random& own) {
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
